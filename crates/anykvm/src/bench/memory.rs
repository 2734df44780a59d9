//! `anykvm bench memory`: measures accesses beyond the reach of TLBs. The program is memory.c.

use super::machines::{Files, Guest, Machine};
use super::plot::{self, Bar, NATIVE, OURS, Scale, TCG};
use super::report::{self, Column, Row, Verdict};
use super::workloads::{Suite, Workload};
use super::{is_plausible, note};
use crate::cli::BenchArgs;
use crate::error::BootError;

/// Number of accesses that a workload makes, as in memory.c.
const COUNT: f64 = 2e6;
/// The scale, which begins at a nanosecond.
const SCALE: Scale = Scale {
    from: 0.001,
    decades: 4,
};
/// Size of the guest's memory: the largest table, and what the kernel needs.
const RAM: &str = "3G";

const fn table(name: &'static str, script: &'static str) -> Workload {
    Workload {
        name,
        suite: Suite::Memory,
        groups: &[],
        script,
    }
}

/// All workloads.
pub(super) const WORKLOADS: &[Workload] = &[
    table("write-16-4k", "./memory write 16 4k"),
    table("write-64-4k", "./memory write 64 4k"),
    table("write-256-4k", "./memory write 256 4k"),
    table("write-1024-4k", "./memory write 1024 4k"),
    table("write-2048-4k", "./memory write 2048 4k"),
    table("write-256-2m", "./memory write 256 2m"),
    table("write-1024-2m", "./memory write 1024 2m"),
    table("write-2048-2m", "./memory write 2048 2m"),
    table("read-256-4k", "./memory read 256 4k"),
    table("read-1024-4k", "./memory read 1024 4k"),
    table("read-1024-2m", "./memory read 1024 2m"),
    table("chase-16-4k", "./memory chase 16 4k"),
    table("chase-256-4k", "./memory chase 256 4k"),
    table("chase-1024-4k", "./memory chase 1024 4k"),
    table("chase-1024-2m", "./memory chase 1024 2m"),
    table("join-512-4k", "./memory join 512 4k"),
    table("join-512-2m", "./memory join 512 2m"),
    table("collect-512-4k", "./memory collect 512 4k"),
    table("collect-512-2m", "./memory collect 512 2m"),
];

/// Maximum time of workloads, as a multiple of the native time.
const BARS: &[(&str, f64)] = &[
    ("write-256-4k", 3.5),
    ("write-1024-4k", 4.0),
    ("write-256-2m", 3.0),
    ("write-1024-2m", 3.0),
];

/// Runs the suite.
pub(super) fn run(
    args: &BenchArgs,
    files: &mut Files,
    verdict: &mut Verdict,
) -> Result<String, BootError> {
    files.add_program("memory", include_str!("memory.c"))?;
    let is_wanted = |w: &&Workload| args.only.is_empty() || args.only.iter().any(|n| n == w.name);
    let workloads: Vec<&'static Workload> = WORKLOADS.iter().filter(is_wanted).collect();
    let lines: Vec<&str> = workloads.iter().map(|w| w.script).collect();
    let script = format!(
        "n=0; while [ $n -lt {} ]; do\n{}\nn=$((n + 1)); done",
        args.repeats,
        lines.join("\n")
    );
    let mut machines = vec![Machine::Native, Machine::Anykvm];
    machines.extend((!args.no_tcg).then_some(Machine::Tcg));
    let mut rows: Vec<Row> = workloads.iter().map(|w| Row::new(w)).collect();
    for round in 1..=args.rounds {
        for machine in &machines {
            let run =
                files.run_script(&Guest::new(*machine, 1, RAM), Some(Suite::Memory), &script)?;
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
    if let Some(file) = &args.svg {
        std::fs::write(file, plot::draw(&bars_of(&rows), SCALE))
            .map_err(BootError::host("cannot write the plot"))?;
    }
    Ok(table_of(&rows, verdict))
}

/// Returns the rows as bars.
fn bars_of(rows: &[Row]) -> Vec<Bar> {
    let columns = [
        (Column::Native, "native", NATIVE),
        (Column::Anykvm, "anykvm", OURS),
        (Column::Tcg, "TCG", TCG),
    ];
    let of_row = |row: &Row| {
        let name = row.workload().name;
        columns.map(|(column, who, colour)| {
            let us = row.best(column)? * 1e3 / COUNT;
            Some((format!("{name}: {who}"), us, colour))
        })
    };
    rows.iter().flat_map(of_row).flatten().collect()
}

/// Returns the table of nanoseconds per access and of ratios, each by the best of its runs.
fn table_of(rows: &[Row], verdict: &mut Verdict) -> String {
    let head = [
        "ns an access (table, MiB, pages)",
        "native",
        "anykvm",
        "TCG",
        "anykvm/native",
        "TCG/anykvm",
    ];
    let mut lines = vec![head.map(str::to_owned).to_vec()];
    for row in rows {
        let name = row.workload().name;
        let ratio = |of, to| Some(row.best(of)? / row.best(to)?);
        let slower = ratio(Column::Anykvm, Column::Native);
        if let (Some(slower), Some((_, bar))) = (slower, BARS.iter().find(|(n, _)| *n == name)) {
            verdict.at_most(&format!("{name} over native"), slower, *bar);
        }
        let mut line = vec![name.to_owned()];
        let times = [Column::Native, Column::Anykvm, Column::Tcg];
        line.extend(times.map(|c| report::cell(row.best(c).map(|ms| ms * 1e6 / COUNT))));
        line.push(report::cell(slower));
        line.push(report::cell(ratio(Column::Tcg, Column::Anykvm)));
        lines.push(line);
    }
    report::aligned(&lines)
}
