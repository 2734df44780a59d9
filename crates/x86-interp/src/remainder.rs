//! What is left of an instruction that waits for the VMM: most are IN, OUT or a MOV, of which
//! only the register and RIP remain to be written once the answer is there. All others are
//! executed again from their start.

use iced_x86::Code;
use x86_cpu::{CpuState, Shadow};
use x86_defs::{dr, reg, rflags};

use crate::{Insn, exec::reg_write};

/// The rest of one instruction.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Remainder {
    /// RIP of the instruction, and of the next.
    rip: u64,
    next: u64,
    /// Size of its one access.
    size: u64,
    /// The register that it loads, or [`NONE`]. (Words, like the others: it is copied soon after
    /// it is made, by wide accesses, for which narrow ones would have to be waited for.)
    target: u64,
}

const NONE: u64 = u64::MAX;

impl Remainder {
    /// Of `insn` at `rip`, which has stopped at an access; `None` if there is more to it.
    #[cold]
    pub(crate) fn of<B>(insn: &Insn<B>, rip: u64, next: u64) -> Option<Self> {
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
            | C::In_EAX_DX => reg::RAX as u64,
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
            | C::Mov_RAX_moffs64 => insn.dst.into(),
            _ => return None,
        };
        Some(Self {
            rip,
            next,
            size: insn.op_size.into(),
            target,
        })
    }

    /// Finishes the instruction; false if it has to be executed again: `len` is not the size of
    /// its access, the VMM has moved RIP, or something else happens at its end.
    pub(crate) fn finish(&self, cpu: &mut CpuState, len: u8, value: u64) -> bool {
        let is_plain = cpu.rip() == self.rip
            && u64::from(len) == self.size
            && cpu.rflags & (rflags::TF | rflags::RF) == 0
            && cpu.shadow == Shadow::None
            && cpu.held_dr6 == 0
            && cpu.effective_dr7() & dr::DR7_ENABLES == 0;
        if !is_plain {
            return false;
        }
        if self.target != NONE {
            let r = self.target as u8;
            match self.size {
                1 => reg_write(cpu, r, value as u8),
                2 => reg_write(cpu, r, value as u16),
                4 => reg_write(cpu, r, value as u32),
                _ => reg_write(cpu, r, value),
            }
        }
        cpu.set_rip(self.next);
        true
    }
}
