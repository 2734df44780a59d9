//! KVM_CHECK_EXTENSION. A capability is non-zero only if all of it works.

use kvm_bindings::*;

use crate::limits::{
    APIC_TICK_NS, DISABLED_EXITS, GUEST_DEBUG, HYPERCALL_EXITS, MANUAL_DIRTY_LOG, MAX_DIRTY_RING,
    MAX_VCPU_IDS, MAX_VCPUS, MCE_BANKS, MCE_SUPPORTED_CAP, QUIRKS, X2APIC_API, XEN_HVM,
};

/// KVM_X86_GET_MCE_CAP_SUPPORTED.
pub fn mce_cap_supported() -> u64 {
    MCE_SUPPORTED_CAP
}

/// KVM_CHECK_EXTENSION.
pub fn check_extension(cap: u32) -> i32 {
    match cap {
        _ if is_there(cap) => 1,
        KVM_CAP_X86_APIC_BUS_CYCLES_NS => APIC_TICK_NS as i32,
        KVM_CAP_X2APIC_API => X2APIC_API as i32,
        KVM_CAP_DISABLE_QUIRKS2 => QUIRKS as i32,
        KVM_CAP_DIRTY_LOG_RING | KVM_CAP_DIRTY_LOG_RING_ACQ_REL => MAX_DIRTY_RING as i32,
        KVM_CAP_X86_DISABLE_EXITS => DISABLED_EXITS as i32,
        KVM_CAP_EXIT_HYPERCALL => HYPERCALL_EXITS as i32,
        KVM_CAP_XEN_HVM => XEN_HVM as i32,
        KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2 => MANUAL_DIRTY_LOG as i32,
        KVM_CAP_SET_GUEST_DEBUG2 => GUEST_DEBUG as i32,
        KVM_CAP_SYNC_REGS => KVM_SYNC_X86_VALID_FIELDS as i32,
        KVM_CAP_MULTI_ADDRESS_SPACE => 2,
        KVM_CAP_COALESCED_MMIO => KVM_COALESCED_MMIO_PAGE_OFFSET as i32,
        KVM_CAP_MCE => MCE_BANKS as i32,
        KVM_CAP_XSAVE2 => 4096,
        // The size of a header, because there are no nested guests.
        KVM_CAP_NESTED_STATE => size_of::<kvm_nested_state>() as i32,
        KVM_CAP_CLOCKSOURCE | KVM_CAP_X86_USER_SPACE_MSR => 1,
        KVM_CAP_ADJUST_CLOCK => {
            (KVM_CLOCK_TSC_STABLE | KVM_CLOCK_REALTIME | KVM_CLOCK_HOST_TSC) as i32
        }
        KVM_CAP_IRQ_ROUTING => 4096,
        KVM_CAP_NR_MEMSLOTS => 32764,
        KVM_CAP_NR_VCPUS => host::thread::cores().max(4) as i32,
        KVM_CAP_MAX_VCPUS => MAX_VCPUS,
        KVM_CAP_MAX_VCPU_ID => MAX_VCPU_IDS,
        _ => counters(cap),
    }
}

/// True for extensions that exist and have no number to report.
const fn is_there(cap: u32) -> bool {
    matches!(
        cap,
        KVM_CAP_IRQCHIP
            | KVM_CAP_VAPIC
            | KVM_CAP_HLT
            | KVM_CAP_USER_MEMORY
            | KVM_CAP_SET_TSS_ADDR
            | KVM_CAP_EXT_CPUID
            | KVM_CAP_DESTROY_MEMORY_REGION_WORKS
            | KVM_CAP_JOIN_MEMORY_REGIONS_WORKS
            | KVM_CAP_MP_STATE
            | KVM_CAP_NOP_IO_DELAY
            | KVM_CAP_SYNC_MMU
            | KVM_CAP_IRQFD
            | KVM_CAP_IOEVENTFD
            | KVM_CAP_IOEVENTFD_ANY_LENGTH
            | KVM_CAP_PIT2
            | KVM_CAP_PIT_STATE2
            | KVM_CAP_IRQ_INJECT_STATUS
            | KVM_CAP_USER_NMI
            | KVM_CAP_SET_IDENTITY_MAP_ADDR
            | KVM_CAP_VCPU_EVENTS
            | KVM_CAP_DEBUGREGS
            | KVM_CAP_XSAVE
            | KVM_CAP_XCRS
            | KVM_CAP_GET_TSC_KHZ
            | KVM_CAP_TSC_DEADLINE_TIMER
            | KVM_CAP_SIGNAL_MSI
            | KVM_CAP_READONLY_MEM
            | KVM_CAP_IMMEDIATE_EXIT
            | KVM_CAP_GET_MSR_FEATURES
            | KVM_CAP_ONE_REG
            | KVM_CAP_CHECK_EXTENSION_VM
            | KVM_CAP_SET_BOOT_CPU_ID
            | KVM_CAP_SREGS2
            | KVM_CAP_SET_GUEST_DEBUG
            | KVM_CAP_INTR_SHADOW
            | KVM_CAP_BINARY_STATS_FD
            | KVM_CAP_ASYNC_PF
            | KVM_CAP_ASYNC_PF_INT
            | KVM_CAP_ENABLE_CAP_VM
            | KVM_CAP_HALT_POLL
            | KVM_CAP_COALESCED_PIO
            | KVM_CAP_X86_SMM
            | KVM_CAP_KVMCLOCK_CTRL
            | KVM_CAP_SPLIT_IRQCHIP
            | KVM_CAP_MMU_SHADOW_CACHE_CONTROL
            | KVM_CAP_PIT
            | KVM_CAP_ENABLE_CAP
            | KVM_CAP_EXCEPTION_PAYLOAD
            | KVM_CAP_X86_TRIPLE_FAULT_EVENT
            | KVM_CAP_MSR_PLATFORM_INFO
            | KVM_CAP_X86_MSR_FILTER
            | KVM_CAP_ENFORCE_PV_FEATURE_CPUID
            | KVM_CAP_VCPU_ATTRIBUTES
            | KVM_CAP_SYS_ATTRIBUTES
            | KVM_CAP_DEVICE_CTRL
            | KVM_CAP_INTERNAL_ERROR_DATA
            | KVM_CAP_SYSTEM_EVENT_DATA
            | KVM_CAP_EXT_EMUL_CPUID
            | KVM_CAP_PCI_SEGMENT
            | KVM_CAP_IOAPIC_POLARITY_IGNORED
            | KVM_CAP_IOEVENTFD_NO_LENGTH
            | KVM_CAP_IRQFD_RESAMPLE
            | KVM_CAP_X86_ROBUST_SINGLESTEP
            | KVM_CAP_TSC_CONTROL
            | KVM_CAP_VM_TSC_CONTROL
            | KVM_CAP_STEAL_TIME
            | KVM_CAP_USER_MEMORY2
            | KVM_CAP_DISABLE_QUIRKS
            | KVM_CAP_VM_TYPES
            | KVM_CAP_PRE_FAULT_MEMORY
            | KVM_CAP_MEMORY_FAULT_INFO
            | KVM_CAP_HYPERV
            | KVM_CAP_HYPERV_VAPIC
            | KVM_CAP_HYPERV_SPIN
            | KVM_CAP_HYPERV_TIME
            | KVM_CAP_HYPERV_VP_INDEX
            | KVM_CAP_HYPERV_SEND_IPI
            | KVM_CAP_HYPERV_CPUID
            | KVM_CAP_SYS_HYPERV_CPUID
            | KVM_CAP_HYPERV_ENFORCE_CPUID
            | KVM_CAP_HYPERV_SYNIC
            | KVM_CAP_HYPERV_SYNIC2
            | KVM_CAP_HYPERV_EVENTFD
            | KVM_CAP_HYPERV_TLBFLUSH
            | KVM_CAP_REINJECT_CONTROL
            // KVM_RUN_X86_GUEST_MODE is never set, as there are no nested guests.
            | KVM_CAP_X86_GUEST_MODE
    )
}

/// Returns the values of capabilities that concern performance counters.
fn counters(cap: u32) -> i32 {
    match cap {
        KVM_CAP_PMU_EVENT_FILTER | KVM_CAP_PMU_EVENT_MASKED_EVENTS => 1,
        KVM_CAP_PMU_CAPABILITY => KVM_PMU_CAP_DISABLE as i32,
        _ => 0,
    }
}
