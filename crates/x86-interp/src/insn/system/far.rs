//! Far JMP, CALL and RET (SDM vol. 2; vol. 3, 5.8).

use iced_x86::{Code, Instruction};
use x86_cpu::{CpuState, Exception, GuestBus, Privilege};
use x86_defs::{
    reg,
    segment::{Segment, system},
    vector,
};

use crate::{
    Exec, Flow, Handler, Insn, Step, Stop,
    deliver::{
        inner_stack,
        task::{self, Reason},
        tss_stack,
    },
    descriptor::{Descriptor, is_null, rpl},
    segment::{contains, gp, np, null_segment},
    selectors::code_in_real_mode,
    stack::Stack,
};

pub(super) fn select<B: GuestBus>(i: &Instruction, insn: &mut Insn<B>) -> Option<Handler<B>> {
    let (handler, size): (Handler<B>, u8) = match i.code() {
        Code::Jmp_ptr1616 | Code::Jmp_m1616 => (jmp, 2),
        Code::Jmp_ptr1632 | Code::Jmp_m1632 => (jmp, 4),
        Code::Jmp_m1664 => (jmp, 8),
        Code::Call_ptr1616 | Code::Call_m1616 => (call, 2),
        Code::Call_ptr1632 | Code::Call_m1632 => (call, 4),
        Code::Call_m1664 => (call, 8),
        Code::Retfw | Code::Retfw_imm16 => (ret, 2),
        Code::Retfd | Code::Retfd_imm16 => (ret, 4),
        Code::Retfq | Code::Retfq_imm16 => (ret, 8),
        _ => return None,
    };
    insn.op_size = size;
    Some(handler)
}

/// Returns the far pointer, which is in the instruction or in memory.
fn pointer<B: GuestBus>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Result<(u16, u64), Stop> {
    if !insn.has_mem() {
        return Ok((insn.imm2, insn.imm));
    }
    let at = ex.effective_address(insn);
    let mask = u64::MAX >> (insn.addr_shift & 63);
    let (offset, len) = match insn.op_size {
        2 => (u64::from(ex.read_at::<u16>(insn.seg, at)?), 2),
        4 => (u64::from(ex.read_at::<u32>(insn.seg, at)?), 4),
        _ => (ex.read_at::<u64>(insn.seg, at)?, 8),
    };
    let selector = ex.read_at::<u16>(insn.seg, at.wrapping_add(len) & mask)?;
    Ok((selector, offset))
}

/// #GP(0) unless RIP may be `rip` in code segment `cs`.
pub(super) fn check_target<B: GuestBus>(
    ex: &Exec<'_, B>,
    cs: &Segment,
    rip: u64,
) -> Result<(), Stop> {
    let good = if ex.cpu.is_long_mode() && cs.attr.is_long() {
        ex.cpu.is_canonical(rip)
    } else {
        contains(cs, rip, 1)
    };
    if good {
        Ok(())
    } else {
        Err(Exception::GP0.into())
    }
}

/// Returns a code descriptor to which IRET or RET may return.
pub(super) fn return_target<B: GuestBus>(
    ex: &mut Exec<'_, B>,
    selector: u16,
) -> Result<Descriptor, Stop> {
    if is_null(selector) {
        return Err(Exception::GP0.into());
    }
    let d = ex.descriptor(selector, vector::GP)?;
    let attr = d.attr();
    let dpl_ok = if attr.is_conforming_or_expand_down() {
        attr.dpl() <= rpl(selector)
    } else {
        attr.dpl() == rpl(selector)
    };
    if !attr.is_code()
        || rpl(selector) < ex.cpu.cpl
        || !dpl_ok
        || ex.cpu.is_long_mode() && attr.is_long() && attr.is_big()
    {
        return Err(gp(selector).into());
    }
    if !attr.is_present() {
        return Err(np(selector).into());
    }
    Ok(d)
}

/// Makes data segments null that an outer level may not use, after a return to that level, and makes null selectors of
/// any RPL 0 (SDM vol. 2, RET, "return to outer privilege level").
pub(super) fn drop_privileged_segments(cpu: &mut CpuState) {
    for sreg in [reg::ES, reg::DS, reg::FS, reg::GS] {
        if is_null(cpu.seg[sreg].selector) {
            cpu.seg[sreg].selector = 0;
        }
        let attr = cpu.seg[sreg].attr;
        let conforming = attr.is_code() && attr.is_conforming_or_expand_down();
        if !attr.is_unusable() && !conforming && attr.dpl() < cpu.cpl {
            // FS and GS keep their bases, which 64-bit code uses whatever the selectors are.
            let base = cpu.seg[sreg].base;
            cpu.seg[sreg] = Segment {
                base,
                ..null_segment(0, 0)
            };
        }
    }
}

/// Checks the target of a direct JMP or CALL to a code segment of the same privilege (SDM vol. 3, 5.8.1).
fn direct_target<B: GuestBus>(ex: &Exec<'_, B>, d: &Descriptor, selector: u16) -> Result<(), Stop> {
    let attr = d.attr();
    let cpl = ex.cpu.cpl;
    let privilege_ok = if attr.is_conforming_or_expand_down() {
        attr.dpl() <= cpl
    } else {
        rpl(selector) <= cpl && attr.dpl() == cpl
    };
    if !privilege_ok || ex.cpu.is_long_mode() && attr.is_long() && attr.is_big() {
        return Err(gp(selector).into());
    }
    if !attr.is_present() {
        return Err(np(selector).into());
    }
    Ok(())
}

fn enter<B: GuestBus>(ex: &mut Exec<'_, B>, cs: Segment, rip: u64, cpl: u8) {
    ex.cpu.seg[reg::CS] = Segment {
        selector: cs.selector & !3 | u16::from(cpl),
        ..cs
    };
    ex.cpu.set_rip(rip);
    ex.cpu.cpl = cpl;
    ex.cpu.update_mode();
    ex.bus.select_view(ex.cpu);
}

fn real_cs<B: GuestBus>(ex: &Exec<'_, B>, selector: u16, rip: u64) -> Result<Segment, Stop> {
    let cs = code_in_real_mode(ex.cpu, selector);
    if rip > u64::from(cs.limit) {
        return Err(Exception::GP0.into());
    }
    Ok(cs)
}

fn jmp<B: GuestBus>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    let (selector, rip) = pointer(ex, insn)?;
    if ex.cpu.is_real_or_v86() {
        let cs = real_cs(ex, selector, rip)?;
        ex.cpu.seg[reg::CS] = cs;
        ex.cpu.set_rip(rip);
        ex.cpu.update_mode();
        return Ok(Flow::Jump);
    }
    if is_null(selector) {
        return Err(Exception::GP0.into());
    }
    let d = ex.descriptor(selector, vector::GP)?;
    if d.attr().is_code() {
        direct_target(ex, &d, selector)?;
        let cs = d.segment(selector);
        check_target(ex, &cs, rip)?;
        ex.set_accessed(&d)?;
        let cpl = ex.cpu.cpl;
        enter(ex, cs, rip, cpl);
        return Ok(Flow::Jump);
    }
    match system_target(ex, insn, &d, selector, Reason::Jmp)? {
        None => Ok(Flow::Jump),
        Some(gate) => {
            let (target, cs) = gate_target(ex, &gate)?;
            let attr = target.attr();
            let ok = if attr.is_conforming_or_expand_down() {
                attr.dpl() <= ex.cpu.cpl
            } else {
                attr.dpl() == ex.cpu.cpl
            };
            if !ok {
                return Err(gp(cs).into());
            }
            let segment = target.segment(cs);
            check_target(ex, &segment, gate.gate_offset())?;
            ex.set_accessed(&target)?;
            let cpl = ex.cpu.cpl;
            enter(ex, segment, gate.gate_offset(), cpl);
            Ok(Flow::Jump)
        }
    }
}

/// Handles a system descriptor as the target: performs a task switch (`None`), or returns the call gate.
fn system_target<B: GuestBus>(
    ex: &mut Exec<'_, B>,
    insn: &Insn<B>,
    d: &Descriptor,
    selector: u16,
    reason: Reason,
) -> Result<Option<Descriptor>, Stop> {
    let attr = d.attr();
    let kind = attr.kind();
    let long = ex.cpu.is_long_mode();
    let gate = matches!(kind, system::CALL_GATE32) || !long && kind == system::CALL_GATE16;
    let tss = !long && matches!(kind, system::TSS16_AVAILABLE | system::TSS32_AVAILABLE);
    let task_gate = !long && kind == system::TASK_GATE;
    if attr.is_s()
        || !(gate || tss || task_gate)
        || attr.dpl() < ex.cpu.cpl
        || attr.dpl() < rpl(selector)
    {
        return Err(gp(selector).into());
    }
    if !attr.is_present() {
        return Err(np(selector).into());
    }
    if gate {
        return Ok(Some(ex.widen(*d, selector, vector::GP)?));
    }
    let tss = if task_gate {
        d.gate_selector()
    } else {
        selector
    };
    let (rip, flags) = (ex.next_rip(insn), ex.rflags());
    task::switch(ex, tss, reason, rip, flags)?;
    Ok(None)
}

/// Returns the code segment behind a call gate, and its selector.
fn gate_target<B: GuestBus>(
    ex: &mut Exec<'_, B>,
    gate: &Descriptor,
) -> Result<(Descriptor, u16), Stop> {
    let cs = gate.gate_selector();
    if is_null(cs) {
        return Err(Exception::GP0.into());
    }
    let d = ex.descriptor(cs, vector::GP)?;
    let attr = d.attr();
    let bad_mode = ex.cpu.is_long_mode() && (!attr.is_long() || attr.is_big());
    if !attr.is_code() || attr.dpl() > ex.cpu.cpl || bad_mode {
        return Err(gp(cs).into());
    }
    if !attr.is_present() {
        return Err(np(cs).into());
    }
    Ok((d, cs))
}

fn call<B: GuestBus>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    let (selector, rip) = pointer(ex, insn)?;
    let next = ex.next_rip(insn);
    let old_cs = u64::from(ex.cpu.seg[reg::CS].selector);
    let size = insn.op_size;
    let mut stack = Stack::current(ex.cpu);
    if ex.cpu.is_real_or_v86() {
        let cs = real_cs(ex, selector, rip)?;
        stack.push(ex, size, old_cs)?;
        stack.push(ex, size, next)?;
        stack.commit(ex.cpu);
        ex.cpu.seg[reg::CS] = cs;
        ex.cpu.set_rip(rip);
        ex.cpu.update_mode();
        return Ok(Flow::Jump);
    }
    if is_null(selector) {
        return Err(Exception::GP0.into());
    }
    let d = ex.descriptor(selector, vector::GP)?;
    if d.attr().is_code() {
        direct_target(ex, &d, selector)?;
        let cs = d.segment(selector);
        stack.push(ex, size, old_cs)?;
        stack.push(ex, size, next)?;
        check_target(ex, &cs, rip)?;
        ex.set_accessed(&d)?;
        stack.commit(ex.cpu);
        let cpl = ex.cpu.cpl;
        enter(ex, cs, rip, cpl);
        return Ok(Flow::Jump);
    }
    if let Some(gate) = system_target(ex, insn, &d, selector, Reason::Call)? {
        call_gate(ex, &gate, next)?;
    }
    Ok(Flow::Jump)
}

/// CALL through a gate, with a switch of stacks if the privilege level becomes an inner one (SDM vol. 3, 5.8.5).
fn call_gate<B: GuestBus>(ex: &mut Exec<'_, B>, gate: &Descriptor, next: u64) -> Result<(), Stop> {
    let (target, cs) = gate_target(ex, gate)?;
    let attr = target.attr();
    let cpl = ex.cpu.cpl;
    let long = ex.cpu.is_long_mode();
    let size = if long {
        8
    } else if gate.attr().kind() == system::CALL_GATE32 {
        4
    } else {
        2
    };
    let inward = !attr.is_conforming_or_expand_down() && attr.dpl() < cpl;
    let new_cpl = if inward { attr.dpl() } else { cpl };
    let old = Stack::current(ex.cpu);
    let mut stack = old;
    if inward && long {
        stack = Stack {
            ss: null_segment(u16::from(new_cpl), new_cpl),
            rsp: tss_stack(ex, 4 + 8 * u64::from(new_cpl))?,
            who: Privilege::System,
            long: true,
            fault: Exception::SS0,
        };
    } else if inward {
        stack = inner_stack(ex, new_cpl)?;
    } else {
        stack.long = long;
    }
    let segment = target.segment(cs);
    check_target(ex, &segment, gate.gate_offset())?;
    if inward {
        stack.push(ex, size, u64::from(ex.cpu.seg[reg::SS].selector))?;
        stack.push(ex, size, ex.cpu.gpr[reg::RSP])?;
        if !long {
            let nr = u64::from(gate.gate_parameters());
            for i in (0..nr).rev() {
                let value = old.peek(ex, i * u64::from(size), size)?;
                stack.push(ex, size, value)?;
            }
        }
    }
    stack.push(ex, size, u64::from(ex.cpu.seg[reg::CS].selector))?;
    stack.push(ex, size, next)?;
    ex.set_accessed(&target)?;
    ex.cpu.seg[reg::SS] = stack.ss;
    stack.commit(ex.cpu);
    enter(ex, segment, gate.gate_offset(), new_cpl);
    Ok(())
}

fn ret<B: GuestBus>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    let size = insn.op_size;
    let release = u64::from(insn.imm as u16);
    let mut stack = Stack::current(ex.cpu);
    let rip = stack.pop(ex, size)?;
    let cs = stack.pop(ex, size)? as u16;
    if ex.cpu.is_real_or_v86() {
        let cs = real_cs(ex, cs, rip)?;
        stack.adjust(release);
        stack.commit(ex.cpu);
        ex.cpu.seg[reg::CS] = cs;
        ex.cpu.set_rip(rip);
        ex.cpu.update_mode();
        return Ok(Flow::Jump);
    }
    let target = return_target(ex, cs)?;
    let segment = target.segment(cs);
    let new_cpl = rpl(cs);
    let outward = new_cpl != ex.cpu.cpl;
    stack.adjust(release);
    if outward {
        let rsp = stack.pop(ex, size)?;
        let selector = stack.pop(ex, size)? as u16;
        let to_64bit = ex.cpu.is_long_mode() && segment.attr.is_long();
        stack.ss = if is_null(selector) {
            if !to_64bit || new_cpl == 3 || rpl(selector) != new_cpl {
                return Err(Exception::GP0.into());
            }
            null_segment(selector, new_cpl)
        } else {
            ex.stack_segment(selector, new_cpl, vector::GP)?
        };
        stack.rsp = rsp;
        stack.long = to_64bit;
        stack.adjust(release);
    }
    check_target(ex, &segment, rip)?;
    ex.set_accessed(&target)?;
    if outward {
        ex.cpu.seg[reg::SS] = stack.ss;
    }
    stack.commit(ex.cpu);
    enter(ex, segment, rip, new_cpl);
    if outward {
        drop_privileged_segments(ex.cpu);
    }
    Ok(Flow::Jump)
}
