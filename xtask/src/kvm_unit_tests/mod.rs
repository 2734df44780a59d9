//! `cargo xtask kvm-unit-tests FOLDER [--engine interp] [--tcg] [NAME…]`: the x86 suite of kvm-unit-tests, built in
//! FOLDER by its own configure and make, under Debian's QEMU through `anykvm exec`.
//!
//! Every entry of its list has to pass, except those that [`expected`] names, which have to end as that says. `--tcg`
//! runs the suite under QEMU's own emulation, to compare; any result is accepted there.

mod expected;
mod list;

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use clap::{Args, ValueEnum};
use expected::{Expect, Host, expectation};
use list::Entry;

/// Minimum time limit. The list's own limits are for real hardware, and this host may be busy.
const LEAST_LIMIT: Duration = Duration::from_secs(300);
/// How often a test is tried. Some tests of timers fail if their vCPU has to wait for a processor of a busy host.
const ATTEMPTS: u32 = 3;
/// QEMU's exit status by what a test writes to its exit device: 0, and the library's "all skipped".
const PASSED: i32 = 1;
const SKIPPED: i32 = 77;

/// The engine that executes the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Engine {
    Jit,
    #[value(name = "interp")]
    Interpreter,
    Tcg,
}

/// The result of a test.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Outcome {
    Pass,
    Skip,
    /// QEMU refuses the entry's own parameters.
    Refused,
    Fail(String),
}

/// Options of `kvm-unit-tests`.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// What executes the guest.
    #[arg(long, value_enum, default_value = "jit", conflicts_with = "tcg")]
    engine: Engine,
    /// QEMU's own emulation, as `--engine tcg`.
    #[arg(long)]
    tcg: bool,
    /// Where the suite was built.
    folder: PathBuf,
    /// These tests alone.
    names: Vec<String>,
}

/// Runs all entries, or those that are named.
pub(crate) fn run(options: &Options) -> Result<(), String> {
    let engine = if options.tcg {
        Engine::Tcg
    } else {
        options.engine
    };
    let names = &options.names;
    let folder = &options.folder;
    let folder = fs::canonicalize(folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    let bits = list::bits(&folder)?;
    let path = folder.join("x86/unittests.cfg");
    let text = fs::read_to_string(&path).map_err(|e| format!("{}: {e}", path.display()))?;
    let entries = list::parse(&text);
    if let Some(unknown) = names
        .iter()
        .find(|n| !entries.iter().any(|e| e.name == **n))
    {
        return Err(format!("{unknown}: no such test"));
    }
    let anykvm = match engine {
        Engine::Tcg => PathBuf::new(),
        _ => crate::build::anykvm()?,
    };
    let logs = crate::build::cache().join("kvm-unit-tests");
    fs::create_dir_all(&logs).map_err(|e| format!("{}: {e}", logs.display()))?;
    let host = this_host()?;
    let (mut passed, mut skipped, mut known, mut wrong) = (0, 0, 0, Vec::new());
    for entry in &entries {
        let is_wanted = if names.is_empty() {
            !entry.is_manual()
        } else {
            names.contains(&entry.name)
        };
        if !is_wanted || !entry.is_for(bits) {
            continue;
        }
        let start = Instant::now();
        let log = logs.join(format!("{}-{bits}-{engine:?}.log", entry.name));
        let expect = expectation(&entry.name, bits, host);
        let mut tries = 0;
        let (outcome, verdict) = loop {
            tries += 1;
            let outcome = run_one(&anykvm, &folder, entry, engine, &log)?;
            let verdict = match engine {
                Engine::Tcg => Ok(()),
                _ => judge(expect, &outcome),
            };
            if verdict.is_ok() || tries == ATTEMPTS {
                break (outcome, verdict);
            }
        };
        match outcome {
            Outcome::Pass => passed += 1,
            Outcome::Skip | Outcome::Refused => skipped += 1,
            Outcome::Fail(_) => known += usize::from(verdict.is_ok()),
        }
        let seconds = start.elapsed().as_secs_f64();
        let what = match &outcome {
            Outcome::Pass => "pass".to_owned(),
            Outcome::Skip => "skip".to_owned(),
            Outcome::Refused => "refused by QEMU".to_owned(),
            Outcome::Fail(why) => format!("fail: {why}"),
        };
        let note = match (&verdict, expect) {
            (Err(why), _) => format!("  NOT EXPECTED: {why}"),
            (Ok(()), Expect::Skips(why) | Expect::Fails(why)) if engine != Engine::Tcg => {
                format!("  ({why})")
            }
            _ => String::new(),
        };
        eprintln!("{:44} {seconds:6.1} s  {what}{note}", entry.name);
        if verdict.is_err() {
            wrong.push(entry.name.as_str());
        }
    }
    eprintln!(
        "{passed} pass, {skipped} skip themselves, {known} fail{}, {} otherwise than expected",
        if engine == Engine::Tcg {
            ""
        } else {
            " for known reasons"
        },
        wrong.len()
    );
    if wrong.is_empty() {
        Ok(())
    } else {
        Err(format!("kvm-unit-tests: {}", wrong.join(" ")))
    }
}

/// Returns the features of this machine.
fn this_host() -> Result<Host, String> {
    const PLACE: &str = "/proc/cpuinfo";
    let text = fs::read_to_string(PLACE).map_err(|e| format!("{PLACE}: {e}"))?;
    Ok(Host::of(&text))
}

fn judge(expect: Expect, outcome: &Outcome) -> Result<(), String> {
    match (expect, outcome) {
        (Expect::Passes, Outcome::Pass)
        | (Expect::Skips(_), Outcome::Skip | Outcome::Refused)
        | (Expect::Fails(_), Outcome::Fail(_)) => Ok(()),
        (Expect::Passes, _) => Err("it should pass".to_owned()),
        (Expect::Skips(why), _) => Err(format!("it should skip itself: {why}")),
        (Expect::Fails(why), _) => Err(format!("the list says that it fails: {why}")),
    }
}

/// Runs a test as the suite's own scripts do. A shell expands the words that the list has for QEMU.
fn run_one(
    anykvm: &Path,
    folder: &Path,
    entry: &Entry,
    engine: Engine,
    log: &Path,
) -> Result<Outcome, String> {
    let limit = LEAST_LIMIT.max(Duration::from_secs(2 * entry.timeout));
    let launcher = match engine {
        Engine::Tcg => "",
        _ => "\"$ANYKVM\" exec --quiet --",
    };
    let accelerator = if engine == Engine::Tcg { "tcg" } else { "kvm" };
    let script = format!(
        "exec timeout --kill-after=5 {} {launcher} qemu-system-x86_64 -no-reboot -nodefaults \
         -global kvm-pit.lost_tick_policy=discard -device pc-testdev \
         -device isa-debug-exit,iobase=0xf4,iosize=0x4 -display none -serial stdio \
         -device pci-testdev -machine accel={accelerator} -kernel \"$KERNEL\" -smp {} {} {}",
        limit.as_secs(),
        entry.smp,
        entry.parameters,
        if entry.arguments.is_empty() {
            String::new()
        } else {
            format!("-append {}", entry.arguments)
        },
    );
    let cannot = |e: std::io::Error| format!("{}: {e}", log.display());
    let output = fs::File::create(log).map_err(cannot)?;
    let mut command = Command::new("bash");
    command
        .args(["-c", &script])
        .env("ANYKVM", anykvm)
        .env("KERNEL", folder.join("x86").join(&entry.file))
        // This is the scripts' default.
        .env("MAX_SMP", "4")
        .stdin(Stdio::null())
        .stdout(output)
        .stderr(fs::File::create(log.with_extension("errors")).map_err(cannot)?);
    if engine == Engine::Interpreter {
        command.env("ANYKVM_ENGINE", "interp");
    }
    let status = command
        .status()
        .map_err(|e| format!("cannot run bash: {e}"))?;
    let text = fs::read(log).map_err(cannot)?;
    Ok(outcome(status.code(), &String::from_utf8_lossy(&text)))
}

/// Returns a test's result. QEMU also ends with 1 if it cannot start, but then the test has printed nothing.
fn outcome(status: Option<i32>, output: &str) -> Outcome {
    let last = |wanted: &str| {
        let mut lines = output.lines().rev();
        lines.find(|l| l.contains(wanted) && !l.trim().is_empty())
    };
    match status {
        Some(PASSED) if output.trim().is_empty() => Outcome::Refused,
        Some(PASSED) => Outcome::Pass,
        Some(SKIPPED) => Outcome::Skip,
        Some(124 | 137) => Outcome::Fail(format!(
            "not over in time; {}",
            last("").unwrap_or("no output")
        )),
        _ => {
            let line = last("FAIL").or_else(|| last("")).unwrap_or("no output");
            let status = status.map_or_else(|| "a signal".to_owned(), |s| s.to_string());
            Outcome::Fail(format!("status {status}; {line}"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_test_that_never_ran_has_not_passed() {
        assert_eq!(outcome(Some(1), "enabling apic\nPASS: a\n"), Outcome::Pass);
        assert_eq!(outcome(Some(77), "SKIP: b\n"), Outcome::Skip);
        assert_eq!(outcome(Some(1), "\n"), Outcome::Refused);
        for (status, output) in [
            (Some(3), "FAIL: c\n"),
            (Some(0), "PASS: a\n"),
            (Some(124), "PASS: a\n"),
            (Some(127), "Unhandled exception\n"),
            (None, "PASS: a\n"),
        ] {
            assert!(matches!(outcome(status, output), Outcome::Fail(_)));
        }
    }

    #[test]
    fn only_what_is_expected_is_right() {
        let fail = Outcome::Fail(String::new());
        for (expect, outcome, good) in [
            (Expect::Passes, &Outcome::Pass, true),
            (Expect::Passes, &Outcome::Skip, false),
            (Expect::Passes, &Outcome::Refused, false),
            (Expect::Passes, &fail, false),
            (Expect::Skips("x"), &Outcome::Refused, true),
            (Expect::Fails("x"), &Outcome::Refused, false),
            (Expect::Skips("x"), &Outcome::Skip, true),
            (Expect::Skips("x"), &Outcome::Pass, false),
            (Expect::Fails("x"), &fail, true),
            (Expect::Fails("x"), &Outcome::Pass, false),
        ] {
            assert_eq!(
                judge(expect, outcome).is_ok(),
                good,
                "{expect:?} {outcome:?}"
            );
        }
    }
}
