//! `cargo xtask stress [--times N] [MODE…]`: signals and KVM_RUN, a million times by default.
//!
//! The VMM in C of `crates/anykvm/tests/exec` runs under `anykvm exec`. A signal, `immediate_exit` or both come at any
//! moment, while the guest computes, sleeps or leaves all the time. A wake-up that is lost ends the test.

use std::{
    path::Path,
    process::{Command, Stdio},
};

use clap::{Args, builder::PossibleValuesParser};

/// Modes of the VMM, and what each of them interrupts.
const MODES: &[(&str, &str)] = &[
    ("spin", "a signal while the guest computes"),
    ("port", "a signal while the guest leaves all the time"),
    ("halt", "a signal while the guest sleeps"),
    ("mask", "a signal that only KVM_RUN lets through"),
    ("immediate", "immediate_exit set by a handler"),
    (
        "sender",
        "immediate_exit set by another thread, and a signal",
    ),
];

/// Options of `stress`.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Signals in each.
    #[arg(long, default_value_t = 1_000_000)]
    times: u64,
    /// These modes alone.
    #[arg(value_parser = PossibleValuesParser::new(MODES.iter().map(|(mode, _)| *mode)))]
    names: Vec<String>,
}

/// Runs the modes that are named, or all.
pub(crate) fn run(options: &Options) -> Result<(), String> {
    let names = &options.names;
    crate::debian::install(&["gcc", "libc6-dev"])?;
    let program = crate::build::cache().join("stress-vmm");
    let source = crate::tidy::root().join("crates/anykvm/tests/exec/vmm.c");
    std::fs::create_dir_all(crate::build::cache()).map_err(|e| e.to_string())?;
    let compiled = Command::new("gcc")
        .args(["-O2", "-pthread", "-o"])
        .arg(&program)
        .arg(&source)
        .status()
        .map_err(|e| format!("cannot run gcc: {e}"))?;
    if !compiled.success() {
        return Err("gcc failed".to_owned());
    }
    let anykvm = crate::build::anykvm()?;
    for (mode, what) in MODES {
        if names.is_empty() || names.iter().any(|n| n == mode) {
            one(&anykvm, &program, mode, options.times)
                .map_err(|e| format!("{mode} ({what}): {e}"))?;
        }
    }
    Ok(())
}

fn one(anykvm: &Path, program: &Path, mode: &str, times: u64) -> Result<(), String> {
    let output = Command::new(anykvm)
        .args(["exec", "--quiet", "--"])
        .arg(program)
        .args([mode, &times.to_string()])
        .stdin(Stdio::null())
        .output()
        .map_err(|e| e.to_string())?;
    let text = String::from_utf8_lossy(&output.stdout);
    eprintln!("{mode:10} {}", text.trim());
    if output.status.success() {
        Ok(())
    } else {
        Err(String::from_utf8_lossy(&output.stderr).into_owned())
    }
}
