//! INT n, INT3, INT1, INTO and HLT.

use iced_x86::{Code, Instruction};
use x86_cpu::{Event, Exception, GuestBus, Shadow};
use x86_defs::{rflags, vector};

use super::iret;
use crate::{Exec, Flow, Handler, Insn, Step, Stop, deliver};

pub(super) fn select<B: GuestBus>(i: &Instruction) -> Option<Handler<B>> {
    Some(match i.code() {
        Code::Int_imm8 => int,
        Code::Int3 => int3,
        Code::Int1 => int1,
        Code::Into => into,
        Code::Hlt => hlt,
        _ => return iret::select(i),
    })
}

fn software<B: GuestBus>(
    ex: &mut Exec<'_, B>,
    insn: &Insn<B>,
    vector: u8,
    privileged: bool,
) -> Step {
    let next_rip = ex.next_rip(insn);
    deliver::event(
        ex,
        Event::Software {
            vector,
            next_rip,
            privileged,
        },
    )?;
    Ok(Flow::Jump)
}

fn int<B: GuestBus>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    if ex.cpu.is_v86() && ex.cpu.iopl() < 3 {
        return Err(Exception::GP0.into());
    }
    software(ex, insn, insn.imm as u8, false)
}

fn int3<B: GuestBus>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    // A debugger's breakpoint leaves RIP at the instruction.
    if ex.bus.intercept(ex.cpu, Exception::new(vector::BP)) {
        return Err(Stop::Exit);
    }
    software(ex, insn, vector::BP, false)
}

fn int1<B: GuestBus>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    ex.cpu.fault_dr6 = 0;
    if ex.bus.intercept(ex.cpu, Exception::DB) {
        return Err(Stop::Exit);
    }
    software(ex, insn, vector::DB, true)
}

fn into<B: GuestBus>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    if ex.rflags() & rflags::OF == 0 {
        return Ok(Flow::Next);
    }
    software(ex, insn, vector::OF, false)
}

fn hlt<B: GuestBus>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    ex.require_cpl0()?;
    let next = ex.next_rip(insn);
    ex.cpu.set_rip(next);
    ex.cpu.shadow = Shadow::None;
    Err(Stop::Halt)
}
