//! ioctl numbers: KVM API document, `include/uapi/linux/kvm.h`.
//!
//! A number carries direction and argument size (`_IOC` in `ioctl(2)`), so that
//! two ioctls may share the last byte (0x67, 0xa2, 0xa3).

#![allow(
    missing_docs,
    reason = "the names are KVM's; its API document describes them"
)]

use std::mem::size_of;

use kvm_bindings::*;

/// KVMIO: the second byte of each number.
pub const KVM_TYPE: u32 = KVMIO;

const NONE: u32 = 0;
const WRITE: u32 = 1;
const READ: u32 = 2;

const fn number(direction: u32, nr: u32, size: usize) -> u32 {
    assert!(size < 1 << 14, "the size field has 14 bits");
    direction << 30 | (size as u32) << 16 | KVMIO << 8 | nr
}
const fn io(nr: u32) -> u32 {
    number(NONE, nr, 0)
}
const fn ior<T>(nr: u32) -> u32 {
    number(READ, nr, size_of::<T>())
}
const fn iow<T>(nr: u32) -> u32 {
    number(WRITE, nr, size_of::<T>())
}
const fn iowr<T>(nr: u32) -> u32 {
    number(READ | WRITE, nr, size_of::<T>())
}

// System fd.
pub const KVM_GET_API_VERSION: u32 = io(0x00);
pub const KVM_CREATE_VM: u32 = io(0x01);
pub const KVM_GET_MSR_INDEX_LIST: u32 = iowr::<kvm_msr_list>(0x02);
pub const KVM_CHECK_EXTENSION: u32 = io(0x03);
pub const KVM_GET_VCPU_MMAP_SIZE: u32 = io(0x04);
pub const KVM_GET_SUPPORTED_CPUID: u32 = iowr::<kvm_cpuid2>(0x05);
pub const KVM_GET_EMULATED_CPUID: u32 = iowr::<kvm_cpuid2>(0x09);
pub const KVM_GET_MSR_FEATURE_INDEX_LIST: u32 = iowr::<kvm_msr_list>(0x0a);

// VM fd (some also on the system, vCPU or device fd).
pub const KVM_CREATE_VCPU: u32 = io(0x41);
pub const KVM_GET_DIRTY_LOG: u32 = iow::<kvm_dirty_log>(0x42);
pub const KVM_SET_NR_MMU_PAGES: u32 = io(0x44);
pub const KVM_GET_NR_MMU_PAGES: u32 = io(0x45);
pub const KVM_SET_USER_MEMORY_REGION: u32 = iow::<kvm_userspace_memory_region>(0x46);
pub const KVM_SET_TSS_ADDR: u32 = io(0x47);
pub const KVM_SET_IDENTITY_MAP_ADDR: u32 = iow::<u64>(0x48);
pub const KVM_SET_USER_MEMORY_REGION2: u32 = iow::<kvm_userspace_memory_region2>(0x49);
pub const KVM_CREATE_IRQCHIP: u32 = io(0x60);
pub const KVM_IRQ_LINE: u32 = iow::<kvm_irq_level>(0x61);
pub const KVM_GET_IRQCHIP: u32 = iowr::<kvm_irqchip>(0x62);
pub const KVM_SET_IRQCHIP: u32 = ior::<kvm_irqchip>(0x63);
pub const KVM_CREATE_PIT: u32 = io(0x64);
pub const KVM_GET_PIT: u32 = iowr::<kvm_pit_state>(0x65);
pub const KVM_SET_PIT: u32 = ior::<kvm_pit_state>(0x66);
pub const KVM_IRQ_LINE_STATUS: u32 = iowr::<kvm_irq_level>(0x67);
pub const KVM_REGISTER_COALESCED_MMIO: u32 = iow::<kvm_coalesced_mmio_zone>(0x67);
pub const KVM_UNREGISTER_COALESCED_MMIO: u32 = iow::<kvm_coalesced_mmio_zone>(0x68);
pub const KVM_SET_GSI_ROUTING: u32 = iow::<kvm_irq_routing>(0x6a);
pub const KVM_REINJECT_CONTROL: u32 = io(0x71);
pub const KVM_IRQFD: u32 = iow::<kvm_irqfd>(0x76);
pub const KVM_CREATE_PIT2: u32 = iow::<kvm_pit_config>(0x77);
pub const KVM_SET_BOOT_CPU_ID: u32 = io(0x78);
pub const KVM_IOEVENTFD: u32 = iow::<kvm_ioeventfd>(0x79);
pub const KVM_XEN_HVM_CONFIG: u32 = iow::<kvm_xen_hvm_config>(0x7a);
pub const KVM_SET_CLOCK: u32 = iow::<kvm_clock_data>(0x7b);
pub const KVM_GET_CLOCK: u32 = ior::<kvm_clock_data>(0x7c);

// vCPU fd, and what came later for any fd.
pub const KVM_RUN: u32 = io(0x80);
pub const KVM_GET_REGS: u32 = ior::<kvm_regs>(0x81);
pub const KVM_SET_REGS: u32 = iow::<kvm_regs>(0x82);
pub const KVM_GET_SREGS: u32 = ior::<kvm_sregs>(0x83);
pub const KVM_SET_SREGS: u32 = iow::<kvm_sregs>(0x84);
pub const KVM_TRANSLATE: u32 = iowr::<kvm_translation>(0x85);
pub const KVM_INTERRUPT: u32 = iow::<kvm_interrupt>(0x86);
pub const KVM_GET_MSRS: u32 = iowr::<kvm_msrs>(0x88);
pub const KVM_SET_MSRS: u32 = iow::<kvm_msrs>(0x89);
pub const KVM_SET_CPUID: u32 = iow::<kvm_cpuid>(0x8a);
pub const KVM_SET_SIGNAL_MASK: u32 = iow::<kvm_signal_mask>(0x8b);
pub const KVM_GET_FPU: u32 = ior::<kvm_fpu>(0x8c);
pub const KVM_SET_FPU: u32 = iow::<kvm_fpu>(0x8d);
pub const KVM_GET_LAPIC: u32 = ior::<kvm_lapic_state>(0x8e);
pub const KVM_SET_LAPIC: u32 = iow::<kvm_lapic_state>(0x8f);
pub const KVM_SET_CPUID2: u32 = iow::<kvm_cpuid2>(0x90);
pub const KVM_GET_CPUID2: u32 = iowr::<kvm_cpuid2>(0x91);
pub const KVM_TPR_ACCESS_REPORTING: u32 = iowr::<kvm_tpr_access_ctl>(0x92);
pub const KVM_SET_VAPIC_ADDR: u32 = iow::<kvm_vapic_addr>(0x93);
pub const KVM_GET_MP_STATE: u32 = ior::<kvm_mp_state>(0x98);
pub const KVM_SET_MP_STATE: u32 = iow::<kvm_mp_state>(0x99);
pub const KVM_NMI: u32 = io(0x9a);
pub const KVM_SET_GUEST_DEBUG: u32 = iow::<kvm_guest_debug>(0x9b);
pub const KVM_X86_SETUP_MCE: u32 = iow::<u64>(0x9c);
pub const KVM_X86_GET_MCE_CAP_SUPPORTED: u32 = ior::<u64>(0x9d);
pub const KVM_X86_SET_MCE: u32 = iow::<kvm_x86_mce>(0x9e);
pub const KVM_GET_PIT2: u32 = ior::<kvm_pit_state2>(0x9f);
pub const KVM_GET_VCPU_EVENTS: u32 = ior::<kvm_vcpu_events>(0x9f);
pub const KVM_SET_PIT2: u32 = iow::<kvm_pit_state2>(0xa0);
pub const KVM_SET_VCPU_EVENTS: u32 = iow::<kvm_vcpu_events>(0xa0);
pub const KVM_GET_DEBUGREGS: u32 = ior::<kvm_debugregs>(0xa1);
pub const KVM_SET_DEBUGREGS: u32 = iow::<kvm_debugregs>(0xa2);
pub const KVM_SET_TSC_KHZ: u32 = io(0xa2);
pub const KVM_ENABLE_CAP: u32 = iow::<kvm_enable_cap>(0xa3);
pub const KVM_GET_TSC_KHZ: u32 = io(0xa3);
pub const KVM_GET_XSAVE: u32 = ior::<kvm_xsave>(0xa4);
pub const KVM_SET_XSAVE: u32 = iow::<kvm_xsave>(0xa5);
pub const KVM_SIGNAL_MSI: u32 = iow::<kvm_msi>(0xa5);
pub const KVM_GET_XCRS: u32 = ior::<kvm_xcrs>(0xa6);
pub const KVM_SET_XCRS: u32 = iow::<kvm_xcrs>(0xa7);
pub const KVM_GET_ONE_REG: u32 = iow::<kvm_one_reg>(0xab);
pub const KVM_SET_ONE_REG: u32 = iow::<kvm_one_reg>(0xac);
pub const KVM_KVMCLOCK_CTRL: u32 = io(0xad);
pub const KVM_GET_REG_LIST: u32 = iowr::<kvm_reg_list>(0xb0);
pub const KVM_SET_PMU_EVENT_FILTER: u32 = iow::<kvm_pmu_event_filter>(0xb2);
pub const KVM_SMI: u32 = io(0xb7);
pub const KVM_MEMORY_ENCRYPT_OP: u32 = iowr::<u64>(0xba);
pub const KVM_MEMORY_ENCRYPT_REG_REGION: u32 = ior::<kvm_enc_region>(0xbb);
pub const KVM_MEMORY_ENCRYPT_UNREG_REGION: u32 = ior::<kvm_enc_region>(0xbc);
pub const KVM_HYPERV_EVENTFD: u32 = iow::<kvm_hyperv_eventfd>(0xbd);
pub const KVM_GET_NESTED_STATE: u32 = iowr::<kvm_nested_state>(0xbe);
pub const KVM_SET_NESTED_STATE: u32 = iow::<kvm_nested_state>(0xbf);
pub const KVM_CLEAR_DIRTY_LOG: u32 = iowr::<kvm_clear_dirty_log>(0xc0);
pub const KVM_GET_SUPPORTED_HV_CPUID: u32 = iowr::<kvm_cpuid2>(0xc1);
pub const KVM_X86_SET_MSR_FILTER: u32 = iow::<kvm_msr_filter>(0xc6);
pub const KVM_RESET_DIRTY_RINGS: u32 = io(0xc7);
pub const KVM_XEN_HVM_GET_ATTR: u32 = iowr::<kvm_xen_hvm_attr>(0xc8);
pub const KVM_XEN_HVM_SET_ATTR: u32 = iow::<kvm_xen_hvm_attr>(0xc9);
pub const KVM_XEN_VCPU_GET_ATTR: u32 = iowr::<kvm_xen_vcpu_attr>(0xca);
pub const KVM_XEN_VCPU_SET_ATTR: u32 = iow::<kvm_xen_vcpu_attr>(0xcb);
pub const KVM_GET_SREGS2: u32 = ior::<kvm_sregs2>(0xcc);
pub const KVM_SET_SREGS2: u32 = iow::<kvm_sregs2>(0xcd);
pub const KVM_GET_STATS_FD: u32 = io(0xce);
pub const KVM_GET_XSAVE2: u32 = ior::<kvm_xsave>(0xcf);
pub const KVM_XEN_HVM_EVTCHN_SEND: u32 = iow::<kvm_irq_routing_xen_evtchn>(0xd0);
pub const KVM_SET_MEMORY_ATTRIBUTES: u32 = iow::<kvm_memory_attributes>(0xd2);
pub const KVM_CREATE_GUEST_MEMFD: u32 = iowr::<kvm_create_guest_memfd>(0xd4);
pub const KVM_PRE_FAULT_MEMORY: u32 = iowr::<kvm_pre_fault_memory>(0xd5);
pub const KVM_CREATE_DEVICE: u32 = iowr::<kvm_create_device>(0xe0);
pub const KVM_SET_DEVICE_ATTR: u32 = iow::<kvm_device_attr>(0xe1);
pub const KVM_GET_DEVICE_ATTR: u32 = iow::<kvm_device_attr>(0xe2);
pub const KVM_HAS_DEVICE_ATTR: u32 = iow::<kvm_device_attr>(0xe3);

#[cfg(test)]
mod tests {
    use super::*;

    /// Values as `strace` prints them for a C program built with the kernel's headers.
    #[test]
    fn numbers_are_those_of_the_c_headers() {
        for (ours, theirs) in [
            (KVM_GET_API_VERSION, 0xae00),
            (KVM_GET_MSR_INDEX_LIST, 0xc004_ae02),
            (KVM_GET_SUPPORTED_CPUID, 0xc008_ae05),
            (KVM_SET_USER_MEMORY_REGION, 0x4020_ae46),
            (KVM_GET_IRQCHIP, 0xc208_ae62),
            (KVM_SET_IRQCHIP, 0x8208_ae63),
            (KVM_IRQ_LINE_STATUS, 0xc008_ae67),
            (KVM_REGISTER_COALESCED_MMIO, 0x4010_ae67),
            (KVM_SET_GSI_ROUTING, 0x4008_ae6a),
            (KVM_RUN, 0xae80),
            (KVM_GET_REGS, 0x8090_ae81),
            (KVM_GET_SREGS, 0x8138_ae83),
            (KVM_SET_MSRS, 0x4008_ae89),
            (KVM_SET_SIGNAL_MASK, 0x4004_ae8b),
            (KVM_GET_LAPIC, 0x8400_ae8e),
            (KVM_ENABLE_CAP, 0x4068_aea3),
            (KVM_GET_TSC_KHZ, 0xaea3),
            (KVM_GET_XSAVE, 0x9000_aea4),
            (KVM_GET_DEVICE_ATTR, 0x4018_aee2),
        ] {
            assert_eq!(ours, theirs, "{ours:#x} {theirs:#x}");
        }
    }
}
