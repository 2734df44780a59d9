//! What is left of an instruction that waits for the VMM: most are IN, OUT or a MOV, of which
//! only the register and RIP remain to be written once the answer is there. All others are
//! executed again from their start.

use iced_x86::Code;
use x86_cpu::{CpuState, Shadow};
use x86_defs::{dr, reg, rflags};

use crate::{Insn, exec::reg_write_sized};

/// The rest of one instruction. Two words, so that it goes from hand to hand in registers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Remainder {
    /// RIP of the instruction.
    rip: u64,
    /// Its length, the size of its one access from bit 8 on, and the register that it loads, or [`NONE`],
    /// from bit 16 on; [`WIDE`]. Zero: no instruction.
    what: u64,
}

const NONE: u8 = u8::MAX;
/// RIP has 64 bits.
const WIDE: u64 = 1 << 32;

impl Remainder {
    /// Of no instruction.
    pub(crate) const NOTHING: Self = Self { rip: 0, what: 0 };

    /// Of `insn` at `rip`, which has stopped at an access; nothing if there is more to it.
    #[cold]
    pub(crate) fn of<B>(insn: &Insn<B>, rip: u64, is_wide: bool) -> Self {
        use Code as C;
        let target = match insn.code {
            C::Out_imm8_AL
            | C::Out_imm8_AX
            | C::Out_imm8_EAX
            | C::Out_DX_AL
            | C::Out_DX_AX
            | C::Out_DX_EAX => NONE,
            C::In_AL_imm8
            | C::In_AX_imm8
            | C::In_EAX_imm8
            | C::In_AL_DX
            | C::In_AX_DX
            | C::In_EAX_DX => reg::RAX as u8,
            C::Mov_rm8_r8
            | C::Mov_rm16_r16
            | C::Mov_rm32_r32
            | C::Mov_rm64_r64
            | C::Mov_rm8_imm8
            | C::Mov_rm16_imm16
            | C::Mov_rm32_imm32
            | C::Mov_rm64_imm32
            | C::Mov_moffs8_AL
            | C::Mov_moffs16_AX
            | C::Mov_moffs32_EAX
            | C::Mov_moffs64_RAX => NONE,
            C::Mov_r8_rm8
            | C::Mov_r16_rm16
            | C::Mov_r32_rm32
            | C::Mov_r64_rm64
            | C::Mov_AL_moffs8
            | C::Mov_AX_moffs16
            | C::Mov_EAX_moffs32
            | C::Mov_RAX_moffs64 => insn.dst,
            _ => return Self::NOTHING,
        };
        let [len, size, target] = [insn.len, insn.op_size, target].map(u64::from);
        let wide = if is_wide { WIDE } else { 0 };
        Self {
            rip,
            what: len | size << 8 | target << 16 | wide,
        }
    }

    /// Finishes the instruction; false if it has to be executed again: `len` is not the size of
    /// its access, the VMM has moved RIP, or something else happens at its end.
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
