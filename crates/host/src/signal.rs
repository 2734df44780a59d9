//! Signals of the calling thread.

/// Signals that are pending for the calling thread or its process and blocked
/// in the thread; bit `n - 1` is signal n.
pub fn pending() -> u64 {
    let mut set = 0u64;
    // SAFETY: the kernel's signal set is eight bytes, which `set` has room for.
    let r = unsafe { libc::syscall(libc::SYS_rt_sigpending, &raw mut set, size_of::<u64>()) };
    // It cannot fail with these arguments, but a system call filter may refuse it.
    if r == 0 { set } else { 0 }
}

/// Blocks all signals in the calling thread, those that faults raise excepted.
pub fn block_all() {
    // SAFETY: only this thread's mask is changed, with a set made by libc.
    unsafe {
        let mut set = std::mem::zeroed();
        libc::sigfillset(&mut set);
        for fault in [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL] {
            libc::sigdelset(&mut set, fault);
        }
        libc::pthread_sigmask(libc::SIG_SETMASK, &set, std::ptr::null_mut());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_blocked_signal_is_seen() {
        std::thread::spawn(|| {
            // SAFETY: only this thread's mask is changed, with a set made by libc.
            unsafe {
                let mut set = std::mem::zeroed();
                libc::sigemptyset(&mut set);
                libc::sigaddset(&mut set, libc::SIGUSR2);
                libc::pthread_sigmask(libc::SIG_BLOCK, &set, std::ptr::null_mut());
                assert_eq!(pending(), 0);
                libc::pthread_kill(libc::pthread_self(), libc::SIGUSR2);
            }
            assert_eq!(pending(), 1 << (libc::SIGUSR2 - 1));
        })
        .join()
        .unwrap();
    }
}
