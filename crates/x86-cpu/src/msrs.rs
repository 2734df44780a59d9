//! The MSRs that are plain CPU registers.
//!
//! EFER, FS.base and GS.base live in [`crate::CpuState`]; APIC, clock and
//! paravirtual MSRs belong to the hypervisor.

/// MSRs without side effects outside the CPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
#[allow(missing_docs, reason = "the fields are the MSRs' own names")]
pub struct Msrs {
    pub star: u64,
    pub lstar: u64,
    pub cstar: u64,
    pub fmask: u64,
    pub kernel_gs_base: u64,
    pub tsc_aux: u64,
    pub sysenter_cs: u64,
    pub sysenter_esp: u64,
    pub sysenter_eip: u64,
    pub pat: u64,
    pub misc_enable: u64,
    pub debugctl: u64,
    pub smbase: u64,
    pub spec_ctrl: u64,
    pub mtrr_def_type: u64,
    pub mtrr_fixed: [u64; 11],
    pub mtrr_var: [u64; 16],
    pub power_ctl: u64,
    pub platform_info: u64,
    pub misc_features: u64,
    pub arch_capabilities: u64,
    pub feature_control: u64,
    pub ucode_rev: u64,
    pub hwcr: u64,
    pub de_cfg: u64,
    pub osvw_id_length: u64,
    pub osvw_status: u64,
}

/// MSR_PLATFORM_INFO: the processor has CPUID faulting (SDM vol. 3, "CPUID faulting").
pub(crate) const PLATFORM_INFO_CPUID_FAULT: u64 = 1 << 31;
/// MSR_MISC_FEATURES_ENABLES: CPUID faulting is on.
pub(crate) const MISC_FEATURES_CPUID_FAULT: u64 = 1 << 0;

/// IA32_FEATURE_CONTROL: the register cannot be written any more.
pub(crate) const FEATURE_CONTROL_LOCKED: u64 = 1 << 0;

impl Msrs {
    /// Returns true if CPUID raises `#GP(0)` outside of ring 0.
    pub const fn faults_cpuid(&self) -> bool {
        self.misc_features & MISC_FEATURES_CPUID_FAULT != 0
    }
}
