//! What the launcher does in the middle of calls that a preloaded program makes as well.
//!
//! [`crate::launch`] stands above everything else here and says so once, before the program
//! runs; without it the program is a preloaded one.

use std::sync::OnceLock;

use libc::c_int;

/// Has the kernel raise SIGSYS for a thread's system calls, of prctl(2).
pub(crate) const PR_SET_SYSCALL_USER_DISPATCH: c_int = 59;

/// The launcher's part.
#[derive(Debug)]
pub(crate) struct Launcher {
    /// Address of the handler that stands before each of the program's.
    pub(crate) handler: usize,
    /// Where handlers return to.
    pub(crate) restorer: fn() -> usize,
    /// From now on these calls of the program's come to us: writes may be to an irqfd, and memory a guest's.
    pub(crate) watch: fn(&[libc::c_long]),
    /// From now on no instruction of the program is rewritten.
    pub(crate) stop_rewriting: fn(),
}

static LAUNCHER: OnceLock<Launcher> = OnceLock::new();

/// There is a launcher. A second one changes nothing: a process launches one program.
pub(crate) fn set(launcher: Launcher) {
    let _ = LAUNCHER.set(launcher);
}

/// `None` in a preloaded program. Async-signal-safe.
pub(crate) fn get() -> Option<&'static Launcher> {
    LAUNCHER.get()
}
