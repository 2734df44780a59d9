//! FP and SIMD instructions that the host executes (see crate `x86-native`).
//!
//! `insn.extra` is the number of the stub, `insn.imm` has [`meta`] bits, `insn.imm2` is the x87 opcode.

use iced_x86::{
    Code, CpuidFeature, Instruction, InstructionInfoFactory, Mnemonic, OpAccess, OpKind,
};
use x86_cpu::{Access, Exception, Feature, GuestBus, Privilege, Word};
use x86_defs::{control::cr4, reg, vector, xsave};
use x86_native::{Class, Outcome, StubId, is_aligned_move, must_be_aligned};

use super::{available, class, misaligned_first};
use crate::insn::{Handler, Insn, Selector};
use crate::{Exec, Flow, Step, Stop};

/// MXCSR.MM (AMD): unaligned legacy SSE operands are allowed.
const MXCSR_MM: u32 = 1 << 17;
/// The exception masks.
const MXCSR_MASKS: u32 = 0x1f80;

/// Bits of `insn.imm`, by which the handler knows the instruction.
mod meta {
    /// Size of the memory operand in bytes.
    pub(super) const LEN: u64 = 0x7f;
    /// The instruction reads or writes arithmetic flags.
    pub(super) const FLAGS: u64 = 1 << 7;
    /// The memory operand must be aligned to its size.
    pub(super) const ALIGNED: u64 = 1 << 8;
    /// Alignment is required whatever MXCSR.MM says.
    pub(super) const STRICT: u64 = 1 << 9;
    /// x87 instruction that leaves the instruction pointer alone.
    pub(super) const CONTROL: u64 = 1 << 10;
}

/// No memory operand.
const REG: u8 = 0;
/// Memory source.
const LOAD: u8 = 1;
/// Memory destination.
const STORE: u8 = 2;

/// The handler of an instruction on the host's allow-list.
pub(super) fn select<B: GuestBus>(
    i: &Instruction,
    insn: &mut Insn<B>,
    s: &mut Selector<'_>,
) -> Option<Handler<B>> {
    let (stub, form) = s.native.prepare(i)?;
    insn.extra = stub.0;
    let mut bits = 0;
    if form.reads_flags || form.writes_flags {
        bits |= meta::FLAGS;
    }
    let mut access = REG;
    if let Some(op) = (0..i.op_count()).find(|&n| i.op_kind(n) == OpKind::Memory) {
        let len = i.memory_size().size();
        if len == 0 || len > 32 {
            return None;
        }
        bits |= len as u64;
        access = if writes(i, op) { STORE } else { LOAD };
        // DEVIATION: AMD processors do not check the alignment of SHA operands
        // (observed on Zen 3); the manual asks for it.
        let unchecked =
            i.cpuid_features().contains(&CpuidFeature::SHA) && s.features.has(Feature::Amd);
        if must_be_aligned(i) && !unchecked {
            bits |= meta::ALIGNED;
        }
        if is_aligned_move(i.mnemonic()) {
            bits |= meta::STRICT;
        }
    }
    if form.class == Class::X87 {
        if matches!(
            i.mnemonic(),
            Mnemonic::Fincstp | Mnemonic::Fdecstp | Mnemonic::Ffree | Mnemonic::Ffreep
        ) {
            bits |= meta::CONTROL;
        }
        let at = s.bytes.iter().position(|b| b & 0xf8 == 0xd8).unwrap_or(0);
        let byte = |n: usize| u16::from(s.bytes.get(at + n).copied().unwrap_or(0));
        insn.imm2 = (byte(0) & 7) << 8 | byte(1);
    }
    insn.imm = bits;
    Some(match form.class {
        Class::X87 => by_access::<B, { class::X87 }>(access),
        Class::Mmx if uses_xmm(i) => by_access::<B, { class::MMX_XMM }>(access),
        Class::Mmx => by_access::<B, { class::MMX }>(access),
        Class::Sse => by_access::<B, { class::SSE }>(access),
        Class::Vex => by_access::<B, { class::VEX }>(access),
    })
}

fn by_access<B: GuestBus, const CLASS: u8>(access: u8) -> Handler<B> {
    match access {
        REG => execute::<B, CLASS, REG>,
        LOAD => execute::<B, CLASS, LOAD>,
        _ => execute::<B, CLASS, STORE>,
    }
}

/// MMX forms that need SSE state too.
fn uses_xmm(i: &Instruction) -> bool {
    (0..i.op_count()).any(|n| i.op_kind(n) == OpKind::Register && i.op_register(n).is_xmm())
        || matches!(
            i.code(),
            Code::Cvtps2pi_mm_xmmm64
                | Code::Cvttps2pi_mm_xmmm64
                | Code::Cvtpd2pi_mm_xmmm128
                | Code::Cvttpd2pi_mm_xmmm128
        )
}

fn writes(i: &Instruction, op: u32) -> bool {
    !matches!(
        InstructionInfoFactory::new().info(i).op_access(op),
        OpAccess::Read | OpAccess::CondRead | OpAccess::NoMemAccess | OpAccess::None
    )
}

fn execute<B: GuestBus, const CLASS: u8, const ACCESS: u8>(
    e: &mut Exec<'_, B>,
    insn: &Insn<B>,
) -> Step {
    available::<B, CLASS>(e)?;
    if CLASS == class::X87 && ACCESS == STORE && is_prevented(e, insn)? {
        return Ok(Flow::Next);
    }
    let len = (insn.imm & meta::LEN) as usize;
    let mut gva = 0;
    if ACCESS != REG {
        let access = if ACCESS == LOAD {
            Access::Read
        } else {
            Access::Write
        };
        let mask = (len as u64).wrapping_sub(1);
        gva = match e.mem_linear(insn, len as u64, access) {
            Ok(gva) => gva,
            Err(stop) if insn.imm & meta::ALIGNED != 0 && check_misaligned(e, insn).is_err() => {
                return Err(misaligned_first(e, insn, mask, stop));
            }
            Err(stop) => return Err(stop),
        };
        if insn.imm & meta::ALIGNED != 0 && gva & mask != 0 {
            check_misaligned(e, insn)?;
        }
    }
    if ACCESS == LOAD {
        load(e, gva, len)?;
    }
    if matches!(CLASS, class::X87 | class::MMX | class::MMX_XMM) && ACCESS == STORE {
        return store_x87::<B, CLASS>(e, insn, gva, len);
    }
    let mxcsr = e.cpu.fp.mxcsr();
    if ACCESS == STORE && mxcsr & MXCSR_MASKS != MXCSR_MASKS {
        // A page fault has precedence over an unmasked exception (VCVTPS2PH).
        e.bus
            .probe(e.cpu, gva, len as u64, Access::Write, Privilege::Current)?;
    }
    run(e, insn)?;
    if CLASS == class::X87 {
        set_pointers(e, insn, ACCESS != REG);
    }
    if ACCESS == STORE
        && let Err(stop) = store(e, gva, len)
    {
        e.cpu.fp.set_mxcsr(mxcsr);
        return Err(stop);
    }
    Ok(Flow::Next)
}

#[inline(always)]
fn load<B: GuestBus>(e: &mut Exec<'_, B>, gva: u64, len: usize) -> Result<(), Stop> {
    match len {
        4 => load_word::<B, u32>(e, gva),
        8 => load_word::<B, u64>(e, gva),
        16 => load_word::<B, u128>(e, gva),
        1 => load_word::<B, u8>(e, gva),
        2 => load_word::<B, u16>(e, gva),
        _ => {
            let buf = &mut e.native.operand()[..len & 63];
            Ok(e.bus.read_bytes(e.cpu, gva, buf, Privilege::Current)?)
        }
    }
}

#[inline(always)]
fn load_word<B: GuestBus, T: Word>(e: &mut Exec<'_, B>, gva: u64) -> Result<(), Stop> {
    let v: T = e.bus.read(e.cpu, gva, Privilege::Current)?;
    e.native.operand()[..16].copy_from_slice(&v.to_le());
    Ok(())
}

#[inline(always)]
fn store<B: GuestBus>(e: &mut Exec<'_, B>, gva: u64, len: usize) -> Result<(), Stop> {
    match len {
        4 => store_word::<B, u32>(e, gva),
        8 => store_word::<B, u64>(e, gva),
        16 => store_word::<B, u128>(e, gva),
        1 => store_word::<B, u8>(e, gva),
        2 => store_word::<B, u16>(e, gva),
        _ => {
            let buf = &e.native.operand()[..len & 63];
            Ok(e.bus.write_bytes(e.cpu, gva, buf, Privilege::Current)?)
        }
    }
}

#[inline(always)]
fn store_word<B: GuestBus, T: Word>(e: &mut Exec<'_, B>, gva: u64) -> Result<(), Stop> {
    let v = T::from_le(&e.native.operand()[..T::SIZE]);
    Ok(e.bus.write(e.cpu, gva, v, Privilege::Current)?)
}

/// Runs the stub.
#[inline(always)]
fn run<B: GuestBus>(e: &mut Exec<'_, B>, insn: &Insn<B>) -> Result<(), Stop> {
    let uses_flags = insn.imm & meta::FLAGS != 0;
    let mut flags = if uses_flags { e.flags.get() } else { 0 };
    let cpu = &mut *e.cpu;
    let outcome = e
        .native
        .run(StubId(insn.extra), &mut cpu.gpr, &mut cpu.fp, &mut flags);
    if outcome != Outcome::Done {
        return Err(failed(e, outcome));
    }
    if uses_flags {
        e.flags.set(flags);
    }
    Ok(())
}

#[cold]
fn failed<B: GuestBus>(e: &Exec<'_, B>, outcome: Outcome) -> Stop {
    let exception = match outcome {
        Outcome::SimdException if e.cpu.cr4 & cr4::OSXMMEXCPT != 0 => Exception::new(vector::XM),
        Outcome::X87Pending => Exception::new(vector::MF),
        _ => Exception::UD,
    };
    exception.into()
}

#[cold]
fn check_misaligned<B: GuestBus>(e: &Exec<'_, B>, insn: &Insn<B>) -> Result<(), Stop> {
    let allowed = insn.imm & meta::STRICT == 0
        && e.cpu.features.has(Feature::Misalignsse)
        && e.cpu.fp.mxcsr() & MXCSR_MM != 0;
    if allowed {
        Ok(())
    } else {
        Err(Exception::GP0.into())
    }
}

/// Exceptions that prevent a store: all except inexact.
const PREVENTS: u16 = 0x1f;

/// True if an unmasked exception completes the store of an x87 register before its address is checked, as on Intel's
/// processors. On AMD's, a fault of the access has precedence.
fn is_prevented<B: GuestBus>(e: &mut Exec<'_, B>, insn: &Insn<B>) -> Result<bool, Stop> {
    if e.cpu.fp.u16_at(xsave::FCW) & PREVENTS == PREVENTS || e.cpu.features.has(Feature::Amd) {
        return Ok(false);
    }
    let mut saved = [0; xsave::XMM0];
    saved.copy_from_slice(&e.cpu.fp.area[..xsave::XMM0]);
    run(e, insn)?;
    let fp = &mut e.cpu.fp;
    let prevented = fp.u16_at(xsave::FSW) & !fp.u16_at(xsave::FCW) & PREVENTS != 0;
    if prevented {
        set_pointers(e, insn, true);
    } else {
        fp.area[..xsave::XMM0].copy_from_slice(&saved);
    }
    Ok(prevented)
}

/// FST, FIST and their kin, and MMX stores, which change tags and TOP. The stack is popped only if the store succeeds,
/// and an unmasked exception other than inexact prevents the store (SDM vol. 1, 8.5).
fn store_x87<B: GuestBus, const CLASS: u8>(
    e: &mut Exec<'_, B>,
    insn: &Insn<B>,
    gva: u64,
    len: usize,
) -> Step {
    const X87_END: usize = xsave::XMM0;
    let mut saved = [0; X87_END];
    saved.copy_from_slice(&e.cpu.fp.area[..X87_END]);
    e.bus
        .probe(e.cpu, gva, len as u64, Access::Write, Privilege::Current)?;
    run(e, insn)?;
    if CLASS == class::X87 {
        set_pointers(e, insn, true);
    }
    let fp = &e.cpu.fp;
    let prevented = fp.u16_at(xsave::FSW) & !fp.u16_at(xsave::FCW) & PREVENTS != 0;
    if !prevented && let Err(stop) = store(e, gva, len) {
        e.cpu.fp.area[..X87_END].copy_from_slice(&saved);
        return Err(stop);
    }
    Ok(Flow::Next)
}

/// Stores opcode, instruction pointer and operand pointer of the last x87 instruction (SDM vol. 1, 8.1.8 and 8.1.9). In
/// 64-bit code the pointers have 64 bits; in other code the selector is above the 32-bit offset, as FXSAVE stores it.
fn set_pointers<B: GuestBus>(e: &mut Exec<'_, B>, insn: &Insn<B>, has_mem: bool) {
    if insn.imm & meta::CONTROL != 0 {
        return;
    }
    let long = e.cpu.is_64bit();
    let pointer = |seg: u8, offset: u64| {
        if long {
            offset
        } else {
            let selector = e.cpu.seg[usize::from(seg).min(5)].selector;
            offset & 0xffff_ffff | u64::from(selector) << 32
        }
    };
    let fip = pointer(reg::CS as u8, e.cpu.rip());
    let fdp = pointer(insn.seg, e.effective_address(insn));
    let area = &mut e.cpu.fp.area;
    area[6..8].copy_from_slice(&insn.imm2.to_le_bytes());
    area[8..16].copy_from_slice(&fip.to_le_bytes());
    if has_mem {
        area[16..24].copy_from_slice(&fdp.to_le_bytes());
    }
}
