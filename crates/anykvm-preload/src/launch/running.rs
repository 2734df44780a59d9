//! How many threads the program has.

use std::sync::atomic::{AtomicUsize, Ordering};

static THREADS: AtomicUsize = AtomicUsize::new(1);

/// True while the program has one thread.
pub(super) fn are_alone() -> bool {
    THREADS.load(Ordering::Acquire) == 1
}

/// A thread is about to begin.
pub(super) fn begin() {
    THREADS.fetch_add(1, Ordering::AcqRel);
}

/// A thread is about to end, or did not begin.
pub(super) fn end() {
    THREADS.fetch_sub(1, Ordering::AcqRel);
}

/// The calling thread is the only one of a child.
pub(super) fn begin_child() {
    THREADS.store(1, Ordering::Release);
}
