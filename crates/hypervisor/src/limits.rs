//! Limits of what calls may ask for. KVM_CHECK_EXTENSION reports the same values that the calls accept.

use kvm_bindings::*;

/// Largest number of vCPUs of a VM (KVM_MAX_VCPUS).
pub(crate) const MAX_VCPUS: i32 = 1024;
/// Exclusive limit of vCPU ids (KVM_MAX_VCPU_IDS). Ids may have gaps, as APIC ids have.
pub(crate) const MAX_VCPU_IDS: i32 = 4 * MAX_VCPUS;

/// The exits that KVM_CAP_X86_DISABLE_EXITS accepts. MWAIT is a NOP here, and there are no C-state MSRs.
pub(crate) const DISABLED_EXITS: u32 = KVM_X86_DISABLE_EXITS_HLT | KVM_X86_DISABLE_EXITS_PAUSE;

/// KVM_GUESTDBG_VALID_MASK: the flags that KVM_SET_GUEST_DEBUG accepts.
pub(crate) const GUEST_DEBUG: u32 = KVM_GUESTDBG_ENABLE
    | KVM_GUESTDBG_SINGLESTEP
    | KVM_GUESTDBG_USE_HW_BP
    | KVM_GUESTDBG_USE_SW_BP
    | KVM_GUESTDBG_INJECT_BP
    | KVM_GUESTDBG_INJECT_DB
    | KVM_GUESTDBG_BLOCKIRQ;

/// Largest number of banks (KVM_MAX_MCE_BANKS).
pub(crate) const MCE_BANKS: usize = 32;
/// IA32_MCG_CAP: IA32_MCG_CTL exists.
pub(crate) const MCG_CTL_P: u64 = 1 << 8;
/// IA32_MCG_CAP: software error recovery.
const MCG_SER_P: u64 = 1 << 24;
/// IA32_MCG_CAP: interrupts for errors that need no action at once (CMCI).
///
/// DEVIATION: CMCI is offered on AMD's hosts, too; KVM offers it on Intel's alone.
pub(crate) const MCG_CMCI_P: u64 = 1 << 10;
/// The bits of IA32_MCG_CAP that a VMM may choose, besides the number of banks.
pub(crate) const MCE_SUPPORTED_CAP: u64 = MCG_CTL_P | MCG_CMCI_P | MCG_SER_P;

/// APIC_BUS_CYCLE_NS_DEFAULT.
pub(crate) const APIC_TICK_NS: u64 = 1;
/// KVM_EXIT_HYPERCALL_VALID_MASK: KVM_HC_MAP_GPA_RANGE.
pub(crate) const HYPERCALL_EXITS: u64 = 1 << 12;
/// The flags that KVM_XEN_HVM_CONFIG accepts.
pub(crate) const XEN_CONFIG: u32 = KVM_XEN_HVM_CONFIG_INTERCEPT_HCALL
    | KVM_XEN_HVM_CONFIG_EVTCHN_SEND
    | KVM_XEN_HVM_CONFIG_PVCLOCK_TSC_UNSTABLE;
/// KVM_CAP_XEN_HVM.
pub(crate) const XEN_HVM: u32 = XEN_CONFIG
    | KVM_XEN_HVM_CONFIG_HYPERCALL_MSR
    | KVM_XEN_HVM_CONFIG_SHARED_INFO
    | KVM_XEN_HVM_CONFIG_RUNSTATE
    | KVM_XEN_HVM_CONFIG_EVTCHN_2LEVEL
    | KVM_XEN_HVM_CONFIG_RUNSTATE_UPDATE_FLAG;
/// KVM_X2APIC_API_VALID_FLAGS.
pub(crate) const X2APIC_API: u64 =
    (KVM_X2APIC_API_USE_32BIT_IDS | KVM_X2APIC_API_DISABLE_BROADCAST_QUIRK) as u64;
/// KVM_X86_VALID_QUIRKS: all of Linux 6.14. KVM_X86_QUIRK_CD_NW_CLEARED has no effect, as there are no caches that
/// CR0.CD could disable, nor has KVM_X86_QUIRK_SLOT_ZAP_ALL: only what concerns a memslot is forgotten with it.
pub(crate) const QUIRKS: u64 = (KVM_X86_QUIRK_LINT0_REENABLED
    | KVM_X86_QUIRK_CD_NW_CLEARED
    | KVM_X86_QUIRK_LAPIC_MMIO_HOLE
    | KVM_X86_QUIRK_OUT_7E_INC_RIP
    | KVM_X86_QUIRK_MISC_ENABLE_NO_MWAIT
    | KVM_X86_QUIRK_FIX_HYPERCALL_INSN
    | KVM_X86_QUIRK_MWAIT_NEVER_UD_FAULTS
    | KVM_X86_QUIRK_SLOT_ZAP_ALL
    | KVM_X86_QUIRK_STUFF_FEATURE_MSRS) as u64;
/// KVM_DIRTY_LOG_MANUAL_CAPS.
pub(crate) const MANUAL_DIRTY_LOG: u64 =
    (KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE | KVM_DIRTY_LOG_INITIALLY_SET) as u64;

/// Size in bytes of a dirty ring's entry.
pub(crate) const RING_ENTRY: u64 = size_of::<kvm_dirty_gfn>() as u64;
/// Size in bytes of the largest dirty ring (KVM_DIRTY_RING_MAX_ENTRIES).
pub(crate) const MAX_DIRTY_RING: u64 = 65536 * RING_ENTRY;

/// IA32_PERF_CAPABILITIES: counters can be written in full width.
pub(crate) const PERF_CAPABILITIES: u64 = 1 << 13;
