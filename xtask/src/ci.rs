//! `cargo xtask ci`: the checks that every change passes, in order, with the
//! seconds that each took. Tests come last, so that the runner's closing lines end the log.

use std::{process::Command, time::Instant};

/// The work of a step.
enum Task {
    /// Runs cargo with these arguments.
    Cargo(&'static [&'static str]),
    /// Runs a task of this program.
    Own(fn() -> Result<(), String>),
}
use Task::{Cargo, Own};

const STEPS: &[(&str, Task)] = &[
    ("tidy", Own(crate::tidy::run)),
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
    ("models", Own(crate::loom::run)),
    (
        "random calls",
        Cargo(&["run", "-p", "fuzzing", "--", "ioctl", "--seconds", "60"]),
    ),
    (
        "boots",
        Own(|| crate::boots::run(&crate::boots::Options::default())),
    ),
    (
        "KVM selftests",
        Own(|| crate::selftests::run(&crate::selftests::Options::default())),
    ),
    (
        "KVM selftests of counters",
        Own(|| {
            crate::selftests::run(&crate::selftests::Options {
                source: Some(crate::selftests::Source::Linux6_12),
                names: ["x86_64/pmu_counters_test", "x86_64/pmu_event_filter_test"]
                    .map(str::to_owned)
                    .into(),
                ..crate::selftests::Options::default()
            })
        }),
    ),
    (
        "guests",
        Own(|| {
            crate::guests::run(&crate::guests::Options {
                quick: true,
                ..crate::guests::Options::default()
            })
        }),
    ),
    (
        "VMMs",
        Own(|| {
            crate::vmms::run(&crate::vmms::Options {
                quick: true,
                ..crate::vmms::Options::default()
            })
        }),
    ),
    (
        "guests, interpreted",
        Own(|| {
            crate::guests::run(&crate::guests::Options {
                engine: Some("interp".to_owned()),
                names: ["sqlite", "ssdd"].map(str::to_owned).into(),
                ..crate::guests::Options::default()
            })
        }),
    ),
    (
        "lock-step",
        Own(|| crate::lockstep::run(&crate::lockstep::Options { quick: true })),
    ),
    ("tests", Cargo(&["test", "--workspace", "--no-fail-fast"])),
];

/// Runs every step. Stops at the first that fails.
pub(crate) fn run() -> Result<(), String> {
    crate::needs::check()?;
    for (name, task) in STEPS {
        eprintln!("== {name}");
        let start = Instant::now();
        let result = match task {
            Cargo(arguments) => cargo(arguments),
            Own(task) => task(),
        };
        eprintln!("== {name}: {} s", start.elapsed().as_secs());
        result.map_err(|e| format!("{name}: {e}"))?;
    }
    Ok(())
}

fn cargo(arguments: &[&str]) -> Result<(), String> {
    let status = Command::new(env!("CARGO"))
        .args(arguments)
        // A broken link is an error like code that does not compile.
        .env("RUSTDOCFLAGS", "-D warnings")
        .status()
        .map_err(|e| format!("cannot run cargo: {e}"))?;
    if status.success() {
        Ok(())
    } else {
        Err(format!("cargo {} failed", arguments.join(" ")))
    }
}
