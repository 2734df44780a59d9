//! The state that the boot protocols demand of the first vCPU: segments, paging, general registers.
//!
//! `Documentation/arch/x86/boot.rst`, "32-bit" and "64-bit boot protocol"; Xen's PVH ABI.

use anykvm_ioctls::VcpuFd;
use kvm_bindings::{Msrs, kvm_fpu, kvm_msr_entry, kvm_regs, kvm_segment};
use vm_memory::{Bytes, GuestAddress};

use crate::error::BootError;
use crate::kernel::Entry;
use crate::layout::{GDT, PML4, PVH_INFO, ZERO_PAGE};
use crate::memory::GuestMemory;

/// CR0, CR4, EFER, MSR, LAPIC and page-table bits (SDM vol. 3).
mod spec {
    pub(super) const CR0_PE: u64 = 1;
    pub(super) const CR0_ET: u64 = 1 << 4;
    pub(super) const CR0_PG: u64 = 1 << 31;
    pub(super) const CR4_PAE: u64 = 1 << 5;
    pub(super) const EFER_LME: u64 = 1 << 8;
    pub(super) const EFER_LMA: u64 = 1 << 10;
    pub(super) const PTE_PRESENT_RW: u64 = 3;
    pub(super) const PDE_LARGE: u64 = 1 << 7;
    pub(super) const IA32_MISC_ENABLE: u32 = 0x1a0;
    pub(super) const MISC_ENABLE_FAST_STRING: u64 = 1;
    pub(super) const IA32_MTRR_DEF_TYPE: u32 = 0x2ff;
    /// MTRRs are on, and all memory is write-back.
    pub(super) const MTRR_ENABLE_WB: u64 = (1 << 11) | 6;
    pub(super) const AMD64_HWCR: u32 = 0xc001_0015;
    /// The TSC counts at the P0 frequency. Firmware of AMD machines sets this bit, and Linux checks it.
    pub(super) const HWCR_TSC_FREQ_SEL: u64 = 1 << 24;
    pub(super) const LVT_LINT0: usize = 0x350;
    pub(super) const LVT_LINT1: usize = 0x360;
    pub(super) const MODE_EXTINT: u32 = 7 << 8;
    pub(super) const MODE_NMI: u32 = 4 << 8;
}

const BOOT_CS: u16 = 0x10;
const BOOT_DS: u16 = 0x18;
const BOOT_TSS: u16 = 0x20;

/// Returns flat segments: null, null, code (64-bit or 32-bit, as the entry demands), data, TSS.
fn gdt(entry: Entry) -> [u64; 5] {
    let code = match entry {
        Entry::Long { .. } => 0x00af_9b00_0000_ffff,
        _ => 0x00cf_9b00_0000_ffff,
    };
    [0, 0, code, 0x00cf_9300_0000_ffff, 0x0000_8b00_0000_0067]
}

/// Writes the GDT and, for a 64-bit entry, the identity map of the first 4 GiB.
pub(crate) fn write_boot_structures(memory: &GuestMemory, entry: Entry) -> Result<(), BootError> {
    let what = "the boot GDT and page tables";
    let put = |at: u64, value: u64| {
        memory
            .write_obj(value, GuestAddress(at))
            .map_err(BootError::guest(what))
    };
    for (at, descriptor) in (GDT..).step_by(8).zip(gdt(entry)) {
        put(at, descriptor)?;
    }
    if !matches!(entry, Entry::Long { .. }) {
        return Ok(());
    }
    let pdpt = PML4 + 0x1000;
    put(PML4, pdpt | spec::PTE_PRESENT_RW)?;
    for gib in 0..4 {
        let directory = pdpt + 0x1000 * (gib + 1);
        put(pdpt + gib * 8, directory | spec::PTE_PRESENT_RW)?;
        for i in 0..512 {
            let gpa = (gib << 30) | (i << 21);
            let pde = gpa | spec::PDE_LARGE | spec::PTE_PRESENT_RW;
            put(directory + i * 8, pde)?;
        }
    }
    Ok(())
}

/// Sets segments, control registers and general registers for `entry`.
pub(super) fn set_entry(vcpu: &VcpuFd, entry: Entry) -> Result<(), BootError> {
    let is_long = matches!(entry, Entry::Long { .. });
    let mut sregs = vcpu.get_sregs().map_err(BootError::kvm("KVM_GET_SREGS"))?;
    let code = kvm_segment {
        limit: 0xffff_ffff,
        selector: BOOT_CS,
        type_: 11,
        present: 1,
        s: 1,
        g: 1,
        l: u8::from(is_long),
        db: u8::from(!is_long),
        ..Default::default()
    };
    let data = kvm_segment {
        selector: BOOT_DS,
        type_: 3,
        l: 0,
        db: 1,
        ..code
    };
    sregs.cs = code;
    sregs.ds = data;
    sregs.es = data;
    sregs.fs = data;
    sregs.gs = data;
    sregs.ss = data;
    sregs.tr = kvm_segment {
        limit: 0x67,
        selector: BOOT_TSS,
        type_: 11,
        present: 1,
        ..Default::default()
    };
    sregs.gdt.base = GDT;
    sregs.gdt.limit = 5 * 8 - 1;
    sregs.idt.base = 0;
    sregs.idt.limit = 0;
    sregs.cr0 = spec::CR0_PE | spec::CR0_ET;
    sregs.cr4 = 0;
    if is_long {
        sregs.cr0 |= spec::CR0_PG;
        sregs.cr3 = PML4;
        sregs.cr4 = spec::CR4_PAE;
        sregs.efer = spec::EFER_LME | spec::EFER_LMA;
    }
    vcpu.set_sregs(&sregs)
        .map_err(BootError::kvm("KVM_SET_SREGS"))?;

    let mut regs = kvm_regs {
        rflags: 2,
        ..Default::default()
    };
    match entry {
        Entry::Long { rip } => {
            regs.rip = rip;
            regs.rsi = ZERO_PAGE;
        }
        Entry::Protected { eip } => {
            regs.rip = eip;
            regs.rsi = ZERO_PAGE;
        }
        Entry::Pvh { eip } => {
            regs.rip = eip;
            regs.rbx = PVH_INFO;
        }
    }
    vcpu.set_regs(&regs).map_err(BootError::kvm("KVM_SET_REGS"))
}

/// Sets the MSRs that Linux checks to what firmware leaves there.
pub(super) fn set_msrs(vcpu: &VcpuFd) -> Result<(), BootError> {
    let entries = [
        (spec::IA32_MISC_ENABLE, spec::MISC_ENABLE_FAST_STRING),
        (spec::IA32_MTRR_DEF_TYPE, spec::MTRR_ENABLE_WB),
        (spec::AMD64_HWCR, spec::HWCR_TSC_FREQ_SEL),
    ];
    for (index, data) in entries {
        let entry = kvm_msr_entry {
            index,
            data,
            ..Default::default()
        };
        let Ok(msrs) = Msrs::from_entries(&[entry]) else {
            continue;
        };
        // If KVM does not have one of these MSRs, it returns that it has set none; the guest does not have it either.
        vcpu.set_msrs(&msrs)
            .map_err(BootError::kvm("KVM_SET_MSRS"))?;
    }
    Ok(())
}

/// Sets FNINIT's control word, and an MXCSR with all exceptions masked.
pub(super) fn set_fpu(vcpu: &VcpuFd) -> Result<(), BootError> {
    let fpu = kvm_fpu {
        fcw: 0x37f,
        mxcsr: 0x1f80,
        ..Default::default()
    };
    vcpu.set_fpu(&fpu).map_err(BootError::kvm("KVM_SET_FPU"))
}

/// Sets the LAPIC's virtual-wire mode, as firmware leaves it: LINT0 takes the PIC's interrupts, LINT1 NMIs.
pub(super) fn set_lapic(vcpu: &VcpuFd) -> Result<(), BootError> {
    let mut lapic = vcpu.get_lapic().map_err(BootError::kvm("KVM_GET_LAPIC"))?;
    for (register, mode) in [
        (spec::LVT_LINT0, spec::MODE_EXTINT),
        (spec::LVT_LINT1, spec::MODE_NMI),
    ] {
        if let Some(bytes) = lapic.regs.get_mut(register..register + 4) {
            for (to, from) in bytes.iter_mut().zip(mode.to_le_bytes()) {
                // c_char is signed here.
                *to = from.cast_signed();
            }
        }
    }
    vcpu.set_lapic(&lapic)
        .map_err(BootError::kvm("KVM_SET_LAPIC"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory;

    #[test]
    fn the_identity_map_reaches_4_gib() {
        let memory = memory::allocate(2 << 20).unwrap();
        write_boot_structures(&memory, Entry::Long { rip: 0 }).unwrap();
        let read = |at: u64| -> u64 { memory.read_obj(GuestAddress(at)).unwrap() };
        for gpa in [0u64, 0x10_0200, 0x1234_5678, 0xffff_ffff] {
            let pdpt = read(PML4) & !0xfff;
            let directory = read(pdpt + (gpa >> 30) * 8) & !0xfff;
            let pde = read(directory + ((gpa >> 21) & 511) * 8);
            assert_eq!(pde & 0x83, 0x83);
            assert_eq!(pde & !0x1f_ffff, gpa & !0x1f_ffff);
        }
    }

    #[test]
    fn the_code_segment_matches_the_entry() {
        assert_eq!((gdt(Entry::Long { rip: 0 })[2] >> 53) & 3, 1, "L, not D");
        assert_eq!((gdt(Entry::Pvh { eip: 0 })[2] >> 53) & 3, 2, "D, not L");
    }
}
