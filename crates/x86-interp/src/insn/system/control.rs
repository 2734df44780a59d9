//! MOV to and from CR0 to CR8, CLTS, LMSW, SMSW, XSETBV, XGETBV, PKRU
//! (SDM vol. 3, 2.5; TLB effects: 4.10.4.1).

use iced_x86::{Code, Instruction};
use x86_cpu::{Exception, Fault, Feature, Features, Flush, GuestBus};
use x86_defs::{
    control::{cr0, cr3, cr4, efer},
    reg, xsave,
};

use crate::{Exec, Flow, Handler, Insn, Step, Stop};

pub(super) fn select<B: GuestBus>(i: &Instruction) -> Option<Handler<B>> {
    Some(match i.code() {
        Code::Mov_r32_cr | Code::Mov_r64_cr => read_cr,
        Code::Mov_cr_r32 | Code::Mov_cr_r64 => write_cr,
        Code::Clts => clts,
        Code::Lmsw_rm16 | Code::Lmsw_r32m16 | Code::Lmsw_r64m16 => lmsw,
        Code::Smsw_rm16 | Code::Smsw_r32m16 | Code::Smsw_r64m16 => smsw,
        Code::Xgetbv => xgetbv,
        Code::Xsetbv => xsetbv,
        Code::Rdpkru => rdpkru,
        Code::Wrpkru => wrpkru,
        _ => return None,
    })
}

fn gp0<T>() -> Result<T, Stop> {
    Err(Exception::GP0.into())
}

fn read_cr<B: GuestBus>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    if !matches!(insn.src, 0 | 2 | 3 | 4 | 8) {
        return Err(Exception::UD.into());
    }
    ex.require_cpl0()?;
    let v = match insn.src {
        0 => ex.cpu.cr0,
        2 => ex.cpu.cr2,
        3 => ex.cpu.cr3,
        4 => ex.cpu.cr4,
        _ => u64::from(ex.bus.task_priority(ex.cpu)),
    };
    if insn.op_size == 4 {
        ex.reg_write(insn.dst, v as u32);
    } else {
        ex.reg_write(insn.dst, v);
    }
    Ok(Flow::Next)
}

fn write_cr<B: GuestBus>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    if !matches!(insn.dst, 0 | 2 | 3 | 4 | 8) {
        return Err(Exception::UD.into());
    }
    ex.require_cpl0()?;
    let v = if ex.cpu.is_64bit() {
        ex.reg_read::<u64>(insn.src)
    } else {
        u64::from(ex.reg_read::<u32>(insn.src))
    };
    match insn.dst {
        0 => write_cr0(ex, v)?,
        2 => ex.cpu.cr2 = v,
        3 => write_cr3(ex, v)?,
        4 => write_cr4(ex, v)?,
        _ => {
            if v > 15 {
                return gp0();
            }
            ex.bus.set_task_priority(ex.cpu, v as u8);
            return Ok(Flow::EndBlock);
        }
    }
    ex.serialize();
    Ok(Flow::EndBlock)
}

/// Has the bus take over a new CR0, CR3, CR4 or EFER. Restores the old values if the bus refuses.
fn reload<B: GuestBus>(ex: &mut Exec<'_, B>, old: [u64; 4]) -> Result<(), Stop> {
    match ex.bus.load_root(ex.cpu) {
        Ok(()) => Ok(()),
        Err(fault) => refused(ex, old, fault),
    }
}

/// Restores the old values, which the bus has refused to replace.
fn refused<B: GuestBus>(ex: &mut Exec<'_, B>, old: [u64; 4], fault: Fault) -> Result<(), Stop> {
    [ex.cpu.cr0, ex.cpu.cr3, ex.cpu.cr4, ex.cpu.efer] = old;
    ex.cpu.update_mode();
    // The old values were accepted before. They can fault only if the guest has broken its PDPTEs since then, and that
    // fault is the one it gets anyway.
    let _ = ex.bus.load_root(ex.cpu);
    Err(fault.into())
}

fn controls<B: GuestBus>(ex: &Exec<'_, B>) -> [u64; 4] {
    [ex.cpu.cr0, ex.cpu.cr3, ex.cpu.cr4, ex.cpu.efer]
}

fn write_cr0<B: GuestBus>(ex: &mut Exec<'_, B>, v: u64) -> Result<(), Stop> {
    if v >> 32 != 0 {
        return gp0();
    }
    let v = v & cr0::DEFINED | cr0::ET;
    if v & cr0::NW != 0 && v & cr0::CD == 0 || v & cr0::PG != 0 && v & cr0::PE == 0 {
        return gp0();
    }
    let old = controls(ex);
    let changed = old[0] ^ v;
    if changed & v & cr0::PG != 0 && ex.cpu.efer & efer::LME != 0 {
        // The mode changes to or from long mode (vol. 3, 10.8.5).
        let cs_long = ex.cpu.seg[reg::CS].attr.is_long();
        if ex.cpu.cr4 & cr4::PAE == 0 || cs_long {
            return gp0();
        }
        ex.cpu.efer |= efer::LMA;
    }
    if changed & cr0::PG != 0 && v & cr0::PG == 0 {
        if ex.cpu.cr4 & cr4::PCIDE != 0 || ex.cpu.is_64bit() {
            return gp0();
        }
        ex.cpu.efer &= !efer::LMA;
    }
    ex.cpu.cr0 = v;
    ex.cpu.update_mode();
    let pae_legacy = ex.cpu.cr4 & cr4::PAE != 0 && !ex.cpu.is_long_mode() && ex.cpu.is_paging();
    // A change of CD or NW reloads the PDPTEs, too (vol. 3, 4.4.1).
    if changed & cr0::PG != 0 || pae_legacy && changed & (cr0::CD | cr0::NW) != 0 {
        reload(ex, old)?;
    }
    if changed & cr0::PG != 0 {
        ex.bus.flush(ex.cpu, Flush::All);
    }
    if changed & (cr0::WP | cr0::PE) != 0 {
        ex.bus.select_view(ex.cpu);
    }
    Ok(())
}

fn write_cr3<B: GuestBus>(ex: &mut Exec<'_, B>, v: u64) -> Result<(), Stop> {
    let may_keep = ex.cpu.cr4 & cr4::PCIDE != 0 || ex.cpu.is_long_mode() && ex.bus.keeps_roots();
    let keep = may_keep && v & cr3::NO_FLUSH != 0;
    let v = if may_keep { v & !cr3::NO_FLUSH } else { v };
    if ex.cpu.is_long_mode() && v >> ex.cpu.features.maxphyaddr != 0 {
        return gp0();
    }
    let old = controls(ex);
    ex.cpu.cr3 = v;
    if !ex.cpu.is_paging() {
        // Nothing depends on it until paging is enabled, which loads it.
        return Ok(());
    }
    match ex.bus.load_cr3(ex.cpu, !keep) {
        Ok(()) => Ok(()),
        Err(fault) => refused(ex, old, fault),
    }
}

/// Returns the bits of CR4 that CPUID promises, and those for which KVM does not check CPUID.
pub fn cr4_valid_bits(f: &Features) -> u64 {
    const BY_FEATURE: &[(Feature, u64)] = &[
        (Feature::Umip, cr4::UMIP),
        (Feature::La57, cr4::LA57),
        (Feature::Fsgsbase, cr4::FSGSBASE),
        (Feature::Pcid, cr4::PCIDE),
        (Feature::Xsave, cr4::OSXSAVE),
        (Feature::Smep, cr4::SMEP),
        (Feature::Smap, cr4::SMAP),
        (Feature::Pku, cr4::PKE),
        (Feature::Pks, cr4::PKS),
    ];
    // KVM lets guests set these whatever CPUID says.
    let mut bits = cr4::VME
        | cr4::PVI
        | cr4::TSD
        | cr4::DE
        | cr4::PSE
        | cr4::PAE
        | cr4::MCE
        | cr4::PGE
        | cr4::PCE
        | cr4::OSFXSR
        | cr4::OSXMMEXCPT;
    for (feature, bit) in BY_FEATURE {
        if f.has(*feature) {
            bits |= bit;
        }
    }
    bits
}

fn write_cr4<B: GuestBus>(ex: &mut Exec<'_, B>, v: u64) -> Result<(), Stop> {
    let old = controls(ex);
    let changed = old[2] ^ v;
    if v & !cr4_valid_bits(&ex.cpu.features) != 0 {
        return gp0();
    }
    if ex.cpu.is_long_mode() && (v & cr4::PAE == 0 || changed & cr4::LA57 != 0) {
        return gp0();
    }
    if changed & v & cr4::PCIDE != 0 && (!ex.cpu.is_long_mode() || ex.cpu.cr3 & cr3::PCID != 0) {
        return gp0();
    }
    ex.cpu.cr4 = v;
    let translation = cr4::PAE | cr4::PSE | cr4::LA57 | cr4::PCIDE | cr4::PGE;
    // With PAE paging, a change of SMEP reloads the PDPTEs, too (vol. 3, 4.4.1).
    let pdpte = ex.cpu.is_paging() && !ex.cpu.is_long_mode() && changed & cr4::SMEP != 0;
    if changed & translation != 0 || pdpte {
        reload(ex, old)?;
    }
    if changed & (cr4::PAE | cr4::PSE | cr4::LA57) != 0 {
        ex.bus.flush(ex.cpu, Flush::All);
    } else if changed & (cr4::PGE | old[2] & cr4::PCIDE) != 0 {
        ex.bus.flush(ex.cpu, Flush::Global);
    } else if changed & v & cr4::SMEP != 0 {
        let pcid = if v & cr4::PCIDE != 0 {
            (ex.cpu.cr3 & cr3::PCID) as u16
        } else {
            0
        };
        ex.bus.flush(ex.cpu, Flush::Pcid(pcid));
    }
    ex.bus.select_view(ex.cpu);
    Ok(())
}

fn clts<B: GuestBus>(ex: &mut Exec<'_, B>, _: &Insn<B>) -> Step {
    ex.require_cpl0()?;
    ex.cpu.cr0 &= !cr0::TS;
    Ok(Flow::EndBlock)
}

fn lmsw<B: GuestBus>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    ex.require_cpl0()?;
    let v = if insn.has_mem() {
        ex.mem_read::<u16>(insn)?
    } else {
        ex.reg_read::<u16>(insn.dst)
    };
    // PE can be set but not cleared.
    let v = u64::from(v) & 0xf | ex.cpu.cr0 & cr0::PE;
    let merged = ex.cpu.cr0 & !0xf | v;
    write_cr0(ex, merged)?;
    ex.serialize();
    Ok(Flow::EndBlock)
}

fn smsw<B: GuestBus>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    super::tables::check_umip(ex)?;
    let v = ex.cpu.cr0;
    if insn.has_mem() {
        ex.mem_write(insn, v as u16)?;
        return Ok(Flow::Next);
    }
    match insn.op_size {
        2 => ex.reg_write(insn.dst, v as u16),
        4 => ex.reg_write(insn.dst, v as u32),
        _ => ex.reg_write(insn.dst, v),
    }
    Ok(Flow::Next)
}

/// Writes EDX:EAX.
pub(super) fn set_edx_eax<B: GuestBus>(ex: &mut Exec<'_, B>, v: u64) {
    ex.cpu.gpr[reg::RAX] = v & 0xffff_ffff;
    ex.cpu.gpr[reg::RDX] = v >> 32;
}

/// EDX:EAX.
pub(super) fn edx_eax<B: GuestBus>(ex: &Exec<'_, B>) -> u64 {
    ex.cpu.gpr[reg::RDX] << 32 | ex.cpu.gpr[reg::RAX] & 0xffff_ffff
}

fn require_osxsave<B: GuestBus>(ex: &Exec<'_, B>) -> Result<(), Stop> {
    if ex.cpu.cr4 & cr4::OSXSAVE == 0 {
        return Err(Exception::UD.into());
    }
    Ok(())
}

fn xgetbv<B: GuestBus>(ex: &mut Exec<'_, B>, _: &Insn<B>) -> Step {
    require_osxsave(ex)?;
    let v = match ex.cpu.gpr[reg::RCX] as u32 {
        0 => ex.cpu.xcr0,
        // XINUSE: all enabled components are reported as in use, which is permitted (vol. 1, 13.6).
        1 if ex.cpu.features.has(Feature::Xgetbv1) => ex.cpu.xcr0,
        _ => return gp0(),
    };
    set_edx_eax(ex, v);
    Ok(Flow::Next)
}

fn xsetbv<B: GuestBus>(ex: &mut Exec<'_, B>, _: &Insn<B>) -> Step {
    require_osxsave(ex)?;
    ex.require_cpl0()?;
    let v = edx_eax(ex);
    let avx512 = xsave::OPMASK | xsave::ZMM_HI256 | xsave::HI16_ZMM;
    let good = ex.cpu.gpr[reg::RCX] as u32 == 0
        && v & !ex.cpu.features.xcr0 == 0
        && v & xsave::X87 != 0
        && (v & xsave::AVX == 0 || v & xsave::SSE != 0)
        // All of AVX-512 or none, and only on top of AVX (vol. 1, 13.3).
        && (v & avx512 == 0 || v & avx512 == avx512 && v & xsave::AVX != 0);
    if !good {
        return gp0();
    }
    ex.cpu.xcr0 = v;
    Ok(Flow::EndBlock)
}

fn rdpkru<B: GuestBus>(ex: &mut Exec<'_, B>, _: &Insn<B>) -> Step {
    if ex.cpu.cr4 & cr4::PKE == 0 {
        return Err(Exception::UD.into());
    }
    if ex.cpu.gpr[reg::RCX] as u32 != 0 {
        return gp0();
    }
    let v = u64::from(ex.cpu.pkru);
    set_edx_eax(ex, v);
    Ok(Flow::Next)
}

fn wrpkru<B: GuestBus>(ex: &mut Exec<'_, B>, _: &Insn<B>) -> Step {
    if ex.cpu.cr4 & cr4::PKE == 0 {
        return Err(Exception::UD.into());
    }
    if ex.cpu.gpr[reg::RCX] as u32 != 0 || ex.cpu.gpr[reg::RDX] as u32 != 0 {
        return gp0();
    }
    ex.cpu.pkru = ex.cpu.gpr[reg::RAX] as u32;
    ex.bus.select_view(ex.cpu);
    Ok(Flow::EndBlock)
}
