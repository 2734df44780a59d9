//! Protected and virtual-8086 mode (SDM vol. 3, 6.12 and 21.3; vol. 2, INT n).

use x86_cpu::{Exception, GuestBus, Privilege};
use x86_defs::{
    reg, rflags,
    segment::{Segment, system},
    vector,
};

use super::{
    Delivery,
    task::{self, Reason},
};
use crate::{
    Exec, Stop,
    descriptor::{Descriptor, is_null, selector_code},
    segment::{contains, gp, np, null_segment},
    stack::Stack,
};

pub(super) fn deliver<B: GuestBus>(ex: &mut Exec<'_, B>, d: &Delivery) -> Result<(), Stop> {
    let entry = u64::from(d.vector) * 8;
    if entry + 7 > u64::from(ex.cpu.idtr.limit) {
        return Err(d.idt_fault(vector::GP));
    }
    let gva = ex.cpu.idtr.base.wrapping_add(entry) & 0xffff_ffff;
    let lo = ex.bus.read::<u64>(ex.cpu, gva, Privilege::System)?;
    let gate = Descriptor { lo, hi: 0, gva };
    let attr = gate.attr();
    let known = matches!(
        attr.kind(),
        system::TASK_GATE
            | system::INTERRUPT_GATE16
            | system::TRAP_GATE16
            | system::INTERRUPT_GATE32
            | system::TRAP_GATE32
    );
    if attr.is_s() || !known || d.checks_dpl && attr.dpl() < ex.cpu.cpl {
        return Err(d.idt_fault(vector::GP));
    }
    if !attr.is_present() {
        return Err(d.idt_fault(vector::NP));
    }
    if attr.kind() == system::TASK_GATE {
        return task::switch(
            ex,
            gate.gate_selector(),
            Reason::Interrupt {
                error_code: d.error_code,
            },
            d.rip,
            d.rflags,
        );
    }
    through_gate(ex, d, &gate)
}

fn through_gate<B: GuestBus>(
    ex: &mut Exec<'_, B>,
    d: &Delivery,
    gate: &Descriptor,
) -> Result<(), Stop> {
    let selector = gate.gate_selector();
    if is_null(selector) {
        return Err(Exception::GP0.into());
    }
    let target = ex.descriptor(selector, vector::GP)?;
    let attr = target.attr();
    let cpl = ex.cpu.cpl;
    if !attr.is_code() || attr.dpl() > cpl {
        return Err(gp(selector).into());
    }
    if !attr.is_present() {
        return Err(np(selector).into());
    }
    let new_cpl = if attr.is_conforming_or_expand_down() {
        cpl
    } else {
        attr.dpl()
    };
    let v86 = ex.cpu.is_v86();
    // From virtual-8086 mode, events can be delivered to ring 0 only.
    if v86 && new_cpl != 0 {
        return Err(gp(selector).into());
    }
    let offset = gate.gate_offset();
    let size = if gate.attr().kind() & 8 != 0 { 4 } else { 2 };
    let mut stack = if new_cpl == cpl {
        Stack::current(ex.cpu)
    } else {
        inner_stack(ex, new_cpl)?
    };
    if !contains(&target.segment(selector), offset, 1) {
        return Err(Exception::GP0.into());
    }
    if v86 {
        for sreg in [reg::GS, reg::FS, reg::DS, reg::ES] {
            stack.push(ex, size, u64::from(ex.cpu.seg[sreg].selector))?;
        }
    }
    if new_cpl != cpl {
        stack.push(ex, size, u64::from(ex.cpu.seg[reg::SS].selector))?;
        stack.push(ex, size, ex.cpu.gpr[reg::RSP])?;
    }
    stack.push(ex, size, d.rflags)?;
    stack.push(ex, size, u64::from(ex.cpu.seg[reg::CS].selector))?;
    stack.push(ex, size, d.rip)?;
    if let Some(code) = d.error_code {
        stack.push(ex, size, u64::from(code))?;
    }
    ex.set_accessed(&target)?;

    if v86 {
        for sreg in [reg::GS, reg::FS, reg::DS, reg::ES] {
            ex.cpu.seg[sreg] = null_segment(0, 0);
        }
    }
    ex.cpu.seg[reg::SS] = stack.ss;
    stack.commit(ex.cpu);
    ex.cpu.seg[reg::CS] = target.segment(selector & !3 | u16::from(new_cpl));
    ex.cpu.cpl = new_cpl;
    ex.cpu.set_rip(offset);
    let mut clear = rflags::TF | rflags::NT | rflags::RF | rflags::VM;
    // Odd types are trap gates, which leave IF alone.
    if gate.attr().kind() & 1 == 0 {
        clear |= rflags::IF;
    }
    let flags = ex.rflags() & !clear;
    ex.set_rflags(flags);
    ex.cpu.update_mode();
    ex.bus.select_view(ex.cpu);
    Ok(())
}

/// Returns the stack for privilege level `cpl` from the current TSS, checked (SDM vol. 3, 5.8.5 and 6.12.1).
pub(crate) fn inner_stack<B: GuestBus>(ex: &mut Exec<'_, B>, cpl: u8) -> Result<Stack, Stop> {
    let tr = ex.cpu.tr;
    let invalid = Exception::with_code(vector::TS, selector_code(tr.selector));
    // Bit 3 of the type distinguishes 32-bit from 16-bit TSSs.
    let wide = tr.attr.kind() & 8 != 0;
    let offset = if wide {
        4 + u64::from(cpl) * 8
    } else {
        2 + u64::from(cpl) * 4
    };
    let len = if wide { 6 } else { 4 };
    if offset + len - 1 > u64::from(tr.limit) {
        return Err(invalid.into());
    }
    let gva = tr.base.wrapping_add(offset) & 0xffff_ffff;
    let (rsp, selector) = if wide {
        (
            u64::from(ex.bus.read::<u32>(ex.cpu, gva, Privilege::System)?),
            ex.bus
                .read::<u16>(ex.cpu, gva.wrapping_add(4), Privilege::System)?,
        )
    } else {
        (
            u64::from(ex.bus.read::<u16>(ex.cpu, gva, Privilege::System)?),
            ex.bus
                .read::<u16>(ex.cpu, gva.wrapping_add(2), Privilege::System)?,
        )
    };
    let ss: Segment = ex.stack_segment(selector, cpl, vector::TS)?;
    Ok(Stack {
        ss,
        rsp,
        who: Privilege::System,
        long: false,
        fault: Exception::with_code(vector::SS, selector_code(selector)),
    })
}
