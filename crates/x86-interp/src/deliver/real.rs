//! Real-address mode: the interrupt vector table (SDM vol. 3, 21.1.4).

use x86_cpu::{GuestBus, Privilege};
use x86_defs::{reg, rflags, vector};

use super::Delivery;
use crate::{Exec, Stop, segment::real_segment, stack::Stack};

pub(super) fn deliver<B: GuestBus>(ex: &mut Exec<'_, B>, d: &Delivery) -> Result<(), Stop> {
    let entry = u64::from(d.vector) * 4;
    if entry + 3 > u64::from(ex.cpu.idtr.limit) {
        return Err(d.idt_fault(vector::GP));
    }
    let gva = ex.cpu.idtr.base.wrapping_add(entry) & 0xffff_ffff;
    let target = ex.bus.read::<u32>(ex.cpu, gva, Privilege::System)?;
    // Real mode pushes no error codes.
    let mut stack = Stack::current(ex.cpu);
    stack.push(ex, 2, d.rflags)?;
    stack.push(ex, 2, u64::from(ex.cpu.seg[reg::CS].selector))?;
    stack.push(ex, 2, d.rip)?;
    stack.commit(ex.cpu);
    let cs = real_segment(&ex.cpu.seg[reg::CS], reg::CS, (target >> 16) as u16);
    ex.cpu.seg[reg::CS] = cs;
    ex.cpu.set_rip(u64::from(target as u16));
    let flags = ex.rflags() & !(rflags::IF | rflags::TF | rflags::AC | rflags::RF);
    ex.set_rflags(flags);
    ex.cpu.update_mode();
    ex.bus.select_view(ex.cpu);
    Ok(())
}
