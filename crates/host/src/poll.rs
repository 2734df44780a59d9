//! poll(2) over a set of descriptors, and sets that the kernel keeps (epoll).

use std::{
    io,
    os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd},
    time::Duration,
};

use crate::{service_thread::FILES, system};

/// The state of one descriptor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ready {
    /// Reading would not block.
    pub readable: bool,
    /// Writing would not block.
    pub writable: bool,
    /// Error, hang-up, or not an open fd.
    pub closed: bool,
}

/// Waits until one of `fds` is readable, or until the timeout. The answers are in the order of `fds`.
///
/// # Errors
/// Those of `poll`, `EINTR` included.
pub fn readable(fds: &[BorrowedFd<'_>], timeout: Option<Duration>) -> io::Result<Vec<Ready>> {
    let mut set: Vec<libc::pollfd> = fds
        .iter()
        .map(|fd| libc::pollfd {
            fd: fd.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        })
        .collect();
    let ms = milliseconds(timeout);
    let n = set.len() as libc::nfds_t;
    // SAFETY: `set` is `n` initialised pollfds, writable for the call.
    unsafe {
        system::call(
            libc::SYS_poll,
            [set.as_mut_ptr() as usize, n as usize, ms as usize],
        )?
    };
    Ok(set
        .iter()
        .map(|p| Ready {
            readable: p.revents & libc::POLLIN != 0,
            writable: p.revents & libc::POLLOUT != 0,
            closed: p.revents & (libc::POLLERR | libc::POLLHUP | libc::POLLNVAL) != 0,
        })
        .collect())
}

/// Converts a timeout for the kernel, rounding up: returning early would make callers spin.
fn milliseconds(timeout: Option<Duration>) -> i32 {
    timeout.map_or(-1, |t| {
        i32::try_from(t.as_nanos().div_ceil(1_000_000)).unwrap_or(i32::MAX)
    })
}

/// When an entry of an [`Epoll`] is reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trigger {
    /// As long as it is readable.
    Level,
    /// Each time that something is written, and once if it is readable when it is added.
    Edge,
}

/// An epoll set. An entry is a file and the number that it was added by. The entry does not keep the file open, and
/// vanishes with the file's last descriptor.
#[derive(Debug)]
pub struct Epoll(OwnedFd);

/// Largest number of entries reported at once.
const BATCH: usize = 32;

impl Epoll {
    /// An empty set.
    ///
    /// # Errors
    /// Those of `epoll_create1`.
    pub fn new() -> io::Result<Self> {
        // SAFETY: a system call without pointers.
        let fd = unsafe {
            let flags = libc::EPOLL_CLOEXEC as usize;
            system::open(libc::SYS_epoll_create1, [flags])?
        };
        Ok(Self(fd))
    }

    /// Adds a file, which the caller or other code of the process has open as `fd`.
    ///
    /// # Errors
    /// Those of `epoll_ctl`.
    pub fn add(&self, fd: RawFd, token: u64, trigger: Trigger) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_ADD, fd, token, trigger)
    }

    /// Renews an entry, which is reported once more if the file is readable.
    ///
    /// # Errors
    /// Fails if `fd` is closed, or is another file than the one that was added by this number.
    pub fn renew(&self, fd: RawFd, token: u64, trigger: Trigger) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_MOD, fd, token, trigger)
    }

    /// Removes an entry.
    ///
    /// # Errors
    /// As [`Self::renew`].
    pub fn remove(&self, fd: RawFd) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_DEL, fd, 0, Trigger::Level)
    }

    fn control(&self, what: i32, fd: RawFd, token: u64, trigger: Trigger) -> io::Result<()> {
        let edge = if trigger == Trigger::Edge {
            libc::EPOLLET
        } else {
            0
        };
        let mut event = libc::epoll_event {
            events: (libc::EPOLLIN | edge) as u32,
            u64: token,
        };
        // SAFETY: `event` is initialised and outlives the call; numbers that are not open are
        // refused.
        unsafe {
            system::call(
                libc::SYS_epoll_ctl,
                [
                    self.0.as_raw_fd() as usize,
                    what as usize,
                    fd as usize,
                    &raw mut event as usize,
                ],
            )?
        };
        Ok(())
    }

    /// Waits for entries and puts their tokens into `tokens`, which is empty after the timeout.
    ///
    /// # Errors
    /// Those of `epoll_wait`, `EINTR` included; `tokens` is empty then.
    pub fn wait(&self, tokens: &mut Vec<u64>, timeout: Option<Duration>) -> io::Result<()> {
        tokens.clear();
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; BATCH];
        let ms = milliseconds(timeout);
        let fd = self.0.as_raw_fd() as usize;
        // SAFETY: `events` is writable for `BATCH` entries.
        let n = unsafe {
            system::call(
                libc::SYS_epoll_wait,
                [fd, events.as_mut_ptr() as usize, BATCH, ms as usize],
            )?
        };
        tokens.extend(events.iter().take(n).map(|e| e.u64));
        Ok(())
    }

    /// Returns the tokens of all entries that are left; `None` if /proc does not tell.
    pub fn tokens(&self) -> Option<Vec<u64>> {
        let path = format!("/proc/self/fdinfo/{}", self.0.as_raw_fd());
        let info = FILES.pass(|| std::fs::read_to_string(path))?.ok()?;
        let entries = info.lines().filter(|l| l.starts_with("tfd:"));
        entries
            .map(|l| {
                let mut words = l.split_whitespace().skip_while(|w| *w != "data:");
                u64::from_str_radix(words.nth(1)?, 16).ok()
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::EventFd;
    use std::os::fd::AsFd;

    #[test]
    fn tells_which_is_ready() {
        let (a, b) = (EventFd::new(0).unwrap(), EventFd::new(1).unwrap());
        let r = readable(&[a.as_fd(), b.as_fd()], None).unwrap();
        assert_eq!(
            r.iter().map(|r| r.readable).collect::<Vec<_>>(),
            [false, true]
        );
        let r = readable(&[a.as_fd()], Some(Duration::from_micros(10))).unwrap();
        assert_eq!(r, [Ready::default()]);
    }

    #[test]
    fn a_set_does_not_keep_what_is_in_it() {
        let set = Epoll::new().unwrap();
        let (a, b) = (EventFd::new(1).unwrap(), EventFd::new(0).unwrap());
        set.add(a.as_raw_fd(), 7, Trigger::Edge).unwrap();
        set.add(b.as_raw_fd(), 0xab, Trigger::Edge).unwrap();
        let mut tokens = Vec::new();
        let now = Some(Duration::ZERO);
        let mut ready = || {
            set.wait(&mut tokens, now).unwrap();
            tokens.clone()
        };
        assert_eq!(ready(), [7]);
        assert_eq!(ready(), [0u64; 0], "once");
        b.signal(1).unwrap();
        assert_eq!(ready(), [0xab]);
        b.signal(1).unwrap();
        assert_eq!(ready(), [0xab], "each write");
        let number = a.as_raw_fd();
        let other = a.try_clone().unwrap();
        drop(a);
        assert!(set.renew(number, 7, Trigger::Edge).is_err());
        other.signal(1).unwrap();
        assert_eq!(ready(), [7], "it lives by its other descriptor");
        let mut left = set.tokens().unwrap();
        left.sort_unstable();
        assert_eq!(left, [7, 0xab]);
        drop(other);
        assert_eq!(set.tokens().unwrap(), [0xab]);
        set.remove(b.as_raw_fd()).unwrap();
        assert_eq!(set.tokens().unwrap(), [0u64; 0]);
    }
}
