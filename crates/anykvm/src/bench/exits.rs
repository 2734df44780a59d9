//! `anykvm bench exits`: measures what an exit to the VMM and back costs, by kind.
//!
//! The guest is a loop of one instruction that exits. The time is from one KVM_RUN to the next, with nothing done
//! between. The best of many runs counts, as other load on the machine only makes it slower.

use std::time::Instant;

use anykvm_ioctls::VcpuExit;

use super::bare::{Bare, Mode};
use super::report::{self, Verdict};
use crate::error::BootError;

const EXITS: u32 = 1_000;
const RUNS: u32 = 300;

/// A row: its name, the maximum number of nanoseconds, the 32-bit and the 64-bit code. The store and the load are
/// outside of RAM.
type ExitRow = (&'static str, f64, &'static [u8], &'static [u8]);
const KINDS: [ExitRow; 4] = [
    (
        "port write",
        150.0,
        &[0xe6, 0x80, 0xeb, 0xfc],
        &[0xe6, 0x80, 0xeb, 0xfc],
    ),
    (
        "port read",
        150.0,
        &[0xe4, 0x80, 0xeb, 0xfc],
        &[0xe4, 0x80, 0xeb, 0xfc],
    ),
    (
        "MMIO write",
        150.0,
        &[0xa3, 0, 0, 0x10, 0, 0xeb, 0xf9],
        &[0x89, 0x04, 0x25, 0, 0, 0x10, 0, 0xeb, 0xf7],
    ),
    (
        "MMIO read",
        150.0,
        &[0xa1, 0, 0, 0x10, 0, 0xeb, 0xf9],
        &[0x8b, 0x04, 0x25, 0, 0, 0x10, 0, 0xeb, 0xf7],
    ),
];

/// Returns the name of each figure, in the table's order.
pub(super) fn names() -> impl Iterator<Item = String> {
    let columns = ["64-bit", "64-bit, irqchip", "32-bit", "32-bit, irqchip"];
    KINDS
        .into_iter()
        .flat_map(move |(kind, ..)| columns.map(|column| format!("{kind}, {column}")))
}

/// Returns the figures of a table that [`run`] has made, in [`names`]' order; `None` if `text` is no such table.
pub(super) fn figures(text: &str) -> Option<Vec<f64>> {
    let rows = text.lines().skip(1).map(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let cells = words.last_chunk::<4>()?;
        cells
            .iter()
            .map(|cell| cell.parse().ok())
            .collect::<Option<Vec<f64>>>()
    });
    let figures = rows.collect::<Option<Vec<_>>>()?.concat();
    (figures.len() == names().count()).then_some(figures)
}

/// Measures all kinds. Returns the table.
pub(super) fn run(verdict: &mut Verdict) -> Result<String, BootError> {
    let head = [
        "exit to the VMM and back, ns",
        "64-bit",
        "with irqchip",
        "32-bit",
        "with irqchip",
    ];
    let mut lines = vec![head.map(str::to_owned).to_vec()];
    for (name, bar, code32, code64) in KINDS {
        let mut line = vec![name.to_owned()];
        for (mode, code) in [(Mode::Long, code64), (Mode::Flat32, code32)] {
            for irqchip in [false, true] {
                let ns = measure(mode, irqchip, code)?;
                verdict.at_most(name, ns, bar);
                line.push(report::cell(Some(ns)));
            }
        }
        lines.push(line);
    }
    Ok(report::aligned(&lines))
}

fn measure(mode: Mode, irqchip: bool, code: &[u8]) -> Result<f64, BootError> {
    let Bare {
        mut vcpu, vm: _vm, ..
    } = Bare::new(mode, irqchip, code)?;
    let mut best = f64::INFINITY;
    for _ in 0..RUNS {
        let begin = Instant::now();
        for _ in 0..EXITS {
            match vcpu.run().map_err(BootError::kvm("KVM_RUN"))? {
                VcpuExit::IoOut(..) | VcpuExit::MmioWrite(..) => {}
                VcpuExit::IoIn(_, data) | VcpuExit::MmioRead(_, data) => data.fill(1),
                exit => return Err(BootError::NoImage(format!("unexpected exit: {exit:?}"))),
            }
        }
        best = best.min(begin.elapsed().as_secs_f64() / f64::from(EXITS));
    }
    Ok(best * 1e9)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_those_of_a_table() {
        let mut lines = vec![["exit, ns", "a", "b", "c", "d"].map(str::to_owned).to_vec()];
        for (name, ..) in KINDS {
            let cells = [1.5, 20.0, 300.0, 4.0].map(|ns| report::cell(Some(ns)));
            lines.push([name.to_owned()].into_iter().chain(cells).collect());
        }
        let table = report::aligned(&lines);
        let found = figures(&table).unwrap();
        assert_eq!(found, [1.5, 20.0, 300.0, 4.0].repeat(KINDS.len()));
        let broken = table.replace("300", "-");
        assert_eq!([figures(&broken), figures("")], [None, None]);
    }
}
