//! Signals of the calling thread.

use crate::system;

/// Returns the signals that are pending for the calling thread or its process and blocked in the thread; bit `n - 1` is
/// signal n.
pub fn pending() -> u64 {
    let mut set = 0u64;
    // SAFETY: the kernel's signal set is eight bytes, which `set` has room for.
    let known = unsafe {
        let arguments = [&raw mut set as usize, size_of::<u64>()];
        system::call(libc::SYS_rt_sigpending, arguments)
    };
    // The call cannot fail with these arguments, but a system call filter may refuse it.
    if known.is_ok() { set } else { 0 }
}

/// Blocks all signals in the calling thread, except those that faults raise.
pub fn block_all() {
    block();
}

/// Blocks them, and returns the previous mask.
fn block() -> libc::sigset_t {
    // SAFETY: only this thread's mask is changed, with a set made by libc.
    unsafe {
        let mut set = std::mem::zeroed();
        libc::sigfillset(&mut set);
        for fault in [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL] {
            libc::sigdelset(&mut set, fault);
        }
        let mut before = std::mem::zeroed();
        libc::pthread_sigmask(libc::SIG_SETMASK, &set, &mut before);
        before
    }
}

/// Returns the result of `f`, which is called with [`block_all`] in force. A thread that `f` starts has signals blocked
/// from its first instruction on, so it handles none of the VMM's.
pub fn while_blocked<R>(f: impl FnOnce() -> R) -> R {
    let before = block();
    let result = f();
    // SAFETY: a mask that this thread had.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &before, std::ptr::null_mut()) };
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_begins_with_signals_blocked_and_its_parent_gets_its_mask_back() {
        let is_blocked = || {
            // SAFETY: asks for this thread's mask.
            unsafe {
                let mut set = std::mem::zeroed();
                libc::pthread_sigmask(libc::SIG_BLOCK, std::ptr::null(), &mut set);
                [libc::SIGUSR2, libc::SIGALRM, libc::SIGSEGV]
                    .map(|s| libc::sigismember(&set, s) == 1)
            }
        };
        let before = is_blocked();
        let thread = while_blocked(|| std::thread::spawn(is_blocked));
        assert_eq!(is_blocked(), before);
        assert_eq!(thread.join().unwrap(), [true, true, false]);
    }

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
