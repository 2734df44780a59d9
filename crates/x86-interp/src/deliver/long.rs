//! Long mode: 16-byte gates, IST, aligned frames of eight-byte slots (SDM vol. 3, 6.14).

use x86_cpu::{Exception, GuestBus, Privilege};
use x86_defs::{
    reg, rflags,
    segment::{Segment, system},
    vector,
};

use super::Delivery;
use crate::{
    Exec, Stop,
    descriptor::{Descriptor, is_null, selector_code},
    segment::{gp, np, null_segment},
    stack::Stack,
};

pub(super) fn deliver<B: GuestBus>(ex: &mut Exec<'_, B>, d: &Delivery) -> Result<(), Stop> {
    let entry = u64::from(d.vector) * 16;
    if entry + 15 > u64::from(ex.cpu.idtr.limit) {
        return Err(d.idt_fault(vector::GP));
    }
    let gva = ex.cpu.idtr.base.wrapping_add(entry);
    let lo = ex.bus.read::<u64>(ex.cpu, gva, Privilege::System)?;
    let hi = ex
        .bus
        .read::<u64>(ex.cpu, gva.wrapping_add(8), Privilege::System)?;
    let gate = Descriptor {
        lo,
        hi: hi & 0xffff_ffff,
        gva,
    };
    let attr = gate.attr();
    let known = matches!(attr.kind(), system::INTERRUPT_GATE32 | system::TRAP_GATE32);
    if attr.is_s() || !known || d.checks_dpl && attr.dpl() < ex.cpu.cpl {
        return Err(d.idt_fault(vector::GP));
    }
    if !attr.is_present() {
        return Err(d.idt_fault(vector::NP));
    }
    let selector = gate.gate_selector();
    if is_null(selector) {
        return Err(Exception::GP0.into());
    }
    let target = ex.descriptor(selector, vector::GP)?;
    let code = target.attr();
    let cpl = ex.cpu.cpl;
    if !code.is_code() || code.dpl() > cpl || !code.is_long() || code.is_big() {
        return Err(gp(selector).into());
    }
    if !code.is_present() {
        return Err(np(selector).into());
    }
    let new_cpl = if code.is_conforming_or_expand_down() {
        cpl
    } else {
        code.dpl()
    };
    let offset = gate.gate_offset();
    let ist = gate.gate_ist();
    let (rsp, ss) = if ist != 0 {
        (tss_stack(ex, 28 + 8 * ist)?, None)
    } else if new_cpl != cpl {
        (tss_stack(ex, 4 + 8 * u64::from(new_cpl))?, None)
    } else {
        (ex.cpu.gpr[reg::RSP], Some(ex.cpu.seg[reg::SS]))
    };
    // An IST stack without a change of privilege keeps SS.
    let ss: Segment = ss.unwrap_or(if new_cpl != cpl {
        null_segment(u16::from(new_cpl), new_cpl)
    } else {
        ex.cpu.seg[reg::SS]
    });
    if !ex.cpu.is_canonical(offset) {
        return Err(Exception::GP0.into());
    }
    let mut stack = Stack {
        ss,
        rsp: rsp & !15,
        who: if new_cpl == cpl {
            Privilege::Current
        } else {
            Privilege::System
        },
        long: true,
        fault: Exception::SS0,
    };
    stack.push(ex, 8, u64::from(ex.cpu.seg[reg::SS].selector))?;
    stack.push(ex, 8, ex.cpu.gpr[reg::RSP])?;
    stack.push(ex, 8, d.rflags)?;
    stack.push(ex, 8, u64::from(ex.cpu.seg[reg::CS].selector))?;
    stack.push(ex, 8, d.rip)?;
    if let Some(code) = d.error_code {
        stack.push(ex, 8, u64::from(code))?;
    }
    ex.set_accessed(&target)?;

    ex.cpu.seg[reg::SS] = ss;
    stack.commit(ex.cpu);
    ex.cpu.seg[reg::CS] = target.segment(selector & !3 | u16::from(new_cpl));
    ex.cpu.cpl = new_cpl;
    ex.cpu.set_rip(offset);
    let mut clear = rflags::TF | rflags::NT | rflags::RF | rflags::VM;
    if attr.kind() == system::INTERRUPT_GATE32 {
        clear |= rflags::IF;
    }
    let flags = ex.rflags() & !clear;
    ex.set_rflags(flags);
    ex.cpu.update_mode();
    ex.bus.select_view(ex.cpu);
    Ok(())
}

/// Reads a stack pointer from the 64-bit TSS (SDM vol. 3, figure 8-11).
pub(crate) fn tss_stack<B: GuestBus>(ex: &mut Exec<'_, B>, offset: u64) -> Result<u64, Stop> {
    let tr = ex.cpu.tr;
    if offset + 7 > u64::from(tr.limit) {
        return Err(Exception::with_code(vector::TS, selector_code(tr.selector)).into());
    }
    let gva = tr.base.wrapping_add(offset);
    Ok(ex.bus.read::<u64>(ex.cpu, gva, Privilege::System)?)
}
