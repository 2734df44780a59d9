//! Which process has the objects: what forks and signals ask.

use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};

pub(crate) use host::fork::generation;

/// The process that has the objects, 0 before there are any, and its generation.
static PROCESS: AtomicI32 = AtomicI32::new(0);
static PROCESS_GENERATION: AtomicU32 = AtomicU32::new(0);

/// The process, with a system call for the first in each process only.
pub(crate) fn id() -> i32 {
    let generation = generation();
    let known = PROCESS.load(Ordering::Relaxed);
    if known != 0 && PROCESS_GENERATION.load(Ordering::Relaxed) == generation {
        return known;
    }
    // SAFETY: no arguments, cannot fail.
    let process = unsafe { libc::getpid() };
    PROCESS.store(process, Ordering::Relaxed);
    PROCESS_GENERATION.store(generation, Ordering::Relaxed);
    process
}

/// True in a process that shares our memory, as no fork has been noticed, and is not the one that has the objects.
pub(crate) fn is_another() -> bool {
    let process = PROCESS.load(Ordering::Relaxed);
    process != 0
        && PROCESS_GENERATION.load(Ordering::Relaxed) == generation()
        // SAFETY: no arguments, cannot fail.
        && process != unsafe { libc::getpid() }
}
