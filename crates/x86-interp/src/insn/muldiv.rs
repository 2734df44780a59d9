//! MUL, IMUL, DIV, IDIV, MULX, and the sign extensions that prepare them.
//!
//! Flags that the manual leaves undefined are as on AMD processors (family 25): a multiplication keeps SF, ZF, PF and
//! AF; a division clears SF, ZF and PF, sets AF, and keeps CF and OF.

use iced_x86::{Instruction, Mnemonic};
use x86_cpu::{Exception, GuestBus};
use x86_defs::{reg, rflags};

use super::{Handler, Insn, read_rm, sized, vex};
use crate::{Exec, Flow, Int, Step};

const RAX: u8 = reg::RAX as u8;
const RDX: u8 = reg::RDX as u8;
/// AH.
const AH: u8 = 32;

/// The register that receives the high half: AH, or rDX.
const fn high_of(bits: u32) -> u8 {
    if bits == 8 { AH } else { RDX }
}

fn mul<B: GuestBus, T: Int>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    let b = read_rm::<B, T>(ex, insn, insn.dst)?;
    let r = u128::from(ex.reg_read::<T>(RAX).to_u64()) * u128::from(b.to_u64());
    let low = T::from_u64(r as u64);
    let high = T::from_u64((r >> T::BITS) as u64);
    ex.reg_write(RAX, low);
    ex.reg_write(high_of(T::BITS), high);
    let over = high.to_u64() != 0;
    ex.flags.set_cf_of(over, over);
    Ok(Flow::Next)
}

/// Returns the signed product, and whether it does not fit.
#[inline(always)]
fn signed<T: Int>(a: T, b: T) -> (i128, bool) {
    let r = i128::from(a.sext() as i64) * i128::from(b.sext() as i64);
    let low = T::from_u64(r as u64);
    (r, i128::from(low.sext() as i64) != r)
}

fn imul1<B: GuestBus, T: Int>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    let b = read_rm::<B, T>(ex, insn, insn.dst)?;
    let (r, over) = signed(ex.reg_read::<T>(RAX), b);
    let low = T::from_u64(r as u64);
    ex.reg_write(RAX, low);
    ex.reg_write(high_of(T::BITS), T::from_u64((r >> T::BITS) as u64));
    ex.flags.set_cf_of(over, over);
    Ok(Flow::Next)
}

fn imul2<B: GuestBus, T: Int>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    let b = read_rm::<B, T>(ex, insn, insn.src)?;
    let (r, over) = signed(ex.reg_read::<T>(insn.dst), b);
    let low = T::from_u64(r as u64);
    ex.reg_write(insn.dst, low);
    ex.flags.set_cf_of(over, over);
    Ok(Flow::Next)
}

fn imul3<B: GuestBus, T: Int>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    let b = read_rm::<B, T>(ex, insn, insn.src)?;
    let (r, over) = signed(b, T::from_u64(insn.imm));
    let low = T::from_u64(r as u64);
    ex.reg_write(insn.dst, low);
    ex.flags.set_cf_of(over, over);
    Ok(Flow::Next)
}

/// Returns the dividend: AX, or rDX:rAX.
#[inline(always)]
fn dividend<B: GuestBus, T: Int>(ex: &Exec<'_, B>) -> u128 {
    let low = u128::from(ex.reg_read::<T>(RAX).to_u64());
    let high = u128::from(ex.reg_read::<T>(high_of(T::BITS)).to_u64());
    high << T::BITS | low
}

#[inline(always)]
fn divided<B: GuestBus>(ex: &mut Exec<'_, B>) {
    let kept = ex.flags.get() & (rflags::CF | rflags::OF);
    ex.flags.set(kept | rflags::AF);
}

fn div<B: GuestBus, T: Int>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    let b = u128::from(read_rm::<B, T>(ex, insn, insn.dst)?.to_u64());
    let a = dividend::<B, T>(ex);
    // A 128-bit division is a function call; most dividends fit in 64 bits.
    let (q, r) = match (u64::try_from(a), b as u64) {
        (_, 0) => return Err(Exception::DE.into()),
        (Ok(a), b) => (u128::from(a / b), u128::from(a % b)),
        _ => (a / b, a % b),
    };
    if q >> T::BITS != 0 {
        return Err(Exception::DE.into());
    }
    ex.reg_write(RAX, T::from_u64(q as u64));
    ex.reg_write(high_of(T::BITS), T::from_u64(r as u64));
    divided(ex);
    Ok(Flow::Next)
}

fn idiv<B: GuestBus, T: Int>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    let b = i128::from(read_rm::<B, T>(ex, insn, insn.dst)?.sext() as i64);
    let shift = 128 - 2 * T::BITS;
    let a = (dividend::<B, T>(ex) << shift) as i128 >> shift;
    let (Some(q), Some(r)) = (a.checked_div(b), a.checked_rem(b)) else {
        return Err(Exception::DE.into());
    };
    let low = T::from_u64(q as u64);
    if i128::from(low.sext() as i64) != q {
        return Err(Exception::DE.into());
    }
    ex.reg_write(RAX, low);
    ex.reg_write(high_of(T::BITS), T::from_u64(r as u64));
    divided(ex);
    Ok(Flow::Next)
}

fn mulx<B: GuestBus, T: Int>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    vex(ex)?;
    let b = u128::from(read_rm::<B, T>(ex, insn, insn.src2)?.to_u64());
    let r = u128::from(ex.reg_read::<T>(RDX).to_u64()) * b;
    // Written last: if both destinations are one register, it gets the high half.
    ex.reg_write(insn.src, T::from_u64(r as u64));
    ex.reg_write(insn.dst, T::from_u64((r >> T::BITS) as u64));
    Ok(Flow::Next)
}

/// CBW, CWDE, CDQE: rAX from its lower half.
fn widen<B: GuestBus, T: Int>(ex: &mut Exec<'_, B>, _: &Insn<B>) -> Step {
    let half = 64 - T::BITS / 2;
    let v = (ex.cpu.gpr[reg::RAX] << half) as i64 >> half;
    ex.reg_write(RAX, T::from_u64(v as u64));
    Ok(Flow::Next)
}

/// CWD, CDQ, CQO: rDX from rAX's sign.
fn spread<B: GuestBus, T: Int>(ex: &mut Exec<'_, B>, _: &Insn<B>) -> Step {
    let v = (ex.reg_read::<T>(RAX).sext() as i64 >> 63) as u64;
    ex.reg_write(RDX, T::from_u64(v));
    Ok(Flow::Next)
}

/// The handler of a multiplication, division or sign extension of rAX.
pub(crate) fn select<B: GuestBus>(i: &Instruction, insn: &mut Insn<B>) -> Option<Handler<B>> {
    let size = insn.op_size;
    match (i.mnemonic(), i.op_count()) {
        (Mnemonic::Mul, _) => sized!(size, mul),
        (Mnemonic::Imul, 1) => sized!(size, imul1),
        (Mnemonic::Imul, 2) => sized!(size, imul2),
        (Mnemonic::Imul, _) => sized!(size, imul3),
        (Mnemonic::Div, _) => sized!(size, div),
        (Mnemonic::Idiv, _) => sized!(size, idiv),
        (Mnemonic::Mulx, _) => sized!(size, mulx),
        (Mnemonic::Cbw, _) => Some(widen::<B, u16>),
        (Mnemonic::Cwde, _) => Some(widen::<B, u32>),
        (Mnemonic::Cdqe, _) => Some(widen::<B, u64>),
        (Mnemonic::Cwd, _) => Some(spread::<B, u16>),
        (Mnemonic::Cdq, _) => Some(spread::<B, u32>),
        (Mnemonic::Cqo, _) => Some(spread::<B, u64>),
        _ => None,
    }
}
