//! A guest without a kernel that goes from root to root: with the cache of roots that it shares with the hypervisor,
//! and without it (docs/paravirt.md).

use std::time::Instant;

use anykvm_ioctls::VcpuExit;
use kvm_bindings::{Msrs, kvm_msr_entry};
use vm_memory::{Bytes, GuestAddress};

use crate::bench::bare::{Bare, Mode};
use crate::bench::report::{self, Verdict};
use crate::error::BootError;

/// Numbers of roots that take turns.
const TURNS: [u64; 5] = [2, 5, 10, 40, 100];
/// Number of pages of its own that each root has and writes to.
const PAGES: u64 = 16;
const ROUNDS: u32 = 100;
const RUNS: u32 = 40;
/// Address of the roots' pages, and of the list of roots.
const WINDOW: u64 = 0x20_0000;
const LIST: u64 = 0x8000;
const AREA: u64 = 0x9000;
const ROOTS: u64 = 0x20_0000;
/// Size of a root's four tables and its pages, in bytes.
const SIZE: u64 = (4 + PAGES) << 12;
/// More than the roots need: address spaces of a guest with little memory get less than others.
const RAM: u64 = 256 << 20;
const _: () = assert!(ROOTS + TURNS[TURNS.len() - 1] * SIZE <= RAM);
const MSR: u32 = 0x616b_0001;
const KEEP: u64 = 1 << 63;
/// CR4.PGE.
const PGE: u64 = 1 << 7;
/// Microseconds of a switch between two tasks in 2007: KVM without its cache of roots, and with it.
const SOURCE: [f64; 2] = [6.36, 1.60];
/// Maximum of what a switch may take with the cache, as a part of what it takes without it.
const BAR: f64 = 0.5;

/// Measures the switches. Returns the table.
pub(super) fn measure(verdict: &mut Verdict) -> Result<String, BootError> {
    let head = [
        "roots, without a kernel",
        "µs without a cache",
        "page walks",
        "with it",
        "page walks",
        "part",
    ];
    let mut lines = vec![head.map(str::to_owned).to_vec()];
    for roots in TURNS {
        let [without, with] = [turns(roots, false)?, turns(roots, true)?];
        let part = with.0 / without.0;
        verdict.at_most(&format!("{roots} roots with the cache"), part, BAR);
        let cells = [without.0, without.1, with.0, with.1, part];
        let cells = cells.iter().map(|v| report::cell(Some(*v)));
        lines.push([roots.to_string()].into_iter().chain(cells).collect());
    }
    let [without, with] = SOURCE;
    let source = ["2 tasks, 2007", "6.36", "-", "1.60", "-"].map(str::to_owned);
    let part = [report::cell(Some(with / without))];
    lines.push(source.into_iter().chain(part).collect());
    Ok(report::aligned(&lines))
}

/// Returns the code: `mov esi, roots; mov ecx, ROUNDS; for each, ROUNDS times: mov cr3, [LIST + …]; inc byte [page] …;
/// out 0x80, al`
fn code(roots: u64) -> Vec<u8> {
    let mut code = vec![0xbe];
    code.extend((roots as u32).to_le_bytes());
    code.push(0xb9);
    code.extend(ROUNDS.to_le_bytes());
    let round = code.len();
    code.extend([0x31, 0xdb]);
    let next = code.len();
    code.extend([0x48, 0x8b, 0x04, 0xdd]);
    code.extend((LIST as u32).to_le_bytes());
    code.extend([0x0f, 0x22, 0xd8]);
    for page in 0..PAGES {
        code.extend([0xfe, 0x04, 0x25]);
        code.extend(((WINDOW + (page << 12)) as u32).to_le_bytes());
    }
    let branch = |code: &mut Vec<u8>, opcode: &[u8], to: usize| {
        code.extend(opcode);
        let distance = to as i32 - (code.len() as i32 + 4);
        code.extend(distance.to_le_bytes());
    };
    code.extend([0xff, 0xc3, 0x39, 0xf3]);
    branch(&mut code, &[0x0f, 0x82], next);
    code.extend([0xff, 0xc9]);
    branch(&mut code, &[0x0f, 0x85], round);
    code.extend([0xe6, 0x80]);
    branch(&mut code, &[0xe9], 0);
    code
}

/// Returns microseconds and page walks per switch.
fn turns(roots: u64, is_cached: bool) -> Result<(f64, f64), BootError> {
    let Bare {
        mut vcpu,
        vm: _vm,
        ram,
    } = Bare::sized(Mode::Long, true, &code(roots), RAM)?;
    let put = |at: u64, value: u64| {
        ram.write_slice(&value.to_le_bytes(), GuestAddress(at))
            .map_err(BootError::guest("tables"))
    };
    for n in 0..roots {
        let at = ROOTS + n * SIZE;
        put(at, (at + 0x1000) | 3)?;
        put(at + 0x1000, (at + 0x2000) | 3)?;
        put(at + 0x2000, 0x183)?;
        put(at + 0x2008, (at + 0x3000) | 3)?;
        for page in 0..PAGES {
            put(at + 0x3000 + 8 * page, (at + 0x4000 + (page << 12)) | 3)?;
        }
        put(LIST + 8 * n, at | if is_cached { KEEP } else { 0 })?;
    }
    let mut sregs = vcpu.get_sregs().map_err(BootError::kvm("KVM_GET_SREGS"))?;
    sregs.cr4 |= PGE;
    vcpu.set_sregs(&sregs)
        .map_err(BootError::kvm("KVM_SET_SREGS"))?;
    if is_cached {
        // The area has versions, the size of a page in bytes, and entries.
        put(AREA, 1)?;
        put(AREA + 8, 0x1000 | 128 << 32)?;
        let entry = kvm_msr_entry {
            index: MSR,
            data: AREA | 1,
            ..Default::default()
        };
        let msrs = Msrs::from_entries(&[entry]).map_err(|_| BootError::NoImage("MSRs".into()))?;
        vcpu.set_msrs(&msrs)
            .map_err(BootError::kvm("KVM_SET_MSRS"))?;
    }
    let mut best = f64::INFINITY;
    let mut walks = 0;
    for run in 0..RUNS {
        if run == 10 {
            walks = walked(&vcpu)?;
        }
        let begin = Instant::now();
        match vcpu.run().map_err(BootError::kvm("KVM_RUN"))? {
            VcpuExit::IoOut(0x80, _) => {}
            exit => {
                let what = format!("the guest has ended with {exit:?}");
                return Err(BootError::NoImage(what));
            }
        }
        best = best.min(begin.elapsed().as_secs_f64());
    }
    let switches = f64::from(ROUNDS) * roots as f64;
    let walks = (walked(&vcpu)? - walks) as f64 / f64::from(RUNS - 10);
    Ok((best * 1e6 / switches, walks / switches))
}

fn walked(vcpu: &anykvm_ioctls::VcpuFd) -> Result<u64, BootError> {
    let stats = vcpu
        .statistics()
        .map_err(BootError::kvm("KVM_GET_STATS_FD"))?;
    let walks = stats.iter().find(|(name, _)| *name == "page_walks");
    Ok(walks.map_or(0, |(_, value)| *value))
}
