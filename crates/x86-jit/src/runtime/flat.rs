//! Which 32-bit code can be translated: that with flat segments.

use x86_cpu::{CodeSize, CpuState};
use x86_defs::{reg, segment::Segment};

use crate::ir::mode::Mode;

/// 32-bit protected or compatibility mode, and addresses in CS, SS, DS and ES are
/// linear ones without a limit.
pub(crate) fn is_flat(cpu: &CpuState) -> bool {
    let cs = &cpu.seg[reg::CS];
    cpu.code_size == CodeSize::Bits32
        && cpu.is_protected()
        && cs.base == 0
        && cs.limit == u32::MAX
        && cpu.seg[reg::SS].attr.is_big()
        && [reg::ES, reg::SS, reg::DS].into_iter().all(|n| {
            let s = &cpu.seg[n];
            s.base == 0 && is_whole(s)
        })
}

/// The mode bits of 32-bit code.
pub(crate) fn mode_of(cpu: &CpuState) -> Mode {
    if cpu.is_64bit() {
        return Mode::NONE;
    }
    let usable = |n: usize, bit| {
        if is_whole(&cpu.seg[n]) {
            bit
        } else {
            Mode::NONE
        }
    };
    Mode::BITS32 | usable(reg::FS, Mode::FS) | usable(reg::GS, Mode::GS)
}

/// Present, writable, expand-up data of 4 GiB.
fn is_whole(s: &Segment) -> bool {
    s.attr.0 & 0x1_009e == 0x92 && s.limit == u32::MAX
}
