//! 32-bit code: compatibility mode, and protected mode, with flat segments.
//!
//! The instructions of such code are those of 64-bit code with addresses and stack words of 32 bits; what is encoded in
//! another way, or means something else, is here. Moves of the stack pointer and string instructions clear the upper
//! halves of registers. Nothing can see these before 64-bit mode is entered, and they are undefined then (SDM vol. 1,
//! 3.4.1.1).

use iced_x86::{Code, Instruction, Mnemonic, OpKind, Register};

/// Turns forms of short encodings that 64-bit code does not have into their long forms.
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

/// Returns true if the instruction of 32-bit code means the same in 64-bit code, except for addresses.
pub(crate) fn is_plain(i: &Instruction) -> bool {
    // SYSCALL enters another mode.
    i.mnemonic() != Mnemonic::Syscall
        && (0..i.op_count()).all(|n| i.op_kind(n) != OpKind::Memory || is_plain_operand(i))
}

/// Returns true for a memory operand with a 32-bit address in a segment that can be written.
pub(crate) fn is_plain_operand(i: &Instruction) -> bool {
    let (base, index) = (i.memory_base(), i.memory_index());
    i.memory_segment() != Register::CS
        && !base.is_gpr16()
        && !index.is_gpr16()
        && (base != Register::None || index != Register::None || i.memory_displ_size() == 4)
}

/// Returns true if the instruction has the same bytes in 64-bit code, so far as it can be encoded there.
pub(crate) fn is_encoded_alike(raw: &[u8]) -> bool {
    let is_prefix = |b: &u8| {
        matches!(
            b,
            0x26 | 0x2e | 0x36 | 0x3e | 0x64..=0x67 | 0xf0 | 0xf2 | 0xf3
        )
    };
    // These are not alike: INC and DEC, which are REX there; an alias of 80; absolute addresses; VEX, in which bits
    // that select registers from 8 on have no effect here.
    raw.iter()
        .find(|b| !is_prefix(b))
        .is_some_and(|b| !matches!(b, 0x40..=0x4f | 0x82 | 0xa0..=0xa3 | 0xc4 | 0xc5))
}

/// Returns true for VZEROUPPER and VZEROALL, which do not change the registers that 32-bit code does not have.
pub(crate) fn zeroes_vectors(i: &Instruction) -> bool {
    matches!(i.mnemonic(), Mnemonic::Vzeroupper | Mnemonic::Vzeroall)
}
