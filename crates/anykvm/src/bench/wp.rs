//! `anykvm bench wp`: what changes of CR0.WP, of other inputs of the permission check, visits to SMM, and refills after flushes
//! cost.
//!
//! A guest of a few instructions repeats each change; what an empty loop takes is subtracted. The best of many runs counts. No
//! change may flush or walk: the vCPU's counters say so. QEMU's TCG does the refills as well, in a guest of 32 bits.

use std::time::Instant;

use anykvm_ioctls::{VcpuExit, VcpuFd};
use vm_memory::{Bytes, GuestAddress};

use super::bare::{Bare, Mode};
use super::plot::{self, OURS, SOURCE, Scale, TCG};
use super::refills::{self, PAGES, REFILLS, Refill};
use super::report::{self, Verdict};
use crate::cli::BenchArgs;
use crate::error::BootError;

/// Number of changes between two exits.
const COUNT: u32 = 1000;
const RUNS: u32 = 200;
/// CR4.PGE, CR4.OSFXSR, CR4.PCIDE, CR4.SMAP, CR4.PKE.
const CR4: u64 = 1 << 7 | 1 << 9 | 1 << 17 | 1 << 21 | 1 << 22;
/// The scale, which begins at a nanosecond.
const SCALE: Scale = Scale {
    from: 0.001,
    decades: 3,
};
/// The address at which SMIs begin after a reset.
const SMI: u64 = 0x38000;

/// A change: its name for `--only`, its title, the code, and the maximum number of nanoseconds.
type Change = (&'static str, &'static str, &'static [u8], Option<f64>);
const CHANGES: [Change; 6] = [
    (
        "cr0-wp",
        "CR0.WP toggled",
        &[0x0f, 0x20, 0xc0, 0x35, 0, 0, 1, 0, 0x0f, 0x22, 0xc0],
        Some(15.0),
    ),
    (
        "cr0-ts",
        "CR0.TS set, CLTS",
        &[
            0x0f, 0x20, 0xc0, 0x83, 0xc8, 8, 0x0f, 0x22, 0xc0, 0x0f, 0x06,
        ],
        Some(60.0),
    ),
    ("ac", "STAC and CLAC", &[0x0f, 1, 0xcb, 0x0f, 1, 0xca], None),
    (
        "pkru",
        "WRPKRU twice",
        &[
            0x31, 0xc9, 0x31, 0xd2, 0xb8, 0x54, 0x55, 0x55, 0x55, 0x0f, 1, 0xef, 0x31, 0xc0, 0x0f,
            1, 0xef,
        ],
        Some(40.0),
    ),
    (
        "swapgs",
        "SWAPGS twice",
        &[0x0f, 1, 0xf8, 0x0f, 1, 0xf8],
        None,
    ),
    (
        "cr3",
        "MOV CR3, no flush",
        &[
            0x0f, 0x20, 0xd8, 0x48, 0x0f, 0xba, 0xe8, 63, 0x0f, 0x22, 0xd8,
        ],
        None,
    ),
];
/// Maximum number of nanoseconds of an SMI and RSM.
const SMI_BAR: f64 = 500.0;
const SMI_NAME: &str = "smi";
/// Counters of what may not happen.
const LOSSES: [&str; 3] = ["tlb_flush", WALKS, "mmu_contexts_dropped"];
const WALKS: &str = "page_walks";

/// Returns the names that `--only` may have.
pub(super) fn names() -> impl Iterator<Item = &'static str> {
    let refills = REFILLS.iter().map(|r| r.id);
    CHANGES.iter().map(|c| c.0).chain([SMI_NAME]).chain(refills)
}

/// Runs the suite.
pub(super) fn run(args: &BenchArgs, verdict: &mut Verdict) -> Result<String, BootError> {
    let head = [
        "a change, ns",
        "anykvm",
        "TCG",
        "bar",
        "flushes, walks, contexts dropped a 1000",
    ];
    let mut lines = vec![head.map(str::to_owned).to_vec()];
    let mut bars = Vec::new();
    let is_wanted = |name: &str| args.only.is_empty() || args.only.iter().any(|n| n == name);
    let mut add = |name: &str, ns: f64, bar: Option<f64>, losses| {
        bars.push((name.to_owned(), ns / 1000.0, OURS));
        bars.extend(bar.map(|bar| (format!("{name}: bar"), bar / 1000.0, SOURCE)));
        lines.push(line(name, ns, bar, losses, verdict));
    };
    let (empty, _) = measure(&[], &LOSSES)?;
    for (_, name, code, bar) in CHANGES.into_iter().filter(|c| is_wanted(c.0)) {
        let (ns, losses) = measure(code, &LOSSES)?;
        add(name, ns - empty, bar, losses);
    }
    if is_wanted(SMI_NAME) {
        let (without, _) = visits(false)?;
        let (with, losses) = visits(true)?;
        add("SMI and RSM", with - without, Some(SMI_BAR), losses);
    }
    let refills: Vec<_> = (0..)
        .zip(REFILLS)
        .filter(|(_, r)| is_wanted(r.id))
        .collect();
    let tcg = if args.no_tcg || refills.is_empty() {
        Vec::new()
    } else {
        refills::under_tcg(&args.qemu)?
    };
    for (n, refill) in refills {
        let (ns, walks) = refilled(&refill)?;
        let theirs: Option<f64> = tcg.get::<usize>(n).copied();
        bars.push((refill.name.to_owned(), ns / 1000.0, OURS));
        bars.extend(theirs.map(|ns| (format!("{}: TCG", refill.name), ns / 1000.0, TCG)));
        if let Some(bar) = refill.bar {
            verdict.at_most(refill.name, ns, bar);
        }
        lines.push(vec![
            refill.name.to_owned(),
            report::cell(Some(ns)),
            report::cell(theirs),
            bar_cell(refill.bar),
            format!("{walks:.2} walks a page"),
        ]);
    }
    if let Some(file) = &args.svg {
        std::fs::write(file, plot::draw(&bars, SCALE))
            .map_err(BootError::host("cannot write the plot"))?;
    }
    Ok(report::aligned(&lines))
}

fn line(name: &str, ns: f64, bar: Option<f64>, losses: f64, verdict: &mut Verdict) -> Vec<String> {
    if let Some(bar) = bar {
        verdict.at_most(name, ns, bar);
        verdict.at_most(
            &format!("{name}: flushes, walks and contexts dropped"),
            losses,
            0.5,
        );
    }
    vec![
        name.to_owned(),
        report::cell(Some(ns)),
        report::cell(None),
        bar_cell(bar),
        format!("{losses:.1}"),
    ]
}

fn bar_cell(bar: Option<f64>) -> String {
    bar.map_or_else(|| "-".to_owned(), |bar| format!("{bar:.0}"))
}

/// Nanoseconds and page walks for a page that is accessed again after a flush.
fn refilled(refill: &Refill) -> Result<(f64, f64), BootError> {
    let (flush, access) = (refill.flush_code(), refill.access_code());
    let time = |code: &[u8]| measure(code, &[WALKS]);
    let (empty, _) = time(&[])?;
    let (flushes, _) = time(&flush)?;
    let (accesses, _) = time(&access)?;
    let (both, walks) = time(&[&flush[..], &access].concat())?;
    let pages = f64::from(PAGES);
    Ok((
        (both - flushes - accesses + empty) / pages,
        walks / 1000.0 / pages,
    ))
}

/// The sum of these counters.
fn count(vcpu: &VcpuFd, counters: &[&str]) -> Result<f64, BootError> {
    let stats = vcpu
        .statistics()
        .map_err(BootError::kvm("KVM_GET_STATS_FD"))?;
    let lost = |(name, value): &(&str, u64)| counters.contains(name).then_some(*value);
    Ok(stats.iter().filter_map(lost).sum::<u64>() as f64)
}

/// A loop of the code that ends with an exit: nanoseconds, and by how much the counters grow in a thousand.
fn measure(change: &[u8], counters: &[&str]) -> Result<(f64, f64), BootError> {
    // mov ebx, COUNT; …; dec ebx; jnz …; out 0x80, al; jmp …
    let mut code = vec![0xbb];
    code.extend(COUNT.to_le_bytes());
    code.extend(change);
    let back = |from: usize, to: usize| (to as i64 - from as i64) as i8 as u8;
    code.extend([0xff, 0xcb, 0x75, back(code.len() + 4, 5), 0xe6, 0x80]);
    code.extend([0xeb, back(code.len() + 2, 0)]);
    let Bare {
        mut vcpu,
        vm: _vm,
        ram,
    } = Bare::new(Mode::Long, true, &code)?;
    set_controls(&vcpu)?;
    refills::map(ram)?;
    let mut next = || exit(&mut vcpu);
    for _ in 0..20 {
        next()?;
    }
    let mut best = f64::INFINITY;
    let before = count(&vcpu, counters)?;
    for _ in 0..RUNS {
        let begin = Instant::now();
        exit(&mut vcpu)?;
        best = best.min(begin.elapsed().as_secs_f64());
    }
    let lost = count(&vcpu, counters)? - before;
    let each = best * 1e9 / f64::from(COUNT);
    Ok((each, lost * 1000.0 / f64::from(COUNT * RUNS)))
}

/// Measures exits, each after a visit to SMM or not.
fn visits(smi: bool) -> Result<(f64, f64), BootError> {
    let Bare { mut vcpu, vm, ram } = Bare::new(Mode::Long, true, &[0xe6, 0x80, 0xeb, 0xfc])?;
    // rsm
    ram.write_slice(&[0x0f, 0xaa], GuestAddress(SMI))
        .map_err(BootError::guest("code"))?;
    vm.set_static_memory_of(1, ram)
        .map_err(BootError::kvm("KVM_SET_USER_MEMORY_REGION"))?;
    set_controls(&vcpu)?;
    let mut best = f64::INFINITY;
    let mut before = 0.0;
    for n in 0..RUNS {
        if n == RUNS / 10 {
            before = count(&vcpu, &LOSSES)?;
        }
        let begin = Instant::now();
        for _ in 0..COUNT {
            if smi {
                vcpu.smi().map_err(BootError::kvm("KVM_SMI"))?;
            }
            exit(&mut vcpu)?;
        }
        best = best.min(begin.elapsed().as_secs_f64());
    }
    let lost = count(&vcpu, &LOSSES)? - before;
    Ok((
        best * 1e9 / f64::from(COUNT),
        lost * 1000.0 / f64::from(COUNT * RUNS),
    ))
}

fn set_controls(vcpu: &VcpuFd) -> Result<(), BootError> {
    let mut s = vcpu.get_sregs().map_err(BootError::kvm("KVM_GET_SREGS"))?;
    s.cr4 |= CR4;
    vcpu.set_sregs(&s)
        .map_err(BootError::kvm("KVM_SET_SREGS"))?;
    // Systems have these values, with which code is translated for another mode while CR0.TS is set.
    let mut fpu = vcpu.get_fpu().map_err(BootError::kvm("KVM_GET_FPU"))?;
    (fpu.fcw, fpu.mxcsr) = (0x37f, 0x1f80);
    vcpu.set_fpu(&fpu).map_err(BootError::kvm("KVM_SET_FPU"))
}

fn exit(vcpu: &mut VcpuFd) -> Result<(), BootError> {
    match vcpu.run().map_err(BootError::kvm("KVM_RUN"))? {
        VcpuExit::IoOut(..) => Ok(()),
        exit => Err(BootError::NoImage(format!("unexpected exit: {exit:?}"))),
    }
}
