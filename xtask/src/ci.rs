//! `cargo xtask ci`: the checks that every change passes, in order, with the
//! seconds that each took. Tests come last, so that the runner's closing lines end the log.

use std::{process::Command, time::Instant};

/// What a step does.
enum Task {
    /// Runs cargo with these arguments.
    Cargo(&'static [&'static str]),
    /// Calls a task of ours with these.
    Own(fn(&[String]) -> Result<(), String>, &'static [&'static str]),
}
use Task::{Cargo, Own};

const STEPS: &[(&str, Task)] = &[
    ("tidy", Own(|_| crate::tidy::run(), &[])),
    ("format", Cargo(&["fmt", "--all", "--check"])),
    (
        "lints",
        Cargo(&[
            "clippy",
            "--workspace",
            "--all-targets",
            "--",
            "-D",
            "warnings",
        ]),
    ),
    (
        "documentation",
        Cargo(&[
            "doc",
            "--workspace",
            "--no-deps",
            "--document-private-items",
        ]),
    ),
    ("models", Own(|_| crate::loom::run(), &[])),
    (
        "random calls",
        Cargo(&["run", "-p", "fuzzing", "--", "ioctl", "--seconds", "60"]),
    ),
    ("boots", Own(crate::boots::run, &[])),
    ("KVM selftests", Own(crate::selftests::run, &[])),
    ("guests", Own(crate::guests::run, &["--quick"])),
    ("VMMs", Own(crate::vmms::run, &["--quick"])),
    (
        "guests, interpreted",
        Own(
            crate::guests::run,
            &["--engine", "interp", "sqlite", "ssdd"],
        ),
    ),
    ("lock-step", Own(crate::lockstep::run, &["--quick"])),
    ("tests", Cargo(&["test", "--workspace"])),
];

/// Runs every step; stops at the first that fails.
pub(crate) fn run() -> Result<(), String> {
    crate::needs::check()?;
    for (name, task) in STEPS {
        eprintln!("== {name}");
        let start = Instant::now();
        let result = match task {
            Cargo(arguments) => cargo(arguments),
            Own(task, arguments) => {
                let arguments: Vec<String> = arguments.iter().map(|&a| a.to_owned()).collect();
                task(&arguments)
            }
        };
        eprintln!("== {name}: {} s", start.elapsed().as_secs());
        result.map_err(|e| format!("{name}: {e}"))?;
    }
    Ok(())
}

fn cargo(arguments: &[&str]) -> Result<(), String> {
    let status = Command::new(env!("CARGO"))
        .args(arguments)
        // A link that leads nowhere is as wrong as code that does not compile.
        .env("RUSTDOCFLAGS", "-D warnings")
        .status()
        .map_err(|e| format!("cannot run cargo: {e}"))?;
    if status.success() {
        Ok(())
    } else {
        Err(format!("cargo {} failed", arguments.join(" ")))
    }
}
