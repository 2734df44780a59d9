//! `cargo xtask lockstep [--quick]`: compares the JIT with the interpreter over whole boots.
//!
//! With `ANYKVM_ENGINE=lockstep`, the interpreter executes again everything that translated code has executed. First
//! comes a boot with an error planted in the translator, which has to be found. `--quick` ends after one vCPU's boot;
//! without it, two vCPUs and the guests' programs follow.

use std::time::Duration;

use testkit::boot::{Boot, Outcome};

const LIMIT: Duration = Duration::from_secs(1800);
/// Programs that end within minutes.
const GUESTS: &[&str] = &[
    "openssl",
    "python",
    "sqlite",
    "zstd",
    "busybox-i386",
    "hackbench",
    "ssdd",
    "perl",
    "gcc",
];
/// A command with a little of everything: pipes, forks, files, signals, arithmetic.
const COMMAND: &str = "
    uname -m; nproc
    busybox seq 1 400 | busybox sort -r | busybox sha256sum
    busybox awk 'BEGIN { for (i = 1; i < 60; i++) s += i / 7 * (i % 5 - 2.25); printf \"%.10f\\n\", s }'
    i=0; while [ $i -lt 100 ]; do i=$((i + 1)); done; echo $i
    cat /proc/self/maps >/tmp/maps; wc -l </tmp/maps >/dev/null; gzip -c /tmp/maps | gunzip | cmp - /tmp/maps
    (sleep 100 & kill -TERM $!; wait $!; echo $?); echo end
    exit 7";

/// Options of `lockstep`.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Only what CI does.
    #[arg(long)]
    pub(crate) quick: bool,
}

/// Runs all, or the quick part.
pub(crate) fn run(options: &Options) -> Result<(), String> {
    let quick = options.quick;
    let anykvm = crate::build::anykvm()?;
    let boot = |engine: &str, cpus: u32| {
        let boot = Boot::new(&anykvm).cpus(cpus).mem("256M");
        let outcome = boot.engine(engine).limit(LIMIT).run(&["sh", "-c", COMMAND]);
        outcome.map_err(|e| format!("{}: {e}", anykvm.display()))
    };
    planted(&boot("lockstep-planted", 1)?)?;
    for cpus in if quick { 1..=1 } else { 1..=2 } {
        let outcome = boot("lockstep", cpus)?;
        let line = agreed(&outcome, cpus)?;
        let seconds = outcome.time.as_secs_f64();
        eprintln!("lockstep: boot, {cpus} vCPU: {line} ({seconds:.0} s)");
    }
    if quick {
        return Ok(());
    }
    crate::guests::run(&crate::guests::Options {
        engine: Some("lockstep".to_owned()),
        names: GUESTS.iter().map(|&name| name.to_owned()).collect(),
        ..crate::guests::Options::default()
    })
}

/// Checks that the error was found, and shown with code of the guest and of the host.
fn planted(outcome: &Outcome) -> Result<(), String> {
    let errors = String::from_utf8_lossy(&outcome.stderr).into_owned();
    let shown = [
        "the interpreter differ",
        "guest code from",
        "sar ",
        "translated code at",
        "shr ",
    ];
    match shown.iter().find(|part| !errors.contains(*part)) {
        None if outcome.status != Some(7) => {
            eprintln!("lockstep: a planted error is found");
            Ok(())
        }
        None => Err("the guest went on after a difference".into()),
        Some(part) => Err(format!(
            "a planted error: no {part:?} in the report\n{}",
            outcome.last_words(30)
        )),
    }
}

/// Returns the line that says how much was compared.
fn agreed(outcome: &Outcome, cpus: u32) -> Result<String, String> {
    let text = outcome.text();
    let lines: Vec<&str> = text.lines().collect();
    let complete = lines.first() == Some(&"x86_64")
        && lines.get(1) == Some(&cpus.to_string().as_str())
        && lines.last() == Some(&"end");
    if outcome.status != Some(7) || !complete {
        return Err(format!(
            "lock-step: status {:?}, output {text:?}\n{}",
            outcome.status,
            outcome.last_words(400)
        ));
    }
    let errors = String::from_utf8_lossy(&outcome.stderr);
    let line = errors
        .lines()
        .find_map(|l| l.strip_prefix("anykvm: lock-step: "));
    let line = line.ok_or("nothing was compared")?;
    let stretches = line.split(' ').next().and_then(|n| n.parse::<u64>().ok());
    if stretches.is_none_or(|n| n < 100_000) {
        return Err(format!("too little was compared: {line}"));
    }
    Ok(line.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(status: i32, stdout: &str, stderr: &str) -> Outcome {
        Outcome {
            status: Some(status),
            stdout: stdout.into(),
            stderr: stderr.into(),
            time: Duration::ZERO,
            timed_out: false,
        }
    }

    #[test]
    fn only_a_complete_run_with_comparisons_passes() {
        let good = "anykvm: lock-step: 200000 stretches compared, 0 of them again\n";
        let little = "anykvm: lock-step: 20 stretches compared, 0 of them again\n";
        let rows = [
            (7, "x86_64\n1\nend\n", good, true),
            (7, "x86_64\n1\nend\n", little, false),
            (7, "x86_64\n1\nend\n", "", false),
            (7, "x86_64\n1\n", good, false),
            (125, "x86_64\n1\nend\n", good, false),
        ];
        for (status, stdout, stderr, passes) in rows {
            let result = agreed(&outcome(status, stdout, stderr), 1);
            assert_eq!(result.is_ok(), passes, "{stdout:?} {stderr:?}");
        }
    }

    #[test]
    fn a_planted_error_has_to_be_reported_in_full() {
        let whole =
            "the interpreter differ\nguest code from\nsar rax,3\ntranslated code at\nshr rax,3\n";
        assert!(planted(&outcome(125, "", whole)).is_ok());
        assert!(planted(&outcome(7, "", whole)).is_err());
        assert!(planted(&outcome(125, "", "")).is_err());
    }
}
