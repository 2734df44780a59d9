//! Raw ioctls.

use std::os::fd::RawFd;

use crate::errno::{Errno, Result};

/// `ioctl(fd, number, argument)`.
pub fn ioctl(fd: RawFd, _number: u32, _arg: u64) -> Result<i32> {
    crate::objects::lookup(fd)?;
    Err(Errno::new(libc::ENOTTY))
}
