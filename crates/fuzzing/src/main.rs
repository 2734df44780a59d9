//! Compares the interpreter with the host CPU, the translator with the interpreter, and makes random KVM calls.
//!
//! `insn` runs single instructions, each form in turn; `random` runs blocks of
//! two to eight. Both stop at the first mismatch unless `--all` asks for the
//! first of each form. `jit` runs programs on the translator and on the
//! interpreter. `ioctl` makes random KVM calls.

#![forbid(unsafe_code)]

mod campaign;
mod cli;
mod instructions;

use std::{process::ExitCode, time::Instant};

use clap::Parser;
use fuzzing::jit::{Jits, segments::Segments};

use crate::cli::{Cli, Command, Programs};

#[allow(clippy::print_stdout, reason = "a command-line tool's report")]
fn main() -> ExitCode {
    match run(&Cli::parse().command) {
        Ok((report, clean)) => {
            println!("{report}");
            if clean {
                ExitCode::SUCCESS
            } else {
                ExitCode::FAILURE
            }
        }
        Err(message) => {
            println!("{message}");
            ExitCode::from(2)
        }
    }
}

/// Runs a command. Returns the report, and true if nothing was found.
fn run(command: &Command) -> Result<(String, bool), String> {
    match command {
        Command::Insn(options) => instructions::run(options, false),
        Command::Random(options) => instructions::run(options, true),
        Command::Jit(options) => jit(options),
        Command::Ioctl(options) if options.worker => campaign::work(options),
        Command::Ioctl(options) if options.one => campaign::one(options),
        Command::Ioctl(options) => campaign::run(options),
    }
}

/// Runs programs with segments on the translator and on the interpreter.
#[allow(clippy::print_stdout, reason = "a command-line tool's report")]
fn with_segments(options: &Programs) -> Result<(String, bool), String> {
    let &Programs {
        cases, seed, all, ..
    } = options;
    let make = if options.lockstep {
        Segments::in_lockstep
    } else {
        Segments::new
    };
    let mut jits = make().map_err(|e| format!("memory cannot be mapped: {e}"))?;
    if options.list {
        return Ok((jits.listing(seed), true));
    }
    let start = Instant::now();
    let mut differ = 0;
    for n in seed..seed.saturating_add(cases) {
        if let Err(difference) = jits.run(n) {
            differ += 1;
            println!("{difference}");
            if !all || differ == 20 {
                break;
            }
        }
    }
    let (seconds, summary) = (start.elapsed().as_secs_f64(), jits.summary());
    let report = format!("{summary:?}, {differ} differ, {seconds:.1} s");
    Ok((report, differ == 0))
}

/// Runs programs on the translator and on the interpreter.
#[allow(clippy::print_stdout, reason = "a command-line tool's report")]
fn jit(options: &Programs) -> Result<(String, bool), String> {
    let &Programs {
        cases,
        seed,
        cache,
        segments,
        list,
        all,
        ..
    } = options;
    if segments {
        return with_segments(options);
    }
    let mut jits = Jits::new(cache).map_err(|e| format!("memory cannot be mapped: {e}"))?;
    if list {
        return Ok((jits.listing(seed), true));
    }
    let start = Instant::now();
    let mut differ = 0;
    for n in seed..seed.saturating_add(cases) {
        if let Err(difference) = jits.run(n) {
            differ += 1;
            println!("{difference}");
            if !all || differ == 20 {
                break;
            }
        }
    }
    let (seconds, summary) = (start.elapsed().as_secs_f64(), jits.summary());
    let report = format!("{summary:?}, {differ} differ, {seconds:.1} s");
    Ok((report, differ == 0))
}
