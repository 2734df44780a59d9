//! poll(2) over a set of fds.

use std::{
    io,
    os::fd::{AsRawFd, BorrowedFd},
    time::Duration,
};

/// What is known about one fd.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ready {
    /// Reading would not block.
    pub readable: bool,
    /// Writing would not block.
    pub writable: bool,
    /// Error, hang-up, or not an open fd.
    pub closed: bool,
}

/// Waits until one of `fds` is readable, or the timeout; the answers are in the
/// order of `fds`.
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
    // Round up: returning early would make callers spin.
    let ms = timeout.map_or(-1, |t| {
        i32::try_from(t.as_nanos().div_ceil(1_000_000)).unwrap_or(i32::MAX)
    });
    let n = set.len() as libc::nfds_t;
    // SAFETY: `set` is `n` initialised pollfds, writable for the call.
    if unsafe { libc::poll(set.as_mut_ptr(), n, ms) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(set
        .iter()
        .map(|p| Ready {
            readable: p.revents & libc::POLLIN != 0,
            writable: p.revents & libc::POLLOUT != 0,
            closed: p.revents & (libc::POLLERR | libc::POLLHUP | libc::POLLNVAL) != 0,
        })
        .collect())
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
}
