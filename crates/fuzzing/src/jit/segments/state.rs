//! Modes, tables and start states of programs whose segments have bases and limits.

use x86_cpu::CpuState;
use x86_defs::{
    control::{cr0, cr4},
    reg, rflags,
    segment::{Attr, DescriptorTable, Segment},
};
use x86_native::oracle::Mode as Oracle;

use crate::{Random, jit::machine, state};

pub(super) use machine::RAM;

/// Handlers of interrupts, a HLT each.
pub(super) const HANDLERS: u64 = 0x2800;
pub(super) const HANDLERS_END: u64 = 0x2a00;
const GDT: u64 = 0x800;
const IDT: u64 = 0x1000;
const TSS: u64 = 0x2000;
/// Top of the stack that is used when virtual-8086 mode or CPL 3 is left.
const FRAMES: u64 = 0x3800;

/// The mode that a program executes in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SegmentMode {
    Real,
    V86,
    Protected16,
    Protected32,
}

impl SegmentMode {
    pub(super) const ALL: [Self; 6] = [
        Self::Real,
        Self::Real,
        Self::V86,
        Self::Protected16,
        Self::Protected32,
        Self::Protected32,
    ];
}

/// Selectors that programs may load in protected mode, of these data segments.
pub(super) const DATA_SELECTORS: [u16; 6] = [0x18, 0x20, 0x28, 0x30, 0x38, 0];

pub(super) fn initial_memory() -> Vec<u8> {
    let mut m = vec![0; RAM];
    let mut put = |at: u64, v: u64| {
        m[at as usize..at as usize + 8].copy_from_slice(&v.to_le_bytes());
    };
    // Code and data; data of 64 KiB, of 4 KiB, read-only, expand-down, of 4 GiB with a base.
    for (n, d) in [
        0,
        0x00cf_9b00_0000_ffff_u64,
        0x00cf_9300_0000_ffff,
        0x0000_9301_2340_ffff,
        0x0040_9301_0000_0fff,
        0x0040_9101_8000_ffff,
        0x0040_9701_0000_7fff,
        0x00cf_9300_9550_ffff,
    ]
    .into_iter()
    .enumerate()
    {
        put(GDT + 8 * n as u64, d);
    }
    for vector in 0..256 {
        let to = HANDLERS + vector;
        // The entry of real mode, and an interrupt gate of 32 bits that any level may use.
        m[4 * vector as usize..][..2].copy_from_slice(&(to as u16).to_le_bytes());
        let gate = to & 0xffff | 8 << 16 | 0xee << 40;
        m[(IDT + 8 * vector) as usize..][..8].copy_from_slice(&gate.to_le_bytes());
    }
    m[TSS as usize + 4..][..4].copy_from_slice(&(FRAMES as u32).to_le_bytes());
    m[TSS as usize + 8] = 0x10;
    m[HANDLERS as usize..HANDLERS_END as usize].fill(0xf4);
    m
}

fn segment(base: u64, limit: u32, attr: u32, selector: u16) -> Segment {
    Segment {
        base,
        limit,
        attr: Attr(attr),
        selector,
    }
}

/// Sets segments. Returns CS's base.
fn set_segments(r: &mut Random, kind: SegmentMode, cpu: &mut CpuState) -> u64 {
    let base = |r: &mut Random| match r.below(3) {
        0 => 0x8000 + 0x1000 * r.below(0x28),
        _ => 0x8000 + 0x10 * r.below(0x2800),
    };
    let code = match r.below(3) {
        0 => 0x1_0000,
        1 => 0x1_0000 + 0x10 * r.below(0x1000),
        _ => 0x1_0000 + 0x1000 * r.below(16),
    };
    let limit = |r: &mut Random| r.pick(&[0xffff, 0xffff, 0xffff, 0xfff, 0x27ff, u32::MAX]);
    for n in 0..6 {
        let is_code = n == reg::CS;
        let base = if is_code { code } else { base(r) };
        cpu.seg[n] = match kind {
            SegmentMode::Real => {
                let limit = if is_code || !r.one_in(4) {
                    0xffff
                } else {
                    limit(r)
                };
                let attr = if is_code { 0x9b } else { 0x93 };
                segment(base, limit, attr, (base >> 4) as u16)
            }
            SegmentMode::V86 => segment(base, 0xffff, 0xf3, (base >> 4) as u16),
            _ if is_code => {
                let big = if kind == SegmentMode::Protected32 {
                    0x4000
                } else {
                    0
                };
                let limit = if big != 0 {
                    limit(r).max(0xffff)
                } else {
                    0xffff
                };
                segment(base, limit, 0x9b | big, 0x08)
            }
            _ => {
                let big = r.pick(&[0x4000, 0]);
                let base = if r.one_in(6) { base + 3 } else { base };
                segment(base, limit(r), 0x93 | big, 0x10)
            }
        };
    }
    code
}

/// Returns a start state. The code is at the linear address of its RIP.
pub(super) fn start(r: &mut Random, kind: SegmentMode) -> CpuState {
    let mut cpu = state::cpu(state::host_features(), Oracle::Bits32);
    cpu.cr0 = cr0::NE | cr0::ET | cr0::MP;
    cpu.cr4 = if r.one_in(2) { cr4::OSFXSR } else { 0 };
    cpu.efer = 0;
    cpu.cpl = 0;
    cpu.rflags = r.next() & rflags::ARITH | rflags::FIXED1;
    if r.one_in(8) {
        cpu.rflags |= rflags::DF;
    }
    if r.one_in(2) {
        cpu.rflags |= rflags::IF;
    }
    let code = set_segments(r, kind, &mut cpu);
    if kind == SegmentMode::V86 {
        cpu.cpl = 3;
        cpu.rflags |= rflags::VM;
        if r.one_in(2) {
            cpu.rflags |= rflags::IOPL;
        }
    }
    if kind == SegmentMode::Protected32 && r.one_in(3) {
        // iPXE has such segments: one base for all, and no limit.
        for n in 0..6 {
            let is_code = n == reg::CS;
            let attr = if is_code { 0xc09b } else { 0xc093 };
            cpu.seg[n] = segment(code, u32::MAX, attr, cpu.seg[n].selector);
        }
    }
    if matches!(kind, SegmentMode::Protected16 | SegmentMode::Protected32) && r.one_in(8) {
        let n = r.pick(&[reg::FS, reg::GS]);
        cpu.seg[n] = segment(0, 0, Attr::UNUSABLE, 0);
    }
    if kind != SegmentMode::Real {
        cpu.cr0 |= cr0::PE;
        cpu.idtr = DescriptorTable {
            base: IDT,
            limit: 0x7ff,
        };
    } else {
        cpu.idtr = DescriptorTable {
            base: 0,
            limit: 0x3ff,
        };
    }
    cpu.gdtr = DescriptorTable {
        base: GDT,
        limit: 0x3f,
    };
    cpu.tr = segment(TSS, 0x67, 0x8b, 0x40);
    for g in &mut cpu.gpr[..16] {
        *g = r.integer() & 0xffff_ffff;
    }
    for g in &mut cpu.gpr[8..16] {
        *g = 0;
    }
    let stack = match r.below(6) {
        0 => r.below(8),
        1 => 0x1000 - r.below(8),
        _ => 0x800 + 2 * r.below(0x100),
    };
    let above = if cpu.seg[reg::SS].attr.is_big() {
        0
    } else {
        r.next() << 16 & 0xffff_0000
    };
    cpu.gpr[reg::RSP] = stack | above;
    let ip = match r.below(5) {
        0 => 0x1000 - (code & 0xfff) - r.below(0x20).min(0x10),
        1 => 0xff00 + r.below(0xc0),
        2 => r.below(0x20),
        _ => r.below(0x4000),
    };
    cpu.set_rip(ip & 0xffff);
    cpu.update_mode();
    cpu
}
