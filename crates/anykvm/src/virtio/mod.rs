//! Virtio 1.2 devices on PCI: block (disks), entropy, console.
//!
//! A device is a [`Backend`] (what it does with its queues) behind a [`transport`] (how the guest finds, configures and
//! notifies it). The transport runs on vCPU threads. The backend runs on a worker thread of its own, which doorbells
//! wake; the guest's notifications ring them without an exit.
//!
//! Everything in guest memory is hostile: addresses outside of RAM, chains that are cyclic or incomplete, impossible
//! ring indices. Any of these stops the device (DEVICE_NEEDS_RESET) until the guest resets it, and nothing else.

mod block;
mod console;
mod disk;
mod interrupts;
mod queue;
mod registers;
mod rng;
#[cfg(test)]
mod tests;
mod transport;
mod worker;

use std::sync::Arc;

use anykvm_ioctls::DoorbellQueue;
use virtio_queue::Queue;

pub(crate) use block::BlockDevice;
pub(crate) use console::{Console, Port, PortInput};
pub(crate) use disk::{Disk, DiskHold, DiskOption};
pub(crate) use rng::Rng;
pub(crate) use transport::VirtioPci;

use crate::fields::{Malformed, Reader, Writer};
use crate::memory::GuestMemory;
use queue::{Broken, Progress};

/// What the transport shows of a device.
#[derive(Debug, Clone)]
pub(crate) struct Profile {
    /// The device's name, for threads.
    pub(crate) name: &'static str,
    /// Virtio device id.
    pub(crate) kind: u16,
    /// PCI class code.
    pub(crate) class: u32,
    /// Feature bits of the device type; those of every device are added.
    pub(crate) features: u64,
    /// Maximum number of entries of each queue.
    pub(crate) queue_sizes: Vec<u16>,
    /// The device's configuration structure, which does not change.
    pub(crate) config: Vec<u8>,
}

/// The work of a device.
pub(crate) trait Backend: Send {
    /// Returns what the guest sees of the device.
    fn profile(&self) -> Profile;

    /// Works on what is in queue `index`, for a limited time.
    fn serve(
        &mut self,
        index: usize,
        queue: &mut Queue,
        memory: &GuestMemory,
    ) -> Result<Progress, Broken>;

    /// Gets the queues' doorbells, for a backend that has more to do than the driver asks for.
    fn connect(&mut self, _bells: &Arc<DoorbellQueue>) {}

    /// Saves state that is not in guest memory or registers.
    fn save(&self, _w: &mut Writer) {}

    /// Loads a saved state.
    fn load(&mut self, _r: &mut Reader<'_>) -> Result<(), Malformed> {
        Ok(())
    }

    /// Returns the queues in the order in which the worker looks at them.
    fn order(&self) -> Vec<usize> {
        (0..self.profile().queue_sizes.len()).collect()
    }
}
