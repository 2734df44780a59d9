//! A device's worker thread, and what it shares with the transport.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

use anykvm_ioctls::DoorbellQueue;
use virtio_queue::Queue;

use super::Backend;
use super::interrupts::Interrupts;
use super::queue::Broken;
use crate::error::BootError;
use crate::lock::lock;
use crate::memory::GuestMemory;

/// Queues that the driver has handed over.
#[derive(Debug)]
pub(super) struct Active {
    /// `None`: not enabled.
    pub(super) queues: Vec<Option<Queue>>,
}

/// Shared by the transport and the worker. The worker holds `active` while it works, so that a
/// reset, which takes it, returns only when the device has stopped touching guest memory.
#[derive(Debug)]
pub(super) struct Core {
    pub(super) memory: GuestMemory,
    pub(super) interrupts: Interrupts,
    pub(super) active: Mutex<Option<Active>>,
    /// One for each queue, and [`STOP`].
    pub(super) bells: Arc<DoorbellQueue>,
    pub(super) queues: usize,
    /// The driver broke the rules since the last reset.
    pub(super) is_broken: AtomicBool,
}

/// The doorbell that ends the worker.
const STOP: u32 = 63;

impl Core {
    pub(super) fn new(memory: GuestMemory, interrupts: Interrupts, queues: usize) -> Self {
        Self {
            memory,
            interrupts,
            active: Mutex::new(None),
            bells: Arc::default(),
            queues,
            is_broken: AtomicBool::new(false),
        }
    }

    /// Has the worker look at a queue.
    pub(super) fn kick(&self, queue: usize) {
        if let Some(bell) = u32::try_from(queue).ok().filter(|_| queue < self.queues) {
            self.bells.ring(bell);
        }
    }

    /// Ends the worker.
    pub(super) fn stop(&self) {
        self.bells.ring(STOP);
    }

    /// The device stops until it is reset, and says so.
    pub(super) fn break_down(&self) {
        if !self.is_broken.swap(true, Ordering::AcqRel) {
            self.interrupts.signal_config();
        }
    }

    /// Serves one queue if the driver has handed it over.
    fn serve(&self, backend: &mut dyn Backend, index: usize) {
        let mut active = lock(&self.active);
        let Some(Active { queues }) = active.as_mut() else {
            return;
        };
        let Some(queue) = queues.get_mut(index).and_then(Option::as_mut) else {
            return;
        };
        if self.is_broken.load(Ordering::Acquire) {
            return;
        }
        match backend.serve(index, queue, &self.memory) {
            Ok(progress) => {
                if progress.interrupts {
                    self.interrupts.signal_queue(index);
                }
                if progress.has_more {
                    self.kick(index);
                }
            }
            Err(Broken(_)) => self.break_down(),
        }
    }
}

/// Starts the worker of `backend`.
pub(super) fn start(
    name: &str,
    core: Arc<Core>,
    mut backend: Box<dyn Backend>,
) -> Result<(), BootError> {
    let order = backend.order();
    let run = move || {
        loop {
            let rung = core.bells.wait(None);
            if rung >> STOP & 1 != 0 {
                return;
            }
            for index in order.iter().copied().filter(|index| rung >> index & 1 != 0) {
                core.serve(backend.as_mut(), index);
            }
        }
    };
    thread::Builder::new()
        .name(name.into())
        .spawn(run)
        .map(drop)
        .map_err(BootError::host("cannot start a device's thread"))
}
