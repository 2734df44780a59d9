//! Whose processor the host has.

/// True if the host's processor is AMD's: a vCPU is then AMD's, too, unless KVM_SET_CPUID2 says otherwise.
pub(crate) fn is_amd() -> bool {
    core::arch::x86_64::__cpuid(0).ecx.to_le_bytes() == *b"cAMD"
}
