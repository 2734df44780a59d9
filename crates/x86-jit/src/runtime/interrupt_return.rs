//! IRETQ of a 64-bit kernel to 64-bit code of its own or a user's, without leaving translated code (SDM vol. 2, IRET).
//! Every other case changes nothing and is left to the interpreter: a fault, a task's or an NMI's return, a breakpoint
//! to be passed, an interrupt to be taken, any segment that is not flat or whose descriptor is not in the TLB.

use std::sync::atomic::{Ordering, fence};

use x86_cpu::{CpuState, Privilege};
use x86_defs::{
    control::cr0,
    dr, reg, rflags,
    segment::{Attr, Segment},
};

use crate::{
    JitBus,
    runtime::{Jit, state::may_poll_first, system_call},
};
use x86_codegen::codegen::countdown;

/// Flags that may be set in the RFLAGS that is returned to. Translated kernel code has no others set that matter
/// (`x86_codegen::ir::mode::Mode::KERNEL`).
const PLAIN: u64 = rflags::ARITH
    | rflags::DF
    | rflags::IF
    | rflags::IOPL
    | rflags::FIXED1
    | rflags::RF
    | rflags::AC
    | rflags::ID;

/// Returns a flat segment's descriptor: the limit, and the attributes in their places.
const fn descriptor(attr: u32) -> u64 {
    0x000f_0000_0000_ffff | (attr as u64 & 0xf0ff) << 40
}

/// Returns the segment that `selector` loads at the privilege level of its RPL, if that is the flat one with the
/// attributes `attr`. The descriptor's accessed bit is set then, so nothing has to be written.
fn flat<B: JitBus>(cpu: &CpuState, bus: &mut B, selector: u16, attr: u32) -> Option<Segment> {
    const LOCAL: u16 = 4;
    let rpl = u32::from(selector & 3);
    let attr = attr | rpl << 5;
    let at = selector & !7;
    if selector & LOCAL != 0 || at == 0 || u32::from(at) + 7 > u32::from(cpu.gdtr.limit) {
        return None;
    }
    let gva = cpu.gdtr.base.wrapping_add(at.into());
    let found = bus.mmu().read_hit::<u64>(gva, Privilege::System)?;
    (found == descriptor(attr)).then_some(Segment {
        base: 0,
        limit: u32::MAX,
        attr: Attr(attr),
        selector,
    })
}

/// Executes IRETQ with the frame at `rsp`. Returns the target, or 0 if the interpreter is to execute it.
/// `x86_codegen::frame::words::SPILL` says whether the host's stack has to be dropped.
pub(crate) fn leave<B: JitBus>(jit: &mut Jit<B>, cpu: &mut CpuState, bus: &mut B, rsp: u64) -> u64 {
    let Some(target) = attempt(jit, cpu, bus, rsp) else {
        return 0;
    };
    let before = cpu.engine.key;
    jit.update_mode(cpu, bus);
    jit.follow_level(cpu);
    // IRET serialises: it is a barrier, and code that is executed after it has to be current.
    fence(Ordering::SeqCst);
    let changes = bus.code_changes();
    let changed = core::mem::replace(&mut jit.session.changes, changes) != changes;
    let frame = &mut cpu.engine;
    let drops = changed || frame.key != before;
    frame.spill[0] = drops.into();
    target
}

fn attempt<B: JitBus>(jit: &mut Jit<B>, cpu: &mut CpuState, bus: &mut B, rsp: u64) -> Option<u64> {
    let mut frame = [0; 5];
    for (word, at) in frame.iter_mut().zip((0..).step_by(8)) {
        let gva = rsp.wrapping_add(at);
        *word = bus.mmu().read_hit::<u64>(gva, Privilege::Current)?;
    }
    let [rip, cs, flags, rsp, ss] = frame;
    let (cs, ss) = (cs as u16, ss as u16);
    let cpl = (cs & 3) as u8;
    let is_plain = flags & !PLAIN == 0
        && (cpl == 0 || cpl == 3 && (flags & rflags::AC == 0 || cpu.cr0 & cr0::AM == 0))
        && cpu.is_canonical(rip)
        && !cpu.events.nmi_masked
        && !(flags & rflags::IF != 0 && system_call::interrupt_waits(cpu, bus));
    // RF is cleared by the next instruction. Only breakpoints, lock-step and a poll before that instruction can tell.
    let resumes = flags & rflags::RF != 0;
    let can_tell = resumes
        && (cpu.effective_dr7() & dr::DR7_ENABLES != 0
            || cpu.engine.log() != 0
            || may_poll_first(cpu, countdown::left(&cpu.engine)));
    if !is_plain || can_tell {
        return None;
    }
    let code = flat(cpu, bus, cs, Attr::FLAT_CODE64)?;
    let stack = if ss == 0 && cpl == 0 {
        Segment {
            base: 0,
            limit: 0,
            attr: Attr(Attr::UNUSABLE),
            selector: 0,
        }
    } else if (ss & 3) as u8 == cpl {
        flat(cpu, bus, ss, Attr::FLAT_DATA)?
    } else {
        return None;
    };
    // The interpreter takes away data segments that the outer level may not use, and the RPLs of null selectors.
    let is_left = |n: usize| {
        let Segment { attr, selector, .. } = cpu.seg[n];
        let is_outer_null = cpl != cpu.cpl && matches!(selector, 1..=3);
        !is_outer_null && (attr.is_unusable() || attr.dpl() >= cpl)
    };
    if ![reg::ES, reg::DS, reg::FS, reg::GS]
        .into_iter()
        .all(is_left)
    {
        return None;
    }
    cpu.seg[reg::CS] = code;
    cpu.seg[reg::SS] = stack;
    cpu.cpl = cpl;
    cpu.gpr[reg::RSP] = rsp;
    jit.session.resumed = resumes.then_some(rip);
    system_call::set_flags(cpu, flags & !rflags::RF);
    bus.select_view(cpu);
    Some(rip)
}
