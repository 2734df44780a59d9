//! Children of the process: a VM belongs to the address space that made it.

use std::sync::Once;
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};

/// Counted up in each child.
static GENERATION: AtomicU32 = AtomicU32::new(0);
/// The process that has the objects; 0 before there are any.
static PROCESS: AtomicI32 = AtomicI32::new(0);
static WATCH: Once = Once::new();

extern "C" fn child() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
    // SAFETY: no arguments, cannot fail.
    PROCESS.store(unsafe { libc::getpid() }, Ordering::Relaxed);
}

/// How many forks lie between the first process that asked and this one.
pub(crate) fn generation() -> u32 {
    WATCH.call_once(|| {
        // SAFETY: no arguments, cannot fail.
        PROCESS.store(unsafe { libc::getpid() }, Ordering::Relaxed);
        // SAFETY: the handler only touches atomics. Should it fail for lack of memory, a child
        // that uses its parent's VM is not told so.
        unsafe { libc::pthread_atfork(None, None, Some(child)) };
    });
    GENERATION.load(Ordering::Relaxed)
}

/// The process, without a system call after the first.
pub(crate) fn process() -> i32 {
    generation();
    PROCESS.load(Ordering::Relaxed)
}

/// True in a child of `vfork(2)`, which shares our memory: nothing that it closes is closed here.
pub fn in_child() -> bool {
    let process = PROCESS.load(Ordering::Relaxed);
    // SAFETY: no arguments, cannot fail.
    process != 0 && process != unsafe { libc::getpid() }
}
