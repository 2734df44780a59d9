//! Children of the process: a VM belongs to the address space that made it.

use std::cell::Cell;

use crate::{process, signals};

thread_local! {
    /// The thread's child of `vfork(2)` is running with the thread's own data.
    static BORROWED: Cell<bool> = const { Cell::new(false) };
}

/// Notes a return of `vfork(2)`, for its wrapper: `is_child` says whether it is the child's return.
pub fn set_borrowed(is_child: bool) {
    BORROWED.set(is_child);
}

/// True in a child of `vfork(2)`, which shares anykvm's memory: a descriptor that the child closes stays open in the
/// parent.
///
/// Children made by `clone(2)` in the same way are recognised by their process id, unless a system call filter may
/// forbid asking for it.
pub fn in_child() -> bool {
    if BORROWED.get() {
        return true;
    }
    if signals::is_filtered() {
        return false;
    }
    process::is_another()
}
