//! Compares state images with a model of the manual: what each instruction writes, and what is restored.

use x86_cpu::{CpuState, Feature};
use x86_defs::{
    control::cr4,
    reg,
    xsave::{
        AVX, FCW, FCW_INIT, HEADER_END, LEGACY_SIZE, MXCSR, MXCSR_DEFAULT, SSE, ST0, X87, XMM0,
        YMM_HI,
    },
};

use super::{COMPACT, KIND_XSAVE, KIND_XSAVEC, KIND_XSAVEOPT, LEGACY_USED};
use crate::{
    Interp, RunStop,
    test_bus::{TestBus, at, machine},
};

const IMAGE: u64 = 0x1_0000;
const IMAGE_SIZE: usize = YMM_HI + 256;
const OTHER_MXCSR: u32 = 0x7fa0;

/// A machine in which the components of `used` have values that depend on `salt`.
fn with_state(used: u64, mxcsr: u32, salt: u8) -> (CpuState, TestBus) {
    let (mut cpu, bus) = machine(true, 0);
    for f in [Feature::Xsave, Feature::Xsaveopt, Feature::Xsavec] {
        cpu.features.set(f, true);
    }
    cpu.cr4 |= cr4::OSFXSR | cr4::OSXSAVE;
    cpu.xcr0 = X87 | SSE | AVX;
    cpu.gpr[reg::RBX] = IMAGE;
    let area = &mut cpu.fp.area;
    area[FCW..FCW + 2].copy_from_slice(&FCW_INIT.to_le_bytes());
    let value = |n: usize| (n as u8).wrapping_mul(7) ^ salt | 1;
    if used & X87 != 0 {
        area[FCW..FCW + 2].copy_from_slice(&(0x0272 | u16::from(salt & 1)).to_le_bytes());
        area[2..4].copy_from_slice(&0x4100_u16.to_le_bytes());
        area[4] = salt | 1;
        area[8] = salt;
        for n in (0..8).map(|n| ST0 + 16 * n) {
            (n..n + 10).for_each(|n| area[n] = value(n));
        }
    }
    for (bit, from) in [(SSE, XMM0), (AVX, YMM_HI)] {
        if used & bit != 0 {
            (from..from + 256).for_each(|n| area[n] = value(n));
        }
    }
    cpu.fp.set_mxcsr(mxcsr);
    (cpu, bus)
}

fn run(cpu: &mut CpuState, bus: &mut TestBus, code: &[u8], mask: u64) {
    cpu.gpr[reg::RAX] = mask;
    cpu.gpr[reg::RDX] = 0;
    cpu.set_rip(at::CODE);
    bus.put(at::CODE, code);
    assert_eq!(Interp::new().step(cpu, bus), RunStop::Poll);
    assert_eq!(cpu.rip(), at::CODE + code.len() as u64, "{code:x?}");
}

fn image(bus: &mut TestBus) -> Vec<u8> {
    let from = IMAGE as usize;
    bus.memory(0)[from..from + IMAGE_SIZE].to_vec()
}

/// The registers of a component.
fn registers(cpu: &CpuState, bit: u64) -> Vec<u8> {
    let area = &cpu.fp.area;
    match bit {
        X87 => [&area[..MXCSR], &area[ST0..XMM0]].concat(),
        SSE => area[XMM0..LEGACY_USED].to_vec(),
        _ => area[YMM_HI..YMM_HI + 256].to_vec(),
    }
}

#[test]
fn what_is_saved_is_restored() {
    let kinds: [(u8, &[u8]); 3] = [
        (KIND_XSAVE, &[0x48, 0x0f, 0xae, 0x23]),
        (KIND_XSAVEOPT, &[0x48, 0x0f, 0xae, 0x33]),
        (KIND_XSAVEC, &[0x48, 0x0f, 0xc7, 0x23]),
    ];
    const RESTORE: &[u8] = &[0x48, 0x0f, 0xae, 0x2b];
    let mut compared = 0;
    for (kind, code) in kinds {
        for (used, rfbm, mxcsr) in (0..8_u64)
            .flat_map(|used| (0..8_u64).map(move |rfbm| (used, rfbm)))
            .flat_map(|(u, r)| [(u, r, MXCSR_DEFAULT), (u, r, OTHER_MXCSR)])
        {
            let what = format!("{kind} {used:b} {rfbm:b} {mxcsr:x}");
            let (mut cpu, mut bus) = with_state(used, mxcsr, 0x24);
            let mut want = vec![0xa5; IMAGE_SIZE];
            want[MXCSR..MXCSR + 4].copy_from_slice(&MXCSR_DEFAULT.to_le_bytes());
            want[LEGACY_SIZE..HEADER_END].fill(0);
            // Standard images keep the old contents of components that are not requested.
            want[LEGACY_SIZE] = (X87 | AVX) as u8;
            bus.put(IMAGE, &want);
            let is_compact = kind == KIND_XSAVEC;
            let mut in_use = used;
            if kind != KIND_XSAVE && mxcsr != MXCSR_DEFAULT {
                in_use |= SSE;
            }
            let written = if kind == KIND_XSAVE {
                rfbm
            } else {
                rfbm & in_use
            };
            if written & X87 != 0 {
                want[..MXCSR].copy_from_slice(&cpu.fp.area[..MXCSR]);
                want[ST0..XMM0].copy_from_slice(&cpu.fp.area[ST0..XMM0]);
            }
            if if is_compact {
                written & SSE != 0
            } else {
                rfbm & (SSE | AVX) != 0
            } {
                want[MXCSR..MXCSR + 4].copy_from_slice(&mxcsr.to_le_bytes());
                want[MXCSR + 4..ST0].copy_from_slice(&x86_native::host_mask().to_le_bytes());
            }
            for (bit, from) in [(SSE, XMM0), (AVX, YMM_HI)] {
                if written & bit != 0 {
                    want[from..from + 256].copy_from_slice(&cpu.fp.area[from..from + 256]);
                }
            }
            let bv = if is_compact {
                rfbm & in_use
            } else {
                (X87 | AVX) & !rfbm | rfbm & in_use
            };
            want[LEGACY_SIZE] = bv as u8;
            if is_compact {
                let comp = rfbm | COMPACT;
                want[LEGACY_SIZE + 8..LEGACY_SIZE + 16].copy_from_slice(&comp.to_le_bytes());
            }
            run(&mut cpu, &mut bus, code, rfbm);
            assert!(image(&mut bus) == want, "{what}");

            // Only requests that the image is certain to satisfy.
            for again in (0..8_u64).filter(|again| again & !rfbm == 0) {
                let (mut other, _) = with_state(X87 | SSE | AVX, 0x1fa0, 0x42);
                let (initial, _) = with_state(0, MXCSR_DEFAULT, 0);
                let before = other.clone();
                run(&mut other, &mut bus, RESTORE, again);
                for bit in [X87, SSE, AVX] {
                    let from = match (again & bit != 0, bv & bit != 0) {
                        (false, _) => &before,
                        (true, true) => &cpu,
                        (true, false) => &initial,
                    };
                    assert_eq!(
                        registers(&other, bit),
                        registers(from, bit),
                        "{what} {again:b} {bit:b}"
                    );
                }
                let loaded = match (is_compact, again & SSE != 0, again & AVX != 0) {
                    (true, true, _) if bv & SSE != 0 => mxcsr,
                    (true, true, _) => MXCSR_DEFAULT,
                    (false, false, false) | (true, false, _) => before.fp.mxcsr(),
                    (false, ..) => mxcsr,
                };
                assert_eq!(other.fp.mxcsr(), loaded, "{what} {again:b}");
                compared += 1;
            }
        }
    }
    // As many pairs of sets, one within the other, as 3 to the power of 3.
    assert_eq!(compared, 3 * 8 * 2 * 27);
}

#[test]
fn all_words_count_as_used() {
    let (mut cpu, _) = with_state(0, MXCSR_DEFAULT, 0);
    assert_eq!(cpu.in_use(super::nr_xmm(&cpu)), 0);
    for (bit, from, to) in [
        (X87, 2, 5),
        (X87, 6, MXCSR),
        (X87, ST0, XMM0),
        (SSE, XMM0, XMM0 + 256),
        (AVX, YMM_HI, YMM_HI + 256),
    ] {
        for n in from..to {
            cpu.fp.area[n] = 0x10;
            assert_eq!(cpu.in_use(super::nr_xmm(&cpu)), bit, "{n}");
            cpu.fp.area[n] = 0;
        }
    }
}
