//! Writes to irqfds by threads of the VMM, for whoever stands before its `write(2)`.

use std::os::fd::RawFd;
use std::panic::{AssertUnwindSafe, catch_unwind};

use hypervisor::irqfd_direct as direct;
pub use hypervisor::irqfd_direct::is_irqfd;

use crate::fork;
use crate::signals::Section;
use crate::user_memory::Arg;

/// Bytes of an eventfd's value.
const VALUE: usize = size_of::<u64>();

/// A write of `len` bytes at `address` to an eventfd which [`is_irqfd`]. True if the interrupt is
/// injected, and the write over, with `VALUE` as its result; false if the kernel has to be asked.
///
/// To be called outside of a [`Section`] of the caller's thread, or in one in which it holds nothing.
pub fn write_irqfd(fd: RawFd, address: usize, len: usize) -> bool {
    if len < VALUE {
        return false;
    }
    let _section = Section::enter();
    // What the kernel would refuse is for the kernel to refuse.
    let is_value = Arg(address as u64)
        .read::<u64>()
        .is_ok_and(|value| value != u64::MAX);
    // A defect of ours must not unwind into C.
    is_value && catch_unwind(AssertUnwindSafe(|| direct::signal_irqfd(fd))).unwrap_or(false)
}

/// Tells that these numbers are about to be closed, or to become other files.
pub fn forget_irqfds(first: RawFd, last: RawFd) {
    // What a child of vfork closes stays open in its parent.
    if direct::has_irqfd(first, last) && !fork::in_child() {
        direct::closing(first, last);
    }
}
