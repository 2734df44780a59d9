//! Shifts and rotates (SDM vol. 2, SAL/SAR/SHL/SHR, RCL/RCR/ROL/ROR, SHLD, SHRD).
//!
//! Cases that the manual leaves undefined (OF for counts other than one, AF of shifts, 16-bit double shifts by more
//! than 16) are as on AMD processors of family 25. Only AF is as on processors of the guest's vendor, because it is the
//! one undefined flag of shifts by one.

use iced_x86::{Instruction, Mnemonic, OpKind};
use x86_cpu::{Feature, GuestBus};
use x86_defs::reg;

use super::{Handler, Insn, sized, update_rm};
use crate::{Exec, Flow, Int, Step};

/// Count in `extra` comes from CL (1), or is the immediate (0).
const FROM_CL: u32 = 1;

#[inline(always)]
fn count<B: GuestBus, T: Int>(ex: &Exec<'_, B>, insn: &Insn<B>) -> u32 {
    let c = if insn.extra == FROM_CL {
        ex.cpu.gpr[reg::RCX]
    } else {
        insn.imm
    };
    (c & if T::BITS == 64 { 63 } else { 31 }) as u32
}

/// `v >> n`, zero for a count of 64 and more.
#[inline(always)]
fn shr(v: u64, n: u32) -> u64 {
    v.checked_shr(n).unwrap_or(0)
}

#[inline(always)]
fn bit(v: u64, n: u32) -> bool {
    shr(v, n) & 1 != 0
}

#[inline(always)]
fn msb<T: Int>(v: T) -> bool {
    v.to_u64() >> (T::BITS - 1) != 0
}

/// The bit below the sign bit.
#[inline(always)]
fn second<T: Int>(v: T) -> bool {
    bit(v.to_u64(), T::BITS - 2)
}

/// Sets AF after a shift by a nonzero count: AMD's processors set it, Intel's clear it.
#[inline(always)]
fn set_flags<B: GuestBus, T: Int>(ex: &mut Exec<'_, B>, r: T, cf: bool, of: bool) {
    if ex.cpu.features.has(Feature::Amd) {
        ex.flags.result_af(r, cf, of);
    } else {
        ex.flags.result(r, cf, of);
    }
}

fn shl<B: GuestBus, T: Int>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    let c = count::<B, T>(ex, insn);
    let f = |a: T| T::from_u64(a.to_u64() << c);
    let a = update_rm(ex, insn, f)?;
    if c != 0 {
        let cf = c <= T::BITS && bit(a.to_u64(), T::BITS.wrapping_sub(c));
        let r = f(a);
        set_flags(ex, r, cf, msb(r) ^ cf);
    }
    Ok(Flow::Next)
}

fn shr_op<B: GuestBus, T: Int>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    let c = count::<B, T>(ex, insn);
    let f = |a: T| T::from_u64(a.to_u64() >> c);
    let a = update_rm(ex, insn, f)?;
    if c != 0 {
        let r = f(a);
        set_flags(ex, r, bit(a.to_u64(), c - 1), msb(r) ^ second(r));
    }
    Ok(Flow::Next)
}

fn sar<B: GuestBus, T: Int>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    let c = count::<B, T>(ex, insn);
    let f = |a: T| T::from_u64((a.sext() as i64 >> c) as u64);
    let a = update_rm(ex, insn, f)?;
    if c != 0 {
        set_flags(ex, f(a), bit(a.sext(), c - 1), false);
    }
    Ok(Flow::Next)
}

/// Rotates the low `width` bits of `v` left.
#[inline(always)]
fn rotate(v: u128, n: u32, width: u32) -> u128 {
    if n == 0 {
        return v;
    }
    (v << n | v >> (width - n)) & ((1 << width) - 1)
}

fn rol<B: GuestBus, T: Int>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    let c = count::<B, T>(ex, insn);
    let f = |a: T| T::from_u64(rotate(a.to_u64().into(), c % T::BITS, T::BITS) as u64);
    let a = update_rm(ex, insn, f)?;
    if c != 0 {
        let r = f(a);
        let cf = bit(r.to_u64(), 0);
        ex.flags.set_cf_of(cf, msb(r) ^ cf);
    }
    Ok(Flow::Next)
}

fn ror<B: GuestBus, T: Int>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    let c = count::<B, T>(ex, insn);
    let n = (T::BITS - c % T::BITS) % T::BITS;
    let f = |a: T| T::from_u64(rotate(a.to_u64().into(), n, T::BITS) as u64);
    let a = update_rm(ex, insn, f)?;
    if c != 0 {
        let r = f(a);
        ex.flags.set_cf_of(msb(r), msb(r) ^ second(r));
    }
    Ok(Flow::Next)
}

/// Rotates CF and the operand together; `left` is the count to the left.
#[inline(always)]
fn with_carry<T: Int>(a: T, cf: bool, left: u32) -> (T, bool) {
    let v = u128::from(a.to_u64()) | u128::from(cf) << T::BITS;
    let r = rotate(v, left, T::BITS + 1);
    (T::from_u64(r as u64), r >> T::BITS & 1 != 0)
}

fn rcl<B: GuestBus, T: Int>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    let count = count::<B, T>(ex, insn);
    let c = count % (T::BITS + 1);
    let cf = ex.flags.cf();
    let a = update_rm(ex, insn, |a: T| with_carry(a, cf, c).0)?;
    if count != 0 {
        let (r, out) = with_carry(a, cf, c);
        ex.flags.set_cf_of(out, msb(r) ^ out);
    }
    Ok(Flow::Next)
}

fn rcr<B: GuestBus, T: Int>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    let count = count::<B, T>(ex, insn);
    let left = (T::BITS + 1 - count % (T::BITS + 1)) % (T::BITS + 1);
    let cf = ex.flags.cf();
    let a = update_rm(ex, insn, |a: T| with_carry(a, cf, left).0)?;
    if count != 0 {
        let (r, out) = with_carry(a, cf, left);
        ex.flags.set_cf_of(out, msb(r) ^ second(r));
    }
    Ok(Flow::Next)
}

/// Concatenates the operands of SHLD and SHRD, with `inner` twice: for 16-bit counts above 16, which the manual leaves
/// undefined, AMD processors shift it in again.
#[inline(always)]
fn joined<T: Int>(outer: T, inner: T) -> u128 {
    let (o, i) = (u128::from(outer.to_u64()), u128::from(inner.to_u64()));
    let upper = if T::BITS == 64 { 0 } else { i << (2 * T::BITS) };
    o | i << T::BITS | upper
}

fn shld<B: GuestBus, T: Int>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    let c = count::<B, T>(ex, insn);
    let b = ex.reg_read::<T>(double_source(insn));
    let f = |a: T| {
        let (a, b) = (u128::from(a.to_u64()), u128::from(b.to_u64()));
        let r = if T::BITS == 16 {
            (a << 32 | b << 16 | b) >> (32 - c)
        } else {
            (a << T::BITS | b) >> (T::BITS - c)
        };
        T::from_u64(r as u64)
    };
    let a = update_rm(ex, insn, f)?;
    if c != 0 {
        let r = f(a);
        let cf = c <= T::BITS && bit(a.to_u64(), T::BITS.wrapping_sub(c));
        // For 16-bit counts of 16 and more, the result's sign does not affect OF.
        set_flags(ex, r, cf, (c < T::BITS && msb(r)) ^ cf);
    }
    Ok(Flow::Next)
}

fn shrd<B: GuestBus, T: Int>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    let c = count::<B, T>(ex, insn);
    let b = ex.reg_read::<T>(double_source(insn));
    let f = |a: T| T::from_u64((joined(a, b) >> c) as u64);
    let a = update_rm(ex, insn, f)?;
    if c != 0 {
        let r = f(a);
        let cf = c <= T::BITS && bit(a.to_u64(), c - 1);
        set_flags(ex, r, cf, msb(r) ^ second(r));
    }
    Ok(Flow::Next)
}

/// Returns the register that SHLD and SHRD shift in.
#[inline(always)]
fn double_source<B>(insn: &Insn<B>) -> u8 {
    if insn.has_mem() { insn.dst } else { insn.src }
}

/// The handler of a shift or rotate.
pub(crate) fn select<B: GuestBus>(i: &Instruction, insn: &mut Insn<B>) -> Option<Handler<B>> {
    // The operand, not the count, gives the size.
    let size = if i.op0_kind() == OpKind::Register {
        i.op0_register().size() as u8
    } else {
        i.memory_size().size() as u8
    };
    let handler = match i.mnemonic() {
        Mnemonic::Shl | Mnemonic::Sal => sized!(size, shl),
        Mnemonic::Shr => sized!(size, shr_op),
        Mnemonic::Sar => sized!(size, sar),
        Mnemonic::Rol => sized!(size, rol),
        Mnemonic::Ror => sized!(size, ror),
        Mnemonic::Rcl => sized!(size, rcl),
        Mnemonic::Rcr => sized!(size, rcr),
        Mnemonic::Shld => sized!(size, shld),
        Mnemonic::Shrd => sized!(size, shrd),
        _ => return None,
    };
    let last = i.op_count().saturating_sub(1);
    insn.extra = u32::from(i.op_kind(last) == OpKind::Register);
    handler
}
