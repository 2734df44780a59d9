//! Serves TLB misses of translated code, and what else it calls Rust for in the middle of a block.

use mmu::l1::Half;
use x86_cpu::{Access, CpuState, Exception, Privilege};
use x86_defs::{
    control::{cr0, cr4},
    rflags, vector,
};

use crate::{
    JitBus,
    runtime::lockstep::log_of,
    runtime::state::target_key,
    runtime::{Context, Jit},
    runtime::{counting, interrupt_return, segments, system_call},
};
use x86_codegen::frame::requests;

/// Tells the MMU of the view or root that generated code has changed to by itself.
#[inline]
pub(crate) fn tell_view<B: JitBus>(cpu: &mut CpuState, bus: &mut B) {
    let frame = &mut cpu.engine;
    let is_other_view = core::mem::take(&mut frame.is_other_view) != 0;
    if core::mem::take(&mut frame.is_other_root) != 0 {
        let flushing = core::mem::take(&mut frame.flushing_loads);
        if flushing != 0 {
            bus.mmu().note_flushing_loads(cpu, flushing);
        }
        // The root was loaded before, so nothing can refuse it.
        let _ = bus.load_root(cpu);
    }
    if is_other_view {
        bus.mmu().tell_view();
        bus.select_view(cpu);
    }
}

/// Carries out STAC, CLAC, or a change of CR0.WP, which `change` makes. Has generated code do the next ones itself if
/// only the tables change with them.
fn change_view<B: JitBus>(
    jit: &mut Jit<B>,
    cpu: &mut CpuState,
    bus: &mut B,
    change: impl FnOnce(&mut CpuState),
) -> u64 {
    let view = |cpu: &CpuState| (cpu.cr0 & cr0::WP != 0, cpu.rflags & rflags::AC != 0);
    let was = view(cpu);
    let key = target_key(cpu);
    let from = cpu.engine.tables();
    change(cpu);
    let is = view(cpu);
    let made = bus.mmu().views_made();
    bus.select_view(cpu);
    let leads_back = bus.mmu().views_made() == made;
    jit.set_view(cpu, bus);
    let same = target_key(cpu) == key;
    if !same || bus.mmu().views_made() != jit.session.views_made {
        cpu.engine.forget_views();
    }
    let frame = &mut cpu.engine;
    if same && leads_back && was != is && frame.log() == 0 {
        // SAFETY: both are tables of views that the MMU has. `views_made` tells when it has made another view in place
        // of one of them; both are forgotten then, before translated code runs.
        unsafe {
            frame.set_view(was.0, was.1, from);
            frame.set_view(is.0, is.1, frame.tables());
        }
        if (was, is) == ((true, false), (true, true)) {
            jit.note_access(cpu, from);
        }
        jit.session.views_made = bus.mmu().views_made();
    }
    requests::SAME_KEY + u64::from(!same)
}

/// Carries out WRPKRU. Has generated code do the next one between the same views itself.
fn change_key_rights<B: JitBus>(
    jit: &mut Jit<B>,
    cpu: &mut CpuState,
    bus: &mut B,
    pkru: u32,
) -> u64 {
    if cpu.cr4 & cr4::PKE == 0 {
        return 0;
    }
    let key = target_key(cpu);
    let from = cpu.engine.tables();
    let was_shared = bus.mmu().are_tables_shared();
    cpu.pkru = pkru;
    bus.select_view(cpu);
    // In another address space, the same tables may lead to others.
    let leads_on = !was_shared || bus.mmu().are_tables_shared();
    jit.set_view(cpu, bus);
    if bus.mmu().views_made() != jit.session.views_made {
        cpu.engine.forget_views();
        jit.session.views_made = bus.mmu().views_made();
    }
    let frame = &mut cpu.engine;
    frame.forget_supervisor_views();
    if frame.log() == 0 && leads_on {
        // SAFETY: the live tables are those of a view that the MMU has. `views_made` tells when it has made another
        // view in its place; the pair is forgotten then, before translated code runs.
        unsafe { frame.set_key_view(from, pkru) };
    }
    requests::SAME_KEY + u64::from(target_key(cpu) != key)
}

/// Serves a TLB miss of translated code, or what else `site` asks for ([`requests`]). Returns the host address of the
/// access, or 0 if the interpreter has to execute the instruction.
pub(crate) extern "C" fn serve<B: JitBus>(context: *mut Context<B>, gva: u64, site: u32) -> u64 {
    // SAFETY: `Jit::call` made the context from its own references, and uses none of them until translated code
    // returns.
    let (jit, cpu, bus) = unsafe {
        let c = &mut *context;
        (&mut *c.jit, &mut *c.cpu, &mut *c.bus)
    };
    tell_view(cpu, bus);
    jit.follow_mode(cpu);
    if site & (requests::SET_AC | requests::CLEAR_AC) != 0 {
        return change_view(jit, cpu, bus, |cpu| {
            cpu.rflags &= !rflags::AC;
            if site & requests::SET_AC != 0 {
                cpu.rflags |= rflags::AC;
            }
        });
    }
    if site & requests::SET_CR0 != 0 {
        if (gva ^ cpu.cr0) & !cr0::WP != 0 {
            return 0;
        }
        return change_view(jit, cpu, bus, |cpu| cpu.cr0 = gva);
    }
    if site & requests::SET_PKRU != 0 {
        return change_key_rights(jit, cpu, bus, gva as u32);
    }
    if site & (requests::SYSCALL | requests::SYSRET | requests::IRETQ | requests::RDPMC) != 0 {
        if site & requests::RDPMC != 0 {
            return counting::read(cpu, bus, gva as u32);
        }
        if site & requests::IRETQ != 0 {
            return interrupt_return::leave(jit, cpu, bus, gva);
        }
        let left = (cpu.engine.tables(), cpu.engine.key);
        let target = if site & requests::SYSCALL != 0 {
            system_call::enter(cpu, bus, u64::from(site & 0xfff))
        } else {
            system_call::leave(cpu, bus)
        };
        if target != 0 {
            jit.update_mode(cpu, bus);
            jit.follow_level(cpu);
            jit.note_level_change(cpu, bus, left);
        }
        return target;
    }
    if site & requests::SEGMENT != 0 {
        return segments::serve(jit, cpu, bus, gva, requests::segment_of(site));
    }
    let size = u64::from(site >> 12 & 0xff);
    let (access, half) = if requests::writes(site) {
        (Access::Write, Half::Write)
    } else {
        (Access::Read, Half::Read)
    };
    let host = bus
        .mmu()
        .refill(cpu, gva, size, access, &mut jit.session.fault);
    if host == 0 {
        if bus.mmu().is_watched(gva) {
            jit.session.breakpoints.note_access(cpu);
        }
        let is_its_own = site & requests::RAISES != 0;
        let is_write = access == Access::Write;
        let who = Privilege::Current;
        let is_first_of_device =
            site & requests::FIRST != 0 && bus.mmu().known_device(gva, is_write, who).is_some();
        let is_raised = |e: &Exception| is_its_own && e.vector == vector::PF;
        if is_first_of_device || is_its_own && jit.session.fault.is_none() {
            jit.session.fault = None;
            cpu.engine.spill[0] = gva;
            return requests::ACCESS;
        }
        if !jit.session.fault.as_ref().is_none_or(is_raised) {
            jit.session.fault = None;
        }
        return 0;
    }
    if let Some(log) = log_of(cpu)
        && let Some(page) = bus.mmu().live_tables().find(half, gva)
    {
        log.allow(half, gva, page);
    }
    host
}
