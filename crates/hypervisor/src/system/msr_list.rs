//! KVM_GET_MSR_INDEX_LIST: the MSRs that make up a vCPU's saved state.

use x86_defs::msr::*;

use crate::limits::PERF_CAPABILITIES;

/// KVM_GET_MSR_INDEX_LIST.
pub fn msr_index_list() -> Vec<u32> {
    let mut list = vec![
        IA32_SYSENTER_CS,
        IA32_SYSENTER_ESP,
        IA32_SYSENTER_EIP,
        IA32_STAR,
        IA32_CSTAR,
        IA32_KERNEL_GS_BASE,
        IA32_FMASK,
        IA32_LSTAR,
        IA32_TSC,
        IA32_PAT,
        IA32_TSC_AUX,
        KVM_WALL_CLOCK,
        KVM_SYSTEM_TIME,
        KVM_WALL_CLOCK_NEW,
        KVM_SYSTEM_TIME_NEW,
        KVM_ASYNC_PF_EN,
        KVM_ASYNC_PF_INT,
        KVM_ASYNC_PF_ACK,
        KVM_STEAL_TIME,
        KVM_PV_EOI_EN,
        KVM_POLL_CONTROL,
        ANYKVM_ROOT_CACHE,
        IA32_TSC_ADJUST,
        IA32_TSC_DEADLINE,
        IA32_MISC_ENABLE,
        IA32_MCG_STATUS,
        IA32_MCG_CTL,
        IA32_APIC_BASE,
        // Saved although it is seldom changed: a VMM resets it with the machine.
        IA32_SMBASE,
        IA32_SPEC_CTRL,
        IA32_ARCH_CAPABILITIES,
        IA32_EFER,
        IA32_FS_BASE,
        IA32_GS_BASE,
        IA32_DEBUGCTL,
        IA32_MTRR_DEF_TYPE,
        IA32_MTRR_FIX64K_00000,
        IA32_MTRR_FIX16K_80000,
        IA32_MTRR_FIX16K_A0000,
    ];
    list.extend(IA32_MTRR_FIX4K_C0000..=IA32_MTRR_FIX4K_F8000);
    list.extend(IA32_MTRR_PHYSBASE0..IA32_MTRR_PHYSBASE0 + 16);
    list.extend([
        IA32_XSS,
        IA32_PKRS,
        IA32_SPEC_CTRL,
        IA32_ARCH_CAPABILITIES,
        IA32_BIOS_SIGN_ID,
        IA32_SMBASE,
        MSR_SMI_COUNT,
        MSR_PLATFORM_INFO,
        MSR_MISC_FEATURES_ENABLES,
        MSR_POWER_CTL,
        AMD64_HWCR,
    ]);
    if !super::is_amd() {
        list.push(IA32_FEATURE_CONTROL);
    }
    list.extend(super::hv_msrs::saved());
    list.extend(performance_counters(super::is_amd()));
    list
}

/// Returns the registers of performance counters as the host's vendor has them. Selects and controls come before
/// counters.
fn performance_counters(is_amd: bool) -> Vec<u32> {
    let general = 8;
    if is_amd {
        let mut list: Vec<u32> = (0..4)
            .flat_map(|n| [K7_EVNTSEL0 + n, K7_PERFCTR0 + n])
            .collect();
        list.extend(AMD64_PERFEVTSEL0_CORE..AMD64_PERFEVTSEL0_CORE + 12);
        list.extend([
            AMD64_PERF_CNTR_GLOBAL_CTL,
            AMD64_PERF_CNTR_GLOBAL_STATUS,
            AMD64_PERF_CNTR_GLOBAL_STATUS_CLR,
            AMD64_PERF_CNTR_GLOBAL_STATUS_SET,
        ]);
        return list;
    }
    let mut list = vec![
        IA32_FIXED_CTR_CTRL,
        IA32_PERF_GLOBAL_STATUS,
        IA32_PERF_GLOBAL_CTRL,
        IA32_PERF_GLOBAL_OVF_CTRL,
    ];
    list.extend(IA32_PERFEVTSEL0..IA32_PERFEVTSEL0 + general);
    list.extend(IA32_PMC0..IA32_PMC0 + general);
    list.extend(IA32_FIXED_CTR0..IA32_FIXED_CTR0 + 3);
    list
}

/// The MSRs that describe the CPU. The last one is AMD's.
const FEATURES: [u32; 4] = [
    IA32_ARCH_CAPABILITIES,
    IA32_PERF_CAPABILITIES,
    IA32_BIOS_SIGN_ID,
    AMD64_DE_CFG,
];

/// KVM_GET_MSR_FEATURE_INDEX_LIST.
pub fn msr_feature_index_list() -> Vec<u32> {
    let is_here = |index: &u32| *index != AMD64_DE_CFG || super::is_amd();
    FEATURES.into_iter().filter(is_here).collect()
}

/// True for an MSR that describes the CPU and cannot change while it runs. Microcode may be loaded at any time.
pub(crate) fn is_fixed_feature(index: u32) -> bool {
    index != IA32_BIOS_SIGN_ID && FEATURES.contains(&index)
}

/// IA32_BIOS_SIGN_ID of a new vCPU, as KVM has it.
pub(crate) fn microcode() -> u64 {
    if super::is_amd() {
        0x0100_0065
    } else {
        0x1_0000_0000
    }
}

/// KVM_GET_MSRS on the system fd: a feature MSR's value.
pub fn feature_msr(index: u32) -> Option<u64> {
    match index {
        IA32_ARCH_CAPABILITIES => Some(super::Speculation::here().arch_capabilities),
        // LFENCE is serialising: Linux configures the host's processors so.
        AMD64_DE_CFG if super::is_amd() => Some(1 << 1),
        IA32_PERF_CAPABILITIES if super::is_amd() => Some(0),
        IA32_PERF_CAPABILITIES => Some(PERF_CAPABILITIES),
        IA32_BIOS_SIGN_ID => Some(microcode()),
        _ => None,
    }
}
