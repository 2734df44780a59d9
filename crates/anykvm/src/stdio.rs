//! What anykvm itself says: lines that no closed pipe and no full disk turns into a panic.
//!
//! `println!` and `eprintln!` panic when they cannot write (`clippy.toml` forbids them here).

use std::io::Write;

/// One line on standard error. Nobody may be there to read it, and then there is nobody to tell.
pub(crate) fn say(line: &str) {
    note(&format!("anykvm: {line}"));
}

/// The same without our name.
pub(crate) fn note(line: &str) {
    // In one piece, so that lines of other processes stay apart.
    let _ = std::io::stderr().write_all(format!("{line}\n").as_bytes());
}

/// A command's whole output. A reader who has seen enough has closed the pipe, which is no error.
pub(crate) fn print(text: &str) -> std::io::Result<()> {
    let mut out = std::io::stdout();
    let written = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    match written {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => Err(error),
        _ => Ok(()),
    }
}
