//! SYSCALL, SYSRET, SYSENTER, SYSEXIT (SDM vol. 2; AMD APM vol. 3).

use iced_x86::{Code, Instruction};
use x86_cpu::{Exception, Feature, GuestBus};
use x86_defs::{
    control::efer,
    dr, reg, rflags,
    segment::{Attr, Segment},
};

use crate::{Exec, Flow, Handler, Insn, Step, Stop};

pub(super) fn select<B: GuestBus>(i: &Instruction) -> Option<Handler<B>> {
    Some(match i.code() {
        Code::Syscall => syscall,
        Code::Sysretd => sysret32,
        Code::Sysretq => sysret64,
        Code::Sysenter => sysenter,
        Code::Sysexitd => sysexit32,
        Code::Sysexitq => sysexit64,
        _ => return None,
    })
}

/// Returns the fixed flat segment that these instructions load without a descriptor.
fn flat(selector: u16, attr: u32, dpl: u8) -> Segment {
    Segment {
        base: 0,
        limit: u32::MAX,
        attr: Attr(attr | u32::from(dpl) << 5),
        selector: selector & !3 | u16::from(dpl),
    }
}

const CODE64: u32 = 0xa09b;
const CODE32: u32 = 0xc09b;
const DATA: u32 = 0xc093;

fn enter<B: GuestBus>(
    ex: &mut Exec<'_, B>,
    cs: u16,
    ss: u16,
    code: u32,
    cpl: u8,
    rip: u64,
) -> Step {
    ex.cpu.seg[reg::CS] = flat(cs, code, cpl);
    ex.cpu.seg[reg::SS] = flat(ss, DATA, cpl);
    ex.cpu.cpl = cpl;
    ex.cpu.set_rip(rip);
    ex.cpu.update_mode();
    ex.bus.select_view(ex.cpu);
    Ok(Flow::Jump)
}

/// Raises #UD where the vendor's CPUs have no SYSCALL: Intel's have it only in 64-bit mode.
fn check<B: GuestBus>(ex: &Exec<'_, B>) -> Result<(), Stop> {
    let mode_ok = ex.cpu.is_64bit()
        || ex.cpu.features.has(Feature::Amd) && ex.cpu.is_protected() && !ex.cpu.is_v86();
    if ex.cpu.efer & efer::SCE == 0 || !mode_ok {
        return Err(Exception::UD.into());
    }
    Ok(())
}

fn syscall<B: GuestBus>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    check(ex)?;
    let next = ex.next_rip(insn);
    let star = ex.cpu.msr.star;
    let cs = (star >> 32) as u16;
    let flags = ex.rflags();
    ex.cpu.gpr[reg::RCX] = next;
    let (rip, code) = if ex.cpu.is_long_mode() {
        ex.cpu.gpr[reg::R11] = flags & !rflags::RF;
        let mask = ex.cpu.msr.fmask;
        ex.set_rflags(flags & !mask & !rflags::RF);
        let rip = if ex.cpu.is_64bit() {
            ex.cpu.msr.lstar
        } else {
            ex.cpu.msr.cstar
        };
        (rip, CODE64)
    } else {
        ex.set_rflags(flags & !(rflags::VM | rflags::IF | rflags::RF));
        (star & 0xffff_ffff, CODE32)
    };
    enter(ex, cs & !3, (cs & !3).wrapping_add(8), code, 0, rip)
}

fn sysret<B: GuestBus>(ex: &mut Exec<'_, B>, to_64bit: bool) -> Step {
    check(ex)?;
    ex.require_cpl0()?;
    let rcx = ex.cpu.gpr[reg::RCX];
    // Intel's processors check before they leave ring 0; on AMD's the fetch at ring 3 faults.
    if to_64bit && !ex.cpu.features.has(Feature::Amd) && !ex.cpu.is_canonical(rcx) {
        return Err(Exception::GP0.into());
    }
    let base = (ex.cpu.msr.star >> 48) as u16;
    if ex.cpu.is_long_mode() {
        let writable = rflags::DEFINED & !(rflags::RF | rflags::VM);
        let flags = ex.cpu.gpr[reg::R11] & writable;
        ex.set_rflags(flags);
    } else {
        let flags = ex.rflags() | rflags::IF;
        ex.set_rflags(flags);
    }
    // DEVIATION: AMD CPUs load only SS's selector here. The whole register is loaded for both vendors; no program that
    // had a flat SS before can tell the difference.
    let ss = base.wrapping_add(8);
    let flow = if to_64bit {
        enter(ex, base.wrapping_add(16), ss, CODE64, 3, rcx)?
    } else {
        enter(ex, base, ss, CODE32, 3, rcx & 0xffff_ffff)?
    };
    if ex.cpu.rflags & rflags::TF != 0 {
        // The trap is raised if TF is set at the end of SYSRET, not at its beginning.
        ex.cpu.fault_dr6 = dr::DR6_BS;
        return Err(Exception::DB.into());
    }
    Ok(flow)
}

fn sysret32<B: GuestBus>(ex: &mut Exec<'_, B>, _: &Insn<B>) -> Step {
    sysret(ex, false)
}

fn sysret64<B: GuestBus>(ex: &mut Exec<'_, B>, _: &Insn<B>) -> Step {
    sysret(ex, true)
}

fn sysenter<B: GuestBus>(ex: &mut Exec<'_, B>, _: &Insn<B>) -> Step {
    let long = ex.cpu.is_long_mode();
    if long && ex.cpu.features.has(Feature::Amd) {
        return Err(Exception::UD.into());
    }
    let cs = ex.cpu.msr.sysenter_cs as u16 & !3;
    if !ex.cpu.is_protected() || cs == 0 {
        return Err(Exception::GP0.into());
    }
    let flags = ex.rflags() & !(rflags::VM | rflags::IF | rflags::RF);
    ex.set_rflags(flags);
    let (mask, code) = if long {
        (u64::MAX, CODE64)
    } else {
        (0xffff_ffff, CODE32)
    };
    ex.cpu.gpr[reg::RSP] = ex.cpu.msr.sysenter_esp & mask;
    let rip = ex.cpu.msr.sysenter_eip & mask;
    enter(ex, cs, cs.wrapping_add(8), code, 0, rip)
}

fn sysexit<B: GuestBus>(ex: &mut Exec<'_, B>, to_64bit: bool) -> Step {
    if ex.cpu.is_long_mode() && ex.cpu.features.has(Feature::Amd) {
        return Err(Exception::UD.into());
    }
    let cs = ex.cpu.msr.sysenter_cs as u16 & !3;
    if !ex.cpu.is_protected() || cs == 0 {
        return Err(Exception::GP0.into());
    }
    ex.require_cpl0()?;
    let (rip, rsp) = (ex.cpu.gpr[reg::RDX], ex.cpu.gpr[reg::RCX]);
    if to_64bit {
        if !ex.cpu.is_canonical(rip) || !ex.cpu.is_canonical(rsp) {
            return Err(Exception::GP0.into());
        }
        ex.cpu.gpr[reg::RSP] = rsp;
        enter(ex, cs.wrapping_add(32), cs.wrapping_add(40), CODE64, 3, rip)
    } else {
        ex.cpu.gpr[reg::RSP] = rsp & 0xffff_ffff;
        let rip = rip & 0xffff_ffff;
        enter(ex, cs.wrapping_add(16), cs.wrapping_add(24), CODE32, 3, rip)
    }
}

fn sysexit32<B: GuestBus>(ex: &mut Exec<'_, B>, _: &Insn<B>) -> Step {
    sysexit(ex, false)
}

fn sysexit64<B: GuestBus>(ex: &mut Exec<'_, B>, _: &Insn<B>) -> Step {
    sysexit(ex, true)
}
