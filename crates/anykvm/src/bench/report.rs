//! Medians, geometric means and bars, and a table of them.

use super::machines::{Machine, Run};
use super::workloads::{BARS, Suite, WORST_NATIVE, Workload};
use crate::error::BootError;

/// A machine's place in a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Column {
    Native,
    Anykvm,
    Tcg,
}

impl Column {
    pub(super) fn of(machine: Machine) -> Self {
        match machine {
            Machine::Native => Self::Native,
            Machine::Anykvm => Self::Anykvm,
            Machine::Tcg => Self::Tcg,
        }
    }
}

/// The bars that were missed.
#[derive(Debug, Default)]
pub(super) struct Verdict {
    pub(super) missed: Vec<String>,
}

impl Verdict {
    pub(super) fn at_least(&mut self, what: &str, value: f64, bar: f64) {
        if value < bar {
            self.missed
                .push(format!("{what}: {value:.2}, at least {bar}"));
        }
    }
    pub(super) fn at_most(&mut self, what: &str, value: f64, bar: f64) {
        if value > bar {
            self.missed
                .push(format!("{what}: {value:.2}, at most {bar}"));
        }
    }
}

/// A workload's times.
#[derive(Debug)]
pub(super) struct Row {
    workload: &'static Workload,
    /// Milliseconds by [`Column`], in the order of the rounds.
    times: [Vec<f64>; 3],
    /// The output of the first run.
    sum: Option<String>,
}

impl Row {
    pub(super) fn new(workload: &'static Workload) -> Self {
        Self {
            workload,
            times: Default::default(),
            sum: None,
        }
    }

    /// Adds the workload's lines of a run.
    pub(super) fn add(&mut self, column: Column, run: &Run) -> Result<(), BootError> {
        let name = self.workload.name;
        let before = self.times[column as usize].len();
        for sample in run.samples.iter().filter(|s| s.name == name) {
            let sum = self.sum.get_or_insert_with(|| sample.sum.clone());
            if *sum != sample.sum {
                return Err(BootError::NoImage(format!(
                    "{name}: {column:?} has the result {}, not {sum}",
                    sample.sum
                )));
            }
            self.times[column as usize].push(sample.ns as f64 / 1e6);
        }
        if self.times[column as usize].len() == before {
            return Err(BootError::NoImage(format!("{name} failed on {column:?}")));
        }
        Ok(())
    }

    pub(super) fn workload(&self) -> &'static Workload {
        self.workload
    }

    /// Returns the shortest of the times, in milliseconds, because what the machine's other load adds is not bounded.
    pub(super) fn best(&self, of: Column) -> Option<f64> {
        let times = self.times[of as usize].iter().copied();
        times.reduce(f64::min)
    }

    /// Returns the median of the ratios of times that were taken in the same round.
    pub(super) fn ratio(&self, of: Column, to: Column) -> Option<f64> {
        let pairs = self.times[of as usize].iter().zip(&self.times[to as usize]);
        median(&pairs.map(|(a, b)| a / b).collect::<Vec<_>>())
    }
}

/// Returns the table of a suite, with its geometric means at the end.
pub(super) fn compared(rows: &[Row], suite: Suite, verdict: &mut Verdict) -> String {
    let head = [
        "",
        "native ms",
        "anykvm ms",
        "TCG ms",
        "anykvm/native",
        "TCG/anykvm",
    ];
    let mut lines = vec![head.map(str::to_owned).to_vec()];
    for row in rows {
        let slower = row.ratio(Column::Anykvm, Column::Native);
        let faster = row.ratio(Column::Tcg, Column::Anykvm);
        let name = row.workload.name;
        if let (Some(slower), Suite::Compute) = (slower, suite)
            && !row.workload.groups.is_empty()
            && !row
                .workload
                .groups
                .contains(&super::workloads::Group::Generated)
        {
            verdict.at_most(&format!("{name} over native"), slower, WORST_NATIVE);
        }
        if let Some(faster) = faster {
            let bars = BARS
                .iter()
                .filter(|b| row.workload.groups.contains(&b.group));
            let bar = bars.map(|b| b.tcg_each).fold(1.0, f64::max);
            verdict.at_least(&format!("{name} over TCG"), faster, bar);
        }
        let mut line = vec![name.to_owned()];
        line.extend(row.times.iter().map(|t| cell(median(t))));
        line.extend([cell(slower), cell(faster)]);
        lines.push(line);
    }
    for bar in BARS {
        let members = || {
            rows.iter()
                .filter(|r| r.workload.groups.contains(&bar.group))
        };
        let mean = |of, to| {
            let ratios: Option<Vec<f64>> = members().map(|r| r.ratio(of, to)).collect();
            ratios.and_then(|r| geometric_mean(&r))
        };
        if members().next().is_none() {
            continue;
        }
        let native = mean(Column::Anykvm, Column::Native);
        let tcg = mean(Column::Tcg, Column::Anykvm);
        let mut line = vec![format!("= {} (mean of {})", bar.name, members().count())];
        line.extend(["", "", ""].map(str::to_owned));
        for (value, wanted, sign) in [(native, bar.native, "≤"), (tcg, bar.tcg, "≥")] {
            line.push(match (value, wanted) {
                (None, _) => "-".into(),
                (Some(v), None) => format!("{v:.2}"),
                (Some(v), Some(w)) => format!("{v:.2} (bar {sign} {w})"),
            });
        }
        if let (Some(value), Some(wanted)) = (native, bar.native) {
            verdict.at_most(&format!("{} over native", bar.name), value, wanted);
        }
        if let (Some(value), Some(wanted)) = (tcg, bar.tcg) {
            verdict.at_least(&format!("{} over TCG", bar.name), value, wanted);
        }
        lines.push(line);
    }
    aligned(&lines)
}

/// Returns the least. `None` if there are no values.
pub(super) fn least(values: &[f64]) -> Option<f64> {
    values.iter().copied().min_by(f64::total_cmp)
}

/// Returns the median. `None` if there are no values.
pub(super) fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    let upper = *sorted.get(middle)?;
    Some(if sorted.len().is_multiple_of(2) {
        (sorted.get(middle.wrapping_sub(1))? + upper) / 2.0
    } else {
        upper
    })
}

fn geometric_mean(values: &[f64]) -> Option<f64> {
    let n = values.len();
    (n != 0).then(|| (values.iter().map(|v| v.ln()).sum::<f64>() / n as f64).exp())
}

/// Formats a number, or a dash if there is none.
pub(super) fn cell(value: Option<f64>) -> String {
    match value {
        None => "-".into(),
        Some(v) if v >= 100.0 => format!("{v:.0}"),
        Some(v) if v >= 10.0 => format!("{v:.1}"),
        Some(v) => format!("{v:.2}"),
    }
}

/// Formats columns: the first to the left, the others to the right.
pub(super) fn aligned(lines: &[Vec<String>]) -> String {
    let width = |column: usize| {
        let cells = lines.iter().filter_map(|l| l.get(column));
        cells.map(|c| c.chars().count()).max().unwrap_or(0)
    };
    let mut text = String::new();
    for line in lines {
        for (column, cell) in line.iter().enumerate() {
            let width = width(column);
            match column {
                0 => text.push_str(&format!("{cell:width$}")),
                _ => text.push_str(&format!("  {cell:>width$}")),
            }
        }
        text.truncate(text.trim_end().len());
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::super::machines::Sample;
    use super::super::workloads::WORKLOADS;
    use super::*;

    fn run(name: &str, ns: u64, sum: &str) -> Run {
        Run {
            samples: vec![Sample {
                name: name.into(),
                ns,
                sum: sum.into(),
                cpu: std::time::Duration::ZERO,
            }],
            ..Run::default()
        }
    }

    #[test]
    fn medians_and_means() {
        assert_eq!(median(&[]), None);
        assert_eq!(median(&[3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), Some(2.5));
        assert!((geometric_mean(&[1.0, 4.0]).unwrap() - 2.0).abs() < 1e-9);
        assert_eq!(geometric_mean(&[]), None);
    }

    #[test]
    fn ratios_and_bars() {
        let sieve = WORKLOADS.iter().find(|w| w.name == "sieve").unwrap();
        let mut row = Row::new(sieve);
        for (n, t) in [(10, 60), (20, 120), (10, 20)] {
            row.add(Column::Native, &run("sieve", n, "x")).unwrap();
            row.add(Column::Anykvm, &run("sieve", t, "x")).unwrap();
            row.add(Column::Tcg, &run("sieve", 2 * t, "x")).unwrap();
        }
        let mut verdict = Verdict::default();
        let text = compared(&[row], Suite::Compute, &mut verdict);
        assert!(text.contains("6.00 (bar ≤ 2)"), "{text}");
        // Three bars are missed: the time over native, the kernels' mean over native, and the integer mean over TCG.
        assert_eq!(verdict.missed.len(), 3, "{:?}", verdict.missed);
    }

    #[test]
    fn a_different_or_missing_result_is_an_error() {
        let sieve = WORKLOADS.iter().find(|w| w.name == "sieve").unwrap();
        let mut row = Row::new(sieve);
        row.add(Column::Native, &run("sieve", 10, "x")).unwrap();
        assert!(row.add(Column::Anykvm, &run("sieve", 10, "y")).is_err());
        assert!(row.add(Column::Anykvm, &run("fib", 10, "x")).is_err());
    }

    #[test]
    fn columns_are_in_line() {
        let lines = [["", "ms"], ["a", "10"]].map(|l| l.map(str::to_owned).to_vec());
        assert_eq!(aligned(&lines), "   ms\na  10\n");
    }
}
