//! `cargo xtask ci`: the checks that every change passes, in order, with the
//! seconds that each took. Tests come last, so that the runner's closing lines end the log.

use std::{process::Command, time::Instant};

/// Name of the step and the cargo arguments.
const STEPS: &[(&str, &[&str])] = &[
    ("format", &["fmt", "--all", "--check"]),
    (
        "lints",
        &[
            "clippy",
            "--workspace",
            "--all-targets",
            "--",
            "-D",
            "warnings",
        ],
    ),
    (
        "documentation",
        &[
            "doc",
            "--workspace",
            "--no-deps",
            "--document-private-items",
        ],
    ),
    ("tests", &["test", "--workspace"]),
];

/// Runs tidy, then every step; stops at the first that fails.
pub(crate) fn run() -> Result<(), String> {
    eprintln!("== tidy");
    crate::tidy::run()?;
    for (name, args) in STEPS {
        eprintln!("== {name}: cargo {}", args.join(" "));
        let start = Instant::now();
        let status = Command::new(env!("CARGO"))
            .args(*args)
            .status()
            .map_err(|e| format!("{name}: cannot run cargo: {e}"))?;
        eprintln!("== {name}: {} s", start.elapsed().as_secs());
        if !status.success() {
            return Err(format!("{name} failed"));
        }
    }
    Ok(())
}
