//! The numbered calls: those that this crate makes through `kvm-abi`'s decoder because they
//! have no typed form there, and how a refusal becomes this crate's error.

use std::os::fd::AsRawFd;

use kvm_abi::Errno;
pub(crate) use kvm_abi::numbers::*;
use vmm_sys_util::errno;

/// `ioctl(2)` on one of our descriptors with the address of `argument`.
pub(crate) fn ioctl_with_mut_ptr<F: AsRawFd, T>(
    fd: &F,
    number: u32,
    argument: *mut T,
) -> Result<i32, errno::Error> {
    kvm_abi::ioctl(fd.as_raw_fd(), number, argument as u64).map_err(refused)
}

/// `ioctl(2)` on one of our descriptors with the address of `argument`.
pub(crate) fn ioctl_with_ref<F: AsRawFd, T>(
    fd: &F,
    number: u32,
    argument: &T,
) -> Result<i32, errno::Error> {
    ioctl_with_mut_ptr(fd, number, std::ptr::from_ref(argument).cast_mut())
}

/// The error of a refused call. It is also left in the thread's `errno`, as after a system
/// call, for callers that look there.
pub(crate) fn refused(error: impl Into<Errno>) -> errno::Error {
    let value = error.into().get();
    // SAFETY: the address is that of this thread's `errno`, valid for its whole life.
    unsafe { *libc::__errno_location() = value };
    errno::Error::new(value)
}
