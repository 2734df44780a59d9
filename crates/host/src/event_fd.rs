//! [`EventFd`]: an eventfd(2) counter.

use std::{
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd},
};

use crate::{service_thread::FILES, system};

/// A non-blocking eventfd.
#[derive(Debug)]
pub struct EventFd(OwnedFd);

/// The lowest number of a duplicate, if the process may have so many.
const HIGH: RawFd = 512;

/// EINVAL if `fd` is another file than an eventfd. Without /proc the file's type is unknown; later writes will fail.
fn check(fd: RawFd) -> io::Result<()> {
    let path = format!("/proc/self/fd/{fd}");
    let Some(Ok(to)) = FILES.pass(|| std::fs::read_link(path)) else {
        return Ok(());
    };
    match to.to_str() {
        Some("anon_inode:[eventfd]") => Ok(()),
        // A file that [`EventFd::id`] reads on another thread, by a number that the process has closed.
        Some(to) if to.starts_with("/proc/") && to.contains("/fdinfo/") => {
            Err(io::Error::from_raw_os_error(libc::EBADF))
        }
        _ => Err(io::Error::from_raw_os_error(libc::EINVAL)),
    }
}

/// Duplicates `fd` by the first free number from `lowest` on.
fn duplicate_from(fd: RawFd, lowest: RawFd) -> io::Result<OwnedFd> {
    let arguments = [fd as usize, libc::F_DUPFD_CLOEXEC as usize, lowest as usize];
    // SAFETY: duplicating checks that `fd` is open and touches no memory. Nobody else owns the new number.
    unsafe { system::open(libc::SYS_fcntl, arguments) }
}

impl EventFd {
    /// Creates a non-blocking, close-on-exec eventfd with the given count.
    ///
    /// # Errors
    /// Those of `eventfd`.
    pub fn new(count: u32) -> io::Result<Self> {
        // SAFETY: a system call without pointers.
        let fd = unsafe {
            let flags = libc::EFD_CLOEXEC | libc::EFD_NONBLOCK;
            system::open(libc::SYS_eventfd2, [count as usize, flags as usize])?
        };
        Ok(Self(fd))
    }

    /// Duplicates an eventfd that someone else owns, as KVM takes a reference of its own. Blocking mode is a property
    /// of the open file and stays.
    ///
    /// # Errors
    /// `EBADF` if `fd` is not open; `EINVAL` if it is no eventfd.
    pub fn duplicate(fd: RawFd) -> io::Result<Self> {
        // Checked before duplicating, because other threads would see a second descriptor of some other file.
        check(fd)?;
        // Numbers that the process closes and opens all the time are left to the process.
        let new = duplicate_from(fd, HIGH).or_else(|_| duplicate_from(fd, 0))?;
        // Checked again afterwards, because the number may have become another file's.
        check(new.as_raw_fd())?;
        Ok(Self(new))
    }

    /// Returns the number that identifies the counter on the host, whatever descriptor refers to it; `None` if /proc
    /// does not tell.
    pub fn id(&self) -> Option<u64> {
        let path = format!("/proc/self/fdinfo/{}", self.0.as_raw_fd());
        let info = FILES.pass(|| std::fs::read_to_string(path))?.ok()?;
        let line = info.lines().find_map(|l| l.strip_prefix("eventfd-id:"))?;
        line.trim().parse().ok()
    }

    /// True if writers wait while the counter is full: the eventfd is not O_NONBLOCK.
    pub fn blocks(&self) -> bool {
        // SAFETY: a system call without pointers.
        let flags = unsafe {
            system::call(
                libc::SYS_fcntl,
                [self.0.as_raw_fd() as usize, libc::F_GETFL as usize],
            )
        };
        flags.is_ok_and(|flags| flags & libc::O_NONBLOCK as usize == 0)
    }

    /// True if 1 can be added to the counter.
    pub fn has_room(&self) -> bool {
        let mut set = libc::pollfd {
            fd: self.0.as_raw_fd(),
            events: libc::POLLOUT,
            revents: 0,
        };
        // SAFETY: one initialised pollfd, writable for the call.
        let ready = unsafe { system::call(libc::SYS_poll, [&raw mut set as usize, 1, 0]) };
        ready.is_ok_and(|n| n == 1) && set.revents & libc::POLLOUT != 0
    }

    /// Adds `n` to the counter. Returns false if that would overflow it; the counter is then full, so the reader is
    /// signalled anyway.
    ///
    /// # Errors
    /// Those of `write` other than `EAGAIN`.
    pub fn signal(&self, n: u64) -> io::Result<bool> {
        let bytes = n.to_ne_bytes();
        // SAFETY: `bytes` is readable for 8 bytes.
        let written = unsafe {
            let fd = self.0.as_raw_fd() as usize;
            system::call(libc::SYS_write, [fd, bytes.as_ptr() as usize, 8])
        };
        match written {
            Ok(_) => Ok(true),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(false),
            Err(e) => Err(e),
        }
    }

    /// Takes the counter's value, `None` if it is zero. Blocks if the eventfd was duplicated from a blocking one.
    ///
    /// # Errors
    /// Those of `read` other than `EAGAIN`.
    pub fn take(&self) -> io::Result<Option<u64>> {
        let mut bytes = [0; 8];
        // SAFETY: `bytes` is writable for 8 bytes.
        let read = unsafe {
            let fd = self.0.as_raw_fd() as usize;
            system::call(libc::SYS_read, [fd, bytes.as_mut_ptr() as usize, 8])
        };
        match read {
            Ok(_) => Ok(Some(u64::from_ne_bytes(bytes))),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// Like [`Self::take`], but never blocks.
    ///
    /// # Errors
    /// Those of `preadv2` other than `EAGAIN`.
    pub fn take_now(&self) -> io::Result<Option<u64>> {
        let mut bytes = [0; 8];
        let to = libc::iovec {
            iov_base: bytes.as_mut_ptr().cast(),
            iov_len: 8,
        };
        const NO_OFFSET: usize = usize::MAX;
        let fd = self.0.as_raw_fd() as usize;
        // SAFETY: `to` describes `bytes`, which is writable.
        let read = unsafe {
            let flags = libc::RWF_NOWAIT as usize;
            let arguments = [fd, &raw const to as usize, 1, NO_OFFSET, NO_OFFSET, flags];
            system::call(libc::SYS_preadv2, arguments)
        };
        let Err(e) = read else {
            return Ok(Some(u64::from_ne_bytes(bytes)));
        };
        match e.raw_os_error() {
            Some(libc::EAGAIN) => Ok(None),
            // The flag does not exist before Linux 5.8.
            Some(libc::EOPNOTSUPP) => self.take(),
            _ => Err(e),
        }
    }

    /// Returns another handle to the same counter.
    ///
    /// # Errors
    /// Those of `dup`.
    pub fn try_clone(&self) -> io::Result<Self> {
        self.0.try_clone().map(Self)
    }
}

impl AsFd for EventFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsRawFd for EventFd {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

impl From<OwnedFd> for EventFd {
    fn from(fd: OwnedFd) -> Self {
        Self(fd)
    }
}

impl From<EventFd> for OwnedFd {
    fn from(e: EventFd) -> Self {
        e.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_and_saturates() {
        let e = EventFd::new(0).unwrap();
        assert_eq!(e.take().unwrap(), None);
        assert!(e.signal(2).unwrap());
        let d = EventFd::duplicate(e.as_raw_fd()).unwrap();
        assert!(d.signal(3).unwrap());
        assert_eq!(e.try_clone().unwrap().take().unwrap(), Some(5));
        assert!(e.signal(u64::MAX - 1).unwrap());
        assert!(!e.signal(1).unwrap());
        assert!(e.signal(u64::MAX).is_err());
        assert!(!e.has_room() && !e.blocks());
        e.take().unwrap();
        assert!(e.has_room());
    }

    #[test]
    fn only_eventfds_are_duplicated() {
        let f = std::fs::File::open("/dev/null").unwrap();
        let errno = |fd| EventFd::duplicate(fd).unwrap_err().raw_os_error();
        assert_eq!(errno(f.as_raw_fd()), Some(libc::EINVAL));
        assert_eq!(errno(-1), Some(libc::EBADF));
    }
}
