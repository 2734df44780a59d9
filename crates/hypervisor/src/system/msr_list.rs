//! KVM_GET_MSR_INDEX_LIST: the MSRs that make up a vCPU's saved state.

use x86_cpu::msrs::ARCH_CAPABILITIES;
use x86_defs::msr::*;

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
        IA32_TSC_ADJUST,
        IA32_TSC_DEADLINE,
        IA32_MISC_ENABLE,
        IA32_MCG_STATUS,
        IA32_MCG_CTL,
        IA32_APIC_BASE,
        // A VMM resets it with the machine.
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
    if !super::cpuid::is_amd() {
        list.push(IA32_FEATURE_CONTROL);
    }
    list.extend(crate::vcpu::hyperv::saved());
    list
}

/// KVM_GET_MSR_FEATURE_INDEX_LIST.
pub fn msr_feature_index_list() -> Vec<u32> {
    vec![
        IA32_ARCH_CAPABILITIES,
        IA32_PERF_CAPABILITIES,
        AMD64_DE_CFG,
        IA32_BIOS_SIGN_ID,
    ]
}

/// KVM_GET_MSRS on the system fd: a feature MSR's value.
pub fn feature_msr(index: u32) -> Option<u64> {
    match index {
        IA32_ARCH_CAPABILITIES => Some(ARCH_CAPABILITIES),
        // LFENCE is serialising.
        AMD64_DE_CFG => Some(1 << 1),
        // No virtual PMU.
        IA32_PERF_CAPABILITIES => Some(0),
        IA32_BIOS_SIGN_ID => Some(0x1_0000_0000),
        _ => None,
    }
}
