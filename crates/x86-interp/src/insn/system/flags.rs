//! CLI, STI, PUSHF, POPF, CLAC, STAC (SDM vol. 2; vol. 3, 6.8.1 and 21.3).
//!
//! The VME and PVI extensions are not offered: CR4.VME and CR4.PVI stay zero.

use iced_x86::{Code, Instruction};
use x86_cpu::{Exception, GuestBus, Shadow};
use x86_defs::rflags;

use crate::{Exec, Flow, Handler, Insn, Step};

pub(super) fn select<B: GuestBus>(i: &Instruction) -> Option<Handler<B>> {
    Some(match i.code() {
        Code::Cli => cli,
        Code::Sti => sti,
        Code::Pushfw => pushfw,
        Code::Pushfd => pushfd,
        Code::Pushfq => pushfq,
        Code::Popfw => popfw,
        Code::Popfd | Code::Popfq => popf,
        Code::Clac => clac,
        Code::Stac => stac,
        _ => return None,
    })
}

fn may_change_if<B: GuestBus>(ex: &Exec<'_, B>) -> bool {
    !ex.cpu.is_protected() || ex.cpu.iopl() >= ex.cpu.cpl
}

fn cli<B: GuestBus>(ex: &mut Exec<'_, B>, _: &Insn<B>) -> Step {
    if !may_change_if(ex) {
        return Err(Exception::GP0.into());
    }
    ex.cpu.rflags &= !rflags::IF;
    Ok(Flow::Next)
}

fn sti<B: GuestBus>(ex: &mut Exec<'_, B>, _: &Insn<B>) -> Step {
    if !may_change_if(ex) {
        return Err(Exception::GP0.into());
    }
    if ex.cpu.rflags & rflags::IF == 0 {
        ex.cpu.rflags |= rflags::IF;
        ex.cpu.shadow = Shadow::Sti;
    }
    Ok(Flow::EndBlock)
}

/// The image that PUSHF pushes, or #GP in virtual-8086 mode without IOPL 3.
fn image<B: GuestBus>(ex: &Exec<'_, B>) -> Result<u64, crate::Stop> {
    if ex.cpu.is_v86() && ex.cpu.iopl() < 3 {
        return Err(Exception::GP0.into());
    }
    Ok(ex.rflags() & !(rflags::VM | rflags::RF))
}

fn pushfw<B: GuestBus>(ex: &mut Exec<'_, B>, _: &Insn<B>) -> Step {
    let v = image(ex)?;
    ex.push(v as u16)?;
    Ok(Flow::Next)
}

fn pushfd<B: GuestBus>(ex: &mut Exec<'_, B>, _: &Insn<B>) -> Step {
    let v = image(ex)?;
    ex.push(v as u32)?;
    Ok(Flow::Next)
}

fn pushfq<B: GuestBus>(ex: &mut Exec<'_, B>, _: &Insn<B>) -> Step {
    let v = image(ex)?;
    ex.push(v)?;
    Ok(Flow::Next)
}

fn popfw<B: GuestBus>(ex: &mut Exec<'_, B>, _: &Insn<B>) -> Step {
    check_popf(ex)?;
    let v = ex.pop::<u16>()?;
    set(ex, u64::from(v), 0xffff)
}

fn popf<B: GuestBus>(ex: &mut Exec<'_, B>, _: &Insn<B>) -> Step {
    check_popf(ex)?;
    let v = if ex.cpu.is_64bit() {
        ex.pop::<u64>()?
    } else {
        u64::from(ex.pop::<u32>()?)
    };
    set(ex, v, u64::MAX)
}

fn check_popf<B: GuestBus>(ex: &Exec<'_, B>) -> Result<(), crate::Stop> {
    if ex.cpu.is_v86() && ex.cpu.iopl() < 3 {
        return Err(Exception::GP0.into());
    }
    Ok(())
}

/// POPF's flag rules (SDM vol. 2, POPF, table 4-20); `width` is the operand size's mask.
fn set<B: GuestBus>(ex: &mut Exec<'_, B>, value: u64, width: u64) -> Step {
    let mut writable =
        rflags::ARITH | rflags::TF | rflags::DF | rflags::NT | rflags::AC | rflags::ID;
    if ex.cpu.cpl == 0 {
        writable |= rflags::IOPL;
    }
    if may_change_if(ex) {
        writable |= rflags::IF;
    }
    // RF is cleared whatever was popped.
    let old = ex.rflags();
    let mask = writable & width;
    ex.set_rflags(old & !mask & !(rflags::RF & width) | value & mask);
    if (old ^ ex.cpu.rflags) & rflags::AC != 0 {
        ex.bus.select_view(ex.cpu);
    }
    Ok(Flow::EndBlock)
}

fn set_ac<B: GuestBus>(ex: &mut Exec<'_, B>, on: bool) -> Step {
    if ex.cpu.cpl != 0 {
        return Err(Exception::UD.into());
    }
    if on {
        ex.cpu.rflags |= rflags::AC;
    } else {
        ex.cpu.rflags &= !rflags::AC;
    }
    ex.bus.select_view(ex.cpu);
    // CPL is 0: alignment checks do not depend on AC, so the block goes on.
    Ok(Flow::Next)
}

fn clac<B: GuestBus>(ex: &mut Exec<'_, B>, _: &Insn<B>) -> Step {
    set_ac(ex, false)
}

fn stac<B: GuestBus>(ex: &mut Exec<'_, B>, _: &Insn<B>) -> Step {
    set_ac(ex, true)
}
