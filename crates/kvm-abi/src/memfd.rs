//! The files behind KVM's file descriptors.
//!
//! Each object has a memfd, so that `close`, `dup`, `fcntl`, `mmap` and passing it over a socket work as for any file.
//! Its size is sealed, so nobody can truncate the run page of a running vCPU. VMMs that filter system calls need not
//! know of these files.

use std::ffi::CStr;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};

use host::system;

use crate::errno::Result;

/// Identifies a file: the same for all duplicates, and different for any two files that exist at the same time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct FileIdentity {
    device: u64,
    inode: u64,
}

/// Creates the file; `name` shows up in `/proc/PID/fd` and `/proc/PID/maps`.
pub(crate) fn create(name: &CStr, len: usize, close_on_exec: bool) -> Result<OwnedFd> {
    let cloexec = if close_on_exec { libc::MFD_CLOEXEC } else { 0 };
    let flags = libc::MFD_ALLOW_SEALING | cloexec;
    let fd = host::Memfd::with_flags(name, len, flags)?.into_fd();
    let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
    // SAFETY: a plain system call on a descriptor that we own; F_ADD_SEALS takes an integer.
    unsafe {
        let number = fd.as_raw_fd() as usize;
        let arguments = [number, libc::F_ADD_SEALS as usize, seals as usize];
        system::call(libc::SYS_fcntl, arguments)?;
    }
    Ok(fd)
}

/// Returns the identity of the file that `fd` is now; EBADF if it is not open.
pub(crate) fn identity(fd: RawFd) -> Result<FileIdentity> {
    let mut stat = std::mem::MaybeUninit::<libc::stat>::uninit();
    // SAFETY: `stat` is writable for the size of the structure.
    unsafe { system::call(libc::SYS_fstat, [fd as usize, stat.as_mut_ptr() as usize])? };
    // SAFETY: the successful call filled it.
    let stat = unsafe { stat.assume_init() };
    Ok(FileIdentity {
        device: stat.st_dev,
        inode: stat.st_ino,
    })
}

/// Returns the path that `/proc` shows for an open descriptor.
pub(crate) fn path(fd: BorrowedFd<'_>) -> Result<std::path::PathBuf> {
    let link = format!("/proc/self/fd/{}", fd.as_raw_fd());
    Ok(std::fs::read_link(link)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Errno;

    #[test]
    fn identity_survives_dup_and_differs_between_files() {
        let first = create(c"anykvm-test", 4096, true).unwrap();
        let second = create(c"anykvm-test", 4096, true).unwrap();
        let copy = first.try_clone().unwrap();
        let of = |fd: &OwnedFd| identity(fd.as_raw_fd()).unwrap();
        assert_eq!(of(&first), of(&copy));
        assert_ne!(of(&first), of(&second));
        assert_eq!(identity(-1), Err(Errno::new(libc::EBADF)));
    }

    #[test]
    fn the_size_is_sealed() {
        let fd = create(c"anykvm-test", 4096, true).unwrap();
        // SAFETY: a plain system call on an open descriptor.
        let result = unsafe { libc::ftruncate(fd.as_raw_fd(), 0) };
        assert_eq!((result, Errno::last()), (-1, Errno::new(libc::EPERM)));
    }

    #[test]
    fn close_on_exec_is_as_asked() {
        for wanted in [false, true] {
            let fd = create(c"anykvm-test", 0, wanted).unwrap();
            // SAFETY: F_GETFD takes no argument.
            let flags = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GETFD) };
            assert_eq!(flags & libc::FD_CLOEXEC != 0, wanted);
        }
    }
}
