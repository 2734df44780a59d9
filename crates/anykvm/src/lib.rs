//! `anykvm`: the command line, the small VMM behind `anykvm boot`, and `anykvm exec`, `trace`, `doctor` and `bench`.
//!
//! The VMM uses the hypervisor only through `anykvm-ioctls`, as any other VMM would.

#![forbid(unsafe_code)]
// These macros panic when nobody reads the output; `stdio` does not.
#![deny(clippy::print_stderr, clippy::print_stdout)]

mod acpi;
mod bench;
mod cli;
mod devices;
mod doctor;
mod ending;
mod endpoint;
mod error;
mod exec;
mod fields;
mod images;
mod input;
mod kernel;
mod layout;
mod limits;
mod lock;
mod machine;
mod memory;
mod migrate;
mod pci;
mod setup;
mod stdio;
mod streams;
mod terminal;
mod trace;
mod vcpu;
mod virtio;

use std::process::ExitCode;

use clap::Parser;

// The C functions of this crate are part of the program.
use anykvm_preload as _;

use crate::cli::{Cli, Command};

/// Runs the program: reads the command line and does what it says.
///
/// `main` is not in this crate: a program's code uses thread-local storage in a way that a shared library cannot, and
/// the `anykvm` program is both (`build.rs`).
pub fn main() -> ExitCode {
    let result = match Cli::parse().command {
        // When `main` returns, the vCPU threads end with the process.
        Command::Boot(args) => machine::boot(&args),
        Command::Migrate(args) => migrate::migrate(&args),
        Command::Bench(args) => bench::run(&args),
        Command::Exec(args) => exec::exec(&args),
        Command::Trace(args) => trace::trace(&args),
        Command::Doctor(args) => doctor::examine(&args),
    };
    let (status, line) = match result {
        Ok(verdict) => verdict,
        Err(error) => (ending::STATUS_SETUP, Some(error.to_string())),
    };
    if let Some(line) = line {
        stdio::say(&line);
    }
    ExitCode::from(status)
}
