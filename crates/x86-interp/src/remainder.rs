//! What remains to be done of an instruction that waits for the VMM. Most are IN, OUT or a MOV, which need only a
//! register and RIP to be written once the answer is there. All others are executed again from their start.

use x86_cpu::{CpuState, Shadow};
use x86_defs::{dr, rflags};

use crate::registers::reg_write_sized;

/// The remainder of one instruction. It has two words, so that it is passed in registers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Remainder {
    /// RIP of the instruction.
    rip: u64,
    /// Bits 7:0 are the instruction's length, bits 15:8 the size of its one access, bits 23:16 the register that it
    /// loads, or [`NONE`]; [`WIDE`]; and bits 63:48 the streams that it counts in. Zero: no instruction.
    what: u64,
}

/// No register.
pub(crate) const NONE: u8 = u8::MAX;
/// RIP has 64 bits.
const WIDE: u64 = 1 << 32;
/// The lowest bit of the streams.
const EVENTS: u32 = 48;

impl Remainder {
    /// The remainder of no instruction.
    pub(crate) const NOTHING: Self = Self { rip: 0, what: 0 };

    /// The remainder of an instruction of `len` bytes at `rip` with one access, which loads a register or [`NONE`].
    #[inline]
    pub(crate) fn new(rip: u64, is_wide: bool, [len, size, target]: [u8; 3], events: u16) -> Self {
        let wide = if is_wide { WIDE } else { 0 };
        let what = u64::from(u32::from_le_bytes([len, size, target, 0]));
        Self {
            rip,
            what: what | wide | u64::from(events) << EVENTS,
        }
    }

    /// Returns the streams that the instruction counts in.
    pub(crate) const fn events(&self) -> u16 {
        (self.what >> EVENTS) as u16
    }

    /// Finishes the instruction. False if it must be executed again: because `len` is not the size of its access, the
    /// VMM has moved RIP, or something else happens at its end.
    pub(crate) fn finish(&self, cpu: &mut CpuState, len: u8, value: u64) -> bool {
        let [insn_len, size, target, ..] = self.what.to_le_bytes();
        let is_plain = cpu.rip() == self.rip
            && self.what != 0
            && len == size
            && cpu.rflags & (rflags::TF | rflags::RF) == 0
            && cpu.shadow == Shadow::None
            && cpu.held_dr6 == 0
            && cpu.effective_dr7() & dr::DR7_ENABLES == 0;
        if !is_plain {
            return false;
        }
        if target != NONE {
            reg_write_sized(cpu, target, size, value);
        }
        let next = self.rip.wrapping_add(insn_len.into());
        let is_wide = self.what & WIDE != 0;
        cpu.set_rip(if is_wide { next } else { next & 0xffff_ffff });
        true
    }
}
