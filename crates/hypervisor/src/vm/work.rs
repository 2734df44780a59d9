//! Work for the thread that waits for irqfds.
//!
//! VMMs assign irqfds and ioeventfds while the guest sets up its devices, on a vCPU's thread just after KVM_RUN, and
//! their system call filters expect a single `ioctl` there. Duplicating an eventfd, asking for its identity and waiting
//! for it takes more system calls, which anykvm's own thread is free to make.

use std::sync::{
    Arc, Mutex, PoisonError,
    atomic::{AtomicU32, Ordering},
};
use std::time::Duration;

use host::futex;

use super::VmState;

type Work = Box<dyn FnOnce(&Arc<VmState>) + Send>;

/// The functions that the thread has been asked to run.
#[derive(Default)]
pub(super) struct WorkQueue(Mutex<Vec<Work>>);

impl core::fmt::Debug for WorkQueue {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("WorkQueue")
    }
}

/// Result of a function, and the word that the caller waits on.
struct Answer<R> {
    is_there: AtomicU32,
    value: Mutex<Option<R>>,
}

impl WorkQueue {
    /// Runs all queued functions. Called on the thread.
    pub(super) fn run(&self, vm: &Arc<VmState>) {
        let work_queue =
            core::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner));
        for work in work_queue {
            work(vm);
        }
    }

    fn push(&self, work: Work) {
        let mut work_queue = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        work_queue.push(work);
    }
}

impl VmState {
    /// Returns the result of `work`, which the thread runs if it exists. The caller holds no lock, and makes no system
    /// calls but `write` and `futex`.
    pub(super) fn on_worker<R: Send + 'static>(
        self: &Arc<Self>,
        work: impl FnOnce(&Arc<Self>) -> R + Send + 'static,
    ) -> R {
        if !self.irqfds.has_thread() {
            return work(self);
        }
        let answer = Arc::new(Answer {
            is_there: AtomicU32::new(0),
            value: Mutex::new(None),
        });
        let theirs = Arc::clone(&answer);
        self.irqfds.work_queue().push(Box::new(move |vm| {
            let value = work(vm);
            *theirs.value.lock().unwrap_or_else(PoisonError::into_inner) = Some(value);
            theirs.is_there.store(1, Ordering::Release);
            futex::wake(&theirs.is_there, 1);
        }));
        self.irqfds.tell();
        loop {
            let mut value = answer.value.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(value) = value.take() {
                return value;
            }
            drop(value);
            // A signal ends the wait early, so the loop checks again.
            futex::wait(&answer.is_there, 0, Some(Duration::from_secs(1)));
        }
    }
}
