//! Measures the time from the entry into the guest, which rings at once, until a thread that sleeps has seen the
//! doorbell.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use super::{DoorbellRow, Ear, Setup};
use crate::bench::report;
use crate::error::BootError;

const SAMPLES: u32 = 200;
/// A pause in which the waiter falls asleep.
const PAUSE: Duration = Duration::from_micros(200);

/// What the waiter shares with the vCPU's thread.
struct Shared {
    begin: Instant,
    seen_ns: AtomicU64,
    is_over: AtomicBool,
}

impl Shared {
    fn note(&self) {
        let ns = u64::try_from(self.begin.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.seen_ns.store(ns, Ordering::Release);
    }
}

/// Returns the median in microseconds.
pub(super) fn measure(kind: &DoorbellRow) -> Result<f64, BootError> {
    let mut setup = Setup::new(kind, 1, true)?;
    let clone = || {
        let event = setup.event.try_clone();
        event.map_err(BootError::host("cannot duplicate an eventfd"))
    };
    let (wait, tell) = (clone()?, clone()?);
    let shared = Arc::new(Shared {
        begin: Instant::now(),
        seen_ns: AtomicU64::new(0),
        is_over: AtomicBool::new(false),
    });
    let (theirs, queue) = (Arc::clone(&shared), Arc::clone(&setup.queue));
    let is_subscriber = kind.ear == Ear::Subscriber;
    let waiter = thread::spawn(move || {
        loop {
            if is_subscriber {
                queue.wait(None);
            } else if wait.read().is_err() {
                return;
            }
            if theirs.is_over.load(Ordering::Acquire) {
                return;
            }
            theirs.note();
        }
    });
    let mut samples = Vec::new();
    for _ in 0..SAMPLES {
        thread::sleep(PAUSE);
        shared.seen_ns.store(0, Ordering::Release);
        let start = u64::try_from(shared.begin.elapsed().as_nanos()).unwrap_or(u64::MAX);
        setup.turn(|| {
            // The VMM tells its device's thread.
            let _ = tell.write(1);
        })?;
        let seen = loop {
            match shared.seen_ns.load(Ordering::Acquire) {
                0 => thread::yield_now(),
                ns => break ns,
            }
        };
        samples.push(seen.saturating_sub(start) as f64 / 1e3);
    }
    shared.is_over.store(true, Ordering::Release);
    setup.queue.ring(0);
    let _ = setup.event.write(1);
    // If that thread has panicked, the panic has been printed.
    let _ = waiter.join();
    Ok(report::median(&samples).unwrap_or(f64::NAN))
}
