//! IRET in every mode (SDM vol. 2, IRET).

use iced_x86::{Code, Instruction};
use x86_cpu::{Exception, GuestBus};
use x86_defs::{reg, rflags, vector};

use super::{
    far::{self, drop_privileged_segments},
    flags,
};
use crate::{
    Exec, Flow, Handler, Insn, Step, Stop,
    deliver::task::{self, Reason},
    descriptor::{is_null, rpl},
    segment::{null_segment, real_segment, v86_segment},
    stack::Stack,
};

pub(super) fn select<B: GuestBus>(i: &Instruction) -> Option<Handler<B>> {
    Some(match i.code() {
        Code::Iretw => iretw,
        Code::Iretd => iretd,
        Code::Iretq => iretq,
        _ => return None,
    })
}

fn iretw<B: GuestBus>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    iret(ex, insn, 2)
}

fn iretd<B: GuestBus>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    iret(ex, insn, 4)
}

fn iretq<B: GuestBus>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    iret(ex, insn, 8)
}

fn iret<B: GuestBus>(ex: &mut Exec<'_, B>, insn: &Insn<B>, size: u8) -> Step {
    let result = if ex.cpu.is_real_or_v86() {
        real(ex, size)
    } else {
        protected(ex, insn, size)
    };
    // An IRET that faults ends the blocking of NMIs, too (SDM vol. 3, 6.7.1 and 26.7.1.2).
    if ex.cpu.events.nmi_masked && !matches!(result, Err(Stop::Exit)) {
        ex.cpu.events.nmi_masked = false;
        ex.bus.nmi_unmasked();
    }
    result?;
    ex.cpu.update_mode();
    ex.bus.select_view(ex.cpu);
    ex.serialize();
    Ok(Flow::Jump)
}

/// Flags that any IRET may write.
const PLAIN: u64 = rflags::ARITH | rflags::TF | rflags::DF | rflags::NT;
/// Flags above bit 15 that IRETD and IRETQ may write, too.
const WIDE: u64 = rflags::RF | rflags::AC | rflags::ID;

fn replace_flags<B: GuestBus>(ex: &mut Exec<'_, B>, value: u64, writable: u64, size: u8) {
    let mask = if size == 2 {
        writable & 0xffff
    } else {
        writable
    };
    let v = ex.rflags() & !mask | value & mask;
    ex.set_rflags(v);
}

fn real<B: GuestBus>(ex: &mut Exec<'_, B>, size: u8) -> Result<(), Stop> {
    let v86 = ex.cpu.is_v86();
    let is_virtual = size == 2 && flags::shows_virtual_if(ex);
    if v86 && ex.cpu.iopl() < 3 && !is_virtual {
        return Err(Exception::GP0.into());
    }
    let mut stack = Stack::current(ex.cpu);
    let rip = stack.pop(ex, size)?;
    let cs = stack.pop(ex, size)? as u16;
    let image = stack.pop(ex, size)?;
    if rip > u64::from(ex.cpu.seg[reg::CS].limit) {
        return Err(Exception::GP0.into());
    }
    if is_virtual {
        flags::set_virtual(ex, image)?;
    }
    stack.commit(ex.cpu);
    ex.cpu.seg[reg::CS] = if v86 {
        v86_segment(cs)
    } else {
        real_segment(&ex.cpu.seg[reg::CS], reg::CS, cs)
    };
    ex.cpu.set_rip(rip);
    if !is_virtual {
        let iopl = if v86 { 0 } else { rflags::IOPL };
        replace_flags(ex, image, PLAIN | WIDE | rflags::IF | iopl, size);
    }
    Ok(())
}

fn protected<B: GuestBus>(ex: &mut Exec<'_, B>, insn: &Insn<B>, size: u8) -> Result<(), Stop> {
    if ex.cpu.rflags & rflags::NT != 0 {
        if !task::is_possible(ex.cpu) {
            return Err(Exception::GP0.into());
        }
        let link = task::back_link(ex)?;
        let (rip, flags) = (ex.next_rip(insn), ex.rflags());
        return task::switch(ex, link, Reason::Iret, rip, flags);
    }
    let cpl = ex.cpu.cpl;
    let mut stack = Stack::current(ex.cpu);
    let rip = stack.pop(ex, size)?;
    let cs = stack.pop(ex, size)? as u16;
    let flags = stack.pop(ex, size)?;
    if !ex.cpu.is_long_mode() && size == 4 && flags & rflags::VM != 0 && cpl == 0 {
        return to_v86(ex, stack, rip, cs, flags);
    }
    let target = far::return_target(ex, cs)?;
    let new_cpl = rpl(cs);
    let to_64bit = ex.cpu.is_long_mode() && target.attr().is_long();
    let mut ss = None;
    if new_cpl != cpl || ex.cpu.is_64bit() {
        let rsp = stack.pop(ex, size)?;
        let selector = stack.pop(ex, size)? as u16;
        let segment = if is_null(selector) && to_64bit && new_cpl < 3 && rpl(selector) == new_cpl {
            null_segment(selector, new_cpl)
        } else if is_null(selector) {
            return Err(Exception::GP0.into());
        } else {
            ex.stack_segment(selector, new_cpl, vector::GP)?
        };
        ss = Some((segment, rsp));
    }
    let segment = target.segment(cs);
    far::check_target(ex, &segment, rip)?;
    ex.set_accessed(&target)?;

    let mut writable = PLAIN | WIDE;
    if cpl == 0 {
        writable |= rflags::IOPL | rflags::VIF | rflags::VIP;
    }
    if cpl <= ex.cpu.iopl() {
        writable |= rflags::IF;
    }
    replace_flags(ex, flags, writable, size);
    ex.cpu.seg[reg::CS] = segment;
    ex.cpu.cpl = new_cpl;
    ex.cpu.update_mode();
    if let Some((segment, rsp)) = ss {
        ex.cpu.seg[reg::SS] = segment;
        stack.ss = segment;
        stack.rsp = rsp;
        stack.long = ex.cpu.is_64bit();
    }
    ex.cpu.set_rip(rip);
    stack.commit(ex.cpu);
    if new_cpl != cpl {
        drop_privileged_segments(ex.cpu);
    }
    Ok(())
}

fn to_v86<B: GuestBus>(
    ex: &mut Exec<'_, B>,
    mut stack: Stack,
    rip: u64,
    cs: u16,
    flags: u64,
) -> Result<(), Stop> {
    let rsp = stack.pop(ex, 4)?;
    let mut selectors = [0; 5];
    for s in &mut selectors {
        *s = stack.pop(ex, 4)? as u16;
    }
    if rip > 0xffff {
        return Err(Exception::GP0.into());
    }
    ex.set_rflags(flags & rflags::DEFINED);
    ex.cpu.seg[reg::CS] = v86_segment(cs);
    for (sreg, selector) in [reg::SS, reg::ES, reg::DS, reg::FS, reg::GS]
        .into_iter()
        .zip(selectors)
    {
        ex.cpu.seg[sreg] = v86_segment(selector);
    }
    ex.cpu.cpl = 3;
    ex.cpu.gpr[reg::RSP] = rsp;
    ex.cpu.set_rip(rip);
    Ok(())
}
