//! The console device (virtio 1.2, 5.3) with one port: the guest's hvc0.

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::sync::{Arc, Mutex, OnceLock};

use anykvm_ioctls::DoorbellQueue;
use virtio_bindings::virtio_ids::VIRTIO_ID_CONSOLE;
use virtio_queue::Queue;

use super::queue::{Broken, Progress, Step, serve_chains};
use super::{Backend, Profile};
use crate::devices::{Output, lock};
use crate::memory::GuestMemory;

/// VIRTIO_CONSOLE_F_SIZE: the configuration has columns and rows.
const F_SIZE: u64 = 1;
/// The queues.
const RECEIVE: usize = 0;
const TRANSMIT: usize = 1;
/// Bytes that are moved at once.
const CHUNK: usize = 4096;

/// Bytes on their way to the guest.
#[derive(Debug)]
pub(crate) struct ConsoleInput {
    bytes: Mutex<VecDeque<u8>>,
    /// Once there is a device.
    bells: OnceLock<Arc<DoorbellQueue>>,
}

impl ConsoleInput {
    /// Empty.
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self {
            bytes: Mutex::default(),
            bells: OnceLock::new(),
        })
    }

    /// Queues bytes; they wait until the guest takes them.
    pub(crate) fn feed(&self, bytes: &[u8]) {
        lock(&self.bytes).extend(bytes);
        if let Some(bells) = self.bells.get() {
            bells.ring(RECEIVE as u32);
        }
    }

    /// How many bytes wait.
    pub(crate) fn backlog(&self) -> usize {
        lock(&self.bytes).len()
    }

    fn take(&self, max: usize) -> Vec<u8> {
        let mut bytes = lock(&self.bytes);
        let len = bytes.len().min(max);
        bytes.drain(..len).collect()
    }
}

/// hvc0.
pub(crate) struct Console {
    input: Arc<ConsoleInput>,
    output: Arc<Output>,
    /// Rows and columns.
    size: Option<(u16, u16)>,
}

impl Console {
    /// A console between `input` and `output`.
    pub(crate) fn new(
        input: Arc<ConsoleInput>,
        output: Arc<Output>,
        size: Option<(u16, u16)>,
    ) -> Self {
        Self {
            input,
            output,
            size,
        }
    }

    fn receive(&self, queue: &mut Queue, memory: &GuestMemory) -> Result<Progress, Broken> {
        serve_chains(queue, memory, |chain| {
            let mut writer = chain.writer(memory)?;
            if self.input.backlog() == 0 {
                return Ok(Step::Wait);
            }
            let bytes = self.input.take(writer.available_bytes().min(CHUNK));
            writer
                .write_all(&bytes)
                .map_err(|error| Broken(error.to_string()))?;
            Ok(Step::Done(u32::try_from(bytes.len()).unwrap_or(0)))
        })
    }

    fn transmit(&self, queue: &mut Queue, memory: &GuestMemory) -> Result<Progress, Broken> {
        serve_chains(queue, memory, |chain| {
            let mut reader = chain.reader(memory)?;
            let mut bytes = [0; CHUNK];
            loop {
                let len = reader
                    .read(&mut bytes)
                    .map_err(|error| Broken(error.to_string()))?;
                if len == 0 {
                    return Ok(Step::Done(0));
                }
                self.output.push(bytes.get(..len).unwrap_or_default());
            }
        })
    }
}

impl Backend for Console {
    fn profile(&self) -> Profile {
        let (rows, columns) = self.size.unwrap_or((0, 0));
        // Columns, rows, number of ports, emergency write.
        let mut config = columns.to_le_bytes().to_vec();
        config.extend(rows.to_le_bytes());
        config.extend([0; 8]);
        Profile {
            name: "virtio-console",
            kind: u16::try_from(VIRTIO_ID_CONSOLE).unwrap_or(0),
            class: 0x07_80_00,
            features: if self.size.is_some() { F_SIZE } else { 0 },
            queue_sizes: vec![64, 64],
            config,
        }
    }

    fn serve(
        &mut self,
        index: usize,
        queue: &mut Queue,
        memory: &GuestMemory,
    ) -> Result<Progress, Broken> {
        match index {
            RECEIVE => self.receive(queue, memory),
            TRANSMIT => self.transmit(queue, memory),
            _ => Ok(Progress::default()),
        }
    }

    fn connect(&self, bells: &Arc<DoorbellQueue>) {
        // The first device has the input.
        let _ = self.input.bells.set(Arc::clone(bells));
    }
}
