//! The calling thread: its id, name and scheduling.

use std::ffi::CString;

/// The kernel's id of the calling thread.
pub fn tid() -> i32 {
    // SAFETY: no arguments, cannot fail.
    unsafe { libc::gettid() }
}

/// Names the calling thread; the kernel keeps the first 15 bytes.
pub fn set_name(name: &str) {
    let bytes: Vec<u8> = name.bytes().filter(|b| *b != 0).take(15).collect();
    if let Ok(name) = CString::new(bytes) {
        // SAFETY: `name` is NUL-terminated and outlives the call.
        unsafe { libc::prctl(libc::PR_SET_NAME, name.as_ptr()) };
    }
}

/// Gives the rest of the time slice to another thread.
pub fn yield_now() {
    std::thread::yield_now();
}

/// Asks the kernel to wake the calling thread as close to its deadline as it can:
/// the default slack of 50 µs would delay guest timers.
pub fn set_timer_slack_ns(ns: u64) {
    let ns = libc::c_ulong::try_from(ns.max(1)).unwrap_or(libc::c_ulong::MAX);
    // SAFETY: an integer argument, no pointers.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, ns) };
}

#[cfg(test)]
mod tests {
    use super::*;

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
