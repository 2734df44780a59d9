//! Saves and loads a vCPU's whole state: everything that KVM has a GET and a SET for.

use anykvm_ioctls::{Kvm, VcpuFd};
use kvm_bindings::{
    CpuId, KVM_MAX_CPUID_ENTRIES, Msrs, kvm_cpuid_entry2, kvm_msr_entry, kvm_sregs2,
};

use crate::error::BootError;
use crate::fields::{Malformed, Reader, Writer};

/// IA32_TSC is left out, because the TSC's offset says the same exactly.
const TSC: u32 = 0x10;
/// Maximum number of MSRs.
const MSRS_MAX: usize = 4096;

/// Returns the MSRs that a vCPU may have.
pub(crate) fn msr_list(kvm: &Kvm) -> Result<Vec<u32>, BootError> {
    let list = kvm
        .get_msr_index_list()
        .map_err(BootError::kvm("KVM_GET_MSR_INDEX_LIST"))?;
    Ok(list.as_slice().to_vec())
}

fn get_msrs(vcpu: &VcpuFd, indices: &[u32]) -> Result<Vec<kvm_msr_entry>, BootError> {
    let entries: Vec<kvm_msr_entry> = indices
        .iter()
        .filter(|index| **index != TSC)
        .map(|index| kvm_msr_entry {
            index: *index,
            ..Default::default()
        })
        .collect();
    let mut got = Vec::new();
    let mut rest = entries.as_slice();
    while !rest.is_empty() {
        let mut msrs = Msrs::from_entries(rest)
            .map_err(|error| BootError::Usage(format!("a list of MSRs: {error:?}")))?;
        let count = vcpu
            .get_msrs(&mut msrs)
            .map_err(BootError::kvm("KVM_GET_MSRS"))?;
        got.extend(msrs.as_slice().iter().take(count));
        // The MSR that was refused is skipped: this vCPU does not have it, as the guest's CPUID lacks the feature.
        rest = rest.get(count + 1..).unwrap_or_default();
    }
    Ok(got)
}

/// Saves the state of a vCPU that has left KVM_RUN and has no access of the guest to complete.
pub(crate) fn save(vcpu: &VcpuFd, msrs: &[u32]) -> Result<Vec<u8>, BootError> {
    let mut w = Writer::default();
    let cpuid = vcpu
        .get_cpuid2(KVM_MAX_CPUID_ENTRIES)
        .map_err(BootError::kvm("KVM_GET_CPUID2"))?;
    w.list(cpuid.as_slice());
    w.put(
        &vcpu
            .get_tsc_khz()
            .map_err(BootError::kvm("KVM_GET_TSC_KHZ"))?,
    );
    w.put(
        &vcpu
            .tsc_offset()
            .map_err(BootError::kvm("KVM_GET_DEVICE_ATTR"))?,
    );
    // This comes before the others, as in QEMU, because it makes what a waiting INIT or SIPI changes part of the rest.
    w.put(
        &vcpu
            .get_mp_state()
            .map_err(BootError::kvm("KVM_GET_MP_STATE"))?,
    );
    w.put(&vcpu.get_regs().map_err(BootError::kvm("KVM_GET_REGS"))?);
    put_sregs(
        &mut w,
        &vcpu
            .get_sregs2()
            .map_err(BootError::kvm("KVM_GET_SREGS2"))?,
    );
    w.put(&vcpu.get_xcrs().map_err(BootError::kvm("KVM_GET_XCRS"))?);
    w.put(&vcpu.get_xsave().map_err(BootError::kvm("KVM_GET_XSAVE"))?);
    w.put(
        &vcpu
            .get_debug_regs()
            .map_err(BootError::kvm("KVM_GET_DEBUGREGS"))?,
    );
    w.put(&vcpu.get_lapic().map_err(BootError::kvm("KVM_GET_LAPIC"))?);
    w.list(&get_msrs(vcpu, msrs)?);
    w.put(
        &vcpu
            .get_vcpu_events()
            .map_err(BootError::kvm("KVM_GET_VCPU_EVENTS"))?,
    );
    Ok(w.into_bytes())
}

/// Writes `kvm_sregs2`, which has no conversion of its own.
fn put_sregs(w: &mut Writer, s: &kvm_sregs2) {
    for segment in [s.cs, s.ds, s.es, s.fs, s.gs, s.ss, s.tr, s.ldt] {
        w.put(&segment);
    }
    w.put(&s.gdt);
    w.put(&s.idt);
    for value in [
        s.cr0,
        s.cr2,
        s.cr3,
        s.cr4,
        s.cr8,
        s.efer,
        s.apic_base,
        s.flags,
    ] {
        w.put(&value);
    }
    w.put(&s.pdptrs);
}

fn get_sregs(r: &mut Reader<'_>) -> Result<kvm_sregs2, Malformed> {
    Ok(kvm_sregs2 {
        cs: r.get()?,
        ds: r.get()?,
        es: r.get()?,
        fs: r.get()?,
        gs: r.get()?,
        ss: r.get()?,
        tr: r.get()?,
        ldt: r.get()?,
        gdt: r.get()?,
        idt: r.get()?,
        cr0: r.get()?,
        cr2: r.get()?,
        cr3: r.get()?,
        cr4: r.get()?,
        cr8: r.get()?,
        efer: r.get()?,
        apic_base: r.get()?,
        flags: r.get()?,
        pdptrs: r.get()?,
    })
}

/// Makes an error of a state that could not be restored.
fn refused(call: &'static str) -> impl FnOnce(anykvm_ioctls::Error) -> Malformed {
    move |errno| {
        Malformed(format!(
            "this host refuses the vCPU's state: {call}: {errno}"
        ))
    }
}

/// Loads the state into a new vCPU. `shift` is added to the TSC's offset: 0 on the machine that the state comes from.
pub(crate) fn load(vcpu: &VcpuFd, bytes: &[u8], shift: u64) -> Result<(), Malformed> {
    let r = &mut Reader::new(bytes, "a vCPU");
    let leaves: Vec<kvm_cpuid_entry2> = r.list(KVM_MAX_CPUID_ENTRIES)?;
    let cpuid = CpuId::from_entries(&leaves).map_err(|_| r.wrong("too many CPUID leaves"))?;
    vcpu.set_cpuid2(&cpuid).map_err(refused("KVM_SET_CPUID2"))?;
    let khz: u32 = r.get()?;
    vcpu.set_tsc_khz(khz).map_err(refused("KVM_SET_TSC_KHZ"))?;
    let offset: u64 = r.get()?;
    vcpu.set_tsc_offset(offset.wrapping_add(shift))
        .map_err(refused("KVM_SET_DEVICE_ATTR"))?;
    vcpu.set_mp_state(r.get()?)
        .map_err(refused("KVM_SET_MP_STATE"))?;
    vcpu.set_regs(&r.get()?).map_err(refused("KVM_SET_REGS"))?;
    vcpu.set_sregs2(&get_sregs(r)?)
        .map_err(refused("KVM_SET_SREGS2"))?;
    vcpu.set_xcrs(&r.get()?).map_err(refused("KVM_SET_XCRS"))?;
    vcpu.restore_xsave(&r.get()?)
        .map_err(refused("KVM_SET_XSAVE"))?;
    vcpu.set_debug_regs(&r.get()?)
        .map_err(refused("KVM_SET_DEBUGREGS"))?;
    vcpu.set_lapic(&r.get()?)
        .map_err(refused("KVM_SET_LAPIC"))?;
    // MSRs come after the LAPIC, whose timer mode decides what a deadline means.
    for entry in r.list::<kvm_msr_entry>(MSRS_MAX)? {
        let msrs = Msrs::from_entries(&[entry]).map_err(|_| r.wrong("an MSR"))?;
        let set = vcpu.set_msrs(&msrs).map_err(refused("KVM_SET_MSRS"))?;
        if set != 1 {
            return Err(Malformed(format!(
                "this host refuses the vCPU's state: MSR {:#x} of {:#x}",
                entry.index, entry.data
            )));
        }
    }
    vcpu.set_vcpu_events(&r.get()?)
        .map_err(refused("KVM_SET_VCPU_EVENTS"))?;
    r.end()
}
