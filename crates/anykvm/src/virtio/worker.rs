//! A device's worker thread, and what it shares with the transport.

use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

use virtio_queue::Queue;
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::Backend;
use super::interrupts::Interrupts;
use super::queue::Broken;
use crate::devices::lock;
use crate::error::BootError;
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
    /// One for each queue.
    pub(super) kicks: Vec<EventFd>,
    /// The driver broke the rules since the last reset.
    pub(super) is_broken: AtomicBool,
    stop: EventFd,
}

impl Core {
    pub(super) fn new(
        memory: GuestMemory,
        interrupts: Interrupts,
        queues: usize,
    ) -> Result<Self, BootError> {
        let event =
            || EventFd::new(EFD_NONBLOCK).map_err(BootError::host("cannot make an eventfd"));
        Ok(Self {
            memory,
            interrupts,
            active: Mutex::new(None),
            kicks: (0..queues).map(|_| event()).collect::<Result<_, _>>()?,
            is_broken: AtomicBool::new(false),
            stop: event()?,
        })
    }

    /// Has the worker look at a queue.
    pub(super) fn kick(&self, queue: usize) {
        if let Some(kick) = self.kicks.get(queue) {
            // A full counter is a kick already.
            let _ = kick.write(1);
        }
    }

    /// Ends the worker.
    pub(super) fn stop(&self) {
        let _ = self.stop.write(1);
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
    let what = "cannot start a device's thread";
    let epoll = Epoll::new().map_err(BootError::host(what))?;
    let watch = |fd, data| {
        epoll
            .ctl(
                ControlOperation::Add,
                fd,
                EpollEvent::new(EventSet::IN, data),
            )
            .map_err(BootError::host(what))
    };
    for (index, kick) in (0..).zip(&core.kicks) {
        watch(kick.as_raw_fd(), index)?;
    }
    let queues = core.kicks.len();
    let (of_input, of_stop) = (queues as u64, queues as u64 + 1);
    let input = backend.input();
    if let Some((fd, _)) = input {
        watch(fd, of_input)?;
    }
    watch(core.stop.as_raw_fd(), of_stop)?;
    let run = move || {
        let mut events = [EpollEvent::default(); 8];
        loop {
            // It fails only for a signal.
            let ready = epoll.wait(-1, &mut events).unwrap_or(0);
            for event in events.iter().take(ready) {
                if event.data() == of_stop {
                    return;
                }
                let index = match input {
                    Some((_, index)) if event.data() == of_input => index,
                    _ => usize::try_from(event.data()).unwrap_or(usize::MAX),
                };
                if let Some(kick) = core.kicks.get(index) {
                    // Empty if it was the input.
                    let _ = kick.read();
                }
                core.serve(backend.as_mut(), index);
            }
        }
    };
    thread::Builder::new()
        .name(name.into())
        .spawn(run)
        .map(drop)
        .map_err(BootError::host(what))
}
