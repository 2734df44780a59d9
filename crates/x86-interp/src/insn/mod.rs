//! The decoded instruction and the handler families, one file each.
//!
//! A family is a module with a `select` function. [`select`] asks the families in order for the handler of a form. A
//! form that no family selects is #UD.

pub(crate) mod control;
pub(crate) mod events;
pub(crate) mod simd;
pub(crate) mod system;
mod xsave;

mod arith;
mod bits;
mod mov;
mod muldiv;
mod shift;
mod simple;
mod stack;
mod string;

use iced_x86::{Code, Instruction, Mnemonic, OpKind};
use x86_cpu::{CodeSize, Exception, Features, GuestBus};
use x86_native::Native;

use crate::{Exec, Int, Step, Stop};

/// A generic handler for an operand size in bytes.
macro_rules! sized {
    ($size:expr, $f:ident $(, $g:ty)*) => {
        Some(match $size {
            1 => $f::<B, u8 $(, $g)*> as $crate::Handler<B>,
            2 => $f::<B, u16 $(, $g)*>,
            4 => $f::<B, u32 $(, $g)*>,
            _ => $f::<B, u64 $(, $g)*>,
        })
    };
}
use sized;

/// Executes one instruction.
pub type Handler<B> = fn(&mut Exec<'_, B>, &Insn<B>) -> Step;

/// What a family may use, besides the instruction, to select a handler.
#[derive(Debug)]
pub struct Selector<'a> {
    /// Native stubs of the FP/SIMD family.
    pub native: &'a mut Native,
    /// The instruction's bytes.
    pub bytes: &'a [u8],
    /// What CPUID promises.
    pub features: &'a Features,
    /// Width of the code.
    pub code_size: CodeSize,
}

/// A decoded instruction: plain data that the handler reads.
///
/// Register numbers index [`x86_cpu::CpuState::gpr`] (mask with 31); an 8-bit
/// high register (AH, CH, DH, BH) is its number + 32. Segment, control, debug
/// and vector registers have their own number. An absent base or index
/// is [`x86_defs::reg::ZERO`], RIP-relative uses [`x86_defs::reg::RIP`] with the
/// length already in `disp`.
#[repr(C)]
pub struct Insn<B> {
    /// The function that executes the instruction.
    pub handler: Handler<B>,
    /// Immediate, sign-extended as the instruction asks; or a near branch's
    /// displacement from the *start* of the instruction; or a far pointer's offset.
    pub imm: u64,
    /// Displacement of the memory operand.
    pub disp: u64,
    /// Data that the family stored in `select`.
    pub extra: u32,
    /// The instruction's form.
    pub code: Code,
    /// Far pointer selector, ENTER's level, or second immediate.
    pub imm2: u16,
    /// Length in bytes.
    pub len: u8,
    /// Size of the first register or memory operand in bytes: 1, 2, 4, 8 (0: none or larger).
    pub op_size: u8,
    /// Address size in bytes: 2, 4, 8.
    pub addr_size: u8,
    /// 64 minus the address size in bits.
    pub addr_shift: u8,
    /// First register operand in operand order: the destination, unless that is memory.
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
    /// [`Insn::LOCK`], [`Insn::REP`], [`Insn::REPNE`], [`Insn::MEM`],
    /// [`Insn::WRITES`], [`Insn::QUIET`].
    pub prefix: u8,
    /// The streams of retired events that the form counts in ([`x86_defs::retired`]).
    pub events: u16,
}

impl<B> Insn<B> {
    /// LOCK prefix, or XCHG with memory.
    pub const LOCK: u8 = 1;
    /// REP/REPE prefix.
    pub const REP: u8 = 2;
    /// REPNE prefix.
    pub const REPNE: u8 = 4;
    /// The instruction has a memory operand.
    pub const MEM: u8 = 8;
    /// The instruction may write memory, and so change the code that follows it.
    pub const WRITES: u8 = 16;
    /// The instruction never uses the bus, so there is nothing to commit.
    pub const QUIET: u8 = 32;

    /// True if there is a memory operand.
    #[inline(always)]
    pub fn has_mem(&self) -> bool {
        self.prefix & Self::MEM != 0
    }
}

impl<B> Clone for Insn<B> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<B> Copy for Insn<B> {}

impl<B> core::fmt::Debug for Insn<B> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Insn")
            .field("code", &self.code)
            .field("len", &self.len)
            .finish_non_exhaustive()
    }
}

/// Reads the r/m operand: memory, or register `r`.
#[inline(always)]
fn read_rm<B: GuestBus, T: Int>(ex: &mut Exec<'_, B>, insn: &Insn<B>, r: u8) -> Result<T, Stop> {
    if insn.has_mem() {
        ex.mem_read(insn)
    } else {
        Ok(ex.reg_read(r))
    }
}

/// Writes the r/m operand.
#[inline(always)]
fn write_rm<B: GuestBus, T: Int>(
    ex: &mut Exec<'_, B>,
    insn: &Insn<B>,
    r: u8,
    v: T,
) -> Result<(), Stop> {
    if insn.has_mem() {
        ex.mem_write(insn, v)
    } else {
        ex.reg_write(r, v);
        Ok(())
    }
}

/// Replaces the destination (memory or register `dst`) by `f` of it; returns the old value.
#[inline(always)]
fn update_rm<B: GuestBus, T: Int>(
    ex: &mut Exec<'_, B>,
    insn: &Insn<B>,
    f: impl Fn(T) -> T,
) -> Result<T, Stop> {
    if insn.has_mem() {
        ex.mem_rmw(insn, f)
    } else {
        let old = ex.reg_read(insn.dst);
        ex.reg_write(insn.dst, f(old));
        Ok(old)
    }
}

/// VEX encodings exist in protected mode only.
#[inline(always)]
fn vex<B: GuestBus>(ex: &Exec<'_, B>) -> Result<(), Stop> {
    if ex.cpu.is_real_or_v86() {
        return Err(Exception::UD.into());
    }
    Ok(())
}

/// Returns the handler of an instruction; #UD if no family has one. A family may fill `extra` and adjust other fields
/// of `insn`.
pub(crate) fn select<B: GuestBus>(
    i: &Instruction,
    insn: &mut Insn<B>,
    s: &mut Selector<'_>,
) -> Handler<B> {
    let stack = i.stack_pointer_increment();
    let op0_is_memory = i.op_count() > 0
        && !matches!(
            i.op0_kind(),
            OpKind::Register | OpKind::NearBranch16 | OpKind::NearBranch32 | OpKind::NearBranch64
        )
        && insn.has_mem();
    let reads_only = matches!(
        i.mnemonic(),
        Mnemonic::Cmp | Mnemonic::Test | Mnemonic::Bt | Mnemonic::Jmp
    );
    if stack < 0 || op0_is_memory && !reads_only {
        insn.prefix |= Insn::<B>::WRITES;
    }
    // System forms of shared mnemonics (MOV, POP, RET far) come first.
    if let Some(handler) = system::select(i, insn, s) {
        return handler;
    }
    if let Some(handler) = integer(i, insn, s) {
        if !insn.has_mem() && stack == 0 && i.mnemonic() != Mnemonic::Clzero {
            insn.prefix |= Insn::<B>::QUIET;
        }
        return handler;
    }
    simd::select(i, insn, s).unwrap_or(control::undefined)
}

fn integer<B: GuestBus>(
    i: &Instruction,
    insn: &mut Insn<B>,
    s: &mut Selector<'_>,
) -> Option<Handler<B>> {
    control::select(i, insn, s)
        .or_else(|| arith::select(i, insn))
        .or_else(|| shift::select(i, insn))
        .or_else(|| muldiv::select(i, insn))
        .or_else(|| stack::select(i, insn))
        .or_else(|| string::select(i, insn))
        .or_else(|| bits::select(i, insn))
        .or_else(|| simple::select(i, insn))
        .or_else(|| mov::select(i, insn, s))
}
