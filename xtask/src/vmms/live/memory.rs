//! Compares all of a guest's memory on both sides of a migration.
//!
//! Only bytes that the hypervisor writes by itself may differ. The guest says where these are: its MSRs have the
//! addresses.

use std::{
    fs::File,
    io::{BufReader, Read},
    path::Path,
};

use super::qmp::{Qemu, value};

const PAGE: usize = 4096;

/// A range of bytes that the hypervisor writes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Area {
    name: String,
    gpa: u64,
    len: u64,
}

/// Returns the areas that the guest has named.
pub(super) fn areas(console: &str) -> Vec<Area> {
    let area = |line: &str| {
        let mut words = line.trim().strip_prefix("AREA ")?.split(' ');
        Some(Area {
            name: words.next()?.to_owned(),
            gpa: words.next()?.parse().ok()?,
            len: words.next()?.parse().ok()?,
        })
    };
    console.lines().filter_map(area).collect()
}

/// Saves the memory of two stopped machines, and compares it.
pub(super) fn compare(
    dir: &Path,
    source: &mut Qemu,
    target: &mut Qemu,
    mem_mib: u64,
    areas: &[Area],
) -> Result<Vec<String>, String> {
    let mut files = Vec::new();
    for (name, qemu) in [("source", &mut *source), ("target", &mut *target)] {
        let state = qemu.ask("query-status", "{}")?;
        if value(&state, "running") != Some("false") {
            return Err(format!("the {name} runs: {state}"));
        }
        let path = dir.join(format!("{name}.memory"));
        let arguments = format!(
            "{{\"val\":0,\"size\":{},\"filename\":\"{}\"}}",
            mem_mib << 20,
            path.display()
        );
        qemu.ask("pmemsave", &arguments)?;
        files.push(File::open(&path).map_err(|e| format!("{}: {e}", path.display()))?);
    }
    let [first, second] = <[File; 2]>::try_from(files).map_err(|_| "two files")?;
    differences(first, second, mem_mib << 20, areas)
}

/// Returns the names of the areas that differ. An error says what else differs.
fn differences(
    first: impl Read,
    second: impl Read,
    len: u64,
    areas: &[Area],
) -> Result<Vec<String>, String> {
    let (mut first, mut second) = (BufReader::new(first), BufReader::new(second));
    let mut pages = [[0; PAGE]; 2];
    let (mut wrong, mut known) = (Vec::new(), Vec::new());
    for gpa in (0..len).step_by(PAGE) {
        let [a, b] = &mut pages;
        first.read_exact(a).map_err(|e| format!("source: {e}"))?;
        second.read_exact(b).map_err(|e| format!("target: {e}"))?;
        if a == b {
            continue;
        }
        for ((at, x), y) in (gpa..).zip(a.iter()).zip(b.iter()) {
            if x == y {
                continue;
            }
            match areas.iter().find(|r| (r.gpa..r.gpa + r.len).contains(&at)) {
                Some(area) if known.contains(&area.name) => {}
                Some(area) => known.push(area.name.clone()),
                None => wrong.push(at),
            }
        }
    }
    let Some(at) = wrong.first() else {
        return Ok(known);
    };
    let mut pages: Vec<u64> = wrong.iter().map(|at| at / PAGE as u64).collect();
    pages.dedup();
    Err(format!(
        "memory differs in {} bytes of {} pages: {pages:x?}, first at {at:#x}",
        wrong.len(),
        pages.len()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_the_hypervisor_writes_may_differ() {
        let areas = areas("x\nAREA clock-0 4128 32\r\nAREA bad\ntick 1\n");
        assert_eq!(areas.len(), 1);
        let memory = vec![7u8; 2 * PAGE];
        let with = |at: usize| {
            let mut other = memory.clone();
            other[at] = 8;
            differences(&memory[..], &other[..], 2 * PAGE as u64, &areas)
        };
        assert_eq!(with(4128), Ok(vec!["clock-0".to_owned()]));
        assert_eq!(with(4159), Ok(vec!["clock-0".to_owned()]));
        assert!(with(4127).is_err());
        assert!(with(4160).unwrap_err().contains("1 bytes of 1 pages: [1]"));
        assert!(with(0).is_err());
        assert!(differences(&memory[..], &memory[..PAGE], 2 * PAGE as u64, &[]).is_err());
    }
}
