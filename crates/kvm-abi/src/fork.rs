//! Children of the process: a VM belongs to the address space that made it.

use std::cell::Cell;

use crate::{process, signals};

thread_local! {
    /// The thread's child of `vfork(2)` is running, on the thread's own data.
    static BORROWED: Cell<bool> = const { Cell::new(false) };
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
    if signals::is_filtered() {
        return false;
    }
    process::is_another()
}
