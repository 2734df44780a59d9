//! Decoding of bytes into [`Insn`]s.
//!
//! Decoding is position-independent: the instruction pointer is taken as 0. So RIP-relative displacements and branch
//! targets are relative to the start of the instruction, and decoded code serves every virtual address.

use iced_x86::{Decoder, DecoderError, Instruction, OpKind, Register};
use x86_cpu::{CodeSize, GuestBus};
use x86_defs::reg;

use crate::{
    Insn, Selector,
    gating::{decoder_options, is_available},
    insn::{self, control::undefined},
};

/// Longest instruction in bytes (SDM vol. 2, 2.3.11).
pub(crate) const MAX_LEN: usize = 15;

/// Why bytes cannot be decoded to an instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Incomplete {
    /// The bytes end before the instruction does.
    NeedsMore,
    /// The instruction would have more than 15 bytes: #GP(0).
    TooLong,
}

/// Decodes the instruction at the start of `bytes`. An invalid one gets a handler that raises #UD.
pub(crate) fn decode<B: GuestBus>(
    bytes: &[u8],
    selector: &mut Selector<'_>,
) -> Result<Insn<B>, Incomplete> {
    let bytes = bytes.get(..MAX_LEN).unwrap_or(bytes);
    let bitness = match selector.code_size {
        CodeSize::Bits16 => 16,
        CodeSize::Bits32 => 32,
        CodeSize::Bits64 => 64,
    };
    let options = decoder_options(selector.features);
    let mut decoder = Decoder::with_ip(bitness, bytes, 0, options);
    let mut i = Instruction::default();
    decoder.decode_out(&mut i);
    let valid = match decoder.last_error() {
        DecoderError::None => is_available(&i, selector.features),
        DecoderError::NoMoreBytes if bytes.len() < MAX_LEN => return Err(Incomplete::NeedsMore),
        DecoderError::NoMoreBytes => return Err(Incomplete::TooLong),
        _ => false,
    };
    let mut insn = operands::<B>(&i);
    if valid {
        let s = Selector {
            native: selector.native,
            bytes: bytes.get(..i.len()).unwrap_or(bytes),
            features: selector.features,
            code_size: selector.code_size,
        };
        insn.handler = insn::select(&i, &mut insn, &mut { s });
    }
    Ok(insn)
}

/// Fills in all parts of an [`Insn`] that do not depend on its family.
fn operands<B: GuestBus>(i: &Instruction) -> Insn<B> {
    let mut insn = Insn {
        handler: undefined::<B>,
        imm: 0,
        disp: 0,
        extra: 0,
        code: i.code(),
        imm2: 0,
        len: i.len() as u8,
        op_size: 0,
        addr_size: 8,
        addr_shift: 0,
        dst: 0,
        src: 0,
        src2: 0,
        base: reg::ZERO as u8,
        index: reg::ZERO as u8,
        scale: 0,
        seg: reg::DS as u8,
        prefix: 0,
        events: insn::events::events_of(i),
    };
    if i.has_lock_prefix() {
        insn.prefix |= Insn::<B>::LOCK;
    }
    if i.has_rep_prefix() {
        insn.prefix |= Insn::<B>::REP;
    }
    if i.has_repne_prefix() {
        insn.prefix |= Insn::<B>::REPNE;
    }
    let mut registers = 0;
    let mut immediates = 0;
    for op in 0..i.op_count() {
        let kind = i.op_kind(op);
        match kind {
            OpKind::Register => {
                let r = i.op_register(op);
                let slot = match registers {
                    0 => &mut insn.dst,
                    1 => &mut insn.src,
                    _ => &mut insn.src2,
                };
                *slot = register(r);
                registers += 1;
                if insn.op_size == 0 {
                    insn.op_size = size_code(r.size());
                }
            }
            OpKind::NearBranch16 | OpKind::NearBranch32 | OpKind::NearBranch64 => {
                insn.imm = i.near_branch_target();
            }
            OpKind::FarBranch16 => {
                insn.imm = u64::from(i.far_branch16());
                insn.imm2 = i.far_branch_selector();
            }
            OpKind::FarBranch32 => {
                insn.imm = u64::from(i.far_branch32());
                insn.imm2 = i.far_branch_selector();
            }
            OpKind::Immediate8
            | OpKind::Immediate8_2nd
            | OpKind::Immediate16
            | OpKind::Immediate32
            | OpKind::Immediate64
            | OpKind::Immediate8to16
            | OpKind::Immediate8to32
            | OpKind::Immediate8to64
            | OpKind::Immediate32to64 => {
                if immediates == 0 {
                    insn.imm = i.immediate(op);
                } else {
                    insn.imm2 = i.immediate(op) as u16;
                }
                immediates += 1;
            }
            _ => memory(&mut insn, i, kind),
        }
    }
    insn
}

fn memory<B: GuestBus>(insn: &mut Insn<B>, i: &Instruction, kind: OpKind) {
    insn.prefix |= Insn::<B>::MEM;
    if insn.op_size == 0 {
        insn.op_size = size_code(i.memory_size().size());
    }
    let segment = segment(i);
    match kind {
        OpKind::Memory => {
            let base = i.memory_base();
            let index = i.memory_index();
            if base == Register::RIP || base == Register::EIP {
                insn.base = reg::RIP as u8;
            } else if base != Register::None {
                insn.base = base.number() as u8;
            }
            // A vector index (gathers) is handled by the FP/SIMD family.
            if index != Register::None {
                insn.index = index.number() as u8;
                insn.scale = i.memory_index_scale().trailing_zeros() as u8;
            }
            insn.disp = i.memory_displacement64();
            insn.addr_size = address_size(i);
            insn.seg = segment.number() as u8;
        }
        // Implicit operands of string instructions: rSI (or rDI for XLAT-like
        // MASKMOV) in an overridable segment, or rDI in ES.
        OpKind::MemorySegSI => string(insn, reg::RSI, 2, segment),
        OpKind::MemorySegESI => string(insn, reg::RSI, 4, segment),
        OpKind::MemorySegRSI => string(insn, reg::RSI, 8, segment),
        OpKind::MemorySegDI => string(insn, reg::RDI, 2, segment),
        OpKind::MemorySegEDI => string(insn, reg::RDI, 4, segment),
        OpKind::MemorySegRDI => string(insn, reg::RDI, 8, segment),
        OpKind::MemoryESDI => string_es(insn, 2),
        OpKind::MemoryESEDI => string_es(insn, 4),
        OpKind::MemoryESRDI => string_es(insn, 8),
        _ => {}
    }
    insn.addr_shift = 64 - 8 * insn.addr_size;
}

/// Returns the segment of the memory operand. 64-bit code has only the overrides FS and GS (SDM vol. 2, 2.1.1): others
/// do not even turn #SS into #GP.
fn segment(i: &Instruction) -> Register {
    use Register as R;
    let ignored = matches!(i.segment_prefix(), R::ES | R::CS | R::SS | R::DS);
    if i.code_size() != iced_x86::CodeSize::Code64 || !ignored {
        return i.memory_segment();
    }
    match i.memory_base() {
        R::RSP | R::ESP | R::RBP | R::EBP => R::SS,
        _ => R::DS,
    }
}

fn string<B: GuestBus>(insn: &mut Insn<B>, base: usize, size: u8, segment: Register) {
    insn.base = base as u8;
    insn.addr_size = size;
    insn.seg = segment.number() as u8;
}

/// ES:rDI: `seg` is kept for the source operand if there is one.
fn string_es<B: GuestBus>(insn: &mut Insn<B>, size: u8) {
    insn.addr_size = size;
}

fn address_size(i: &Instruction) -> u8 {
    let of = |r: Register| match r {
        Register::EIP => 4,
        Register::RIP => 8,
        r if r.is_gpr() => r.size() as u8,
        _ => 0,
    };
    match of(i.memory_base()).max(of(i.memory_index())) {
        0 => match i.memory_displ_size() {
            // A bare displacement: its size is the address size, but for
            // 64-bit code, where a sign-extended disp32 has size 8.
            2 => 2,
            4 => 4,
            _ => 8,
        },
        n => n,
    }
}

fn register(r: Register) -> u8 {
    let n = r.number() as u8;
    match r {
        // The decoder numbers bytes AL to BL, AH to BH, SPL to DIL, R8B to R15B;
        // 32 selects bits 8 to 15.
        _ if !r.is_gpr8() || n < 4 => n,
        _ if n < 8 => n + 28,
        _ => n - 4,
    }
}

fn size_code(bytes: usize) -> u8 {
    if bytes <= 8 { bytes as u8 } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn byte_registers_name_their_slot_and_half() {
        for (r, n) in [
            (Register::AL, 0),
            (Register::BL, 3),
            (Register::AH, 32),
            (Register::BH, 35),
            (Register::SPL, 4),
            (Register::DIL, 7),
            (Register::R8L, 8),
            (Register::R15L, 15),
            (Register::R15W, 15),
            (Register::RDI, 7),
        ] {
            assert_eq!(register(r), n, "{r:?}");
        }
    }
}
