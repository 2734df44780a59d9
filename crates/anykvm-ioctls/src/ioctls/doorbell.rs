//! Beyond `kvm-ioctls`: doorbells and interrupts for devices in the VMM's own process, without the
//! system calls that an eventfd costs.
//!
//! ```no_run
//! # fn main() -> Result<(), anykvm_ioctls::Error> {
//! use std::{sync::Arc, thread};
//! use anykvm_ioctls::{DoorbellQueue, DoorbellSpec, Kvm, Space};
//!
//! let vm = Kvm::new()?.create_vm()?;
//! vm.create_irq_chip()?;
//! let queue = Arc::new(DoorbellQueue::new());
//! let notify = DoorbellSpec { space: Space::Mmio, address: 0xd000_0000, len: 0, datamatch: None };
//! let doorbell = vm.subscribe(notify, queue.ringer(0))?;
//! let irq = vm.irq_trigger(10)?;
//! thread::spawn(move || loop {
//!     let rung = queue.wait(None);
//!     // … serve the virtqueues whose bits are set …
//!     irq.trigger();
//! });
//! # drop(doorbell);
//! # Ok(())
//! # }
//! ```

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use host::futex;
pub use kvm_abi::{Doorbell, DoorbellSpec, IrqTrigger, Space};

use crate::ioctls::Result;
use crate::ioctls::vm::VmFd;
use crate::kvm_ioctls::refused;

impl VmFd {
    /// Has `call` called with the value that the guest writes, instead of signalling an eventfd as
    /// [`Self::register_ioevent`] does, until the result is dropped. After that it is not called any
    /// more (unless it is dropped by another such function, on a vCPU's thread).
    ///
    /// It runs on the vCPU's thread in the middle of KVM_RUN: it must not block, call this VM's
    /// vCPUs, or panic. [`DoorbellQueue`] passes the word on to another thread.
    ///
    /// # Errors
    ///
    /// As [`Self::register_ioevent`].
    pub fn subscribe(
        &self,
        place: DoorbellSpec,
        call: impl Fn(u64) + Send + Sync + 'static,
    ) -> Result<Doorbell> {
        self.typed()?
            .subscribe(place, Box::new(call))
            .map_err(refused)
    }

    /// What raises `gsi` as a write to an irqfd would, without an eventfd.
    ///
    /// # Errors
    ///
    /// EINVAL without in-kernel LAPICs.
    pub fn irq_trigger(&self, gsi: u32) -> Result<IrqTrigger> {
        self.typed()?.irq_trigger(gsi).map_err(refused)
    }
}

/// Up to 64 doorbells, and the thread that answers them.
///
/// Ringing costs no system call unless the thread sleeps. Rings of the same doorbell that nobody has
/// seen yet are one, as the counts of an eventfd are.
#[derive(Debug, Default)]
pub struct DoorbellQueue {
    rung: AtomicU64,
    /// 1 while the thread sleeps on it.
    sleeps: AtomicU32,
}

impl DoorbellQueue {
    /// With nothing rung.
    pub const fn new() -> Self {
        Self {
            rung: AtomicU64::new(0),
            sleeps: AtomicU32::new(0),
        }
    }

    /// Rings doorbell `number`, of which the lowest six bits count.
    #[inline]
    pub fn ring(&self, number: u32) {
        self.rung.fetch_or(1 << (number & 63), Ordering::SeqCst);
        if self.sleeps.load(Ordering::SeqCst) != 0 && self.sleeps.swap(0, Ordering::SeqCst) != 0 {
            futex::wake(&self.sleeps, 1);
        }
    }

    /// For [`VmFd::subscribe`].
    pub fn ringer(self: &Arc<Self>, number: u32) -> impl Fn(u64) + Send + Sync + 'static {
        let queue = Arc::clone(self);
        move |_| queue.ring(number)
    }

    /// Takes the doorbells that were rung, one bit each.
    #[inline]
    pub fn take(&self) -> u64 {
        self.rung.swap(0, Ordering::SeqCst)
    }

    /// The same, and waits for one; 0 after the timeout. For one thread at a time.
    pub fn wait(&self, timeout: Option<Duration>) -> u64 {
        let end = timeout.map(|t| Instant::now() + t);
        loop {
            let rung = self.take();
            if rung != 0 {
                return rung;
            }
            let left = end.map(|end| end.saturating_duration_since(Instant::now()));
            if left == Some(Duration::ZERO) {
                return 0;
            }
            self.sleeps.store(1, Ordering::SeqCst);
            // Who rings from here on sees that somebody sleeps, and who rang before is seen.
            if self.rung.load(Ordering::SeqCst) == 0 {
                futex::wait(&self.sleeps, 1, left);
            }
            self.sleeps.store(0, Ordering::SeqCst);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;

    #[test]
    fn rings_are_taken_once() {
        let queue = DoorbellQueue::new();
        queue.ring(3);
        queue.ring(3);
        queue.ring(64);
        assert_eq!(queue.wait(None), 9);
        assert_eq!(queue.take(), 0);
        assert_eq!(queue.wait(Some(Duration::from_millis(1))), 0);
    }

    #[test]
    fn no_ring_is_lost() {
        const RINGS: u32 = 20_000;
        let queue = Arc::new(DoorbellQueue::new());
        let answered = Arc::new(AtomicBool::new(true));
        let (theirs, answers) = (Arc::clone(&queue), Arc::clone(&answered));
        let waiter = std::thread::spawn(move || {
            for n in 0..RINGS {
                // Without a limit, as a ring that is lost would only delay.
                assert_eq!(theirs.wait(None), 1 << (n % 64));
                answers.store(true, Ordering::SeqCst);
            }
        });
        for n in 0..RINGS {
            while !answered.swap(false, Ordering::SeqCst) {
                std::thread::yield_now();
            }
            queue.ring(n);
        }
        waiter.join().unwrap();
    }
}
