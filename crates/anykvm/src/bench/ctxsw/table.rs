//! Shows the figures as tables and as bars, and compares them with the bars that they have to meet.

use super::{COUNTERS, Cell, Column, ROWS};
use crate::bench::machines::Machine;
use crate::bench::plot::{self, Bar, Scale};
use crate::bench::report::{Verdict, aligned, cell, least};

/// The first paravirtual KVM's figures (I. Molnar, 7 January 2007): microseconds, seconds, seconds.
const SOURCE: [(&str, f64, f64, f64); 5] = [
    ("native", 1.11, 0.25, 0.9),
    ("QEMU", 61.18, 7.8, 35.2),
    ("KVM upstream", 53.01, 2.8, 9.4),
    ("KVM trunk", 6.36, 0.55, 2.8),
    ("KVM with its CR3 cache", 1.60, 0.36, 2.2),
];

pub(super) const SCALE: Scale = Scale {
    from: 0.1,
    decades: 4,
};

/// Returns the tables: times, then multiples of the native times, then the counters, then the source's figures.
pub(super) fn print(columns: &[Column], rows: &[usize]) -> String {
    let head = |what: &str| {
        let names = columns.iter().map(Column::title);
        [what.to_owned()]
            .into_iter()
            .chain(names)
            .collect::<Vec<_>>()
    };
    let mut times = vec![head("µs a switch, a call, a run")];
    let mut ratios = vec![head("times native")];
    for row in rows {
        let us: Vec<Option<f64>> = columns.iter().map(|c| least(&c.cells[*row].us)).collect();
        let line = us.iter().map(|us| cell(*us));
        times.push([ROWS[*row].0.to_owned()].into_iter().chain(line).collect());
        let line = columns.iter().map(|c| {
            cell(native_of(columns, c).and_then(|n| over(&c.cells[*row], &n.cells[*row])))
        });
        ratios.push([ROWS[*row].0.to_owned()].into_iter().chain(line).collect());
    }
    let mut text = format!("{}\n{}\n", aligned(&times), aligned(&ratios));
    for (n, counter) in COUNTERS.iter().enumerate() {
        let mut lines = vec![head(&format!("{counter} a switch, a call, a run"))];
        for row in rows {
            let of = |c: &Column| c.cells[*row].counted.map(|counted| counted[n]);
            let line = columns.iter().map(|c| cell(of(c)));
            lines.push([ROWS[*row].0.to_owned()].into_iter().chain(line).collect());
        }
        let is_empty = |c: &Column| c.cells.iter().all(|c| c.counted.is_none());
        if !columns.iter().all(is_empty) {
            text.push_str(&format!("{}\n", aligned(&lines)));
        }
    }
    let mut source = vec![
        [
            "2007",
            "2 tasks, µs",
            "hackbench 1, s",
            "hackbench 5, s",
            "times native",
            "",
            "",
        ]
        .map(str::to_owned)
        .to_vec(),
    ];
    let native = SOURCE[0];
    for (name, switch, one, five) in SOURCE {
        let values = [
            switch,
            one,
            five,
            switch / native.1,
            one / native.2,
            five / native.3,
        ];
        let line = values.iter().map(|v| format!("{v:.2}"));
        source.push([name.to_owned()].into_iter().chain(line).collect());
    }
    text + &aligned(&source)
}

/// Returns the host's column with as many processors.
fn native_of<'a>(columns: &'a [Column], column: &Column) -> Option<&'a Column> {
    let is_it = |c: &&Column| c.machine == Machine::Native && c.cpus == column.cpus;
    columns.iter().find(is_it)
}

/// Returns the ratio of the least times: other load on the machine only makes a switch slower.
fn over(this: &Cell, that: &Cell) -> Option<f64> {
    Some(least(&this.us)? / least(&that.us)?)
}

/// Returns a bar for each cell, and the source's switches at the end.
pub(super) fn bars(columns: &[Column], rows: &[usize]) -> Vec<Bar> {
    let mut bars = Vec::new();
    for row in rows
        .iter()
        .filter(|row| !ROWS[**row].0.starts_with("hackbench"))
    {
        for column in columns {
            let colour = match column.machine {
                Machine::Native => plot::NATIVE,
                Machine::Anykvm => plot::OURS,
                Machine::Tcg => plot::TCG,
            };
            if let Some(us) = least(&column.cells[*row].us) {
                bars.push((format!("{}: {}", ROWS[*row].0, column.title()), us, colour));
            }
        }
    }
    for (name, us, _, _) in SOURCE {
        bars.push((format!("2 tasks, 2007: {name}"), us, plot::SOURCE));
    }
    bars
}

/// A row, a column, the column that it is compared with, and the maximum multiple of that.
const BARS: [(&str, &str, &str, f64); 19] = [
    ("ring-2", "pcid", "native", 1.3),
    ("ring-10", "pcid", "native", 1.5),
    ("ring-40", "pcid", "native", 1.5),
    ("ring-1000", "pcid", "native", 1.6),
    ("ring-2", "nopcid", "pcid", 1.15),
    ("ring-10", "nopcid", "pcid", 1.15),
    ("ring-2", "pti", "pcid", 1.5),
    ("ring-10", "pti", "pcid", 1.5),
    ("ring-1000", "pti", "pcid", 1.5),
    ("getpid", "pti nopcid", "pti", 1.5),
    ("hackbench-1", "pcid", "native", 2.0),
    ("hackbench-5", "pcid", "native", 2.0),
    ("ring-2", "pti nopcid", "TCG pti", 1.0),
    ("ring-10", "pti nopcid", "TCG pti", 1.0),
    ("ring-40", "pti nopcid", "TCG pti", 1.0),
    ("ring-1000", "pti nopcid", "TCG pti", 1.0),
    ("getpid", "pti nopcid", "TCG pti", 1.0),
    ("hackbench-1", "pti nopcid", "TCG pti", 1.0),
    ("hackbench-5", "pti nopcid", "TCG pti", 1.0),
];

/// Checks the bars, for the first way of keeping translations that was asked for.
pub(super) fn check(columns: &[Column], verdict: &mut Verdict) {
    for (row, ours, theirs, bar) in BARS {
        let Some(row) = ROWS.iter().position(|(name, _)| *name == row) else {
            continue;
        };
        let mut seen = Vec::new();
        for cpus in columns.iter().map(|c| c.cpus) {
            // The bars of switches are for guests with one processor.
            let is_told = cpus == 1 || ROWS[row].0.starts_with("hackbench");
            if seen.contains(&cpus) || !is_told {
                continue;
            }
            seen.push(cpus);
            let find = |name: &str| {
                let is_it = |c: &&Column| c.name.split(',').next() == Some(name) && c.cpus == cpus;
                columns.iter().find(is_it)
            };
            if let (Some(this), Some(that)) = (find(ours), find(theirs))
                && let Some(ratio) = over(&this.cells[row], &that.cells[row])
            {
                let what = format!("{} {} over {theirs}", ROWS[row].0, this.title());
                verdict.at_most(&what, ratio, bar);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::KINDS;
    use super::*;

    fn column(name: &str, us: f64) -> Column {
        let cell = Cell {
            us: vec![us],
            counted: Some([us; COUNTERS.len()]),
        };
        Column {
            name: name.into(),
            machine: match name {
                "native" => Machine::Native,
                _ => Machine::Anykvm,
            },
            cpus: 1,
            words: "",
            mmu: None,
            before: String::new(),
            cells: vec![cell; ROWS.len()],
        }
    }

    #[test]
    fn bars_name_rows_and_columns_that_there_are() {
        let is_column = |name: &str| {
            ["native", "TCG", "TCG pti"].contains(&name) || KINDS.iter().any(|(k, _)| *k == name)
        };
        for (row, ours, theirs, _) in BARS {
            assert!(
                super::super::names().any(|n| n == row) && is_column(ours) && is_column(theirs)
            );
        }
    }

    #[test]
    fn slow_switches_are_told() {
        let columns = [column("native", 1.0), column("pcid, auto", 2.0)];
        let mut verdict = Verdict::default();
        check(&columns, &mut verdict);
        // Two tasks and three rings miss their bars; hackbench is just quick enough.
        assert_eq!(verdict.missed.len(), 4, "{:?}", verdict.missed);
        let text = print(&columns, &[0]);
        assert!(text.contains("ring-2") && text.contains("53.01"), "{text}");
        assert_eq!(bars(&columns, &[0, 9]).len(), 2 + SOURCE.len());
    }
}
