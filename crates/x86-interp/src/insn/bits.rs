//! Bit instructions: BT*, BSF, BSR, TZCNT, LZCNT, POPCNT, BMI1, BMI2, CRC32.
//!
//! BMI forms are normalised in [`select`]: `src` is the VEX.vvvv register and
//! `src2` the r/m one.

use iced_x86::{Instruction, Mnemonic, OpKind};
use x86_cpu::{Feature, GuestBus, Privilege};
use x86_defs::rflags;

use super::{Handler, Insn, read_rm, sized, update_rm, vex};
use crate::{Exec, Flow, Int, Step};

/// BT, BTS, BTR, BTC by [`Insn::extra`].
const BT: u32 = 0;
const BTS: u32 = 1;
const BTR: u32 = 2;

#[inline(always)]
fn change(kind: u32, v: u64, mask: u64) -> u64 {
    match kind {
        BTS => v | mask,
        BTR => v & !mask,
        _ => v ^ mask,
    }
}

/// BT and its kin with a register operand, or with an immediate index.
fn bt<B: GuestBus, T: Int>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    let by_register = insn.imm2 != 0;
    let index = if by_register {
        ex.reg_read::<T>(insn.src).to_u64()
    } else {
        insn.imm
    };
    let mask = 1u64 << (index & u64::from(T::BITS - 1));
    let kind = insn.extra;
    let old: T = if kind == BT {
        read_rm(ex, insn, insn.dst)?
    } else {
        update_rm(ex, insn, |v: T| T::from_u64(change(kind, v.to_u64(), mask)))?
    };
    ex.flags.set_cf(old.to_u64() & mask != 0);
    Ok(Flow::Next)
}

/// BT and its kin with a memory operand and a register index: a bit string of any length.
fn bt_string<B: GuestBus, T: Int>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    let index = ex.reg_read::<T>(insn.dst).sext() as i64;
    let mask = 1u64 << (index as u64 & u64::from(T::BITS - 1));
    let words = index >> T::BITS.trailing_zeros();
    let delta = (words as u64).wrapping_mul(T::SIZE as u64);
    let offset =
        ex.effective_address(insn).wrapping_add(delta) & u64::MAX >> (insn.addr_shift & 63);
    let kind = insn.extra;
    let old: T = if kind == BT {
        ex.read_at(insn.seg, offset)?
    } else {
        let gva = ex.linear(insn.seg, offset, T::SIZE as u64, x86_cpu::Access::Write)?;
        let lock = insn.prefix & Insn::<B>::LOCK != 0;
        ex.bus.rmw(ex.cpu, gva, Privilege::Current, lock, |v: T| {
            T::from_u64(change(kind, v.to_u64(), mask))
        })?
    };
    ex.flags.set_cf(old.to_u64() & mask != 0);
    Ok(Flow::Next)
}

fn bsf<B: GuestBus, T: Int>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    let v = read_rm::<B, T>(ex, insn, insn.src)?.to_u64();
    found::<B, T>(ex, insn, (v != 0).then(|| v.trailing_zeros()));
    Ok(Flow::Next)
}
fn bsr<B: GuestBus, T: Int>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    let v = read_rm::<B, T>(ex, insn, insn.src)?.to_u64();
    found::<B, T>(ex, insn, v.checked_ilog2());
    Ok(Flow::Next)
}
/// Stores the result of BSF and BSR for a bit's index. A source of zero leaves the destination as it was, as
/// processors do. The flags other than ZF, which the manual leaves undefined, are kept as on Zen 3; Zen 4 clears them
/// and sets PF by the index.
#[inline(always)]
fn found<B: GuestBus, T: Int>(ex: &mut Exec<'_, B>, insn: &Insn<B>, index: Option<u32>) {
    if ex.cpu.features.has(Feature::Zen4) {
        let odd = index.unwrap_or(0).count_ones() & 1 != 0;
        ex.flags.set(if odd { 0 } else { rflags::PF });
    }
    ex.flags.set_zf(index.is_none());
    if let Some(n) = index {
        ex.reg_write(insn.dst, T::from_u64(n.into()));
    }
}
/// Sets the flags of TZCNT and LZCNT, the undefined ones as on AMD processors.
#[inline(always)]
fn counted<B: GuestBus, T: Int>(ex: &mut Exec<'_, B>, cf: bool, r: T) {
    let kept = ex.flags.get() & rflags::OF;
    let zf = u64::from(r.to_u64() == 0) << 6;
    ex.flags.set(kept | zf | u64::from(cf));
}
fn tzcnt<B: GuestBus, T: Int>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    let v = read_rm::<B, T>(ex, insn, insn.src)?.to_u64();
    let r = T::from_u64(v.trailing_zeros().min(T::BITS).into());
    counted(ex, v == 0, r);
    ex.reg_write(insn.dst, r);
    Ok(Flow::Next)
}
fn lzcnt<B: GuestBus, T: Int>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    let v = read_rm::<B, T>(ex, insn, insn.src)?.to_u64();
    let r = T::from_u64((v.leading_zeros() - (64 - T::BITS)).into());
    counted(ex, v == 0, r);
    ex.reg_write(insn.dst, r);
    Ok(Flow::Next)
}
fn popcnt<B: GuestBus, T: Int>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    let v = read_rm::<B, T>(ex, insn, insn.src)?.to_u64();
    ex.reg_write(insn.dst, T::from_u64(v.count_ones().into()));
    ex.flags.set(u64::from(v == 0) << 6);
    Ok(Flow::Next)
}

fn andn<B: GuestBus, T: Int>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    vex(ex)?;
    let b = read_rm::<B, T>(ex, insn, insn.src2)?.to_u64();
    let r = T::from_u64(!ex.reg_read::<T>(insn.src).to_u64() & b);
    ex.flags.logic(r);
    ex.reg_write(insn.dst, r);
    Ok(Flow::Next)
}
fn blsi<B: GuestBus, T: Int>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    vex(ex)?;
    let v = read_rm::<B, T>(ex, insn, insn.src)?.to_u64();
    let r = T::from_u64(v & v.wrapping_neg());
    ex.flags.result(r, v != 0, false);
    ex.reg_write(insn.dst, r);
    Ok(Flow::Next)
}
fn blsmsk<B: GuestBus, T: Int>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    vex(ex)?;
    let v = read_rm::<B, T>(ex, insn, insn.src)?.to_u64();
    let r = T::from_u64(v ^ v.wrapping_sub(1));
    ex.flags.result(r, v == 0, false);
    ex.reg_write(insn.dst, r);
    Ok(Flow::Next)
}
fn blsr<B: GuestBus, T: Int>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    vex(ex)?;
    let v = read_rm::<B, T>(ex, insn, insn.src)?.to_u64();
    let r = T::from_u64(v & v.wrapping_sub(1));
    ex.flags.result(r, v == 0, false);
    ex.reg_write(insn.dst, r);
    Ok(Flow::Next)
}

/// Returns a mask of the low `n` bits.
fn low_bits(n: u64) -> u64 {
    if n >= 64 { u64::MAX } else { (1 << n) - 1 }
}

fn bextr<B: GuestBus, T: Int>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    vex(ex)?;
    let v = read_rm::<B, T>(ex, insn, insn.src2)?.to_u64();
    let control = ex.reg_read::<T>(insn.src).to_u64();
    let start = (control & 0xff) as u32;
    let r = v.checked_shr(start).unwrap_or(0) & low_bits(control >> 8 & 0xff);
    let r = T::from_u64(r);
    // AF and SF are undefined: clear, as on AMD processors.
    ex.flags.result_af(r, false, false);
    let rest = ex.flags.get() & !rflags::SF;
    ex.flags.set(rest);
    ex.reg_write(insn.dst, r);
    Ok(Flow::Next)
}
fn bzhi<B: GuestBus, T: Int>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    vex(ex)?;
    let v = read_rm::<B, T>(ex, insn, insn.src2)?.to_u64();
    let n = ex.reg_read::<T>(insn.src).to_u64() & 0xff;
    let r = T::from_u64(v & low_bits(n));
    ex.flags.result(r, n >= u64::from(T::BITS), false);
    ex.reg_write(insn.dst, r);
    Ok(Flow::Next)
}
/// The mask is the r/m operand, the source VEX.vvvv.
fn pdep<B: GuestBus, T: Int>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    vex(ex)?;
    let mut mask = read_rm::<B, T>(ex, insn, insn.src2)?.to_u64();
    let mut v = ex.reg_read::<T>(insn.src).to_u64();
    let mut r = 0;
    while mask != 0 {
        if v & 1 != 0 {
            r |= mask & mask.wrapping_neg();
        }
        v >>= 1;
        mask &= mask - 1;
    }
    ex.reg_write(insn.dst, T::from_u64(r));
    Ok(Flow::Next)
}
fn pext<B: GuestBus, T: Int>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    vex(ex)?;
    let mut mask = read_rm::<B, T>(ex, insn, insn.src2)?.to_u64();
    let v = ex.reg_read::<T>(insn.src).to_u64();
    let (mut r, mut bit) = (0u64, 1u64);
    while mask != 0 {
        if v & mask & mask.wrapping_neg() != 0 {
            r |= bit;
        }
        bit = bit.wrapping_shl(1);
        mask &= mask - 1;
    }
    ex.reg_write(insn.dst, T::from_u64(r));
    Ok(Flow::Next)
}
fn rorx<B: GuestBus, T: Int>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    vex(ex)?;
    let v = read_rm::<B, T>(ex, insn, insn.src)?.to_u64();
    let n = insn.imm as u32 & (T::BITS - 1);
    let left = (T::BITS - n) & (T::BITS - 1);
    ex.reg_write(insn.dst, T::from_u64(v >> n | v << left));
    Ok(Flow::Next)
}
/// SARX (0), SHLX (1), SHRX (2) by [`Insn::extra`].
fn shiftx<B: GuestBus, T: Int>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    vex(ex)?;
    let v = read_rm::<B, T>(ex, insn, insn.src2)?;
    let n = ex.reg_read::<T>(insn.src).to_u64() as u32 & (T::BITS - 1);
    let r = match insn.extra {
        0 => (v.sext() as i64 >> n) as u64,
        1 => v.to_u64() << n,
        _ => v.to_u64() >> n,
    };
    ex.reg_write(insn.dst, T::from_u64(r));
    Ok(Flow::Next)
}

/// CRC-32C, reflected polynomial 0x82f63b78.
fn crc32<B: GuestBus, S: Int>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    let v = read_rm::<B, S>(ex, insn, insn.src)?.to_u64();
    let mut crc = ex.reg_read::<u32>(insn.dst);
    for byte in v.to_le_bytes().into_iter().take(S::SIZE) {
        crc ^= u32::from(byte);
        for _ in 0..8 {
            crc = crc >> 1 ^ (0x82f6_3b78 & (crc & 1).wrapping_neg());
        }
    }
    ex.reg_write(insn.dst, crc);
    Ok(Flow::Next)
}

/// The handler of a bit instruction.
pub(crate) fn select<B: GuestBus>(i: &Instruction, insn: &mut Insn<B>) -> Option<Handler<B>> {
    let size = insn.op_size;
    match i.mnemonic() {
        m @ (Mnemonic::Bt | Mnemonic::Bts | Mnemonic::Btr | Mnemonic::Btc) => {
            insn.extra = match m {
                Mnemonic::Bt => BT,
                Mnemonic::Bts => BTS,
                Mnemonic::Btr => BTR,
                _ => 3,
            };
            let by_register = i.op1_kind() == OpKind::Register;
            insn.imm2 = u16::from(by_register);
            if by_register && insn.has_mem() {
                sized!(size, bt_string)
            } else {
                sized!(size, bt)
            }
        }
        Mnemonic::Bsf => sized!(size, bsf),
        Mnemonic::Bsr => sized!(size, bsr),
        Mnemonic::Tzcnt => sized!(size, tzcnt),
        Mnemonic::Lzcnt => sized!(size, lzcnt),
        Mnemonic::Popcnt => sized!(size, popcnt),
        Mnemonic::Blsi => sized!(size, blsi),
        Mnemonic::Blsmsk => sized!(size, blsmsk),
        Mnemonic::Blsr => sized!(size, blsr),
        Mnemonic::Andn => sized!(size, andn),
        Mnemonic::Pdep => sized!(size, pdep),
        Mnemonic::Pext => sized!(size, pext),
        Mnemonic::Rorx => sized!(size, rorx),
        m @ (Mnemonic::Bextr
        | Mnemonic::Bzhi
        | Mnemonic::Sarx
        | Mnemonic::Shlx
        | Mnemonic::Shrx) => {
            // TBM's immediate form of BEXTR is not supported.
            if i.op_kind(2) != OpKind::Register {
                return None;
            }
            if !insn.has_mem() {
                core::mem::swap(&mut insn.src, &mut insn.src2);
            }
            insn.extra = match m {
                Mnemonic::Sarx => 0,
                Mnemonic::Shlx => 1,
                _ => 2,
            };
            match m {
                Mnemonic::Bextr => sized!(size, bextr),
                Mnemonic::Bzhi => sized!(size, bzhi),
                _ => sized!(size, shiftx),
            }
        }
        Mnemonic::Crc32 => {
            let source = if insn.has_mem() {
                i.memory_size().size()
            } else {
                i.op1_register().size()
            };
            sized!(source, crc32)
        }
        _ => None,
    }
}
