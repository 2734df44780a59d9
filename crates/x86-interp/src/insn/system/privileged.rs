//! CPUID, MSRs, time, TLB and cache control, MONITOR, hypercalls.

use iced_x86::{Instruction, Mnemonic};
use x86_cpu::{Exception, Fault, Flush, GuestBus, HypercallForm, Privilege};
use x86_defs::{
    control::{cr3, cr4},
    reg,
};

use super::control::{edx_eax, set_edx_eax};
use crate::{Exec, Flow, Handler, Insn, Step, Stop, smm};

pub(super) fn select<B: GuestBus>(i: &Instruction) -> Option<Handler<B>> {
    Some(match i.mnemonic() {
        Mnemonic::Cpuid => cpuid,
        Mnemonic::Rdmsr => rdmsr,
        Mnemonic::Wrmsr => wrmsr,
        Mnemonic::Rdtsc => rdtsc,
        Mnemonic::Rdtscp => rdtscp,
        Mnemonic::Rdpid => rdpid,
        Mnemonic::Rdpmc => rdpmc,
        Mnemonic::Invlpg => invlpg,
        Mnemonic::Invpcid => invpcid,
        Mnemonic::Invd | Mnemonic::Wbinvd | Mnemonic::Wbnoinvd => cache_control,
        Mnemonic::Monitor | Mnemonic::Mwait => monitor,
        Mnemonic::Vmcall => vmcall,
        Mnemonic::Vmmcall => vmmcall,
        Mnemonic::Vmgexit => vmgexit,
        Mnemonic::Serialize => serialize,
        Mnemonic::Rsm => rsm,
        _ => return None,
    })
}

fn cpuid<B: GuestBus>(ex: &mut Exec<'_, B>, _: &Insn<B>) -> Step {
    if ex.cpu.msr.faults_cpuid() && !ex.cpu.events.in_smm {
        ex.require_cpl0()?;
    }
    let (leaf, subleaf) = (ex.cpu.gpr[reg::RAX] as u32, ex.cpu.gpr[reg::RCX] as u32);
    let [a, b, c, d] = ex.bus.cpuid(ex.cpu, leaf, subleaf).map(u64::from);
    ex.cpu.gpr[reg::RAX] = a;
    ex.cpu.gpr[reg::RBX] = b;
    ex.cpu.gpr[reg::RCX] = c;
    ex.cpu.gpr[reg::RDX] = d;
    ex.serialize();
    Ok(Flow::Next)
}

fn rdmsr<B: GuestBus>(ex: &mut Exec<'_, B>, _: &Insn<B>) -> Step {
    ex.require_cpl0()?;
    let index = ex.cpu.gpr[reg::RCX] as u32;
    let v = ex.bus.read_msr(ex.cpu, index)?;
    set_edx_eax(ex, v);
    Ok(Flow::Next)
}

fn wrmsr<B: GuestBus>(ex: &mut Exec<'_, B>, _: &Insn<B>) -> Step {
    ex.require_cpl0()?;
    let index = ex.cpu.gpr[reg::RCX] as u32;
    let v = edx_eax(ex);
    ex.bus.write_msr(ex.cpu, index, v)?;
    ex.serialize();
    Ok(Flow::EndBlock)
}

fn check_tsd<B: GuestBus>(ex: &Exec<'_, B>) -> Result<(), Stop> {
    if ex.cpu.cr4 & cr4::TSD != 0 && ex.cpu.is_protected() && ex.cpu.cpl != 0 {
        return Err(Exception::GP0.into());
    }
    Ok(())
}

fn rdtsc<B: GuestBus>(ex: &mut Exec<'_, B>, _: &Insn<B>) -> Step {
    check_tsd(ex)?;
    let v = ex.bus.tsc(ex.cpu);
    set_edx_eax(ex, v);
    Ok(Flow::Next)
}

fn rdtscp<B: GuestBus>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    rdtsc(ex, insn)?;
    ex.cpu.gpr[reg::RCX] = ex.cpu.msr.tsc_aux & 0xffff_ffff;
    Ok(Flow::Next)
}

fn rdpid<B: GuestBus>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    let v = ex.cpu.msr.tsc_aux & 0xffff_ffff;
    ex.reg_write(insn.dst, v);
    Ok(Flow::Next)
}

fn rdpmc<B: GuestBus>(ex: &mut Exec<'_, B>, _: &Insn<B>) -> Step {
    if ex.cpu.cr4 & cr4::PCE == 0 && ex.cpu.is_protected() && ex.cpu.cpl != 0 {
        return Err(Exception::GP0.into());
    }
    let index = ex.cpu.gpr[reg::RCX] as u32;
    let v = ex.bus.read_pmc(ex.cpu, index)?;
    set_edx_eax(ex, v);
    Ok(Flow::Next)
}

fn invlpg<B: GuestBus>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    ex.require_cpl0()?;
    // The address is not checked: a non-canonical one invalidates nothing.
    let offset = ex.effective_address(insn);
    let segment = &ex.cpu.seg[usize::from(insn.seg).min(5)];
    let gva = if ex.cpu.is_64bit() {
        let base = if usize::from(insn.seg) >= reg::FS {
            segment.base
        } else {
            0
        };
        base.wrapping_add(offset)
    } else {
        segment.base.wrapping_add(offset) & 0xffff_ffff
    };
    if ex.cpu.is_canonical(gva) {
        ex.bus.flush(ex.cpu, Flush::Page(gva));
    }
    ex.serialize();
    Ok(Flow::EndBlock)
}

fn invpcid<B: GuestBus>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    if ex.cpu.is_real_or_v86() && ex.cpu.is_protected() {
        return Err(Exception::GP0.into());
    }
    ex.require_cpl0()?;
    let kind = if ex.cpu.is_64bit() {
        ex.reg_read::<u64>(insn.dst)
    } else {
        u64::from(ex.reg_read::<u32>(insn.dst))
    };
    let descriptor = ex.mem_read::<u128>(insn)?;
    let pcid = descriptor as u64;
    let gva = (descriptor >> 64) as u64;
    let pcide = ex.cpu.cr4 & cr4::PCIDE != 0;
    let pcid_bad = pcid & !cr3::PCID != 0 || !pcide && pcid != 0;
    let what = match kind {
        0 if !pcid_bad && ex.cpu.is_canonical(gva) => Flush::PcidPage(pcid as u16, gva),
        1 if !pcid_bad => Flush::Pcid(pcid as u16),
        2 if pcid & !cr3::PCID == 0 => Flush::Global,
        3 if pcid & !cr3::PCID == 0 => Flush::NonGlobal,
        _ => return Err(Exception::GP0.into()),
    };
    ex.bus.flush(ex.cpu, what);
    ex.serialize();
    Ok(Flow::EndBlock)
}

fn rsm<B: GuestBus>(ex: &mut Exec<'_, B>, _: &Insn<B>) -> Step {
    if !ex.cpu.events.in_smm {
        return Err(Exception::UD.into());
    }
    ex.sync_flags();
    smm::leave(ex.cpu, ex.bus)?;
    ex.flags.set(ex.cpu.rflags);
    ex.serialize();
    Ok(Flow::Jump)
}

/// WBINVD and INVD: there is no cache to write back or invalidate.
fn cache_control<B: GuestBus>(ex: &mut Exec<'_, B>, _: &Insn<B>) -> Step {
    ex.require_cpl0()?;
    ex.serialize();
    Ok(Flow::Next)
}

/// MONITOR and MWAIT do nothing, as KVM emulates them.
fn monitor<B: GuestBus>(ex: &mut Exec<'_, B>, _: &Insn<B>) -> Step {
    if ex.cpu.cpl != 0 || !ex.bus.has_monitor(ex.cpu) {
        return Err(Exception::UD.into());
    }
    Ok(Flow::Next)
}

fn vmcall<B: GuestBus>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    hypercall(ex, insn, true)
}

fn vmmcall<B: GuestBus>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    hypercall(ex, insn, false)
}

/// VMGEXIT is VMMCALL outside an SEV-ES guest (APM volume 3), and nothing on Intel's processors.
fn vmgexit<B: GuestBus>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    match ex.bus.hypercall_form(false) {
        HypercallForm::Native => vmmcall(ex, insn),
        HypercallForm::Undefined | HypercallForm::Replaced => Err(Exception::UD.into()),
    }
}

fn hypercall<B: GuestBus>(ex: &mut Exec<'_, B>, insn: &Insn<B>, is_vmcall: bool) -> Step {
    match ex.bus.hypercall_form(is_vmcall) {
        HypercallForm::Native => {}
        HypercallForm::Undefined => return Err(Exception::UD.into()),
        // The two instructions differ only in the last byte: 0F 01 C1 and 0F 01 D9.
        HypercallForm::Replaced => {
            let last = ex.next_rip(insn).wrapping_sub(1);
            let gva = ex.code_linear(last);
            let byte: u8 = if is_vmcall { 0xd9 } else { 0xc1 };
            match ex.bus.write(ex.cpu, gva, byte, Privilege::Current) {
                // DEVIATION: KVM raises the page fault if the guest may not write the code.
                Ok(()) | Err(Fault::Exception(_)) => {}
                Err(fault) => return Err(fault.into()),
            }
        }
    }
    ex.bus.hypercall(ex.cpu)?;
    Ok(Flow::EndBlock)
}

fn serialize<B: GuestBus>(ex: &mut Exec<'_, B>, _: &Insn<B>) -> Step {
    ex.serialize();
    Ok(Flow::EndBlock)
}
