//! KVM_GET_SUPPORTED_HV_CPUID: the supported part of Hyper-V's interface.
//!
//! The synthetic interrupt controller, its timers and messages exist for VMMs that enable them (KVM_CAP_HYPERV_SYNIC).

use kvm_bindings::kvm_cpuid_entry2;

use crate::limits::MAX_VCPUS;

/// Leaf 1, EAX: "Hv#1".
pub(crate) const INTERFACE: u32 = 0x3123_7648;
/// Leaf of features.
pub(crate) const FEATURES: u32 = 0x4000_0003;
/// Leaf of recommendations.
pub(crate) const RECOMMENDATIONS: u32 = 0x4000_0004;

/// Leaf of the synthetic debugger.
pub(crate) const DEBUGGER: u32 = 0x4000_0082;

/// Bits of [`FEATURES`], EAX: the MSRs that the guest may access.
pub(crate) mod access {
    /// VP_RUNTIME.
    pub(crate) const RUNTIME: u32 = 1 << 0;
    /// TIME_REF_COUNT.
    pub(crate) const TIME: u32 = 1 << 1;
    /// SCONTROL and the other registers of the synthetic interrupt controller.
    pub(crate) const SYNIC: u32 = 1 << 2;
    /// STIMER*.
    pub(crate) const TIMERS: u32 = 1 << 3;
    /// EOI, ICR, TPR and VP_ASSIST_PAGE.
    pub(crate) const APIC: u32 = 1 << 4;
    /// GUEST_OS_ID and HYPERCALL.
    pub(crate) const HYPERCALL: u32 = 1 << 5;
    /// VP_INDEX.
    pub(crate) const INDEX: u32 = 1 << 6;
    /// RESET.
    pub(crate) const RESET: u32 = 1 << 7;
    /// REFERENCE_TSC.
    pub(crate) const REFERENCE_TSC: u32 = 1 << 9;
    /// TSC_FREQUENCY and APIC_FREQUENCY.
    pub(crate) const FREQUENCIES: u32 = 1 << 11;
    /// REENLIGHTENMENT_CONTROL and TSC_EMULATION_*.
    pub(crate) const REENLIGHTENMENT: u32 = 1 << 13;
    /// TSC_INVARIANT_CONTROL.
    pub(crate) const INVARIANT_TSC: u32 = 1 << 15;
}

/// Bits of [`FEATURES`], EBX: the hypercalls that the guest may make.
pub(crate) mod right {
    /// HvCallPostMessage.
    pub(crate) const POST_MESSAGES: u32 = 1 << 4;
    /// HvCallSignalEvent.
    pub(crate) const SIGNAL_EVENTS: u32 = 1 << 5;
    /// HvCallPostDebugData and the debugger's other calls.
    pub(crate) const DEBUG: u32 = 1 << 11;
    /// HvExtCallQueryCapabilities, and the calls that it reports.
    pub(crate) const EXTENDED: u32 = 1 << 20;
}

/// Bits of [`FEATURES`], EDX.
pub(crate) mod feature {
    /// Arguments of hypercalls may be in SSE registers.
    pub(crate) const SSE_INPUT: u32 = 1 << 4;
    /// TSC_FREQUENCY and APIC_FREQUENCY exist.
    pub(crate) const FREQUENCIES: u32 = 1 << 8;
    /// CRASH_*.
    pub(crate) const CRASH: u32 = 1 << 10;
    /// SYNDBG_*.
    pub(crate) const DEBUGGER: u32 = 1 << 11;
    /// Synthetic timers may interrupt without a message.
    pub(crate) const DIRECT_TIMERS: u32 = 1 << 19;
}

/// Bits of [`RECOMMENDATIONS`], EAX.
pub(crate) mod recommended {
    /// HvCallFlushVirtualAddressSpace and -List.
    pub(crate) const FLUSH: u32 = 1 << 2;
    /// EOI, ICR and TPR by MSR.
    pub(crate) const APIC: u32 = 1 << 3;
    /// The guest need not use watchdogs.
    pub(crate) const RELAXED: u32 = 1 << 5;
    /// HvCallSendSyntheticClusterIpi.
    pub(crate) const IPI: u32 = 1 << 10;
    /// Hypercalls have forms for more than 64 processors.
    pub(crate) const SPARSE: u32 = 1 << 11;
    /// The hyperthreads of a core are never used by two VMs.
    pub(crate) const NO_CORE_SHARING: u32 = 1 << 18;
}

/// KVM_GET_SUPPORTED_HV_CPUID on the system, or on a vCPU with or without an in-kernel LAPIC.
pub fn supported_hv_cpuid(has_lapic: bool) -> Vec<kvm_cpuid_entry2> {
    const LAST: u32 = DEBUGGER;
    /// "Linux KVM Hv".
    const VENDOR: [u32; 3] = [0x756e_694c, 0x564b_2078, 0x7648_204d];
    /// Build and version of the interface, with KVM's numbers.
    const VERSION: [u32; 2] = [0x3839, 0xa_0000];
    /// "VS#1".
    const DEBUGGER_INTERFACE: u32 = 0x3123_5356;
    /// HV_X64_NESTED_MSR_BITMAP, which is of use only to guests with nested virtualization.
    const NESTED: u32 = 1 << 19;
    let accesses = access::RUNTIME
        | access::TIME
        | access::SYNIC
        | access::TIMERS
        | access::APIC
        | access::HYPERCALL
        | access::INDEX
        | access::RESET
        | access::REFERENCE_TSC
        | access::FREQUENCIES
        | access::REENLIGHTENMENT
        | access::INVARIANT_TSC;
    let mut advice =
        recommended::FLUSH | recommended::APIC | recommended::RELAXED | recommended::SPARSE;
    let rights = right::POST_MESSAGES | right::SIGNAL_EVENTS | right::DEBUG | right::EXTENDED;
    let mut features =
        feature::SSE_INPUT | feature::FREQUENCIES | feature::CRASH | feature::DEBUGGER;
    if has_lapic {
        features |= feature::DIRECT_TIMERS;
        advice |= recommended::IPI;
    }
    if !has_hyperthreads() {
        advice |= recommended::NO_CORE_SHARING;
    }
    let [b, c, d] = VENDOR;
    [
        (0x4000_0000, [LAST, b, c, d]),
        (0x4000_0001, [INTERFACE, 0, 0, 0]),
        (0x4000_0002, [VERSION[0], VERSION[1], 0, 0]),
        (FEATURES, [accesses, rights, 0, features]),
        // EBX: how often to try a lock before HvCallNotifyLongSpinWait. All ones mean never.
        (RECOMMENDATIONS, [advice, u32::MAX, 0, 0]),
        (0x4000_0005, [MAX_VCPUS as u32, 64, 0, 0]),
        (0x4000_000a, [NESTED, 0, 0, 0]),
        (0x4000_0080, [LAST, b, c, d]),
        (0x4000_0081, [DEBUGGER_INTERFACE, 0, 0, 0]),
        // The guest may be debugged, if the VMM keeps this bit.
        (DEBUGGER, [1 << 1, 0, 0, 0]),
    ]
    .map(|(function, [eax, ebx, ecx, edx])| kvm_cpuid_entry2 {
        function,
        eax,
        ebx,
        ecx,
        edx,
        ..Default::default()
    })
    .to_vec()
}

/// True if the host may run another VM on the other hyperthread of a core.
fn has_hyperthreads() -> bool {
    let control = std::fs::read_to_string("/sys/devices/system/cpu/smt/control");
    control.is_ok_and(|text| !matches!(text.trim(), "forceoff" | "notsupported"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leaves_are_in_order_and_say_who_answers() {
        let list = supported_hv_cpuid(true);
        assert!(list.is_sorted_by_key(|e| e.function));
        let first = list[0];
        let name: Vec<u8> = [first.ebx, first.ecx, first.edx]
            .iter()
            .flat_map(|word| word.to_le_bytes())
            .collect();
        assert_eq!(name, b"Linux KVM Hv");
        assert_eq!(first.eax, list[list.len() - 1].function);
    }
}
