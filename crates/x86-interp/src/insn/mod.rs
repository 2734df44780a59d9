//! The decoded instruction and the handler families, one file each.

pub(crate) mod simd;

use iced_x86::Code;

use crate::{Exec, Step};

/// Executes one instruction.
pub type Handler<B> = fn(&mut Exec<'_, B>, &Insn<B>) -> Step;

/// A decoded instruction: plain data that the handler reads.
///
/// Register numbers index [`x86_cpu::CpuState::gpr`] (mask with 31); an 8-bit
/// high register (AH, CH, DH, BH) is its number + 32. An absent base or index
/// is [`x86_defs::reg::ZERO`], RIP-relative uses [`x86_defs::reg::RIP`] with the
/// length already in `disp`.
#[derive(Clone, Copy)]
pub struct Insn<B> {
    /// What executes it.
    pub handler: Handler<B>,
    /// Immediate (sign-extended as the instruction asks), branch displacement, or far pointer offset.
    pub imm: u64,
    /// Displacement of the memory operand.
    pub disp: u64,
    /// The instruction's form.
    pub code: Code,
    /// Far pointer selector, ENTER's level, or second immediate.
    pub imm2: u16,
    /// Length in bytes.
    pub len: u8,
    /// Operand size in bytes: 1, 2, 4, 8.
    pub op_size: u8,
    /// Address size in bytes: 2, 4, 8.
    pub addr_size: u8,
    /// First register operand (destination, or the only one).
    pub dst: u8,
    /// Second register operand.
    pub src: u8,
    /// Third register operand (VEX forms, BMI).
    pub src2: u8,
    /// Base register of the memory operand.
    pub base: u8,
    /// Index register of the memory operand.
    pub index: u8,
    /// log2 of the scale.
    pub scale: u8,
    /// Segment of the memory operand (ES 0 … GS 5), overrides applied.
    pub seg: u8,
    /// [`Insn::LOCK`], [`Insn::REP`], [`Insn::REPNE`], [`Insn::MEM`].
    pub prefix: u8,
    /// Where the raw bytes and family-specific data are (FP/SIMD families: set by `simd::select`).
    pub extra: u32,
}

impl<B> Insn<B> {
    /// LOCK prefix, or XCHG with memory.
    pub const LOCK: u8 = 1;
    /// REP/REPE prefix.
    pub const REP: u8 = 2;
    /// REPNE prefix.
    pub const REPNE: u8 = 4;
    /// There is a memory operand.
    pub const MEM: u8 = 8;
}

impl<B> core::fmt::Debug for Insn<B> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Insn")
            .field("code", &self.code)
            .field("len", &self.len)
            .finish_non_exhaustive()
    }
}
