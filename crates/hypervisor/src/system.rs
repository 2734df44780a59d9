//! What the system fd answers: capabilities, supported CPUID, MSR lists.

use kvm_bindings::kvm_cpuid_entry2;

/// KVM_GET_SUPPORTED_CPUID.
pub fn supported_cpuid() -> Vec<kvm_cpuid_entry2> {
    Vec::new()
}

/// KVM_GET_EMULATED_CPUID.
pub fn emulated_cpuid() -> Vec<kvm_cpuid_entry2> {
    Vec::new()
}

/// KVM_GET_MSR_INDEX_LIST.
pub fn msr_index_list() -> Vec<u32> {
    Vec::new()
}

/// KVM_GET_MSR_FEATURE_INDEX_LIST.
pub fn msr_feature_index_list() -> Vec<u32> {
    Vec::new()
}

/// KVM_GET_MSRS on the system fd: a feature MSR's value.
pub fn feature_msr(_index: u32) -> Option<u64> {
    None
}

/// KVM_CHECK_EXTENSION.
pub fn check_extension(_cap: u32) -> i32 {
    0
}
