//! String instructions: their operations, and which of them are translated.

use iced_x86::{Instruction, Mnemonic, OpKind, Register};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Op {
    Movs,
    Stos,
    Lods,
    Scas,
    Cmps,
}

pub(crate) const OPS: [Op; 5] = [Op::Movs, Op::Stos, Op::Lods, Op::Scas, Op::Cmps];

impl Op {
    /// Returns the opcode for bytes; the next opcode is for larger elements.
    pub(crate) const fn opcode(self) -> u8 {
        match self {
            Self::Movs => 0xa4,
            Self::Stos => 0xaa,
            Self::Lods => 0xac,
            Self::Scas => 0xae,
            Self::Cmps => 0xa6,
        }
    }
    pub(crate) const fn uses_rdi(self) -> bool {
        !matches!(self, Self::Lods)
    }
    pub(crate) const fn uses_rsi(self) -> bool {
        !matches!(self, Self::Stos | Self::Scas)
    }
    pub(crate) const fn writes(self) -> bool {
        matches!(self, Self::Movs | Self::Stos)
    }
    pub(crate) const fn compares(self) -> bool {
        matches!(self, Self::Scas | Self::Cmps)
    }
}

/// Returns the operation, and log2 of the element's size in bytes.
pub(crate) fn operation(i: &Instruction) -> Option<(Op, usize)> {
    use Mnemonic as M;
    if !i.is_string_instruction() {
        return None;
    }
    Some(match i.mnemonic() {
        M::Movsb => (Op::Movs, 0),
        M::Movsw => (Op::Movs, 1),
        M::Movsd => (Op::Movs, 2),
        M::Movsq => (Op::Movs, 3),
        M::Stosb => (Op::Stos, 0),
        M::Stosw => (Op::Stos, 1),
        M::Stosd => (Op::Stos, 2),
        M::Stosq => (Op::Stos, 3),
        M::Lodsb => (Op::Lods, 0),
        M::Lodsw => (Op::Lods, 1),
        M::Lodsd => (Op::Lods, 2),
        M::Lodsq => (Op::Lods, 3),
        M::Scasb => (Op::Scas, 0),
        M::Scasw => (Op::Scas, 1),
        M::Scasd => (Op::Scas, 2),
        M::Scasq => (Op::Scas, 3),
        M::Cmpsb => (Op::Cmps, 0),
        M::Cmpsw => (Op::Cmps, 1),
        M::Cmpsd => (Op::Cmps, 2),
        M::Cmpsq => (Op::Cmps, 3),
        _ => return None,
    })
}

pub(crate) fn repeats(i: &Instruction) -> bool {
    i.has_rep_prefix() || i.has_repne_prefix()
}

/// Returns true for a string instruction with addresses of the mode's size and flat segments.
pub(crate) fn is_plain(i: &Instruction, long: bool) -> bool {
    operation(i).is_some()
        && (0..i.op_count()).all(|n| match i.op_kind(n) {
            OpKind::Register => true,
            OpKind::MemorySegRSI | OpKind::MemoryESRDI => long,
            OpKind::MemorySegESI | OpKind::MemoryESEDI => !long,
            _ => false,
        })
        && !matches!(i.memory_segment(), Register::FS | Register::GS)
        && (long || i.memory_segment() != Register::CS)
}

/// Returns true for instructions that may compare nothing, and change no flag then.
pub(crate) fn may_keep_flags(i: &Instruction) -> bool {
    repeats(i)
}
