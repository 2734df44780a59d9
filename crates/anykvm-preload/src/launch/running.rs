//! The number of the program's threads.

use std::sync::atomic::{AtomicUsize, Ordering};

static THREADS: AtomicUsize = AtomicUsize::new(1);

/// Returns true while the program has one thread.
pub(super) fn are_alone() -> bool {
    THREADS.load(Ordering::Acquire) == 1
}

/// Notes that a thread is about to begin.
pub(super) fn begin() {
    THREADS.fetch_add(1, Ordering::AcqRel);
}

/// Notes that a thread is about to end, or did not begin.
pub(super) fn end() {
    THREADS.fetch_sub(1, Ordering::AcqRel);
}

/// Notes that the calling thread is the only one of a child process.
pub(super) fn begin_child() {
    THREADS.store(1, Ordering::Release);
}
