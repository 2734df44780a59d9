//! CLI, STI, PUSHF, POPF, CLAC, STAC (SDM vol. 2; vol. 3, 6.8.1, 21.3 and 21.4).
//!
//! With virtual interrupts (CR4.VME in virtual-8086 mode, CR4.PVI at CPL 3), a program whose IOPL is too low changes
//! VIF instead of IF. Its monitor sets VIP while an interrupt waits, and gets #GP as soon as the program would take the
//! interrupt.

use iced_x86::{Code, Instruction};
use x86_cpu::{Exception, GuestBus, Shadow};
use x86_defs::{reg, rflags};

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
    if may_change_if(ex) {
        ex.cpu.rflags &= !rflags::IF;
        Ok(Flow::Next)
    } else if ex.cpu.has_virtual_interrupts() {
        ex.cpu.rflags &= !rflags::VIF;
        Ok(Flow::EndBlock)
    } else {
        Err(Exception::GP0.into())
    }
}

fn sti<B: GuestBus>(ex: &mut Exec<'_, B>, _: &Insn<B>) -> Step {
    if !may_change_if(ex) {
        if !ex.cpu.has_virtual_interrupts() || ex.cpu.rflags & rflags::VIP != 0 {
            return Err(Exception::GP0.into());
        }
        ex.cpu.rflags |= rflags::VIF;
        return Ok(Flow::EndBlock);
    }
    if ex.cpu.rflags & rflags::IF == 0 {
        ex.cpu.rflags |= rflags::IF;
        ex.cpu.shadow = Shadow::Sti;
    }
    Ok(Flow::EndBlock)
}

/// True if PUSHFW, POPFW, IRETW and INT n show VIF as IF: virtual-8086 mode with CR4.VME and IOPL below 3.
pub(super) fn shows_virtual_if<B: GuestBus>(ex: &Exec<'_, B>) -> bool {
    ex.cpu.is_v86() && ex.cpu.has_virtual_interrupts()
}

/// Returns FLAGS as a program with a virtual IF sees them: IF is VIF, and IOPL is 3.
pub(super) fn virtual_image(flags: u64) -> u64 {
    let vif = if flags & rflags::VIF != 0 {
        rflags::IF
    } else {
        0
    };
    flags & !rflags::IF | vif | rflags::IOPL
}

/// Applies FLAGS that such a program pops: IF goes to VIF. #GP if TF is set, or if the waiting interrupt would be
/// taken.
pub(super) fn set_virtual<B: GuestBus>(
    ex: &mut Exec<'_, B>,
    value: u64,
) -> Result<(), crate::Stop> {
    let old = ex.rflags();
    let is_taken = old & rflags::VIP != 0 && value & rflags::IF != 0;
    if is_taken || value & rflags::TF != 0 {
        return Err(Exception::GP0.into());
    }
    let vif = if value & rflags::IF != 0 {
        rflags::VIF
    } else {
        0
    };
    let mask = rflags::ARITH | rflags::TF | rflags::DF | rflags::NT;
    ex.set_rflags(old & !(mask | rflags::VIF) | value & mask | vif);
    Ok(())
}

/// Returns the image that PUSHF pushes; #GP in virtual-8086 mode with IOPL below 3.
fn image<B: GuestBus>(ex: &Exec<'_, B>) -> Result<u64, crate::Stop> {
    if ex.cpu.is_v86() && ex.cpu.iopl() < 3 {
        return Err(Exception::GP0.into());
    }
    Ok(ex.rflags() & !(rflags::VM | rflags::RF))
}

fn pushfw<B: GuestBus>(ex: &mut Exec<'_, B>, _: &Insn<B>) -> Step {
    let v = if shows_virtual_if(ex) {
        virtual_image(ex.rflags())
    } else {
        image(ex)?
    };
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
    if shows_virtual_if(ex) {
        let before = ex.cpu.gpr[reg::RSP];
        let v = ex.pop::<u16>()?;
        return match set_virtual(ex, u64::from(v)) {
            Ok(()) => Ok(Flow::EndBlock),
            Err(stop) => {
                ex.cpu.gpr[reg::RSP] = before;
                Err(stop)
            }
        };
    }
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

/// Applies POPF's flag rules (SDM vol. 2, POPF, table 4-20); `width` is the operand size's mask.
fn set<B: GuestBus>(ex: &mut Exec<'_, B>, value: u64, width: u64) -> Step {
    let mut writable =
        rflags::ARITH | rflags::TF | rflags::DF | rflags::NT | rflags::AC | rflags::ID;
    if ex.cpu.cpl == 0 {
        writable |= rflags::IOPL;
    }
    if may_change_if(ex) {
        writable |= rflags::IF;
    }
    // RF is cleared whatever was popped, as are VIF and VIP outside of virtual-8086 mode.
    let mut cleared = rflags::RF;
    if !ex.cpu.is_v86() {
        cleared |= rflags::VIF | rflags::VIP;
    }
    let old = ex.rflags();
    let mask = writable & width;
    ex.set_rflags(old & !mask & !(cleared & width) | value & mask);
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
    // At CPL 0 alignment checks do not depend on AC, so the block goes on.
    Ok(Flow::Next)
}

fn clac<B: GuestBus>(ex: &mut Exec<'_, B>, _: &Insn<B>) -> Step {
    set_ac(ex, false)
}

fn stac<B: GuestBus>(ex: &mut Exec<'_, B>, _: &Insn<B>) -> Step {
    set_ac(ex, true)
}
