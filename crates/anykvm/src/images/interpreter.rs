//! What interpreters and scripts need besides shared libraries: modules in folders that an interpreter names itself,
//! and a script's interpreter.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::setup;
use crate::stdio::say;

/// Interpreters, and the question that each answers with its folders, a line each.
const QUESTIONS: [(&str, &[&str]); 3] = [
    (
        "python",
        &["-I", "-c", "import sys\nfor p in sys.path: print(p)"],
    ),
    ("perl", &["-e", "print map { \"$_\\n\" } @INC"]),
    ("ruby", &["-e", "puts $LOAD_PATH"]),
];
/// Interpreters whose folders are not known.
const OTHERS: [&str; 6] = ["java", "node", "php", "lua", "tclsh", "guile"];

/// Returns files and folders of the host that `program` needs. `bytes` is the program's content.
pub(super) fn companions(program: &Path, bytes: &[u8]) -> Vec<PathBuf> {
    if let Some(interpreter) = of_script(bytes) {
        // A module whose first line names another machine's interpreter (Python's cgi.py) is imported, not run.
        return interpreter
            .exists()
            .then_some(interpreter)
            .into_iter()
            .collect();
    }
    if !bytes.starts_with(b"\x7fELF") {
        return Vec::new();
    }
    let name = program.file_name().unwrap_or_default().to_string_lossy();
    let is = |stem: &str| {
        let rest = name.strip_prefix(stem);
        rest.is_some_and(|rest| rest.bytes().all(|b| b.is_ascii_digit() || b == b'.'))
    };
    if let Some((_, question)) = QUESTIONS.iter().find(|(stem, _)| is(stem)) {
        let output = setup::run(Command::new(program).args(*question));
        if let Ok(output) = output.as_ref()
            && output.status.success()
        {
            return folders(&String::from_utf8_lossy(&output.stdout));
        }
        say(&format!(
            "--overlay: {} does not say where its modules are, and is taken without them",
            program.display()
        ));
    } else if OTHERS.iter().any(|stem| is(stem)) {
        say(&format!(
            "--overlay: {} is taken with its shared libraries only; name what else it needs with \
             more --overlay options",
            program.display()
        ));
    }
    Vec::new()
}

/// Returns the program that a script's first line names. With `env`, that is the program behind it.
fn of_script(bytes: &[u8]) -> Option<PathBuf> {
    let line = bytes.strip_prefix(b"#!")?.split(|b| *b == b'\n').next()?;
    let line = std::str::from_utf8(line).ok()?;
    let mut words = line.split_whitespace();
    let interpreter = Path::new(words.next()?);
    let is_env = interpreter.file_name().is_some_and(|name| name == "env");
    let name = words.find(|word| !word.starts_with('-'));
    match name.filter(|_| is_env) {
        Some(name) => anykvm_preload::program::find(name.as_ref()),
        None => Some(interpreter.to_path_buf()),
    }
}

/// Returns the absolute folders that exist, without those inside of others.
fn folders(text: &str) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = text
        .lines()
        .map(PathBuf::from)
        .filter(|path| path.is_absolute() && path.components().count() > 2 && path.is_dir())
        .collect();
    found.sort();
    found.dedup_by(|path, before| path.starts_with(before));
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scripts_and_interpreters() {
        let script = |text: &str| of_script(text.as_bytes());
        assert_eq!(script("#! /bin/sh -e\n"), Some("/bin/sh".into()));
        assert!(script("#!/usr/bin/env sh\n").unwrap().ends_with("sh"));
        assert_eq!(script("\x7fELF"), None);
        assert!(folders("/usr/lib/x\n/\nrelative\n").is_empty());
        assert_eq!(
            folders("/usr/share/doc\n/usr/share\n"),
            [PathBuf::from("/usr/share")]
        );
    }

    #[test]
    fn an_interpreter_that_is_not_there_is_left_out() {
        let of = |text: &str| companions(Path::new("/x/cgi.py"), text.as_bytes());
        assert!(of("#! /nowhere/bin/python\n").is_empty());
        assert_eq!(of("#! /bin/sh\n"), [PathBuf::from("/bin/sh")]);
    }

    #[test]
    fn perl_names_its_folders() {
        // Debian's perl-base is on every machine.
        let perl = Path::new("/usr/bin/perl");
        let found = companions(perl, &std::fs::read(perl).unwrap());
        assert!(
            found.iter().any(|folder| folder.ends_with("perl-base")),
            "{found:?}"
        );
    }
}
