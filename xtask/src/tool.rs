//! Programs that tasks need.

use std::process::{Command, Stdio};

/// Runs a program without input, which has to succeed. Returns its standard output; the error is the program's own.
pub(crate) fn tool(command: &mut Command) -> Result<String, String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command
        .stdin(Stdio::null())
        .output()
        .map_err(|e| format!("cannot run {name}: {e}"))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let errors = String::from_utf8_lossy(&output.stderr);
    let words = match errors.trim() {
        "" => "no reason given",
        words => words,
    };
    Err(format!("{name}: {words}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_or_reason() {
        let run = |script: &str| tool(Command::new("sh").args(["-c", script]));
        assert_eq!(run("echo a").as_deref(), Ok("a\n"));
        assert_eq!(run("echo b >&2; exit 1"), Err("sh: b".to_owned()));
        assert_eq!(run("exit 1"), Err("sh: no reason given".to_owned()));
        assert!(tool(&mut Command::new("/no/such/program")).is_err());
    }
}
