//! KVM_CHECK_EXTENSION. A capability is non-zero only if all of it works.

use kvm_bindings::*;

use crate::vcpu::{MCE_BANKS, MCE_SUPPORTED_CAP};

/// Most vCPUs of a VM.
pub(crate) const MAX_VCPUS: i32 = 255;

/// KVM_X86_GET_MCE_CAP_SUPPORTED.
pub fn mce_cap_supported() -> u64 {
    MCE_SUPPORTED_CAP
}

/// KVM_CHECK_EXTENSION.
pub fn check_extension(cap: u32) -> i32 {
    match cap {
        KVM_CAP_IRQCHIP
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
        | KVM_CAP_REINJECT_CONTROL => 1,
        KVM_CAP_SYNC_REGS => KVM_SYNC_X86_VALID_FIELDS as i32,
        KVM_CAP_MULTI_ADDRESS_SPACE => 2,
        KVM_CAP_COALESCED_MMIO => KVM_COALESCED_MMIO_PAGE_OFFSET as i32,
        KVM_CAP_MCE => MCE_BANKS as i32,
        KVM_CAP_XSAVE2 => 4096,
        KVM_CAP_CLOCKSOURCE => 1,
        KVM_CAP_ADJUST_CLOCK => {
            (KVM_CLOCK_TSC_STABLE | KVM_CLOCK_REALTIME | KVM_CLOCK_HOST_TSC) as i32
        }
        KVM_CAP_IRQ_ROUTING => 4096,
        KVM_CAP_NR_MEMSLOTS => 32764,
        KVM_CAP_NR_VCPUS => {
            std::thread::available_parallelism().map_or(4, |n| n.get().max(4)) as i32
        }
        KVM_CAP_MAX_VCPUS | KVM_CAP_MAX_VCPU_ID => MAX_VCPUS,
        _ => 0,
    }
}
