//! What the launcher contributes to calls that preloaded programs make as well.
//!
//! [`crate::launch`] stands above all other modules here. It registers itself once, before the program runs; without it
//! the program is a preloaded one.

use std::sync::OnceLock;

use libc::c_int;

/// Option of prctl(2) that has the kernel raise SIGSYS for a thread's system calls.
pub(crate) const PR_SET_SYSCALL_USER_DISPATCH: c_int = 59;

/// What the launcher has registered.
#[derive(Debug)]
pub(crate) struct Launcher {
    /// Address of the handler that stands before each of the program's.
    pub(crate) handler: usize,
    /// Returns the code that handlers return to.
    pub(crate) restorer: fn() -> usize,
    /// Has these calls of the program come to us from now on: writes may be to an irqfd, and memory may be a guest's.
    pub(crate) watch: fn(&[libc::c_long]),
    /// Makes sure that no instruction of the program is rewritten from now on.
    pub(crate) stop_rewriting: fn(),
}

static LAUNCHER: OnceLock<Launcher> = OnceLock::new();

/// Registers the launcher. A second call changes nothing: a process launches one program.
pub(crate) fn set(launcher: Launcher) {
    let _ = LAUNCHER.set(launcher);
}

/// Returns the launcher. `None` in a preloaded program. Async-signal-safe.
pub(crate) fn get() -> Option<&'static Launcher> {
    LAUNCHER.get()
}
