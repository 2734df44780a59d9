//! General registers as instructions name them: by size, with AH to BH as numbers from 32 on.

use x86_cpu::CpuState;

use crate::Int;

/// Reads a register as `T`; with `u8`, numbers from 32 are AH, CH, DH, BH.
#[inline(always)]
pub(crate) fn reg_read<T: Int>(cpu: &CpuState, r: u8) -> T {
    let v = cpu.gpr[usize::from(r) & 31];
    if T::BITS == 8 {
        T::from_u64(v >> (r >> 5 << 3))
    } else {
        T::from_u64(v)
    }
}

/// Writes a register: 32 bits clear the upper half, 8 and 16 keep the rest.
#[inline(always)]
pub(crate) fn reg_write<T: Int>(cpu: &mut CpuState, r: u8, v: T) {
    let slot = &mut cpu.gpr[usize::from(r) & 31];
    match T::BITS {
        8 => {
            let shift = r >> 5 << 3;
            *slot = *slot & !(0xff << shift) | v.to_u64() << shift;
        }
        16 => *slot = *slot & !0xffff | v.to_u64(),
        _ => *slot = v.to_u64(),
    }
}

/// Writes a register whose size in bytes is known only at run time.
#[inline(always)]
pub(crate) fn reg_write_sized(cpu: &mut CpuState, r: u8, size: u8, v: u64) {
    match size {
        1 => reg_write(cpu, r, v as u8),
        2 => reg_write(cpu, r, v as u16),
        4 => reg_write(cpu, r, v as u32),
        _ => reg_write(cpu, r, v),
    }
}
