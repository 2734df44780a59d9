//! Reads and writes of the MSRs that are CPU registers (SDM vol. 4; AMD APM vol. 2;
//! which numbers exist and what a bad value does follows KVM).
//!
//! [`read()`] and [`write()`] are what RDMSR and WRMSR see; [`host_read`] and
//! [`host_write`] are what KVM_GET_MSRS and KVM_SET_MSRS see. APIC, TSC,
//! machine-check, performance and paravirtual MSRs answer [`MsrWrite::Unknown`]
//! here: the hypervisor owns them.

use x86_defs::{
    control::{cr0, efer},
    msr::*,
    reg,
};

use crate::{
    CpuState, Feature, Features,
    msrs::{FEATURE_CONTROL_LOCKED, MISC_FEATURES_CPUID_FAULT, PLATFORM_INFO_CPUID_FAULT},
};

/// What became of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MsrWrite {
    /// Stored, or ignored as KVM ignores it.
    Done,
    /// Stored; translation depends on it: the caller asks for
    /// [`crate::GuestBus::load_root`] and flushes everything.
    LoadRoot,
    /// Stored; supervisor protection keys changed: [`crate::GuestBus::select_view`].
    SelectView,
    /// `#GP(0)`, or KVM_SET_MSRS stops.
    Rejected,
    /// Not an MSR of this model.
    Unknown,
}

/// Who asks: the guest, or the VMM, which may also set read-only MSRs and
/// MSRs that the guest's CPUID does not promise.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Origin {
    Guest,
    Host,
}

/// RDMSR. `None`: not an MSR of this model, or the guest may not read it.
pub fn read(cpu: &CpuState, index: u32) -> Option<u64> {
    get(cpu, index, Origin::Guest)
}

/// KVM_GET_MSRS.
pub fn host_read(cpu: &CpuState, index: u32) -> Option<u64> {
    get(cpu, index, Origin::Host)
}

/// WRMSR.
pub fn write(cpu: &mut CpuState, index: u32, value: u64) -> MsrWrite {
    set(cpu, index, value, Origin::Guest)
}

/// KVM_SET_MSRS.
pub fn host_write(cpu: &mut CpuState, index: u32, value: u64) -> MsrWrite {
    set(cpu, index, value, Origin::Host)
}

/// IA32_MTRRCAP: write-combining, fixed ranges, eight variable ranges.
const MTRRCAP: u64 = 1 << 10 | 1 << 8 | 8;
/// IA32_MISC_ENABLE bits that only the host may change: BTS and PEBS unavailable.
const MISC_ENABLE_RO: u64 = 1 << 11 | 1 << 12;
/// IA32_MISC_ENABLE.EMON, which keeps its value when a guest writes another.
const MISC_ENABLE_EMON: u64 = 1 << 7;
/// IA32_DEBUGCTL: LBR and BTF, which KVM accepts and drops where it has no LBRs.
const DEBUGCTL_IGNORED: u64 = 3;
/// AMD64_DE_CFG: LFENCE is dispatch-serializing.
const DE_CFG_LFENCE: u64 = 1 << 1;
/// AMD64_HWCR: McStatusWrEn, the one bit KVM stores; TscFreqSel reads as set by the VMM.
const HWCR_MC_STATUS_WR: u64 = 1 << 18;
const HWCR_TSC_FREQ_SEL: u64 = 1 << 24;
/// AMD64_HWCR bits that guests set as workarounds and KVM ignores.
const HWCR_IGNORED: u64 = 1 << 3 | 1 << 6 | 1 << 8;

fn get(cpu: &CpuState, index: u32, origin: Origin) -> Option<u64> {
    let f = &cpu.features;
    let m = &cpu.msr;
    let host = origin == Origin::Host;
    Some(match index {
        IA32_EFER => cpu.efer,
        IA32_STAR => m.star,
        IA32_LSTAR => m.lstar,
        IA32_CSTAR => m.cstar,
        IA32_FMASK => m.fmask,
        IA32_FS_BASE => cpu.seg[reg::FS].base,
        IA32_GS_BASE => cpu.seg[reg::GS].base,
        IA32_KERNEL_GS_BASE => m.kernel_gs_base,
        IA32_TSC_AUX if host || f.has(Feature::Rdtscp) || f.has(Feature::Rdpid) => m.tsc_aux,
        IA32_SYSENTER_CS => m.sysenter_cs,
        IA32_SYSENTER_ESP => m.sysenter_esp,
        IA32_SYSENTER_EIP => m.sysenter_eip,
        IA32_PAT => m.pat,
        IA32_MTRRCAP => MTRRCAP,
        IA32_MTRR_DEF_TYPE => m.mtrr_def_type,
        _ if variable_mtrr(index).is_some() => m.mtrr_var[variable_mtrr(index)?],
        _ if fixed_mtrr(index).is_some() => m.mtrr_fixed[fixed_mtrr(index)?],
        IA32_MISC_ENABLE => m.misc_enable,
        IA32_DEBUGCTL => m.debugctl,
        IA32_SPEC_CTRL if host || has_spec_ctrl(cpu) => m.spec_ctrl,
        IA32_XSS if host || f.has(Feature::Xsaves) => cpu.xss,
        IA32_PKRS if host || f.has(Feature::Pks) => cpu.pkrs.into(),
        IA32_ARCH_CAPABILITIES if host || f.has(Feature::ArchCapabilities) => m.arch_capabilities,
        IA32_BIOS_SIGN_ID => m.ucode_rev,
        MSR_PLATFORM_INFO => m.platform_info,
        MSR_POWER_CTL => m.power_ctl,
        MSR_MISC_FEATURES_ENABLES => m.misc_features,
        IA32_SMBASE if host || cpu.events.in_smm => m.smbase,
        IA32_FEATURE_CONTROL if host || !f.has(Feature::Amd) => m.feature_control,
        // KVM: 1000 MHz steps, multiplier 4.
        IA32_PERF_STATUS => 1000 | 4 << 40,
        MSR_EBC_FREQUENCY_ID => 1 << 24,
        MSR_FSB_FREQ => 3,
        MSR_BBL_CR_CTL3 => 0xbe70_2111,
        AMD64_HWCR => m.hwcr,
        AMD64_DE_CFG if f.has(Feature::Amd) => m.de_cfg,
        AMD64_OSVW_ID_LENGTH if host || f.has(Feature::Osvw) => m.osvw_id_length,
        AMD64_OSVW_STATUS if host || f.has(Feature::Osvw) => m.osvw_status,
        _ if reads_as_zero(index) => 0,
        _ => return None,
    })
}

/// Counters that software touches without asking CPUID. There is no PMU: as KVM without one has
/// them, they stay zero.
fn is_counter(index: u32) -> bool {
    const P6_PERFCTR: u32 = 0xc1;
    const P6_EVNTSEL: u32 = 0x186;
    [
        (K7_EVNTSEL0, 4),
        (K7_PERFCTR0, 4),
        (P6_PERFCTR, 2),
        (P6_EVNTSEL, 2),
    ]
    .iter()
    .any(|(first, n)| index.wrapping_sub(*first) < *n)
}

/// MSRs that KVM answers with zero because guests read them unasked.
fn reads_as_zero(index: u32) -> bool {
    is_counter(index)
        || matches!(
            index,
            IA32_PLATFORM_ID | MSR_EBL_CR_POWERON | MSR_SMI_COUNT | MSR_LASTBRANCHFROMIP
                ..=MSR_LASTINTTOIP
                    | IA32_PERF_CTL
                    | MSR_RAPL_POWER_UNIT
                    | MSR_PKG_ENERGY_STATUS
                    | MSR_DRAM_ENERGY_STATUS
                    | MSR_PP0_ENERGY_STATUS
                    | MSR_PP1_ENERGY_STATUS
                    | AMD64_SYSCFG
                    | AMD64_NB_CFG
                    | AMD64_BU_CFG2
                    | AMD64_DC_CFG
                    | AMD64_VM_HSAVE_PA
                    | K7_CLK_CTL
                    | K8_INT_PENDING_MSG
                    | K8_TSEG_ADDR
                    | K8_TSEG_MASK
                    | FAM10H_MMIO_CONF_BASE
                    | F15H_EX_CFG
        )
}

/// MSRs whose writes KVM drops.
fn write_is_ignored(index: u32) -> bool {
    is_counter(index)
        || matches!(
            index,
            IA32_BIOS_UPDT_TRIG
                | AMD64_NB_CFG
                | AMD64_VM_HSAVE_PA
                | AMD64_PATCH_LOADER
                | AMD64_BU_CFG2
                | AMD64_DC_CFG
                | F15H_EX_CFG
                | K7_CLK_CTL
                | MSR_BBL_CR_CTL3
        )
}

/// Returns the value that is stored when `value` is written: some bits do not follow.
fn kept(cpu: &CpuState, index: u32, value: u64, host: bool) -> u64 {
    let emon = MISC_ENABLE_EMON;
    match index {
        // AMD's processors have no 64-bit SYSENTER.
        IA32_SYSENTER_ESP | IA32_SYSENTER_EIP if cpu.features.has(Feature::Amd) => {
            value & 0xffff_ffff
        }
        IA32_MISC_ENABLE if !host => value & !emon | cpu.msr.misc_enable & emon,
        _ => value,
    }
}

fn set(cpu: &mut CpuState, index: u32, value: u64, origin: Origin) -> MsrWrite {
    let host = origin == Origin::Host;
    let f = cpu.features;
    let value = kept(cpu, index, value, host);
    // Each arm yields whether the value is good; the slot is written at the end.
    let canonical = cpu.is_canonical(value);
    let (good, slot): (bool, &mut u64) = match index {
        IA32_EFER => return set_efer(cpu, value, host),
        IA32_STAR => (true, &mut cpu.msr.star),
        IA32_LSTAR => (canonical, &mut cpu.msr.lstar),
        IA32_CSTAR => (canonical, &mut cpu.msr.cstar),
        IA32_FMASK => (true, &mut cpu.msr.fmask),
        IA32_FS_BASE => (canonical, &mut cpu.seg[reg::FS].base),
        IA32_GS_BASE => (canonical, &mut cpu.seg[reg::GS].base),
        IA32_KERNEL_GS_BASE => (canonical, &mut cpu.msr.kernel_gs_base),
        IA32_TSC_AUX => return set_tsc_aux(cpu, value, host),
        IA32_SYSENTER_CS => (true, &mut cpu.msr.sysenter_cs),
        IA32_SYSENTER_ESP => (canonical, &mut cpu.msr.sysenter_esp),
        IA32_SYSENTER_EIP => (canonical, &mut cpu.msr.sysenter_eip),
        IA32_PAT => (is_valid_pat(value), &mut cpu.msr.pat),
        IA32_MTRR_DEF_TYPE => (
            value & !0xcff == 0 && is_mtrr_type(value as u8),
            &mut cpu.msr.mtrr_def_type,
        ),
        _ if let Some(n) = variable_mtrr(index) => {
            let good = is_variable_mtrr_value(n, value, f.maxphyaddr);
            (good, &mut cpu.msr.mtrr_var[n])
        }
        _ if let Some(n) = fixed_mtrr(index) => (
            value.to_le_bytes().into_iter().all(is_mtrr_type),
            &mut cpu.msr.mtrr_fixed[n],
        ),
        IA32_MISC_ENABLE => (
            host || (cpu.msr.misc_enable ^ value) & MISC_ENABLE_RO == 0,
            &mut cpu.msr.misc_enable,
        ),
        // DEVIATION: branch single-stepping (BTF) is accepted and has no effect.
        IA32_DEBUGCTL => return accept(value & !DEBUGCTL_IGNORED == 0),
        IA32_SPEC_CTRL => (
            (host || has_spec_ctrl(cpu)) && value & !spec_ctrl_bits(cpu, host) == 0,
            &mut cpu.msr.spec_ctrl,
        ),
        // Commands to a predictor and a cache that are not there.
        IA32_PRED_CMD => return accept((host || f.has(Feature::Ibpb)) && value & !1 == 0),
        IA32_FLUSH_CMD => return accept((host || f.has(Feature::FlushL1d)) && value & !1 == 0),
        IA32_XSS => (
            (host || f.has(Feature::Xsaves)) && value & !f.xss == 0,
            &mut cpu.xss,
        ),
        IA32_PKRS => return set_pkrs(cpu, value, host),
        IA32_ARCH_CAPABILITIES => (host, &mut cpu.msr.arch_capabilities),
        IA32_BIOS_SIGN_ID => {
            // Software writes zero before it asks CPUID for the revision.
            if host {
                cpu.msr.ucode_rev = value;
            }
            return MsrWrite::Done;
        }
        MSR_PLATFORM_INFO => {
            // What is in use cannot be taken back.
            let in_use = cpu.msr.faults_cpuid() && value & PLATFORM_INFO_CPUID_FAULT == 0;
            (host && !in_use, &mut cpu.msr.platform_info)
        }
        // KVM keeps it on AMD too.
        MSR_POWER_CTL => (true, &mut cpu.msr.power_ctl),
        MSR_MISC_FEATURES_ENABLES => {
            let good = value & !known_misc_features(cpu) == 0;
            (good, &mut cpu.msr.misc_features)
        }
        IA32_SMBASE => (host, &mut cpu.msr.smbase),
        MSR_SMI_COUNT | FAM10H_MMIO_CONF_BASE => return accept(value == 0),
        // There is nothing to be enabled (VMX, SGX, LMCE), but firmware and kernels lock it.
        IA32_FEATURE_CONTROL if host || !f.has(Feature::Amd) => (
            value & !FEATURE_CONTROL_LOCKED == 0 && (host || cpu.msr.feature_control == 0),
            &mut cpu.msr.feature_control,
        ),
        AMD64_HWCR => return set_hwcr(cpu, value),
        AMD64_DE_CFG if f.has(Feature::Amd) => (value & !DE_CFG_LFENCE == 0, &mut cpu.msr.de_cfg),
        AMD64_OSVW_ID_LENGTH => (host || f.has(Feature::Osvw), &mut cpu.msr.osvw_id_length),
        AMD64_OSVW_STATUS => (host || f.has(Feature::Osvw), &mut cpu.msr.osvw_status),
        _ if write_is_ignored(index) => return MsrWrite::Done,
        // What can be read but not written, and what the VMM restores after reading it.
        _ => {
            return match get(cpu, index, origin) {
                Some(old) => accept(host && old == value),
                None => MsrWrite::Unknown,
            };
        }
    };
    if good {
        *slot = value;
    }
    accept(good)
}

/// Base (even) and mask of a range: no bits beyond physical addresses, none that are reserved.
fn is_variable_mtrr_value(n: usize, value: u64, maxphyaddr: u8) -> bool {
    let above = !0 << maxphyaddr;
    if n.is_multiple_of(2) {
        value & (above | 0xf00) == 0 && is_mtrr_type(value as u8)
    } else {
        value & (above | 0x7ff) == 0
    }
}

/// Bits of MSR_MISC_FEATURES_ENABLES: those that MSR_PLATFORM_INFO offers.
fn known_misc_features(cpu: &CpuState) -> u64 {
    if cpu.msr.platform_info & PLATFORM_INFO_CPUID_FAULT != 0 {
        MISC_FEATURES_CPUID_FAULT
    } else {
        0
    }
}

fn set_hwcr(cpu: &mut CpuState, value: u64) -> MsrWrite {
    let kept = value & !HWCR_IGNORED;
    let good = kept & !(HWCR_MC_STATUS_WR | HWCR_TSC_FREQ_SEL) == 0;
    if good {
        cpu.msr.hwcr = kept;
    }
    accept(good)
}

fn set_tsc_aux(cpu: &mut CpuState, value: u64, host: bool) -> MsrWrite {
    let f = &cpu.features;
    let there = host || f.has(Feature::Rdtscp) || f.has(Feature::Rdpid);
    // AMD drops the upper half, Intel faults.
    if !there || value >> 32 != 0 && !f.has(Feature::Amd) {
        return MsrWrite::Rejected;
    }
    cpu.msr.tsc_aux = value & 0xffff_ffff;
    MsrWrite::Done
}

fn set_pkrs(cpu: &mut CpuState, value: u64, host: bool) -> MsrWrite {
    match u32::try_from(value) {
        Ok(rights) if host || cpu.features.has(Feature::Pks) => {
            cpu.pkrs = rights;
            MsrWrite::SelectView
        }
        _ => MsrWrite::Rejected,
    }
}

fn accept(good: bool) -> MsrWrite {
    if good {
        MsrWrite::Done
    } else {
        MsrWrite::Rejected
    }
}

/// EFER bits that the guest's CPUID promises.
pub fn efer_valid_bits(f: &Features) -> u64 {
    let mut bits = 0;
    // Intel has SCE with long mode even where leaf 0x80000001 shows SYSCALL
    // only in 64-bit mode.
    if f.has(Feature::Syscall) || f.has(Feature::Lm) {
        bits |= efer::SCE;
    }
    if f.has(Feature::Lm) {
        bits |= efer::LME | efer::LMA;
    }
    if f.has(Feature::Nx) {
        bits |= efer::NXE;
    }
    if f.has(Feature::Fxsropt) {
        bits |= efer::FFXSR;
    }
    bits
}

fn set_efer(cpu: &mut CpuState, value: u64, host: bool) -> MsrWrite {
    let valid = efer_valid_bits(&cpu.features);
    let old = cpu.efer;
    if host {
        // A VMM restores MSRs in any order relative to CPUID's finer bits; KVM
        // checks only that the bits exist.
        if value & !(valid | efer::SCE | efer::LME | efer::LMA | efer::NXE) != 0 {
            return MsrWrite::Rejected;
        }
        cpu.efer = value & !efer::LMA | old & efer::LMA;
    } else {
        if value & !valid != 0 {
            return MsrWrite::Rejected;
        }
        // SDM vol. 3, 2.2.1: LME may not change while paging is on. LMA is read-only;
        // writing it changes nothing.
        if cpu.cr0 & cr0::PG != 0 && (value ^ old) & efer::LME != 0 {
            return MsrWrite::Rejected;
        }
        cpu.efer = value & !efer::LMA | old & efer::LMA;
    }
    if (cpu.efer ^ old) & efer::NXE != 0 {
        MsrWrite::LoadRoot
    } else {
        MsrWrite::Done
    }
}

/// Index into `mtrr_var`: base and mask of eight ranges.
fn variable_mtrr(index: u32) -> Option<usize> {
    let n = index.wrapping_sub(IA32_MTRR_PHYSBASE0) as usize;
    (n < 16).then_some(n)
}

/// Index into `mtrr_fixed`: 64K, two of 16K, eight of 4K.
fn fixed_mtrr(index: u32) -> Option<usize> {
    match index {
        IA32_MTRR_FIX64K_00000 => Some(0),
        IA32_MTRR_FIX16K_80000 => Some(1),
        IA32_MTRR_FIX16K_A0000 => Some(2),
        IA32_MTRR_FIX4K_C0000..=IA32_MTRR_FIX4K_F8000 => {
            Some(3 + (index - IA32_MTRR_FIX4K_C0000) as usize)
        }
        _ => None,
    }
}

/// UC, WC, WT, WP, WB (SDM vol. 3, table 12-8).
fn is_mtrr_type(t: u8) -> bool {
    matches!(t, 0 | 1 | 4 | 5 | 6)
}

/// Also UC-, which MTRRs do not have.
fn is_valid_pat(value: u64) -> bool {
    value
        .to_le_bytes()
        .into_iter()
        .all(|t| is_mtrr_type(t) || t == 7)
}

fn has_spec_ctrl(cpu: &CpuState) -> bool {
    let f = &cpu.features;
    f.has(Feature::SpecCtrl) || f.has(Feature::Stibp) || f.has(Feature::Ssbd)
}

fn spec_ctrl_bits(cpu: &CpuState, host: bool) -> u64 {
    let f = &cpu.features;
    if host {
        return 1 << 10 | 7;
    }
    u64::from(f.has(Feature::SpecCtrl))
        // IBRS without STIBP: the bit may be set and does nothing (SDM vol. 4, table 2-2).
        | u64::from(f.has(Feature::Stibp) || f.has(Feature::SpecCtrl)) << 1
        | u64::from(f.has(Feature::Ssbd)) << 2
        | u64::from(f.has(Feature::BhiCtrl)) << 10
}

#[cfg(test)]
mod tests;
