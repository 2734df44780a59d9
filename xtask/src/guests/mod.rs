//! `cargo xtask guests [--quick] [--engine jit|interp|lockstep] [--small-cache | --flushes]
//! [--kernel FILE] [NAME…]`: real programs in a guest.
//!
//! Each program of [`programs`] gets a boot of its own, with the host's binaries
//! and libraries in the initramfs. What it prints is compared with what the same
//! script prints on the host: the host CPU is the oracle.

mod host;
mod programs;

use std::{path::PathBuf, process::Command, time::Duration};

use clap::{Args, builder::PossibleValuesParser};
use testkit::boot::{Boot, Outcome, run_limited};

use programs::{Expect, PROGRAMS, Program};

/// Time limit of one program in the guest, including its boot.
const LIMIT: Duration = Duration::from_secs(580);
/// Time limit with two engines side by side.
const LOCKSTEP_LIMIT: Duration = Duration::from_secs(3600);
/// Folder in which the guest finds what is not part of the host's system.
const GUEST_OPT: &str = "/opt/guests";

/// Options of `guests`.
#[derive(Debug, Default, Args)]
pub(crate) struct Options {
    /// Only those of CI.
    #[arg(long)]
    pub(crate) quick: bool,
    /// What executes the guest.
    #[arg(long, value_parser = ["jit", "interp", "lockstep"])]
    pub(crate) engine: Option<String>,
    /// Another kernel.
    #[arg(long, value_name = "FILE")]
    pub(crate) kernel: Option<PathBuf>,
    /// Little room for translated code.
    #[arg(long, conflicts_with = "flushes")]
    pub(crate) small_cache: bool,
    /// Translated code is dropped at random.
    #[arg(long)]
    pub(crate) flushes: bool,
    /// These programs alone.
    #[arg(value_parser = PossibleValuesParser::new(PROGRAMS.iter().map(|p| p.name)))]
    pub(crate) names: Vec<String>,
}

impl Options {
    /// Returns an environment variable and its value.
    fn variable(&self) -> Option<(&'static str, &'static str)> {
        if self.small_cache {
            Some(crate::boots::SMALL_CACHE)
        } else {
            self.flushes.then_some(crate::boots::RANDOM_FLUSHES)
        }
    }

    fn wants(&self, p: &Program) -> bool {
        if self.names.is_empty() {
            p.quick || !self.quick
        } else {
            self.names.iter().any(|n| n == p.name)
        }
    }
}

/// Runs the programs that the arguments name, or all. Fails if any of them fails.
pub(crate) fn run(options: &Options) -> Result<(), String> {
    let anykvm = crate::build::anykvm()?;
    let opt = host::prepare()?;
    let mut failed = Vec::new();
    for program in PROGRAMS.iter().filter(|p| options.wants(p)) {
        crate::debian::install(program.packages)?;
        let mut boot = Boot::new(&anykvm)
            .mem(program.mem)
            .cpus(program.cpus)
            .limit(LIMIT)
            .overlay(&format!("{}:{GUEST_OPT}", opt.display()));
        if program.script.contains(programs::MODULE) {
            boot = boot.kernel(&host::kernel()?);
        } else if let Some(kernel) = &options.kernel {
            boot = boot.kernel(kernel);
        } else if programs::FULL_KERNEL.contains(&program.name) {
            let kernel = crate::debian::kernel("linux-image-amd64", "kernel-amd64")?;
            boot = boot.kernel(&kernel);
        }
        if let Some(engine) = &options.engine {
            boot = boot.engine(engine);
            if engine == "lockstep" {
                boot = boot.limit(LOCKSTEP_LIMIT);
            }
        }
        if let Some((name, value)) = options.variable() {
            boot = boot.variable(name, value);
        }
        for path in host::expand(program.paths)? {
            boot = boot.overlay(&format!("{path}:{path}"));
        }
        let script = script(program, GUEST_OPT);
        let guest = boot.run(&["sh", "-c", &script]);
        let guest = guest.map_err(|e| format!("{}: {e}", anykvm.display()))?;
        let reference = match program.expect {
            Expect::Host => Some(on_host(program, &opt.to_string_lossy())?),
            Expect::Lines(_) => None,
        };
        match verdict(program, &guest, reference.as_ref()) {
            Ok(()) => eprintln!("{:14} ok    {:6.1} s", program.name, seconds(&guest)),
            Err(why) => {
                eprintln!(
                    "{:14} FAILED {:5.1} s: {why}\n{}",
                    program.name,
                    seconds(&guest),
                    guest.last_words(15)
                );
                failed.push(program.name);
            }
        }
    }
    if failed.is_empty() {
        Ok(())
    } else {
        Err(format!("failed in the guest: {}", failed.join(" ")))
    }
}

fn seconds(outcome: &Outcome) -> f64 {
    outcome.time.as_secs_f64()
}

/// Returns the script, with what both sides set up alike.
fn script(program: &Program, opt: &str) -> String {
    format!("export LC_ALL=C OPT={opt}\n{}", program.script)
}

fn on_host(program: &Program, opt: &str) -> Result<Outcome, String> {
    let mut shell = Command::new("busybox");
    shell
        .args(["sh", "-c", &script(program, opt)])
        .env_clear()
        .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
        .env("HOME", "/root");
    run_limited(&mut shell, LIMIT).map_err(|e| format!("busybox sh on the host: {e}"))
}

/// Returns an error that says why the guest's outcome is wrong.
fn verdict(program: &Program, guest: &Outcome, host: Option<&Outcome>) -> Result<(), String> {
    if guest.timed_out {
        return Err("did not end in time".into());
    }
    let text = guest.text();
    if let Some(host) = host {
        if host.stdout.is_empty() || host.status.is_none() {
            return Err("the host's own run printed nothing".into());
        }
        if guest.stdout != host.stdout {
            return Err(first_difference(&text, &host.text()));
        }
        if guest.status != host.status {
            return Err(format!("status {:?}, host {:?}", guest.status, host.status));
        }
        return Ok(());
    }
    if guest.status != Some(0) {
        return Err(format!("status {:?}, output: {text}", guest.status));
    }
    let Expect::Lines(lines) = program.expect else {
        return Ok(());
    };
    match lines.iter().find(|l| !text.contains(*l)) {
        Some(missing) => Err(format!("no {missing:?} in the output: {text}")),
        None => Ok(()),
    }
}

fn first_difference(guest: &str, host: &str) -> String {
    let differing = guest.lines().zip(host.lines()).find(|(g, h)| g != h);
    match differing {
        Some((g, h)) => format!("output differs\n  guest: {g}\n  host:  {h}"),
        None => format!(
            "output has {} bytes, the host's {}\n{}",
            guest.len(),
            host.len(),
            guest.lines().last().unwrap_or_default()
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(status: i32, stdout: &str) -> Outcome {
        Outcome {
            status: Some(status),
            stdout: stdout.into(),
            stderr: Vec::new(),
            time: Duration::ZERO,
            timed_out: false,
        }
    }

    #[test]
    fn a_wrong_output_or_status_is_a_failure() {
        let by_host = PROGRAMS.iter().find(|p| p.name == "sqlite").unwrap();
        let by_lines = PROGRAMS.iter().find(|p| p.name == "ssdd").unwrap();
        let rows = [
            (by_host, outcome(0, "a\n"), Some(outcome(0, "a\n")), true),
            (by_host, outcome(0, "a\n"), Some(outcome(0, "b\n")), false),
            (
                by_host,
                outcome(0, "a\n"),
                Some(outcome(0, "a\nb\n")),
                false,
            ),
            (by_host, outcome(1, "a\n"), Some(outcome(0, "a\n")), false),
            (by_host, outcome(0, ""), Some(outcome(0, "")), false),
            (by_lines, outcome(0, "x PASS\n"), None, true),
            (by_lines, outcome(0, "x\n"), None, false),
            (by_lines, outcome(1, "PASS\n"), None, false),
        ];
        for (i, (program, guest, host, good)) in rows.iter().enumerate() {
            assert_eq!(
                verdict(program, guest, host.as_ref()).is_ok(),
                *good,
                "row {i}"
            );
        }
    }

    #[test]
    fn names_and_parts_select() {
        let wanted = |options: &Options| PROGRAMS.iter().filter(|p| options.wants(p)).count();
        let one = Options {
            names: vec!["zstd".to_owned()],
            ..Options::default()
        };
        assert_eq!(wanted(&one), 1);
        let quick = wanted(&Options {
            quick: true,
            ..Options::default()
        });
        assert!(quick > 0 && quick < wanted(&Options::default()));
    }
}
