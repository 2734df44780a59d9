//! The user's terminal: raw while the guest has it, and restored on every way out.
//!
//! The saved modes belong to the process, because a signal thread or a panic must be able to restore them. They are the
//! program's only process-wide state.

use std::os::fd::BorrowedFd;
use std::sync::Mutex;
use std::thread;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::termios::{self, LocalModes, OptionalActions, Termios};

use crate::lock::lock;
use crate::stdio::say;

static SAVED: Mutex<Option<Termios>> = Mutex::new(None);

/// Restores the terminal when dropped.
#[derive(Debug)]
pub(crate) struct RawMode(());

impl RawMode {
    /// Makes standard input raw if it is a terminal, and installs a panic hook that restores it.
    pub(crate) fn enter() -> Self {
        let stdin = rustix::stdio::stdin();
        if let Ok(modes) = termios::tcgetattr(stdin) {
            let mut raw = modes.clone();
            raw.make_raw();
            *lock(&SAVED) = Some(modes);
            // A terminal that refuses stays as it is. Ctrl-C then ends us like any program.
            let _ = termios::tcsetattr(stdin, OptionalActions::Now, &raw);
            let earlier = std::panic::take_hook();
            std::panic::set_hook(Box::new(move |info| {
                restore();
                earlier(info);
            }));
        }
        Self(())
    }
}

impl Drop for RawMode {
    fn drop(&mut self) {
        restore();
    }
}

/// Restores the saved modes, once.
fn restore() {
    if let Some(modes) = lock(&SAVED).take() {
        // The terminal may be gone (SIGHUP).
        let _ = termios::tcsetattr(rustix::stdio::stdin(), OptionalActions::Now, &modes);
    }
}

/// Returns true if the descriptor is a terminal.
pub(crate) fn is_terminal(fd: BorrowedFd<'_>) -> bool {
    termios::isatty(fd)
}

/// Waits until there is a line to read from a terminal whose modes we have not changed. While another program (a pager
/// behind us in the pipeline) has switched it to single keys, the keys are that program's.
pub(crate) fn wait_for_line(look: Duration) {
    let stdin = rustix::stdio::stdin();
    let timeout = Timespec::try_from(look).ok();
    loop {
        let by_lines = termios::tcgetattr(stdin)
            .is_ok_and(|modes| modes.local_modes.contains(LocalModes::ICANON));
        // If the terminal is gone, read(2) reports that.
        let is_gone = !termios::isatty(stdin);
        if !by_lines && !is_gone {
            thread::sleep(look);
            continue;
        }
        let mut fds = [PollFd::new(&stdin, PollFlags::IN)];
        match poll(&mut fds, timeout.as_ref()) {
            Ok(0) | Err(rustix::io::Errno::INTR) => {}
            _ => return,
        }
    }
}

/// Waits until standard input has something to read, its end or an error among it; whether it has.
pub(crate) fn wait_for_input(limit: Option<Duration>) -> bool {
    let stdin = rustix::stdio::stdin();
    let limit = limit.and_then(|limit| Timespec::try_from(limit).ok());
    let mut fds = [PollFd::new(&stdin, PollFlags::IN)];
    // What is wrong with it is for read(2) to tell.
    !matches!(
        poll(&mut fds, limit.as_ref()),
        Ok(0) | Err(rustix::io::Errno::INTR)
    )
}

/// Prints on a terminal what takes a while.
pub(crate) fn progress(text: &str) {
    if is_terminal(rustix::stdio::stderr()) {
        say(text);
    }
}

/// Prints a text in place of the last one. An empty text ends that.
pub(crate) fn progress_in_place(text: &str) {
    use std::io::Write;
    if is_terminal(rustix::stdio::stderr()) {
        let line = if text.is_empty() {
            "\r\x1b[K".to_owned()
        } else {
            format!("\r\x1b[Kanykvm: {text}")
        };
        let _ = std::io::stderr().write_all(line.as_bytes());
    }
}

/// Returns rows and columns, if there is a terminal that knows them.
pub(crate) fn size() -> Option<(u16, u16)> {
    let size = termios::tcgetwinsize(rustix::stdio::stdout()).ok()?;
    (size.ws_row > 0 && size.ws_col > 0).then_some((size.ws_row, size.ws_col))
}
