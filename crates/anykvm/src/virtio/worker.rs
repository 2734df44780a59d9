//! A device's worker thread, and what it shares with the transport.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

use anykvm_ioctls::DoorbellQueue;
use virtio_queue::{Queue, QueueT};

use super::Backend;
use super::interrupts::Interrupts;
use super::queue::Broken;
use crate::error::BootError;
use crate::fields::{Malformed, Reader, Writer};
use crate::lock::lock;
use crate::memory::GuestMemory;

/// Queues that the driver has handed over.
#[derive(Debug)]
pub(super) struct Active {
    /// The queues; `None` for one that is not enabled.
    pub(super) queues: Vec<Option<Queue>>,
}

/// What the transport and the worker share. The worker locks `active` while it works. A reset locks it too, so it
/// returns only when the device has stopped touching guest memory.
pub(super) struct Core {
    pub(super) memory: GuestMemory,
    pub(super) interrupts: Interrupts,
    pub(super) active: Mutex<Option<Active>>,
    /// The queues, while the machine stands still.
    pub(super) parked: Mutex<Option<Active>>,
    /// The device's work.
    pub(super) backend: Mutex<Box<dyn Backend>>,
    /// The doorbells: one for each queue, and [`STOP`].
    pub(super) bells: Arc<DoorbellQueue>,
    pub(super) queues: usize,
    /// True if the driver has broken the rules since the last reset.
    pub(super) is_broken: AtomicBool,
}

/// The doorbell that ends the worker.
const STOP: u32 = 63;

impl Core {
    pub(super) fn new(
        memory: GuestMemory,
        interrupts: Interrupts,
        queues: usize,
        bells: Arc<DoorbellQueue>,
        backend: Box<dyn Backend>,
    ) -> Self {
        Self {
            memory,
            interrupts,
            active: Mutex::new(None),
            parked: Mutex::new(None),
            backend: Mutex::new(backend),
            bells,
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

    /// Makes the device stand still. Returns when its worker no longer touches guest memory.
    pub(super) fn pause(&self) {
        let queues = lock(&self.active).take();
        // The device may stand still already.
        if queues.is_some() {
            *lock(&self.parked) = queues;
        }
    }

    /// Makes the device go on. The worker looks for what the driver has added meanwhile.
    pub(super) fn resume(&self) {
        if let Some(queues) = lock(&self.parked).take() {
            *lock(&self.active) = Some(queues);
            (0..self.queues).for_each(|queue| self.kick(queue));
        }
    }

    /// Saves the queues' positions and the backend's state, while the device stands still.
    pub(super) fn save(&self, w: &mut Writer) {
        w.flag(self.is_broken.load(Ordering::Acquire));
        let parked = lock(&self.parked);
        w.flag(parked.is_some());
        for queue in parked.iter().flat_map(|active| &active.queues) {
            w.flag(queue.is_some());
            if let Some(queue) = queue {
                w.put(&[queue.next_avail(), queue.next_used()]);
            }
        }
        let mut own = Writer::default();
        lock(&self.backend).save(&mut own);
        w.bytes(&own.into_bytes());
    }

    /// Loads a saved state, for queues as the driver had set them up. The device stands still until [`Self::resume`].
    pub(super) fn load(
        &self,
        queues: Option<Vec<Option<Queue>>>,
        r: &mut Reader<'_>,
    ) -> Result<(), Malformed> {
        self.is_broken.store(r.flag()?, Ordering::Release);
        if r.flag()? {
            let cannot_be = || r.wrong("queues that cannot be");
            let mut queues = queues.ok_or_else(cannot_be)?;
            for queue in &mut queues {
                if r.flag()? != queue.is_some() {
                    return Err(r.wrong("a queue that is not enabled"));
                }
                if let Some(queue) = queue {
                    let [next_avail, next_used] = r.get()?;
                    queue.set_next_avail(next_avail);
                    queue.set_next_used(next_used);
                }
            }
            *lock(&self.parked) = Some(Active { queues });
        }
        let mut own = Reader::new(r.bytes()?, "a device");
        lock(&self.backend).load(&mut own)?;
        own.end()
    }

    /// Ends the worker.
    pub(super) fn stop(&self) {
        self.bells.ring(STOP);
    }

    /// Stops the device until it is reset, and tells the driver.
    pub(super) fn break_down(&self) {
        if !self.is_broken.swap(true, Ordering::AcqRel) {
            self.interrupts.signal_config();
        }
    }

    /// Serves one queue, if the driver has handed it over.
    fn serve(&self, index: usize) {
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
        let served = lock(&self.backend).serve(index, queue, &self.memory);
        match served {
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

/// Starts the device's worker.
pub(super) fn start(name: &str, core: Arc<Core>) -> Result<(), BootError> {
    let order = lock(&core.backend).order();
    let run = move || {
        loop {
            let rung = core.bells.wait(None);
            if rung >> STOP & 1 != 0 {
                return;
            }
            for index in order.iter().copied().filter(|index| rung >> index & 1 != 0) {
                core.serve(index);
            }
        }
    };
    thread::Builder::new()
        .name(name.into())
        .spawn(run)
        .map(drop)
        .map_err(BootError::host("cannot start a device's thread"))
}
