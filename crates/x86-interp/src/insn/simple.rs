//! Flag instructions, BCD arithmetic, BOUND, hints, fences, cache-line and random-number instructions.

use core::sync::atomic::{Ordering, fence};

use iced_x86::{Instruction, Mnemonic};
use x86_cpu::{Access, Exception, GuestBus, Privilege};
use x86_defs::{reg, rflags, vector};

use super::{Handler, Insn, sized};
use crate::{Exec, Flow, Int, Step};

const RAX: u8 = reg::RAX as u8;
const AH: u8 = 32;

fn nop<B: GuestBus>(_: &mut Exec<'_, B>, _: &Insn<B>) -> Step {
    Ok(Flow::Next)
}
/// PAUSE: lets the host core's other thread run. The block ends, so that a spinning guest notices requests at once.
fn pause<B: GuestBus>(ex: &mut Exec<'_, B>, _: &Insn<B>) -> Step {
    ex.bus.pause();
    core::hint::spin_loop();
    Ok(Flow::EndBlock)
}
fn mfence<B: GuestBus>(_: &mut Exec<'_, B>, _: &Insn<B>) -> Step {
    fence(Ordering::SeqCst);
    Ok(Flow::Next)
}
/// CLFLUSH, CLFLUSHOPT, CLWB: checked like a one-byte read (SDM vol. 2).
fn flush_line<B: GuestBus>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    let gva = ex.mem_linear(insn, 1, Access::Read)?;
    ex.bus
        .probe(ex.cpu, gva, 1, Access::Read, Privilege::Current)?;
    Ok(Flow::Next)
}
fn random<B: GuestBus, T: Int>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    let v = ex.bus.random();
    ex.reg_write(insn.dst, T::from_u64(v));
    ex.flags.set(rflags::CF);
    Ok(Flow::Next)
}

fn clc<B: GuestBus>(ex: &mut Exec<'_, B>, _: &Insn<B>) -> Step {
    ex.flags.set_cf(false);
    Ok(Flow::Next)
}
fn stc<B: GuestBus>(ex: &mut Exec<'_, B>, _: &Insn<B>) -> Step {
    ex.flags.set_cf(true);
    Ok(Flow::Next)
}
fn cmc<B: GuestBus>(ex: &mut Exec<'_, B>, _: &Insn<B>) -> Step {
    let cf = ex.flags.cf();
    ex.flags.set_cf(!cf);
    Ok(Flow::Next)
}
fn cld<B: GuestBus>(ex: &mut Exec<'_, B>, _: &Insn<B>) -> Step {
    ex.cpu.rflags &= !rflags::DF;
    Ok(Flow::Next)
}
fn std<B: GuestBus>(ex: &mut Exec<'_, B>, _: &Insn<B>) -> Step {
    ex.cpu.rflags |= rflags::DF;
    Ok(Flow::Next)
}
fn lahf<B: GuestBus>(ex: &mut Exec<'_, B>, _: &Insn<B>) -> Step {
    let v = ex.flags.get() as u8 | rflags::FIXED1 as u8;
    ex.reg_write(AH, v);
    Ok(Flow::Next)
}
fn sahf<B: GuestBus>(ex: &mut Exec<'_, B>, _: &Insn<B>) -> Step {
    let kept = ex.flags.get() & rflags::OF;
    let ah = u64::from(ex.reg_read::<u8>(AH));
    ex.flags.set(kept | ah);
    Ok(Flow::Next)
}
fn salc<B: GuestBus>(ex: &mut Exec<'_, B>, _: &Insn<B>) -> Step {
    let v = u8::from(ex.flags.cf()).wrapping_neg();
    ex.reg_write(RAX, v);
    Ok(Flow::Next)
}

/// Replaces AF and CF. The other flags that the manual leaves undefined after BCD instructions are those of the
/// addition or subtraction inside, as on AMD processors.
fn set_af_cf<B: GuestBus>(ex: &mut Exec<'_, B>, af: bool, cf: bool) {
    let rest = ex.flags.get() & !(rflags::AF | rflags::CF);
    ex.flags.set(rest | u64::from(af) << 4 | u64::from(cf));
}

/// DAA (`extra` 0) and DAS (1).
fn daa_das<B: GuestBus>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    let down = insn.extra != 0;
    let (old, old_cf) = (ex.reg_read::<u8>(RAX), ex.flags.cf());
    let af = old & 15 > 9 || ex.flags.af();
    let high = old > 0x99 || old_cf;
    let fix = if af { 6u8 } else { 0 } + if high { 0x60 } else { 0 };
    // In DAS, a borrow from the correction of the low digit sets CF, too.
    let cf = high || down && af && old < 6;
    let v = if down {
        old.wrapping_sub(fix)
    } else {
        old.wrapping_add(fix)
    };
    ex.reg_write(RAX, v);
    if down {
        ex.flags.sub(old, fix, v);
    } else {
        ex.flags.add(old, fix, v);
    }
    set_af_cf(ex, af, cf);
    Ok(Flow::Next)
}

/// AAA (`extra` 0) and AAS (1).
fn aaa_aas<B: GuestBus>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    let ax = ex.reg_read::<u16>(RAX);
    let adjust = ax & 15 > 9 || ex.flags.af();
    let fix = if adjust { 0x106 } else { 0 };
    let v = if insn.extra == 0 {
        let v = ax.wrapping_add(fix);
        ex.flags.add(ax, fix, v);
        v
    } else {
        let v = ax.wrapping_sub(fix);
        ex.flags.sub(ax, fix, v);
        v
    };
    ex.reg_write(RAX, v & 0xff0f);
    set_af_cf(ex, adjust, adjust);
    Ok(Flow::Next)
}
fn aam<B: GuestBus>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    let al = ex.reg_read::<u8>(RAX);
    let base = insn.imm as u8;
    let (Some(q), Some(r)) = (al.checked_div(base), al.checked_rem(base)) else {
        return Err(Exception::DE.into());
    };
    ex.reg_write(AH, q);
    ex.reg_write(RAX, r);
    ex.flags.logic(r);
    Ok(Flow::Next)
}
fn aad<B: GuestBus>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    let (al, ah) = (ex.reg_read::<u8>(RAX), ex.reg_read::<u8>(AH));
    let tens = ah.wrapping_mul(insn.imm as u8);
    let v = al.wrapping_add(tens);
    ex.reg_write(RAX, u16::from(v));
    ex.flags.add(al, tens, v);
    Ok(Flow::Next)
}

fn bound<B: GuestBus, T: Int>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    let size = T::SIZE as u64;
    let at = ex.effective_address(insn);
    let low = ex.read_at::<T>(insn.seg, at)?.sext() as i64;
    let next = at.wrapping_add(size) & u64::MAX >> (insn.addr_shift & 63);
    let high = ex.read_at::<T>(insn.seg, next)?.sext() as i64;
    let v = ex.reg_read::<T>(insn.dst).sext() as i64;
    if v < low || v > high {
        return Err(Exception::new(vector::BR).into());
    }
    Ok(Flow::Next)
}

/// The handler of a simple instruction.
pub(crate) fn select<B: GuestBus>(i: &Instruction, insn: &mut Insn<B>) -> Option<Handler<B>> {
    use Mnemonic as M;
    let size = insn.op_size;
    Some(match i.mnemonic() {
        M::Nop
        | M::Reservednop
        | M::Endbr32
        | M::Endbr64
        | M::Prefetch
        | M::Prefetchw
        | M::Prefetchwt1
        | M::Prefetchnta
        | M::Prefetcht0
        | M::Prefetcht1
        | M::Prefetcht2
        | M::Prefetchit0
        | M::Prefetchit1
        | M::Cldemote
        | M::Rdsspd
        | M::Rdsspq
        | M::Lfence => nop::<B>,
        M::Pause => pause::<B>,
        // SFENCE waits for non-temporal stores, which are made as such.
        M::Mfence | M::Sfence => mfence::<B>,
        M::Clflush | M::Clflushopt | M::Clwb => flush_line::<B>,
        M::Rdrand | M::Rdseed => return sized!(size, random),
        M::Clc => clc::<B>,
        M::Stc => stc::<B>,
        M::Cmc => cmc::<B>,
        M::Cld => cld::<B>,
        M::Std => std::<B>,
        M::Lahf => lahf::<B>,
        M::Sahf => sahf::<B>,
        M::Salc => salc::<B>,
        M::Daa => daa_das::<B>,
        M::Das => {
            insn.extra = 1;
            daa_das::<B>
        }
        M::Aaa => aaa_aas::<B>,
        M::Aas => {
            insn.extra = 1;
            aaa_aas::<B>
        }
        M::Aam => aam::<B>,
        M::Aad => aad::<B>,
        M::Bound => return sized!(size, bound),
        _ => return None,
    })
}
