//! ioctls of a vCPU's descriptor.

use std::os::fd::IntoRawFd;
use std::sync::Arc;

use kvm_bindings::*;

use super::{LIST, Row, count, done, list_len, no_argument, write_cpuid};
use crate::errno::{Errno, Result};
use crate::nested;
use crate::numbers::*;
use crate::signals;
use crate::system::MAX_IO_MSRS;
use crate::user_memory::Arg;
use crate::vcpu::Vcpu;
use crate::xen;

pub(crate) const TABLE: &[Row<Arc<Vcpu>>] = &[
    Row::done("KVM_RUN", KVM_RUN, run),
    Row::done("KVM_GET_REGS", KVM_GET_REGS, |vcpu, arg| {
        arg.write(&vcpu.hypervisor().get_regs()?)
    }),
    Row::done("KVM_SET_REGS", KVM_SET_REGS, |vcpu, arg| {
        done(vcpu.hypervisor().set_regs(&arg.read()?))
    }),
    Row::done("KVM_GET_SREGS", KVM_GET_SREGS, |vcpu, arg| {
        arg.write(&vcpu.hypervisor().get_sregs()?)
    }),
    Row::done("KVM_SET_SREGS", KVM_SET_SREGS, |vcpu, arg| {
        done(vcpu.hypervisor().set_sregs(&arg.read()?))
    }),
    Row::done("KVM_GET_SREGS2", KVM_GET_SREGS2, |vcpu, arg| {
        arg.write(&vcpu.hypervisor().get_sregs2()?)
    }),
    Row::done("KVM_SET_SREGS2", KVM_SET_SREGS2, |vcpu, arg| {
        done(vcpu.hypervisor().set_sregs2(&arg.read()?))
    }),
    Row::done("KVM_GET_FPU", KVM_GET_FPU, |vcpu, arg| {
        arg.write(&vcpu.hypervisor().get_fpu()?)
    }),
    Row::done("KVM_SET_FPU", KVM_SET_FPU, |vcpu, arg| {
        done(vcpu.hypervisor().set_fpu(&arg.read()?))
    }),
    Row::done("KVM_GET_LAPIC", KVM_GET_LAPIC, |vcpu, arg| {
        arg.write(&vcpu.hypervisor().get_lapic()?)
    }),
    Row::done("KVM_SET_LAPIC", KVM_SET_LAPIC, |vcpu, arg| {
        done(vcpu.hypervisor().set_lapic(&arg.read()?))
    }),
    Row::done("KVM_GET_VCPU_EVENTS", KVM_GET_VCPU_EVENTS, |vcpu, arg| {
        arg.write(&vcpu.hypervisor().get_vcpu_events()?)
    }),
    Row::done("KVM_SET_VCPU_EVENTS", KVM_SET_VCPU_EVENTS, |vcpu, arg| {
        done(vcpu.hypervisor().set_vcpu_events(&arg.read()?))
    }),
    Row::done("KVM_GET_DEBUGREGS", KVM_GET_DEBUGREGS, |vcpu, arg| {
        arg.write(&vcpu.hypervisor().get_debugregs()?)
    }),
    Row::done("KVM_SET_DEBUGREGS", KVM_SET_DEBUGREGS, |vcpu, arg| {
        done(vcpu.hypervisor().set_debugregs(&arg.read()?))
    }),
    Row::done("KVM_GET_XCRS", KVM_GET_XCRS, |vcpu, arg| {
        arg.write(&vcpu.hypervisor().get_xcrs()?)
    }),
    Row::done("KVM_SET_XCRS", KVM_SET_XCRS, |vcpu, arg| {
        done(vcpu.hypervisor().set_xcrs(&arg.read()?))
    }),
    Row::done("KVM_GET_MP_STATE", KVM_GET_MP_STATE, |vcpu, arg| {
        arg.write(&vcpu.hypervisor().get_mp_state()?)
    }),
    Row::done("KVM_SET_MP_STATE", KVM_SET_MP_STATE, |vcpu, arg| {
        done(vcpu.hypervisor().set_mp_state(arg.read()?))
    }),
    Row::done("KVM_GET_XSAVE", KVM_GET_XSAVE, |vcpu, arg| {
        arg.write_list(&vcpu.hypervisor().get_xsave()?.region)
    }),
    Row::done("KVM_GET_XSAVE2", KVM_GET_XSAVE2, |vcpu, arg| {
        arg.write_list(&vcpu.hypervisor().get_xsave2()?)
    }),
    Row::done("KVM_SET_XSAVE", KVM_SET_XSAVE, |vcpu, arg| {
        set_xsave(vcpu, arg)
    }),
    Row::done("KVM_GET_CPUID2", KVM_GET_CPUID2, |vcpu, arg| {
        write_cpuid(arg, |capacity| vcpu.get_cpuid2(capacity))
    }),
    Row::done("KVM_SET_CPUID2", KVM_SET_CPUID2, |vcpu, arg| {
        let len = list_len(arg, KVM_MAX_CPUID_ENTRIES)?;
        done(vcpu.set_cpuid2(&arg.offset(LIST).read_list(len)?))
    }),
    Row::done("KVM_SET_CPUID", KVM_SET_CPUID, |vcpu, arg| {
        let len = list_len(arg, KVM_MAX_CPUID_ENTRIES)?;
        done(vcpu.set_cpuid(&arg.offset(LIST).read_list(len)?))
    }),
    Row::done("KVM_GET_MSRS", KVM_GET_MSRS, |vcpu, arg| {
        let len = list_len(arg, MAX_IO_MSRS - 1)?;
        let mut entries = arg.offset(LIST).read_list::<kvm_msr_entry>(len)?;
        let read = vcpu.get_msrs(&mut entries)?;
        arg.offset(LIST).write_list(&entries)?;
        count(read)
    }),
    Row::done("KVM_SET_MSRS", KVM_SET_MSRS, |vcpu, arg| {
        let len = list_len(arg, MAX_IO_MSRS - 1)?;
        count(vcpu.set_msrs(&arg.offset(LIST).read_list(len)?)?)
    }),
    Row::done("KVM_INTERRUPT", KVM_INTERRUPT, |vcpu, arg| {
        let interrupt: kvm_interrupt = arg.read()?;
        done(vcpu.hypervisor().interrupt(interrupt.irq))
    }),
    Row::done("KVM_NMI", KVM_NMI, |vcpu, _| done(vcpu.hypervisor().nmi())),
    Row::done("KVM_SMI", KVM_SMI, |vcpu, _| done(vcpu.hypervisor().smi())),
    Row::done("KVM_SET_GUEST_DEBUG", KVM_SET_GUEST_DEBUG, |vcpu, arg| {
        done(vcpu.hypervisor().set_guest_debug(&arg.read()?))
    }),
    Row::done("KVM_TRANSLATE", KVM_TRANSLATE, |vcpu, arg| {
        let translation: kvm_translation = arg.read()?;
        arg.write(&vcpu.hypervisor().translate(translation.linear_address)?)
    }),
    Row::done("KVM_SET_TSC_KHZ", KVM_SET_TSC_KHZ, |vcpu, arg| {
        let khz = u32::try_from(arg.0).map_err(|_| Errno::new(libc::EINVAL))?;
        done(vcpu.hypervisor().set_tsc_khz(khz))
    }),
    Row::done("KVM_GET_TSC_KHZ", KVM_GET_TSC_KHZ, |vcpu, _| {
        count(vcpu.hypervisor().tsc_khz()? as usize)
    }),
    Row::done("KVM_KVMCLOCK_CTRL", KVM_KVMCLOCK_CTRL, |vcpu, _| {
        done(vcpu.hypervisor().kvmclock_ctrl())
    }),
    Row::done("KVM_SET_VAPIC_ADDR", KVM_SET_VAPIC_ADDR, |vcpu, arg| {
        let address: kvm_vapic_addr = arg.read()?;
        done(vcpu.hypervisor().set_vapic_addr(address.vapic_addr))
    }),
    Row::done(
        "KVM_TPR_ACCESS_REPORTING",
        KVM_TPR_ACCESS_REPORTING,
        set_tpr_access_reporting,
    ),
    Row::done("KVM_X86_SETUP_MCE", KVM_X86_SETUP_MCE, |vcpu, arg| {
        done(vcpu.hypervisor().setup_mce(arg.read()?))
    }),
    Row::done("KVM_X86_SET_MCE", KVM_X86_SET_MCE, |vcpu, arg| {
        done(vcpu.hypervisor().set_mce(&arg.read()?))
    }),
    Row::done("KVM_ENABLE_CAP", KVM_ENABLE_CAP, |vcpu, arg| {
        done(vcpu.hypervisor().enable_cap(&arg.read()?))
    }),
    Row::done("KVM_SET_SIGNAL_MASK", KVM_SET_SIGNAL_MASK, |vcpu, arg| {
        set_signal_mask(vcpu, arg)
    }),
    Row::done("KVM_GET_NESTED_STATE", KVM_GET_NESTED_STATE, |_, arg| {
        nested::get(arg)
    }),
    Row::done("KVM_SET_NESTED_STATE", KVM_SET_NESTED_STATE, |_, arg| {
        nested::set(arg)
    }),
    Row::done("KVM_GET_ONE_REG", KVM_GET_ONE_REG, |vcpu, arg| {
        let reg: kvm_one_reg = arg.read()?;
        let mut msr = [one_msr(reg.id, 0)?];
        all_of(vcpu.get_msrs(&mut msr)?, &msr)?;
        Arg(reg.addr).write(&msr[0].data)
    }),
    Row::done("KVM_SET_ONE_REG", KVM_SET_ONE_REG, |vcpu, arg| {
        let reg: kvm_one_reg = arg.read()?;
        let msr = [one_msr(reg.id, Arg(reg.addr).read()?)?];
        all_of(vcpu.set_msrs(&msr)?, &msr)
    }),
    Row::done("KVM_GET_REG_LIST", KVM_GET_REG_LIST, |_, arg| {
        // KVM lists the registers that are no MSRs: none without shadow stacks.
        let _room: u64 = arg.read()?;
        arg.write(&0u64)
    }),
    Row::done("KVM_SET_DEVICE_ATTR", KVM_SET_DEVICE_ATTR, |vcpu, arg| {
        let offset = Arg(tsc_offset_attr(arg)?.addr).read()?;
        done(vcpu.hypervisor().set_tsc_offset(offset))
    }),
    Row::done("KVM_GET_DEVICE_ATTR", KVM_GET_DEVICE_ATTR, |vcpu, arg| {
        let attr = tsc_offset_attr(arg)?;
        Arg(attr.addr).write(&vcpu.hypervisor().tsc_offset()?)
    }),
    Row::done("KVM_HAS_DEVICE_ATTR", KVM_HAS_DEVICE_ATTR, |_, arg| {
        tsc_offset_attr(arg).map(|_| 0)
    }),
    Row::done("KVM_GET_STATS_FD", KVM_GET_STATS_FD, |vcpu, _| {
        Ok(vcpu.stats_fd()?.into_raw_fd())
    }),
    Row::done("KVM_PRE_FAULT_MEMORY", KVM_PRE_FAULT_MEMORY, pre_fault),
    Row::done(
        "KVM_GET_SUPPORTED_HV_CPUID",
        KVM_GET_SUPPORTED_HV_CPUID,
        |vcpu, arg| {
            write_cpuid(arg, |capacity| {
                crate::system::vcpu_hv_cpuid(vcpu.hypervisor(), capacity)
            })
        },
    ),
    Row::done(
        "KVM_XEN_VCPU_GET_ATTR",
        KVM_XEN_VCPU_GET_ATTR,
        |vcpu, arg| {
            let mut attr: kvm_xen_vcpu_attr = arg.read()?;
            let value = vcpu.hypervisor().xen_attr(attr.type_.into())?;
            xen::store_vcpu_attr(value, &mut attr);
            arg.write(&attr)
        },
    ),
    Row::done(
        "KVM_XEN_VCPU_SET_ATTR",
        KVM_XEN_VCPU_SET_ATTR,
        |vcpu, arg| {
            done(
                vcpu.hypervisor()
                    .set_xen_attr(&xen::vcpu_attr(&arg.read()?)?),
            )
        },
    ),
];

/// Returns the attribute's structure if it names the only attribute, ENXIO otherwise.
fn tsc_offset_attr(arg: Arg) -> Result<kvm_device_attr> {
    let attr: kvm_device_attr = arg.read()?;
    if (attr.group, attr.attr) == (KVM_VCPU_TSC_CTRL, u64::from(KVM_VCPU_TSC_OFFSET)) {
        Ok(attr)
    } else {
        Err(Errno::new(libc::ENXIO))
    }
}

/// KVM_RUN, which is also called without the table.
pub(super) fn run(vcpu: &Arc<Vcpu>, arg: Arg) -> Result<i32> {
    no_argument(arg)?;
    done(vcpu.run())
}

/// Makes pages present until a signal comes; writes the remaining range back to the caller.
fn pre_fault(vcpu: &Arc<Vcpu>, arg: Arg) -> Result<i32> {
    const PAGE: u64 = crate::run_page::PAGE_SIZE as u64;
    let mut range: kvm_pre_fault_memory = arg.read()?;
    let end = range.gpa.checked_add(range.size);
    let is_aligned = range.gpa.is_multiple_of(PAGE) && range.size.is_multiple_of(PAGE);
    if range.flags != 0 || !is_aligned || range.size == 0 || end.is_none() {
        return Err(Errno::new(libc::EINVAL));
    }
    let whole = range.size;
    let mut result = Ok(0);
    while range.size != 0 && result.is_ok() {
        result = if signals::is_deferred() {
            Err(Errno::new(libc::EINTR))
        } else {
            done(vcpu.hypervisor().pre_fault(range.gpa))
        };
        if result.is_ok() {
            range.gpa += PAGE;
            range.size -= PAGE;
        }
    }
    arg.write(&range)?;
    // One page is enough for success.
    if range.size == whole { result } else { Ok(0) }
}

/// KVM_SET_SIGNAL_MASK: a mask of the kernel's size, or none.
fn set_signal_mask(vcpu: &Arc<Vcpu>, arg: Arg) -> Result<i32> {
    if arg == Arg(0) {
        vcpu.set_signal_mask(None);
        return Ok(0);
    }
    if arg.read::<u32>()? as usize != size_of::<u64>() {
        return Err(Errno::new(libc::EINVAL));
    }
    vcpu.set_signal_mask(Some(arg.offset(size_of::<u32>()).read()?));
    Ok(0)
}

/// The structure is written back unchanged.
fn set_tpr_access_reporting(vcpu: &Arc<Vcpu>, arg: Arg) -> Result<i32> {
    let control: kvm_tpr_access_ctl = arg.read()?;
    if control.flags != 0 {
        return Err(Errno::new(libc::EINVAL));
    }
    vcpu.hypervisor()
        .set_tpr_access_reporting(control.enabled != 0);
    arg.write(&control)
}

fn set_xsave(vcpu: &Arc<Vcpu>, arg: Arg) -> Result<i32> {
    let mut xsave = kvm_xsave::default();
    let words = arg.read_list::<u32>(xsave.region.len())?;
    xsave.region.copy_from_slice(&words);
    done(vcpu.hypervisor().set_xsave(&xsave))
}

/// Returns the MSR that a register of KVM_GET_ONE_REG stands for. EINVAL for any other register.
fn one_msr(id: u64, data: u64) -> Result<kvm_msr_entry> {
    /// KVM_REG_X86, KVM_REG_SIZE_U64, KVM_X86_REG_TYPE_MSR.
    const MSR: u64 = 0x20 << 56 | 3 << 52 | 2 << 32;
    let index = u32::try_from(id ^ MSR).map_err(|_| Errno::new(libc::EINVAL))?;
    Ok(kvm_msr_entry {
        index,
        data,
        ..Default::default()
    })
}

/// EINVAL if fewer MSRs were read or written.
fn all_of(count: usize, msrs: &[kvm_msr_entry]) -> Result<i32> {
    if count == msrs.len() {
        Ok(0)
    } else {
        Err(Errno::new(libc::EINVAL))
    }
}
