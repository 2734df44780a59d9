//! Writes to irqfds by the VMM's threads, for code that intercepts `write(2)`.

use std::os::fd::RawFd;
use std::panic::{AssertUnwindSafe, catch_unwind};

use hypervisor::irqfd_direct as direct;
pub use hypervisor::irqfd_direct::is_irqfd;

use crate::fork;
use crate::signals::Section;
use crate::user_memory::Arg;

/// Size of an eventfd's value in bytes.
const VALUE: usize = size_of::<u64>();

/// Handles a write of `len` bytes at `address` to a descriptor for which [`is_irqfd`] is true. Returns true if the
/// interrupt is injected and the write is complete, with `VALUE` as its result; false if the kernel's `write` is
/// needed.
///
/// Must be called outside of a [`Section`] of the caller's thread, or in one in which the thread holds no lock.
pub fn write_irqfd(fd: RawFd, address: usize, len: usize) -> bool {
    if len < VALUE {
        return false;
    }
    let _section = Section::enter();
    // A write that the kernel would refuse is left to the kernel.
    let is_value = Arg(address as u64)
        .read::<u64>()
        .is_ok_and(|value| value != u64::MAX);
    // A panic must not unwind into C.
    is_value && catch_unwind(AssertUnwindSafe(|| direct::signal_irqfd(fd))).unwrap_or(false)
}

/// Notes that these numbers are about to be closed, or to become other files.
pub fn forget_irqfds(first: RawFd, last: RawFd) {
    // Descriptors that a child of vfork closes stay open in its parent.
    if direct::has_irqfd(first, last) && !fork::in_child() {
        direct::closing(first, last);
    }
}
