//! The entropy device (virtio 1.2, 5.4): the host's random bytes.

use std::io::Write;

use virtio_bindings::virtio_ids::VIRTIO_ID_RNG;
use virtio_queue::Queue;

use super::queue::{Broken, Progress, Step, serve_chains};
use super::{Backend, Profile};
use crate::memory::GuestMemory;

/// Maximum number of bytes for one request, however large its buffers are; the driver asks again.
const GIVEN_MAX: usize = 4096;

/// Random numbers from `getrandom(2)`.
#[derive(Debug, Default)]
pub(crate) struct Rng;

impl Backend for Rng {
    fn profile(&self) -> Profile {
        Profile {
            name: "virtio-rng",
            kind: u16::try_from(VIRTIO_ID_RNG).unwrap_or(0),
            class: 0x00_ff_00,
            features: 0,
            queue_sizes: vec![64],
            config: Vec::new(),
        }
    }

    fn serve(
        &mut self,
        _index: usize,
        queue: &mut Queue,
        memory: &GuestMemory,
    ) -> Result<Progress, Broken> {
        serve_chains(queue, memory, |chain| {
            let mut writer = chain.writer(memory)?;
            let mut bytes = [0; GIVEN_MAX];
            let len = writer.available_bytes().min(GIVEN_MAX);
            let (wanted, _) = bytes.split_at_mut(len);
            let flags = rustix::rand::GetRandomFlags::empty();
            let mut given = rustix::rand::getrandom(&mut *wanted, flags).unwrap_or(0);
            given = given.min(wanted.len());
            let (given, _) = wanted.split_at(given);
            writer
                .write_all(given)
                .map_err(|error| Broken(error.to_string()))?;
            Ok(Step::Done(u32::try_from(given.len()).unwrap_or(0)))
        })
    }
}
