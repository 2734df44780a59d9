//! `anykvm bench --against`: two builds of anykvm beside each other.

use std::path::Path;
use std::process::Command;

use super::machines::{self, Files};
use super::report::{self, Column, Row};
use super::workloads::{Suite, Workload};
use super::{chosen, exits};
use crate::cli::{BenchArgs, BenchSuite};
use crate::error::BootError;

/// True if the suite can compare builds.
pub(super) fn has(suite: &BenchSuite) -> bool {
    use BenchSuite::{Boot, Compute, Exits, Kernel};
    matches!(suite, Compute | Kernel | Boot | Exits)
}

/// Compares this build with `other`. Returns the table.
pub(super) fn run(
    args: &BenchArgs,
    suite: &BenchSuite,
    files: Option<&Files>,
    other: &Path,
) -> Result<String, BootError> {
    let lines = match (suite, files) {
        (BenchSuite::Exits, _) => exits(args, other)?,
        (BenchSuite::Compute, Some(f)) => workloads(args, f, Suite::Compute, other)?,
        (BenchSuite::Kernel, Some(f)) => workloads(args, f, Suite::Kernel, other)?,
        (BenchSuite::Boot, Some(f)) => boots(args, f, other)?,
        _ => Vec::new(),
    };
    Ok(report::aligned(&lines))
}

fn line(cells: &[&str]) -> Vec<String> {
    cells.iter().map(|&cell| cell.to_owned()).collect()
}

/// Returns two cells: the median of our times, and its ratio to the median of the other build's.
fn cells(own: &[f64], other: &[f64]) -> [String; 2] {
    let (own, other) = (report::median(own), report::median(other));
    let ratio = own.zip(other).map(|(own, other)| own / other);
    [
        report::cell(own),
        ratio.map_or_else(|| "-".to_owned(), |r| format!("{r:.3}")),
    ]
}

/// Compares workloads, each in a run of its own: otherwise the build that is ahead would run beside other workloads.
fn workloads(
    args: &BenchArgs,
    files: &Files,
    suite: Suite,
    other: &Path,
) -> Result<Vec<Vec<String>>, BootError> {
    let head = ["", "first, ms", "over other's", "later, ms", "over other's"];
    let mut lines = vec![line(&head)];
    for workload in chosen(args, suite) {
        // The row checks that results agree.
        let mut row = Row::new(workload);
        // Times of the first run and of the others, by machine.
        let mut times: [[Vec<f64>; 2]; 2] = Default::default();
        for _ in 0..args.rounds {
            let runs = files.pair(other, "1G", &[workload], args.repeats)?;
            for (run, times) in runs.iter().zip(&mut times) {
                row.add(Column::Anykvm, run)?;
                for (n, sample) in run.samples.iter().enumerate() {
                    times[n.min(1)].push(sample.cpu.as_secs_f64() * 1e3);
                }
            }
        }
        let [own, other] = &times;
        let cells = own
            .iter()
            .zip(other)
            .flat_map(|(own, other)| cells(own, other));
        lines.push(
            [workload.name.to_owned()]
                .into_iter()
                .chain(cells)
                .collect(),
        );
    }
    Ok(lines)
}

/// Compares boots to the shell, by the processor's time.
fn boots(args: &BenchArgs, files: &Files, other: &Path) -> Result<Vec<Vec<String>>, BootError> {
    let mut times: [Vec<f64>; 2] = Default::default();
    for _ in 0..args.rounds {
        let runs = files.pair(other, "256M", &[] as &[&Workload], 1)?;
        for (run, times) in runs.iter().zip(&mut times) {
            times.push(run.ready_cpu.as_secs_f64() * 1e3);
        }
    }
    let [own, other] = &times;
    let name = "boot to the shell, 1 vCPU".to_owned();
    Ok(vec![
        line(&["", "ms", "over other's"]),
        [name].into_iter().chain(cells(own, other)).collect(),
    ])
}

/// Compares exits. The builds measure in turn, each in processes of its own.
fn exits(args: &BenchArgs, other: &Path) -> Result<Vec<Vec<String>>, BootError> {
    let own = machines::own()?;
    let mut times: [Vec<Vec<f64>>; 2] = Default::default();
    for _ in 0..args.rounds {
        for (program, times) in [own.as_path(), other].into_iter().zip(&mut times) {
            let output = Command::new(program)
                .args(["bench", "exits"])
                .output()
                .map_err(|e| {
                    BootError::NoImage(format!("cannot run {}: {e}", program.display()))
                })?;
            let figures = exits::figures(&String::from_utf8_lossy(&output.stdout));
            let figures = figures.ok_or_else(|| {
                BootError::NoImage(format!("{}: no table of exits", program.display()))
            })?;
            times.resize(figures.len(), Vec::new());
            for (all, ns) in times.iter_mut().zip(figures) {
                all.push(ns);
            }
        }
    }
    let [own, other] = &times;
    let mut lines = vec![line(&["exit to the VMM and back", "ns", "over other's"])];
    for ((name, own), other) in exits::names().zip(own).zip(other) {
        lines.push([name].into_iter().chain(cells(own, other)).collect());
    }
    Ok(lines)
}
