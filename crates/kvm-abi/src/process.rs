//! Which process has the objects. Needed for forks and signals.

use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};

pub(crate) use host::fork::generation;

/// Id of the process that has the objects, 0 before there are any, and its generation.
static PROCESS: AtomicI32 = AtomicI32::new(0);
static PROCESS_GENERATION: AtomicU32 = AtomicU32::new(0);

/// Returns the id of the process. Only the first call in each process makes a system call.
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

/// True in a process that shares the memory of the one that has the objects, because its fork was not noticed.
pub(crate) fn is_another() -> bool {
    let process = PROCESS.load(Ordering::Relaxed);
    process != 0
        && PROCESS_GENERATION.load(Ordering::Relaxed) == generation()
        // SAFETY: no arguments, cannot fail.
        && process != unsafe { libc::getpid() }
}
