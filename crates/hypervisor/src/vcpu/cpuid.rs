//! CPUID as the guest sees it: the VMM's table, with the bits that depend on the CPU's state.

use std::sync::OnceLock;

use irqchip::LapicConfig;
use kvm_bindings::{KVM_CPUID_FLAG_SIGNIFCANT_INDEX, kvm_cpuid_entry2};
use pmu::Config;
use x86_cpu::{CpuState, Feature, Features};
use x86_defs::{control::cr4, xsave};

use crate::{
    system::pkru_offset,
    vm::clock::{TscParams, pvclock_scale},
};

/// IA32_MISC_ENABLE: MONITOR and MWAIT exist.
pub(super) const MISC_ENABLE_MWAIT: u64 = 1 << 18;

/// Returns the features that the table promises, and those that the host's processor executes anyway. State components
/// that are not supported cannot be promised.
pub(super) fn features(entries: &[kvm_cpuid_entry2]) -> Features {
    let mut features = promised(entries).with_native(supported());
    features.xcr0 &= supported().xcr0;
    features.xss &= supported().xss;
    features
}

/// Returns the features of KVM_GET_SUPPORTED_CPUID.
pub(super) fn supported() -> &'static Features {
    static HOST: OnceLock<Features> = OnceLock::new();
    HOST.get_or_init(|| promised(&crate::system::supported_cpuid()))
}

fn promised(entries: &[kvm_cpuid_entry2]) -> Features {
    Features::from_cpuid(entries.iter().map(|e| {
        let ebx = if e.function == 0xd {
            offset_of(e)
        } else {
            e.ebx
        };
        (e.function, e.index, e.eax, ebx, e.ecx, e.edx)
    }))
}

/// Returns the LAPIC's configuration that the table describes.
pub(super) fn lapic_config(
    entries: &[kvm_cpuid_entry2],
    features: &Features,
    is_split: bool,
    old: LapicConfig,
) -> LapicConfig {
    let ecx = find(entries, 1, 0).map_or(0, |e| e.ecx);
    LapicConfig {
        x2apic: ecx >> 21 & 1 != 0,
        tsc_deadline: ecx >> 24 & 1 != 0,
        // KVM's own IOAPIC has no EOI register.
        directed_eoi: is_split && ecx >> 21 & 1 != 0,
        maxphyaddr: features.maxphyaddr.clamp(32, 52),
        masks_pmi: !features.has(Feature::Amd),
        ..old
    }
}

/// Returns the performance counters that the table shows. As in KVM, an AMD processor has at least the K7's four.
pub(super) fn pmu_config(entries: &[kvm_cpuid_entry2], features: &Features) -> Config {
    const PERF_CTR_EXT_CORE: u32 = 1 << 23;
    if entries.is_empty() {
        return Config::default();
    }
    let signature = find(entries, 1, 0).map_or(0, |e| e.eax);
    if features.has(Feature::Amd) {
        let has_core =
            find(entries, 0x8000_0001, 0).is_some_and(|e| e.ecx & PERF_CTR_EXT_CORE != 0);
        let v2 = find(entries, 0x8000_0022, 0).map_or([0; 2], |e| [e.eax, e.ebx]);
        return Config::amd(has_core, v2, signature);
    }
    let leaf = find(entries, 0xa, 0).map_or([0; 3], |e| [e.eax, e.ebx, e.edx]);
    Config::intel(leaf, signature)
}

/// True if the table shows IA32_PERF_CAPABILITIES.
pub(super) fn shows_perf_capabilities(entries: &[kvm_cpuid_entry2]) -> bool {
    const PDCM: u32 = 1 << 15;
    find(entries, 1, 0).is_some_and(|e| e.ecx & PDCM != 0)
}

/// Makes KVM's only check of a table: it shows 48 or 57 bits of virtual address, or none.
pub(super) fn is_possible(entries: &[kvm_cpuid_entry2]) -> bool {
    let widths = find(entries, 0x8000_0008, 0).map_or(0, |e| e.eax);
    matches!(widths >> 8 & 0xff, 0 | 48 | 57)
}

/// True if the table has the PKRU component without a place in XSAVE images. The VMM's images then lack PKRU.
///
/// QEMU asks the processor for the places of components. Where the processor has no PKRU and nothing answers in its
/// place, QEMU shows offset 0, which is x87's. The guest gets a proper place all the same.
pub(super) fn lacks_pkru(entries: &[kvm_cpuid_entry2]) -> bool {
    let component = xsave::PKRU.trailing_zeros();
    find(entries, 0xd, component).is_some_and(|e| e.index == component && e.ebx != offset_of(e))
}

/// Returns the offset of PKRU if the entry is that component's.
fn offset_of(e: &kvm_cpuid_entry2) -> u32 {
    let is_pkru = e.index == xsave::PKRU.trailing_zeros() && e.eax != 0;
    if is_pkru && e.ebx < xsave::HEADER_END as u32 {
        pkru_offset() as u32
    } else {
        e.ebx
    }
}

/// Returns the KVM_FEATURE_* bits that the table promises: leaf 1 behind KVM's signature, wherever that is.
pub(super) fn kvm_features(entries: &[kvm_cpuid_entry2]) -> u32 {
    kvm_features_leaf(entries)
        .and_then(|leaf| find(entries, leaf, 0))
        .map_or(0, |e| e.eax)
}

/// Returns anykvm's own features that the table promises: leaf 1 behind anykvm's signature, wherever that is.
pub(super) fn own_features(entries: &[kvm_cpuid_entry2]) -> u32 {
    base(entries, &crate::system::own_cpuid::SIGNATURE)
        .and_then(|base| find(entries, base.function | 1, 0))
        .map_or(0, |e| e.eax)
}

fn kvm_features_leaf(entries: &[kvm_cpuid_entry2]) -> Option<u32> {
    base(entries, b"KVMKVMKVM\0\0\0").map(|base| base.function | 1)
}

/// Returns the first leaf of the hypervisor's interface with this signature, which may be behind other interfaces.
fn base<'a>(entries: &'a [kvm_cpuid_entry2], signature: &[u8; 12]) -> Option<&'a kvm_cpuid_entry2> {
    let (words, _) = signature.as_chunks::<4>();
    entries.iter().find(|e| {
        let registers = [e.ebx, e.ecx, e.edx].map(u32::to_le_bytes);
        e.function & 0xffff_00ff == 0x4000_0000 && registers == words
    })
}

fn find(entries: &[kvm_cpuid_entry2], leaf: u32, subleaf: u32) -> Option<&kvm_cpuid_entry2> {
    entries.iter().find(|e| {
        e.function == leaf && (e.flags & KVM_CPUID_FLAG_SIGNIFCANT_INDEX == 0 || e.index == subleaf)
    })
}

/// State that bits of the table depend on, besides the CPU's.
#[derive(Clone, Copy, Debug)]
pub(super) struct Follows {
    /// IA32_APIC_BASE enables the LAPIC.
    pub(super) apic_enabled: bool,
    /// The MONITOR bit follows IA32_MISC_ENABLE (without KVM_X86_QUIRK_MISC_ENABLE_NO_MWAIT).
    pub(super) misc_enable: bool,
    /// HLT does not exit (KVM_X86_DISABLE_EXITS_HLT), so other vCPUs need not wake a vCPU from it.
    pub(super) keeps_hlt: bool,
}

/// Returns the registers of a leaf. A leaf above the highest basic one gives the highest basic leaf (Intel) or zeros
/// (AMD), as in KVM (SDM vol. 2, CPUID).
pub(super) fn lookup(
    entries: &[kvm_cpuid_entry2],
    cpu: &CpuState,
    follows: Follows,
    leaf: u32,
    subleaf: u32,
) -> [u32; 4] {
    let entry = find(entries, leaf, subleaf).or_else(|| out_of_range(entries, cpu, leaf, subleaf));
    let Some(e) = entry else {
        // An absent subleaf of the topology leaf still gives the level and the id.
        let id = find(entries, 0xb, 0)
            .or(find(entries, 0xb, 1))
            .map_or(0, |e| e.edx);
        return if matches!(leaf, 0xb | 0x1f) {
            [0, 0, subleaf & 0xff, id]
        } else {
            [0; 4]
        };
    };
    let mut e = *e;
    follow_state(&mut e, entries, cpu, follows);
    [e.eax, e.ebx, e.ecx, e.edx]
}

/// Returns what KVM_GET_CPUID2 shows: the table, with the bits that depend on the CPU's state.
pub(super) fn shown(
    entries: &[kvm_cpuid_entry2],
    cpu: &CpuState,
    follows: Follows,
) -> Vec<kvm_cpuid_entry2> {
    let mut list = entries.to_vec();
    for e in &mut list {
        follow_state(e, entries, cpu, follows);
    }
    list
}

/// Fills in Xen's leaf of time, if there is one: kvmclock's factor and shift, and the TSC's frequency in kHz (Xen's public
/// headers, arch-x86/cpuid.h, leaf 3).
pub(super) fn show_xen_clock(entries: &mut [kvm_cpuid_entry2], tsc: &TscParams) {
    let base = base(entries, b"XenVMMXenVMM");
    let Some(base) = base.filter(|e| e.eax >= e.function + 3) else {
        return;
    };
    let leaf = base.function + 3;
    let khz = tsc.real_khz();
    let (mul, shift) = pvclock_scale(khz);
    for e in entries.iter_mut().filter(|e| e.function == leaf) {
        match e.index {
            1 => (e.ecx, e.edx) = (mul, i32::from(shift) as u32),
            2 => e.eax = khz,
            _ => {}
        }
    }
}

/// Sets the bits of a leaf that depend on control registers and other state.
fn follow_state(
    e: &mut kvm_cpuid_entry2,
    entries: &[kvm_cpuid_entry2],
    cpu: &CpuState,
    follows: Follows,
) {
    /// KVM_FEATURE_PV_UNHALT.
    const PV_UNHALT: u32 = 1 << 7;
    match (e.function, e.index) {
        (leaf @ 0x4000_0000..=0x4000_ffff, _)
            if follows.keeps_hlt && kvm_features_leaf(entries) == Some(leaf) =>
        {
            e.eax &= !PV_UNHALT;
        }
        (1, _) => {
            if e.ecx >> 26 & 1 != 0 {
                let osxsave = cpu.cr4 & cr4::OSXSAVE != 0;
                e.ecx = e.ecx & !(1 << 27) | u32::from(osxsave) << 27;
            }
            e.edx = e.edx & !(1 << 9) | u32::from(follows.apic_enabled) << 9;
            if follows.misc_enable {
                let mwait = cpu.msr.misc_enable & MISC_ENABLE_MWAIT != 0;
                e.ecx = e.ecx & !(1 << 3) | u32::from(mwait) << 3;
            }
        }
        (7, 0) => {
            let ospke = cpu.cr4 & cr4::PKE != 0;
            e.ecx = e.ecx & !(1 << 4) | u32::from(ospke) << 4;
        }
        // Size of the enabled components, in the standard format; in the compacted format, XSS counts, too.
        (0xd, 0) => e.ebx = xsave_size(entries, cpu.xcr0, false),
        (0xd, 1) if e.eax & 0b1010 != 0 => {
            e.ebx = xsave_size(entries, cpu.xcr0 | cpu.xss, true);
        }
        (0xd, 2..) => e.ebx = offset_of(e),
        _ => {}
    }
}

fn out_of_range<'a>(
    entries: &'a [kvm_cpuid_entry2],
    cpu: &CpuState,
    leaf: u32,
    subleaf: u32,
) -> Option<&'a kvm_cpuid_entry2> {
    if leaf >= 0x4000_0000 || cpu.features.has(Feature::Amd) {
        return None;
    }
    let max = find(entries, 0, 0)?.eax;
    (leaf > max).then(|| find(entries, max, subleaf)).flatten()
}

fn xsave_size(entries: &[kvm_cpuid_entry2], components: u64, compacted: bool) -> u32 {
    let mut size = 576u32;
    for e in entries
        .iter()
        .filter(|e| e.function == 0xd && (2..63).contains(&e.index))
    {
        if components >> e.index & 1 == 0 {
            continue;
        }
        size = if compacted {
            // Saturating, because the VMM's table may contain any number.
            let start = if e.ecx & 2 != 0 {
                size.saturating_add(63) & !63
            } else {
                size
            };
            start.saturating_add(e.eax)
        } else {
            size.max(offset_of(e).saturating_add(e.eax))
        };
    }
    size
}
