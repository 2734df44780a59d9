//! anykvm's threads, and properties of the calling thread: id, name and scheduling.

use std::{
    ffi::CString,
    io,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use crate::{futex, signal};

/// Starts a thread that blocks all signals, because the VMM's signals are for the VMM's threads. The thread has begun
/// when this returns: a system call filter that is installed afterwards does not affect what a C library does at the
/// start of a thread.
///
/// # Errors
/// Those of `pthread_create`.
pub fn start(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let begun = Arc::new(AtomicU32::new(0));
    let there = Arc::clone(&begun);
    let body = move || {
        there.store(1, Ordering::Release);
        futex::wake(&there, 1);
        drop(there);
        work();
    };
    let thread = std::thread::Builder::new().name(name.to_owned());
    signal::while_blocked(|| thread.spawn(body))?;
    while begun.load(Ordering::Acquire) == 0 {
        futex::wait(&begun, 0, None);
    }
    Ok(())
}

/// Returns how many cores this process may use, as at the first call. The first call reads files, which a system call
/// filter may forbid later.
pub fn cores() -> usize {
    static CORES: OnceLock<usize> = OnceLock::new();
    *CORES.get_or_init(|| std::thread::available_parallelism().map_or(1, usize::from))
}

/// The kernel's id of the calling thread.
pub fn tid() -> i32 {
    // SAFETY: no arguments, cannot fail.
    unsafe { libc::gettid() }
}

/// Like [`tid`], but without a system call: the C library encodes the id in the id of the thread's clock. `None` if the
/// kernel's encoding is another one.
pub fn known_tid() -> Option<i32> {
    /// A thread's clock (4) of processor time (2). The thread's id is in the bits above, inverted.
    const KIND: i32 = 4 | 2;
    let mut clock = 0;
    // SAFETY: the calling thread exists, and `clock` is writable.
    let error = unsafe { libc::pthread_getcpuclockid(libc::pthread_self(), &mut clock) };
    (error == 0 && clock & 7 == KIND).then_some(!(clock >> 3))
}

/// Names the calling thread; the kernel keeps the first 15 bytes.
pub fn set_name(name: &str) {
    let bytes: Vec<u8> = name.bytes().filter(|b| *b != 0).take(15).collect();
    if let Ok(name) = CString::new(bytes) {
        // SAFETY: `name` is NUL-terminated and outlives the call.
        unsafe { libc::prctl(libc::PR_SET_NAME, name.as_ptr()) };
    }
}

/// Lets another thread run for the time that the kernel needs to set and serve a timer. System call filters allow
/// futex(2), but not all allow sched_yield(2).
pub fn yield_now() {
    static NEVER: AtomicU32 = AtomicU32::new(0);
    futex::wait(&NEVER, 0, Some(Duration::from_nanos(1)));
}

/// Asks the kernel to wake the calling thread as close to its deadline as it can. The default slack of 50 µs would
/// delay guest timers.
pub fn set_timer_slack_ns(ns: u64) {
    let ns = libc::c_ulong::try_from(ns.max(1)).unwrap_or(libc::c_ulong::MAX);
    // SAFETY: an integer argument, no pointers.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, ns) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_id_is_known_without_a_call() {
        assert_eq!(known_tid(), Some(tid()));
        let other = std::thread::spawn(|| (known_tid(), tid())).join().unwrap();
        assert_eq!(other.0, Some(other.1));
        assert_ne!(other.1, tid());
    }

    #[test]
    fn name_is_truncated() {
        std::thread::spawn(|| {
            set_name("a-rather-long\0-thread-name");
            set_timer_slack_ns(1);
            let comm = std::fs::read_to_string(format!("/proc/self/task/{}/comm", tid()));
            assert_eq!(comm.unwrap(), "a-rather-long-t\n");
        })
        .join()
        .unwrap();
    }
}
