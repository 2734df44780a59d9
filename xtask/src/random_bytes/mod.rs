//! `cargo xtask random-bytes [--from N] [--count N] [--bits 32]`: programs of random bytes, on the processor and in a
//! guest.
//!
//! `bytes.c` runs each program in a process of its own and prints what becomes of it: the signal, the exception, the
//! registers, and a sum of its memory. It runs on the host twice, to find what is not the same each time, and once in a
//! guest of `anykvm boot`. What differs is printed, for somebody to read: there are instructions that the guest's
//! processor does not have, and results that a processor is free in (docs/undefined.md).

use std::{collections::BTreeMap, fs, path::Path, process::Command};

use clap::Args;

/// Options of `random-bytes`.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Number of the first program.
    #[arg(long, default_value_t = 0)]
    from: u32,
    /// How many.
    #[arg(long, default_value_t = 20_000)]
    count: u32,
    /// Of which code.
    #[arg(long, default_value = "64", value_parser = ["32", "64"])]
    bits: String,
}

/// Runs the programs, and prints what differs.
pub(crate) fn run(options: &Options) -> Result<(), String> {
    crate::debian::install(&["gcc", "libc6-dev"])?;
    let is_32 = options.bits == "32";
    if is_32 {
        crate::debian::install(&["gcc-multilib"])?;
    }
    let folder = crate::build::cache().join("random-bytes");
    fs::create_dir_all(&folder).map_err(|e| e.to_string())?;
    let program = folder.join("bytes");
    let mut compiler = Command::new("gcc");
    compiler
        .args(["-O2", "-Wall", "-Wextra", "-Werror", "-static", "-no-pie"])
        .args(["-fcf-protection=none", "-fno-stack-protector"])
        .args(is_32.then_some("-m32"))
        .arg("-o")
        .arg(&program)
        .arg(crate::tidy::root().join("xtask/src/random_bytes/bytes.c"));
    lines(&mut compiler)?;
    let numbers = [options.from.to_string(), options.count.to_string()];
    let host = lines(Command::new(&program).args(&numbers))?;
    let again = lines(Command::new(&program).args(&numbers))?;
    let guest = in_guest(&folder, &numbers)?;
    let mut differ = 0;
    for (number, line) in &host {
        let theirs = guest.get(number).map_or("nothing", String::as_str);
        if again.get(number) == Some(line) && theirs != line {
            differ += 1;
            eprintln!("host  {number} {line}\nguest {number} {theirs}");
        }
    }
    eprintln!("{} programs, {differ} differ", host.len());
    if host.len() == options.count as usize {
        Ok(())
    } else {
        Err(format!("{} programs ran on the host", host.len()))
    }
}

fn in_guest(folder: &Path, numbers: &[String]) -> Result<BTreeMap<u32, String>, String> {
    let anykvm = crate::build::anykvm()?;
    lines(
        Command::new(anykvm)
            .args(["boot", "--overlay"])
            .arg(folder)
            .args(["--", "/bytes"])
            .args(numbers),
    )
}

/// Runs the command. Returns what it prints, by the number that begins a line.
fn lines(command: &mut Command) -> Result<BTreeMap<u32, String>, String> {
    let text = crate::tool::tool(command)?;
    let lines = text.lines().filter_map(|line| {
        let (number, rest) = line.trim_end().split_once(' ')?;
        Some((number.parse().ok()?, rest.to_owned()))
    });
    Ok(lines.collect())
}
