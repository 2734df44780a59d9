//! futex(2): parking a thread on a 32-bit word.

use std::{ptr, sync::atomic::AtomicU32, time::Duration};

use crate::system;

/// Why [`wait`] returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// [`wake`] was called, or the kernel woke the thread spuriously.
    Woken,
    /// The word did not have the expected value: no sleep happened.
    Changed,
    /// The timeout has passed.
    TimedOut,
    /// A signal handler ran.
    Interrupted,
}

/// Sleeps until woken, if `word` still is `expected`. The futex is private to the process.
pub fn wait(word: &AtomicU32, expected: u32, timeout: Option<Duration>) -> Wait {
    let ts = timeout.map(|t| libc::timespec {
        tv_sec: libc::time_t::try_from(t.as_secs()).unwrap_or(libc::time_t::MAX),
        tv_nsec: t.subsec_nanos().into(),
    });
    let ts_ptr = ts.as_ref().map_or(ptr::null(), ptr::from_ref);
    // SAFETY: `word` and `ts` are live for the call; the kernel only reads both.
    let result = unsafe {
        let operation = libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG;
        system::call(
            libc::SYS_futex,
            [
                word.as_ptr() as usize,
                operation as usize,
                expected as usize,
                ts_ptr as usize,
            ],
        )
    };
    let Err(error) = result else {
        return Wait::Woken;
    };
    match error.raw_os_error() {
        Some(libc::EAGAIN) => Wait::Changed,
        Some(libc::ETIMEDOUT) => Wait::TimedOut,
        Some(libc::EINTR) => Wait::Interrupted,
        // Nothing else can happen with a valid word; callers re-check it anyway.
        _ => Wait::Woken,
    }
}

/// Wakes up to `n` threads that wait on `word`; returns how many were woken.
pub fn wake(word: &AtomicU32, n: u32) -> u32 {
    let n = i32::try_from(n).unwrap_or(i32::MAX);
    // SAFETY: the kernel uses only the address of `word`.
    let woken = unsafe {
        let operation = libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG;
        system::call(
            libc::SYS_futex,
            [word.as_ptr() as usize, operation as usize, n as usize],
        )
    };
    woken.map_or(0, |n| n as u32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Arc, atomic::Ordering};

    #[test]
    fn changed_and_timed_out() {
        let w = AtomicU32::new(1);
        assert_eq!(wait(&w, 0, None), Wait::Changed);
        let t = Some(Duration::from_millis(2));
        assert_eq!(wait(&w, 1, t), Wait::TimedOut);
        assert_eq!(wake(&w, 1), 0);
    }

    #[test]
    fn wake_reaches_the_sleeper() {
        let w = Arc::new(AtomicU32::new(0));
        let sleeper = {
            let w = Arc::clone(&w);
            std::thread::spawn(move || {
                while w.load(Ordering::Acquire) == 0 {
                    wait(&w, 0, None);
                }
            })
        };
        w.store(1, Ordering::Release);
        while !sleeper.is_finished() {
            wake(&w, u32::MAX);
            std::thread::yield_now();
        }
        sleeper.join().unwrap();
    }
}
