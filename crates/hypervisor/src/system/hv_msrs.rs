//! Hyper-V's MSRs: their numbers, and the features that give a guest access to them (Hypervisor Top-Level Functional
//! Specification).

use super::hv_cpuid::{access, feature};

/// HV_X64_MSR_*.
pub(crate) mod index {
    pub(crate) const GUEST_OS_ID: u32 = 0x4000_0000;
    pub(crate) const HYPERCALL: u32 = 0x4000_0001;
    pub(crate) const VP_INDEX: u32 = 0x4000_0002;
    pub(crate) const RESET: u32 = 0x4000_0003;
    pub(crate) const VP_RUNTIME: u32 = 0x4000_0010;
    pub(crate) const TIME_REF_COUNT: u32 = 0x4000_0020;
    pub(crate) const REFERENCE_TSC: u32 = 0x4000_0021;
    pub(crate) const TSC_FREQUENCY: u32 = 0x4000_0022;
    pub(crate) const APIC_FREQUENCY: u32 = 0x4000_0023;
    pub(crate) const EOI: u32 = 0x4000_0070;
    pub(crate) const ICR: u32 = 0x4000_0071;
    pub(crate) const TPR: u32 = 0x4000_0072;
    pub(crate) const VP_ASSIST_PAGE: u32 = 0x4000_0073;
    pub(crate) const SCONTROL: u32 = 0x4000_0080;
    pub(crate) const SVERSION: u32 = 0x4000_0081;
    pub(crate) const SIEFP: u32 = 0x4000_0082;
    pub(crate) const SIMP: u32 = 0x4000_0083;
    pub(crate) const EOM: u32 = 0x4000_0084;
    pub(crate) const SINT0: u32 = 0x4000_0090;
    pub(crate) const SINT15: u32 = 0x4000_009f;
    pub(crate) const STIMER0_CONFIG: u32 = 0x4000_00b0;
    pub(crate) const STIMER3_COUNT: u32 = 0x4000_00b7;
    /// HV_X64_MSR_SYNDBG_CONTROL: the VMM answers a write with a status.
    pub const SYNDBG_CONTROL: u32 = 0x4000_00f1;
    pub(crate) const SYNDBG_STATUS: u32 = 0x4000_00f2;
    pub(crate) const SYNDBG_SEND_BUFFER: u32 = 0x4000_00f3;
    pub(crate) const SYNDBG_PENDING_BUFFER: u32 = 0x4000_00f5;
    pub(crate) const SYNDBG_OPTIONS: u32 = 0x4000_00ff;
    pub(crate) const CRASH_P0: u32 = 0x4000_0100;
    pub(crate) const CRASH_P4: u32 = 0x4000_0104;
    pub(crate) const CRASH_CTL: u32 = 0x4000_0105;
    pub(crate) const REENLIGHTENMENT_CONTROL: u32 = 0x4000_0106;
    pub(crate) const TSC_EMULATION_CONTROL: u32 = 0x4000_0107;
    pub(crate) const TSC_EMULATION_STATUS: u32 = 0x4000_0108;
    pub(crate) const TSC_INVARIANT_CONTROL: u32 = 0x4000_0118;
}
use index::*;

/// A range of registers.
pub(crate) struct Registers {
    pub(crate) first: u32,
    pub(crate) last: u32,
    /// Bits of leaf [`FEATURES`](super::hv_cpuid::FEATURES), EAX and EDX, that give the guest access if the VMM
    /// enforces CPUID.
    pub(crate) access: u32,
    pub(crate) feature: u32,
    /// A VMM saves all registers of the range.
    saved: bool,
}

const fn registers(first: u32, last: u32, access: u32, feature: u32) -> Registers {
    Registers {
        first,
        last,
        access,
        feature,
        saved: true,
    }
}

const fn not_saved(registers: Registers) -> Registers {
    Registers {
        saved: false,
        ..registers
    }
}

const fn by_access(first: u32, last: u32, access: u32) -> Registers {
    registers(first, last, access, 0)
}

/// All of Hyper-V's MSRs. As in KVM, fewer are listed than must be saved: VMMs know of SINTs and timers by their
/// capability.
pub(crate) const TABLE: &[Registers] = &[
    by_access(GUEST_OS_ID, HYPERCALL, access::HYPERCALL),
    by_access(VP_INDEX, VP_INDEX, access::INDEX),
    by_access(RESET, RESET, access::RESET),
    by_access(VP_RUNTIME, VP_RUNTIME, access::RUNTIME),
    by_access(TIME_REF_COUNT, TIME_REF_COUNT, access::TIME),
    by_access(REFERENCE_TSC, REFERENCE_TSC, access::REFERENCE_TSC),
    by_access(TSC_FREQUENCY, APIC_FREQUENCY, access::FREQUENCIES),
    not_saved(by_access(EOI, TPR, access::APIC)),
    by_access(VP_ASSIST_PAGE, VP_ASSIST_PAGE, access::APIC),
    by_access(SCONTROL, SCONTROL, access::SYNIC),
    not_saved(by_access(SVERSION, EOM, access::SYNIC)),
    not_saved(by_access(SINT0, SINT15, access::SYNIC)),
    by_access(STIMER0_CONFIG, STIMER0_CONFIG, access::TIMERS),
    not_saved(by_access(STIMER0_CONFIG + 1, STIMER3_COUNT, access::TIMERS)),
    registers(SYNDBG_CONTROL, SYNDBG_PENDING_BUFFER, 0, feature::DEBUGGER),
    registers(SYNDBG_OPTIONS, SYNDBG_OPTIONS, 0, feature::DEBUGGER),
    registers(CRASH_P0, CRASH_CTL, 0, feature::CRASH),
    by_access(
        REENLIGHTENMENT_CONTROL,
        TSC_EMULATION_STATUS,
        access::REENLIGHTENMENT,
    ),
    by_access(
        TSC_INVARIANT_CONTROL,
        TSC_INVARIANT_CONTROL,
        access::INVARIANT_TSC,
    ),
];

/// Returns those that KVM_GET_MSR_INDEX_LIST lists.
pub(crate) fn saved() -> impl Iterator<Item = u32> {
    let rows = TABLE.iter().filter(|row| row.saved);
    rows.flat_map(|row| row.first..=row.last)
}
