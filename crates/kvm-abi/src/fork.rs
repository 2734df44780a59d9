//! Children of the process: a VM belongs to the address space that made it.

use std::cell::Cell;
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};

pub(crate) use host::fork::generation;

use crate::signals;

/// The process that has the objects, 0 before there are any, and its generation.
static PROCESS: AtomicI32 = AtomicI32::new(0);
static PROCESS_GENERATION: AtomicU32 = AtomicU32::new(0);

thread_local! {
    /// The thread's child of `vfork(2)` is running, on the thread's own data.
    static BORROWED: Cell<bool> = const { Cell::new(false) };
}

/// The process, with a system call for the first in each process only.
pub(crate) fn process() -> i32 {
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

/// What a wrapper of `vfork(2)` reports on both returns: whether it is the child's.
pub fn set_borrowed(is_child: bool) {
    BORROWED.set(is_child);
}

/// True in a child of `vfork(2)`, which shares our memory: nothing that it closes is closed here.
///
/// Children made by `clone(2)` in the same way are known by their process id; under a filter of
/// system calls, which may not allow to ask for it, they are not known.
pub fn in_child() -> bool {
    if BORROWED.get() {
        return true;
    }
    let process = PROCESS.load(Ordering::Relaxed);
    if process == 0 || signals::is_filtered() {
        return false;
    }
    // SAFETY: no arguments, cannot fail.
    PROCESS_GENERATION.load(Ordering::Relaxed) == generation()
        && process != unsafe { libc::getpid() }
}
