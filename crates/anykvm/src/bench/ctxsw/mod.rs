//! `anykvm bench ctxsw`: measures what it costs to switch from process to process.
//!
//! The rows are those of the first paravirtual KVM's table (2007: a switch between two tasks, and hackbench), and rings
//! of more processes than an operating system has PCIDs for. They run in guests with PCIDs, without, and with separate
//! tables of the kernel and the user. The best of all rounds counts.

mod roots;
mod table;

use super::machines::{Files, Guest, Machine, Run};
use super::plot;
use super::report::Verdict;
use super::workloads::Suite;
use super::{is_plausible, note};
use crate::cli::BenchArgs;
use crate::error::BootError;

/// Each row's name, and the command after the program's name.
const ROWS: [(&str, &str); 10] = [
    ("ring-2", "ring-2"),
    ("ring-5", "ring-5"),
    ("ring-10", "ring-10"),
    ("ring-40", "ring-40"),
    ("ring-200", "ring-200"),
    ("ring-1000", "ring-1000"),
    ("getpid", "getpid"),
    ("hackbench-1", "run hackbench-1 hackbench -g 1 -l 60"),
    ("hackbench-5", "run hackbench-5 hackbench -g 5 -l 12"),
    ("hackbench-25", "run hackbench-25 hackbench -g 25 -l 4"),
];

/// The rows of a guest without a kernel.
const BARE: &str = "roots";

/// Each guest's name, and words for the kernel.
const KINDS: [(&str, &str); 4] = [
    ("pcid", ""),
    ("nopcid", "nopcid"),
    ("pti", "pti=on"),
    ("pti nopcid", "pti=on nopcid"),
];

/// The column of a guest whose kernel has a module that keeps address spaces.
const MODULE: &str = "nopcid and module";

/// The counters that are shown per switch.
const COUNTERS: [&str; 4] = [
    "page_walks",
    "tlb_l1_misses",
    "tlb_flush",
    "fetch_tlb_misses",
];

/// A column of the table.
#[derive(Debug)]
struct Column {
    name: String,
    machine: Machine,
    cpus: u32,
    words: &'static str,
    mmu: Option<String>,
    /// The guest's first command.
    before: String,
    cells: Vec<Cell>,
}

/// The figures of a row in a column.
#[derive(Clone, Debug, Default)]
struct Cell {
    /// Microseconds per switch, call or run, in the order of the rounds.
    us: Vec<f64>,
    /// [`COUNTERS`] per switch, in the last round.
    counted: Option<[f64; COUNTERS.len()]>,
}

pub(super) fn names() -> impl Iterator<Item = &'static str> {
    ROWS.iter().map(|(name, _)| *name).chain([BARE])
}

/// Measures and prints all rows.
pub(super) fn run(
    args: &BenchArgs,
    files: &mut Files,
    verdict: &mut Verdict,
) -> Result<String, BootError> {
    files.add_program("rings", include_str!("rings.c"))?;
    if let Some(module) = &args.module {
        files.add_file(module);
    }
    let rows: Vec<usize> = (0..ROWS.len())
        .filter(|n| args.only.is_empty() || args.only.iter().any(|o| o == ROWS[*n].0))
        .collect();
    let lines: Vec<String> = rows
        .iter()
        .map(|n| format!("./rings {}", ROWS[*n].1))
        .collect();
    let lines = lines.join("\n");
    let mut columns = columns(args);
    let is_bare = args.only.is_empty() || args.only.iter().any(|o| o == BARE);
    let bare = if is_bare {
        roots::measure(verdict)?
    } else {
        String::new()
    };
    if rows.is_empty() {
        return Ok(bare);
    }
    for round in 1..=args.rounds {
        for column in &mut columns {
            let mut guest = Guest::new(column.machine, column.cpus, "1G");
            guest.words = column.words;
            guest.mmu = column.mmu.as_deref();
            guest.stats = true;
            let script = match column.machine {
                Machine::Native => lines.clone(),
                _ => format!("export IN_GUEST=1\n{}\n{lines}", column.before),
            };
            let run = files.run_script(&guest, Some(Suite::Kernel), &script)?;
            note(&format!(
                "round {round} of {}: {}: {:.1} s",
                args.rounds,
                column.title(),
                run.total.as_secs_f64()
            ));
            is_plausible(column.machine, &run)?;
            column.add(&run, &rows)?;
        }
    }
    if let Some(file) = &args.svg {
        let svg = plot::draw(&table::bars(&columns, &rows), table::SCALE);
        std::fs::write(file, svg).map_err(BootError::host("cannot write the plot"))?;
    }
    table::check(&columns, verdict);
    Ok(format!("{bare}\n{}", table::print(&columns, &rows)))
}

fn columns(args: &BenchArgs) -> Vec<Column> {
    let mut columns = Vec::new();
    for cpus in &args.cpus {
        let mut add = |name: String, machine, words, mmu| {
            columns.push(Column {
                name,
                machine,
                cpus: *cpus,
                words,
                mmu,
                before: String::new(),
                cells: vec![Cell::default(); ROWS.len()],
            });
        };
        add("native".into(), Machine::Native, "", None);
        for mmu in &args.mmu {
            for (name, words) in KINDS {
                let name = match mmu.as_str() {
                    "auto" => name.to_owned(),
                    mmu => format!("{name}, {mmu}"),
                };
                add(name, Machine::Anykvm, words, Some(mmu.clone()));
            }
        }
        if !args.no_tcg {
            for (name, words) in [("TCG", ""), ("TCG pti", "pti=on")] {
                add(name.into(), Machine::Tcg, words, None);
            }
        }
        if let Some(module) = &args.module {
            let name = module.file_name().unwrap_or_default().to_string_lossy();
            add(MODULE.into(), Machine::Anykvm, "nopcid", None);
            if let Some(column) = columns.last_mut() {
                column.before = format!("insmod ./{name} || exit 1");
            }
        }
    }
    columns
}

impl Column {
    /// Returns the column's title in the table.
    fn title(&self) -> String {
        match self.cpus {
            1 => self.name.clone(),
            n => format!("{}, {n} vCPUs", self.name),
        }
    }

    /// Adds a run's lines, with the counters printed before and after each.
    fn add(&mut self, run: &Run, rows: &[usize]) -> Result<(), BootError> {
        let counted: Vec<[f64; COUNTERS.len()]> = run.errors.lines().filter_map(counters).collect();
        for (place, row) in rows.iter().enumerate() {
            let name = ROWS[*row].0;
            let sample = run.samples.iter().find(|s| s.name == name);
            let count = sample.and_then(|s| u64::from_str_radix(&s.sum, 16).ok());
            let (Some(sample), Some(count)) = (sample, count) else {
                return Err(BootError::NoImage(format!(
                    "{name} failed on {}",
                    self.title()
                )));
            };
            let count = count.max(1) as f64;
            let cell = &mut self.cells[*row];
            cell.us.push(sample.ns as f64 / 1e3 / count);
            // Each vCPU has printed a line before, and one after.
            let cpus = self.cpus as usize;
            if counted.len() == 2 * cpus * rows.len() {
                let sum = |at: usize, n: usize| {
                    let vcpus = counted.iter().skip(at * cpus).take(cpus);
                    vcpus.map(|values| values[n]).sum::<f64>()
                };
                let each = |n: usize| (sum(2 * place + 1, n) - sum(2 * place, n)) / count;
                cell.counted = Some(core::array::from_fn(each));
            }
        }
        Ok(())
    }
}

/// Reads a line `counted name=value …`.
fn counters(line: &str) -> Option<[f64; COUNTERS.len()]> {
    let words = line.strip_prefix("counted ")?;
    let value = |name: &str| {
        let word = words
            .split(' ')
            .find_map(|w| w.strip_prefix(name)?.strip_prefix('='));
        word.and_then(|v| v.parse().ok()).unwrap_or(0.0)
    };
    Some(COUNTERS.map(value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_come_from_lines_of_the_vmm() {
        assert_eq!(counters("exits 5"), None);
        let line = "counted exits=9 page_walks=7 tlb_l1_misses=5 tlb_flush=3";
        assert_eq!(counters(line), Some([7.0, 5.0, 3.0, 0.0]));
    }

    #[test]
    fn a_row_that_fails_is_an_error() {
        let mut column = Column {
            name: "x".into(),
            machine: Machine::Native,
            cpus: 2,
            words: "",
            mmu: None,
            before: String::new(),
            cells: vec![Cell::default(); ROWS.len()],
        };
        assert!(column.add(&Run::default(), &[0]).is_err());
        assert!(column.add(&Run::default(), &[]).is_ok());
    }

    #[test]
    fn counters_of_all_vcpus_count() {
        let mut column = Column {
            name: "x".into(),
            machine: Machine::Anykvm,
            cpus: 2,
            words: "",
            mmu: None,
            before: String::new(),
            cells: vec![Cell::default(); ROWS.len()],
        };
        let samples = vec![super::super::machines::Sample {
            name: ROWS[0].0.into(),
            ns: 4000,
            sum: "2".into(),
            cpu: std::time::Duration::ZERO,
        }];
        let line = |walks: u32| format!("counted page_walks={walks}");
        let errors = [1, 10, 5, 16].map(line).join("\n");
        let run = Run {
            samples,
            errors,
            ..Run::default()
        };
        column.add(&run, &[0]).unwrap();
        assert_eq!(column.cells[0].us, [2.0]);
        assert_eq!(column.cells[0].counted, Some([5.0, 0.0, 0.0, 0.0]));
    }
}
