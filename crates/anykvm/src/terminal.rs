//! The user's terminal: raw while the guest owns it, as it was on every way out.
//!
//! The saved modes are the process's, because a signal thread or a panic must be able to restore
//! them; this is the only process-wide state of the program.

use std::sync::Mutex;

use rustix::termios::{self, OptionalActions, Termios};

use crate::devices::lock;

static SAVED: Mutex<Option<Termios>> = Mutex::new(None);

/// Restores the terminal when dropped.
#[derive(Debug)]
pub(crate) struct RawMode(());

impl RawMode {
    /// Raw mode if standard input is a terminal; also arms the restoring panic hook.
    pub(crate) fn enter() -> Self {
        let stdin = rustix::stdio::stdin();
        if let Ok(modes) = termios::tcgetattr(stdin) {
            let mut raw = modes.clone();
            raw.make_raw();
            *lock(&SAVED) = Some(modes);
            // A terminal that refuses stays cooked; Ctrl-C then ends us like any program.
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

/// Puts the saved modes back, once.
fn restore() {
    if let Some(modes) = lock(&SAVED).take() {
        // The terminal may be gone (SIGHUP).
        let _ = termios::tcsetattr(rustix::stdio::stdin(), OptionalActions::Now, &modes);
    }
}

/// Whether standard input and output are both a terminal.
pub(crate) fn is_interactive() -> bool {
    termios::isatty(rustix::stdio::stdin()) && termios::isatty(rustix::stdio::stdout())
}

/// Whether standard input is a terminal.
pub(crate) fn is_stdin_terminal() -> bool {
    termios::isatty(rustix::stdio::stdin())
}

/// Whether progress may be shown on standard error.
pub(crate) fn shows_progress() -> bool {
    termios::isatty(rustix::stdio::stderr())
}

/// Rows and columns, if there is a terminal that knows them.
pub(crate) fn size() -> Option<(u16, u16)> {
    let size = termios::tcgetwinsize(rustix::stdio::stdout()).ok()?;
    (size.ws_row > 0 && size.ws_col > 0).then_some((size.ws_row, size.ws_col))
}
