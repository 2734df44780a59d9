//! `anykvm bench`: runs workloads natively, in a guest of ours and in one of QEMU's TCG, in turn.
//!
//! Machines are noisy and drift. So each round runs everything on each of the three, and medians over the rounds of
//! ratios within a round are printed. A workload's time is taken inside, by the clock of the machine that runs it. If a
//! guest's times add up to more time than has passed on the host, that is an error; so are outputs that differ.

mod against;
mod bare;
mod bare_tcg;
mod ctxsw;
mod dirtylog;
mod doorbell;
mod exits;
mod firmware;
mod machines;
mod memory;
mod plot;
mod refills;
mod report;
mod toggles;
mod vpmu;
mod workloads;
mod wp;

use std::io::Write;

use crate::cli::{BenchArgs, BenchSuite};
use crate::error::BootError;
use machines::{Files, Machine, Run};
use report::{Column, Row, Verdict};
use workloads::{SCALING_BAR, Suite, WORKLOADS, Workload};

/// Exit status when a bar is missed.
const STATUS_MISSED: u8 = 1;
/// Minimum of TCG's time of a boot to the shell divided by ours.
const BOOT_BAR: f64 = 2.0;

/// Returns the names that `--only` may have.
fn known() -> impl Iterator<Item = &'static str> {
    WORKLOADS
        .iter()
        .map(|w| w.name)
        .chain(ctxsw::names())
        .chain(memory::names())
        .chain(dirtylog::PARTS)
        .chain(wp::names())
        .chain(vpmu::PARTS)
}

/// Runs `anykvm bench`. Returns the exit status and the line to print with it.
pub(crate) fn run(args: &BenchArgs) -> Result<(u8, Option<String>), BootError> {
    if let Some(name) = args.only.iter().find(|n| known().all(|known| known != **n)) {
        let known: Vec<&str> = known().collect();
        return Err(BootError::Usage(format!(
            "{name}: not one of {}",
            known.join(", ")
        )));
    }
    if args.against.is_some() && !args.suites.iter().all(against::has) {
        return Err(BootError::Usage(
            "--against is for compute, kernel, boot and exits".to_owned(),
        ));
    }
    let mut verdict = Verdict::default();
    let is_bare = |s: &BenchSuite| {
        use BenchSuite::{Dirtylog, Doorbell, Exits, Firmware, Wp};
        matches!(s, Exits | Dirtylog | Doorbell | Firmware | Wp)
    };
    let needs_files = !args.suites.iter().all(is_bare)
        || args.module.is_some() && args.suites.contains(&BenchSuite::Wp);
    let mut files = if needs_files {
        Some(Files::new(args.kernel.as_deref(), &args.qemu)?)
    } else {
        None
    };
    for suite in &args.suites {
        let text = match (suite, &mut files) {
            (suite, files) if let Some(other) = &args.against => {
                against::run(args, suite, files.as_ref(), other)?
            }
            (BenchSuite::Exits, _) => exits::run(&mut verdict)?,
            (BenchSuite::Wp, files) => {
                let mut text = wp::run(args, &mut verdict)?;
                if let (Some(module), Some(files)) = (&args.module, files) {
                    text += "\n";
                    text += &toggles::run(args, files, module, &mut verdict)?;
                }
                text
            }
            (BenchSuite::Dirtylog, _) => dirtylog::run(args, &mut verdict)?,
            (BenchSuite::Firmware, _) => firmware::run(args, &mut verdict)?,
            (BenchSuite::Doorbell, _) => {
                let qemu = (!args.no_tcg).then_some(args.qemu.as_path());
                doorbell::run(&mut verdict, qemu, args.svg.as_deref())?
            }
            (_, None) => continue,
            (BenchSuite::Compute, Some(f)) => compare(args, f, Suite::Compute, &mut verdict)?,
            (BenchSuite::Kernel, Some(f)) => compare(args, f, Suite::Kernel, &mut verdict)?,
            (BenchSuite::Memory, Some(f)) => memory::run(args, f, &mut verdict)?,
            (BenchSuite::Ctxsw, Some(f)) => ctxsw::run(args, f, &mut verdict)?,
            (BenchSuite::Vpmu, Some(f)) => vpmu::run(args, f, &mut verdict)?,
            (BenchSuite::Boot, Some(f)) => boots(args, f, &mut verdict)?,
            (BenchSuite::Smp, Some(f)) => scaling(args, f, &mut verdict)?,
        };
        // A reader who closes our output does not want the rest.
        let _ = std::io::stdout().write_all(text.as_bytes());
    }
    Ok(match verdict.missed.len() {
        0 => (0, None),
        n => (
            STATUS_MISSED,
            Some(format!("{n} bars missed: {}", verdict.missed.join("; "))),
        ),
    })
}

fn note(text: &str) {
    crate::stdio::say(&format!("bench: {text}"));
}

/// Returns the workloads of a suite that are wanted.
fn chosen(args: &BenchArgs, suite: Suite) -> Vec<&'static Workload> {
    WORKLOADS
        .iter()
        .filter(|w| w.suite == suite)
        .filter(|w| args.only.is_empty() || args.only.iter().any(|n| n == w.name))
        .collect()
}

/// Compares the three machines, with one vCPU.
fn compare(
    args: &BenchArgs,
    files: &Files,
    suite: Suite,
    verdict: &mut Verdict,
) -> Result<String, BootError> {
    let workloads = chosen(args, suite);
    let mut machines = vec![Machine::Native, Machine::Anykvm];
    machines.extend((!args.no_tcg).then_some(Machine::Tcg));
    let mut rows: Vec<Row> = workloads.iter().map(|w| Row::new(w)).collect();
    for round in 1..=args.rounds {
        for machine in &machines {
            let run = files.run(*machine, 1, "1G", &workloads, args.repeats)?;
            note(&format!(
                "round {round} of {}: {machine:?}: {:.1} s",
                args.rounds,
                run.total.as_secs_f64()
            ));
            is_plausible(*machine, &run)?;
            for row in &mut rows {
                row.add(Column::of(*machine), &run)?;
            }
        }
    }
    Ok(report::compared(&rows, suite, verdict))
}

/// Returns an error if the times that a guest claims add up to more than has passed outside.
fn is_plausible(machine: Machine, run: &Run) -> Result<(), BootError> {
    let inside: u64 = run.samples.iter().map(|s| s.ns).sum();
    if inside as f64 > 1.02 * run.total.as_nanos() as f64 {
        return Err(BootError::NoImage(format!(
            "the clock of {machine:?} is wrong: {inside} ns inside of {:?}",
            run.total
        )));
    }
    Ok(())
}

/// Measures boots to the shell and to the end, without a workload.
fn boots(args: &BenchArgs, files: &Files, verdict: &mut Verdict) -> Result<String, BootError> {
    let mut lines = vec![
        ["", "anykvm", "TCG", "TCG/anykvm"]
            .map(str::to_owned)
            .to_vec(),
    ];
    for cpus in [1, 2] {
        let mut times = [Vec::new(), Vec::new()];
        for _ in 0..args.rounds {
            for (machine, times) in [Machine::Anykvm, Machine::Tcg].into_iter().zip(&mut times) {
                if machine == Machine::Tcg && args.no_tcg {
                    continue;
                }
                let run = files.run(machine, cpus, "256M", &[], 1)?;
                note(&format!(
                    "boot, {cpus} vCPU: {machine:?}: {:.2} s to the shell, {:.2} s to the end",
                    run.ready.as_secs_f64(),
                    run.total.as_secs_f64()
                ));
                times.push(run.ready.as_secs_f64());
            }
        }
        let [ours, theirs] = times;
        let ratios: Vec<f64> = ours.iter().zip(&theirs).map(|(o, t)| t / o).collect();
        let name = format!("boot to the shell, {cpus} vCPU, s");
        let ratio = report::median(&ratios);
        if let Some(ratio) = ratio {
            verdict.at_least(&name, ratio, BOOT_BAR);
        }
        lines.push(vec![
            name,
            report::cell(report::median(&ours)),
            report::cell(report::median(&theirs)),
            report::cell(ratio),
        ]);
    }
    Ok(report::aligned(&lines))
}

/// Compares one vCPU with two, and one core with two.
fn scaling(args: &BenchArgs, files: &Files, verdict: &mut Verdict) -> Result<String, BootError> {
    let workloads = chosen(args, Suite::Smp);
    let mut machines = vec![Machine::Native, Machine::Anykvm];
    machines.extend((!args.no_tcg).then_some(Machine::Tcg));
    let mut gains: Vec<Vec<Vec<f64>>> = vec![vec![Vec::new(); machines.len()]; workloads.len()];
    for round in 1..=args.rounds {
        for (column, machine) in machines.iter().enumerate() {
            let one = files.run(*machine, 1, "1G", &workloads, args.repeats)?;
            let two = files.run(*machine, 2, "1G", &workloads, args.repeats)?;
            note(&format!("round {round} of {}: {machine:?}", args.rounds));
            for (w, gains) in workloads.iter().zip(&mut gains) {
                let one = one.samples.iter().filter(|s| s.name == w.name);
                let two = two.samples.iter().filter(|s| s.name == w.name);
                gains[column].extend(one.zip(two).map(|(o, t)| o.ns as f64 / t.ns as f64));
            }
        }
    }
    let mut lines = vec![
        ["2 vCPUs over 1", "native", "anykvm", "TCG"]
            .map(str::to_owned)
            .to_vec(),
    ];
    for (w, gains) in workloads.iter().zip(&gains) {
        let gain = |n: usize| gains.get(n).and_then(|g| report::median(g));
        if let Some(ours) = gain(1) {
            verdict.at_least(&format!("scaling of {}", w.name), ours, SCALING_BAR);
        }
        let mut line = vec![w.name.to_owned()];
        line.extend((0..3).map(|n| report::cell(gain(n))));
        lines.push(line);
    }
    Ok(report::aligned(&lines))
}
