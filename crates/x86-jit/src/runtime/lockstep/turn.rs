//! Lets one vCPU at a time execute while engines are compared: what another vCPU writes between the two runs of a
//! stretch would be a difference.

use std::sync::atomic::{AtomicU32, Ordering};

/// Tickets, so that a vCPU that spins cannot keep the vCPU it waits for from running.
static NEXT: AtomicU32 = AtomicU32::new(0);
static SERVED: AtomicU32 = AtomicU32::new(0);

/// This thread's turn, which ends when the value is dropped.
#[derive(Debug)]
pub(crate) struct Turn(());

/// Waits for the thread's turn, and calls `meanwhile` now and then.
pub(crate) fn wait(mut meanwhile: impl FnMut()) -> Turn {
    let ticket = NEXT.fetch_add(1, Ordering::Relaxed);
    let mut spins = 0u32;
    while SERVED.load(Ordering::Acquire) != ticket {
        spins += 1;
        if spins.is_multiple_of(64) {
            std::thread::yield_now();
            meanwhile();
        }
        core::hint::spin_loop();
    }
    Turn(())
}

impl Drop for Turn {
    fn drop(&mut self) {
        SERVED.fetch_add(1, Ordering::Release);
    }
}
