//! INT n, INT3, INT1, INTO and HLT.

use iced_x86::{Code, Instruction};
use x86_cpu::{Event, Exception, GuestBus, Privilege, Shadow};
use x86_defs::{control::cr4, reg, rflags, vector};

use super::{flags, iret};
use crate::{Exec, Flow, Handler, Insn, Step, Stop, deliver, segment::v86_segment, stack::Stack};

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
    if ex.cpu.is_v86() {
        if ex.cpu.cr4 & cr4::VME != 0 && !is_for_monitor(ex, insn.imm as u8)? {
            return redirect(ex, insn, insn.imm as u8);
        }
        if ex.cpu.iopl() < 3 {
            return Err(Exception::GP0.into());
        }
    }
    software(ex, insn, insn.imm as u8, false)
}

/// Reads the vector's bit in the TSS's redirection map, the 32 bytes below the I/O permission map (SDM vol. 3, 21.3.3).
fn is_for_monitor<B: GuestBus>(ex: &mut Exec<'_, B>, vector: u8) -> Result<bool, Stop> {
    let tr = ex.cpu.tr;
    if tr.attr.kind() & 8 == 0 || tr.limit < 0x67 {
        return Err(Exception::GP0.into());
    }
    let gva = ex.system_gva(tr.base.wrapping_add(0x66));
    let end = ex.bus.read::<u16>(ex.cpu, gva, Privilege::System)?;
    let offset = u32::from(end).wrapping_sub(32) + u32::from(vector >> 3);
    if offset > tr.limit {
        return Err(Exception::GP0.into());
    }
    let gva = ex.system_gva(tr.base.wrapping_add(u64::from(offset)));
    let bits = ex.bus.read::<u8>(ex.cpu, gva, Privilege::System)?;
    Ok(bits >> (vector & 7) & 1 != 0)
}

/// INT n of an 8086 program that goes to the program's own handler, by the vector table at its address 0 (SDM vol. 3,
/// table 21-2, methods 5 and 6).
fn redirect<B: GuestBus>(ex: &mut Exec<'_, B>, insn: &Insn<B>, vector: u8) -> Step {
    let is_virtual = flags::shows_virtual_if(ex);
    let old = ex.rflags();
    let image = if is_virtual {
        flags::virtual_image(old)
    } else {
        old
    };
    let target = ex
        .bus
        .read::<u32>(ex.cpu, u64::from(vector) * 4, Privilege::Current)?;
    let next_rip = ex.next_rip(insn);
    let mut stack = Stack::current(ex.cpu);
    stack.push(ex, 2, image)?;
    stack.push(ex, 2, u64::from(ex.cpu.seg[reg::CS].selector))?;
    stack.push(ex, 2, next_rip)?;
    stack.commit(ex.cpu);
    ex.cpu.seg[reg::CS] = v86_segment((target >> 16) as u16);
    ex.cpu.set_rip(u64::from(target as u16));
    let cleared = if is_virtual { rflags::VIF } else { rflags::IF };
    ex.set_rflags(old & !(cleared | rflags::TF | rflags::RF));
    Ok(Flow::Jump)
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
