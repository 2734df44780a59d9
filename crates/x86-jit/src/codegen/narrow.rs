//! 32-bit code: compatibility mode, and protected mode, with flat segments.
//!
//! Its instructions are those of 64-bit code with addresses and stack words of 32
//! bits; what is encoded in another way, or means something else, is here. The
//! upper halves of registers, which nothing can see before 64-bit mode is entered
//! and which are undefined then (SDM vol. 1, 3.4.1.1), are cleared by moves of
//! the stack pointer and string instructions.

use iced_x86::{Code, Instruction, Mnemonic, OpKind, Register};

use super::Translator;
use crate::{asm::*, ir::decoded::Decoded};

/// Forms of short encodings that 64-bit code has not.
pub(crate) fn lift(i: &mut Instruction) {
    let code = match i.code() {
        Code::Inc_r16 => Code::Inc_rm16,
        Code::Inc_r32 => Code::Inc_rm32,
        Code::Dec_r16 => Code::Dec_rm16,
        Code::Dec_r32 => Code::Dec_rm32,
        Code::Mov_AL_moffs8 => Code::Mov_r8_rm8,
        Code::Mov_AX_moffs16 => Code::Mov_r16_rm16,
        Code::Mov_EAX_moffs32 => Code::Mov_r32_rm32,
        Code::Mov_moffs8_AL => Code::Mov_rm8_r8,
        Code::Mov_moffs16_AX => Code::Mov_rm16_r16,
        Code::Mov_moffs32_EAX => Code::Mov_rm32_r32,
        _ => return,
    };
    i.set_code(code);
}

/// An instruction of 32-bit code that means the same in 64-bit code, addresses aside.
pub(crate) fn is_plain(i: &Instruction) -> bool {
    // SYSCALL enters another mode.
    i.mnemonic() != Mnemonic::Syscall
        && (0..i.op_count()).all(|n| i.op_kind(n) != OpKind::Memory || is_plain_operand(i))
}

/// A memory operand with a 32-bit address in a segment that can be written.
fn is_plain_operand(i: &Instruction) -> bool {
    let (base, index) = (i.memory_base(), i.memory_index());
    i.memory_segment() != Register::CS
        && !base.is_gpr16()
        && !index.is_gpr16()
        && (base != Register::None || index != Register::None || i.memory_displ_size() == 4)
}

/// The instruction has the same bytes in 64-bit code, so far as it can be encoded there.
pub(super) fn is_encoded_alike(raw: &[u8]) -> bool {
    let is_prefix = |b: &u8| {
        matches!(
            b,
            0x26 | 0x2e | 0x36 | 0x3e | 0x64..=0x67 | 0xf0 | 0xf2 | 0xf3
        )
    };
    // INC and DEC, REX there; an alias of 80; absolute addresses; VEX, in which bits that
    // select registers from 8 on have no effect here.
    raw.iter()
        .find(|b| !is_prefix(b))
        .is_some_and(|b| !matches!(b, 0x40..=0x4f | 0x82 | 0xa0..=0xa3 | 0xc4 | 0xc5))
}

/// VZEROUPPER and VZEROALL, which do not reach the registers that 32-bit code has not.
pub(super) fn zeroes_vectors(i: &Instruction) -> bool {
    matches!(i.mnemonic(), Mnemonic::Vzeroupper | Mnemonic::Vzeroall)
}

/// Makes a direct branch lead to an offset in the page.
pub(crate) fn set_target(i: &mut Instruction, to: u32) {
    match i.op0_kind() {
        OpKind::NearBranch32 => i.set_near_branch32(to),
        _ => i.set_near_branch64(to.into()),
    }
}

/// Words of the mode's size.
impl Translator {
    /// Bytes of a word on the stack.
    pub(super) const fn word(&self) -> i32 {
        if self.long { 8 } else { 4 }
    }
    pub(super) fn load_word(&mut self, r: Reg, m: Mem) {
        self.asm.rm(self.long, &[0x8b], r, m);
    }
    pub(super) fn store_word(&mut self, m: Mem, r: Reg) {
        self.asm.rm(self.long, &[0x89], r, m);
    }
    /// The immediate is sign-extended.
    pub(super) fn store_word_imm(&mut self, m: Mem, v: i32) {
        self.asm.rm(self.long, &[0xc7], 0, m);
        self.asm.bytes(&v.to_le_bytes());
    }
    /// An address.
    pub(super) fn lea_word(&mut self, r: Reg, m: Mem) {
        self.asm.rm(self.long, &[0x8d], r, m);
    }
    /// VZEROUPPER, VZEROALL: by moves to XMM registers, which clear what is above.
    pub(super) fn zero_vectors(&mut self, d: &Decoded) {
        // VXORPS with itself, or VMOVAPS.
        let all = d.i.mnemonic() == Mnemonic::Vzeroall;
        for n in 0..8 {
            let (v, opcode) = if all { (!n & 15, 0x57) } else { (15, 0x28) };
            self.asm
                .bytes(&[0xc5, 0x80 | v << 3, opcode, 0xc0 | n << 3 | n]);
        }
    }
    /// Moves the guest's stack pointer.
    pub(super) fn move_stack(&mut self, by: i32) {
        self.lea_word(
            crate::frame::area::GUEST_RSP,
            at(crate::frame::area::GUEST_RSP, by),
        );
    }
}
