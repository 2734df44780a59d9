//! Prints what anykvm itself says. A closed pipe or a full disk does not cause a panic.
//!
//! `println!` and `eprintln!` panic when they cannot write (`clippy.toml` forbids them here).

use std::io::Write;

/// Prints a line on standard error. If nobody reads it, nobody can be told.
pub(crate) fn say(line: &str) {
    note(&format!("anykvm: {line}"));
}

/// Prints a line without our name.
pub(crate) fn note(line: &str) {
    // The line is written in one piece, so that lines of other processes stay apart.
    let _ = std::io::stderr().write_all(format!("{line}\n").as_bytes());
}

/// Prints a command's whole output. A reader who has seen enough closes the pipe, which is no error.
pub(crate) fn print(text: &str) -> std::io::Result<()> {
    let mut out = std::io::stdout();
    let written = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    match written {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => Err(error),
        _ => Ok(()),
    }
}
