//! The errnos that the API document (and KVM, where the document says less) lists for each call.

use kvm_abi::{Call, FdKind};

/// The errnos that each call may return, besides EFAULT, which every call returns that accesses memory by a pointer.
const ERRNOS: &[(&str, &[i32])] = &[
    ("KVM_GET_API_VERSION", &[libc::EINVAL]),
    ("KVM_CREATE_VM", &[libc::EINVAL]),
    ("KVM_CHECK_EXTENSION", &[]),
    ("KVM_GET_VCPU_MMAP_SIZE", &[libc::EINVAL]),
    ("KVM_GET_SUPPORTED_CPUID", &[libc::E2BIG]),
    ("KVM_GET_EMULATED_CPUID", &[libc::E2BIG]),
    ("KVM_GET_SUPPORTED_HV_CPUID", &[libc::E2BIG]),
    ("KVM_GET_MSR_INDEX_LIST", &[libc::E2BIG]),
    ("KVM_GET_MSR_FEATURE_INDEX_LIST", &[libc::E2BIG]),
    ("KVM_GET_MSRS", &[libc::E2BIG]),
    ("KVM_SET_MSRS", &[libc::E2BIG]),
    ("KVM_X86_GET_MCE_CAP_SUPPORTED", &[]),
    ("KVM_GET_DEVICE_ATTR", &[libc::ENXIO, libc::EPERM]),
    ("KVM_HAS_DEVICE_ATTR", &[libc::ENXIO]),
    (
        "KVM_SET_DEVICE_ATTR",
        &[
            libc::ENXIO,
            libc::EPERM,
            libc::EINVAL,
            libc::EBADF,
            libc::EEXIST,
            libc::ENOENT,
        ],
    ),
    ("KVM_CREATE_VCPU", &[libc::EINVAL, libc::EEXIST]),
    ("KVM_CREATE_DEVICE", &[libc::ENODEV, libc::EBUSY]),
    (
        "KVM_SET_USER_MEMORY_REGION",
        &[libc::EINVAL, libc::EEXIST, libc::ENOMEM],
    ),
    (
        "KVM_SET_USER_MEMORY_REGION2",
        &[libc::EINVAL, libc::EEXIST, libc::ENOMEM],
    ),
    (
        "KVM_GET_DIRTY_LOG",
        &[libc::EINVAL, libc::ENOENT, libc::ENXIO],
    ),
    (
        "KVM_CLEAR_DIRTY_LOG",
        &[libc::EINVAL, libc::ENOENT, libc::ENXIO],
    ),
    ("KVM_RESET_DIRTY_RINGS", &[libc::EINVAL]),
    ("KVM_SET_TSS_ADDR", &[libc::EINVAL]),
    ("KVM_SET_IDENTITY_MAP_ADDR", &[libc::EINVAL]),
    ("KVM_SET_BOOT_CPU_ID", &[libc::EBUSY, libc::EINVAL]),
    ("KVM_CREATE_IRQCHIP", &[libc::EEXIST, libc::EINVAL]),
    ("KVM_GET_IRQCHIP", &[libc::ENXIO, libc::EINVAL]),
    ("KVM_SET_IRQCHIP", &[libc::ENXIO, libc::EINVAL]),
    (
        "KVM_CREATE_PIT",
        &[libc::EEXIST, libc::ENOENT, libc::EINVAL],
    ),
    (
        "KVM_CREATE_PIT2",
        &[libc::EEXIST, libc::ENOENT, libc::EINVAL],
    ),
    ("KVM_GET_PIT", &[libc::ENXIO]),
    ("KVM_SET_PIT", &[libc::ENXIO]),
    ("KVM_GET_PIT2", &[libc::ENXIO]),
    ("KVM_SET_PIT2", &[libc::ENXIO]),
    ("KVM_REINJECT_CONTROL", &[libc::ENXIO]),
    ("KVM_IRQ_LINE", &[libc::ENXIO, libc::EINVAL]),
    ("KVM_IRQ_LINE_STATUS", &[libc::ENXIO, libc::EINVAL]),
    ("KVM_SET_GSI_ROUTING", &[libc::EINVAL]),
    // A message that no LAPIC takes is -1, which is EPERM.
    ("KVM_SIGNAL_MSI", &[libc::EINVAL, libc::ENXIO, libc::EPERM]),
    (
        "KVM_IRQFD",
        &[
            libc::EINVAL,
            libc::EBADF,
            libc::EBUSY,
            libc::ENOENT,
            libc::EMFILE,
        ],
    ),
    (
        "KVM_HYPERV_EVENTFD",
        &[libc::EINVAL, libc::EBADF, libc::EEXIST, libc::ENOENT],
    ),
    (
        "KVM_IOEVENTFD",
        &[
            libc::EINVAL,
            libc::EBADF,
            libc::EEXIST,
            libc::ENOENT,
            libc::ENOSPC,
            libc::EMFILE,
        ],
    ),
    ("KVM_REGISTER_COALESCED_MMIO", &[libc::EINVAL, libc::ENOSPC]),
    ("KVM_UNREGISTER_COALESCED_MMIO", &[libc::EINVAL]),
    ("KVM_GET_CLOCK", &[]),
    ("KVM_SET_CLOCK", &[libc::EINVAL]),
    ("KVM_SET_TSC_KHZ", &[libc::EINVAL]),
    ("KVM_GET_TSC_KHZ", &[]),
    (
        "KVM_ENABLE_CAP",
        &[
            libc::EINVAL,
            libc::EEXIST,
            libc::EPERM,
            libc::ENXIO,
            libc::E2BIG,
        ],
    ),
    ("KVM_X86_SET_MSR_FILTER", &[libc::EINVAL]),
    ("KVM_XEN_HVM_CONFIG", &[libc::EINVAL]),
    ("KVM_XEN_HVM_GET_ATTR", &[libc::ENOENT]),
    (
        "KVM_XEN_HVM_SET_ATTR",
        &[libc::EINVAL, libc::ENOENT, libc::EEXIST, libc::EBADF],
    ),
    ("KVM_XEN_HVM_EVTCHN_SEND", &[libc::EINVAL]),
    ("KVM_XEN_VCPU_GET_ATTR", &[libc::ENOENT, libc::EINVAL]),
    (
        "KVM_XEN_VCPU_SET_ATTR",
        &[libc::EINVAL, libc::ENOENT, libc::ENXIO],
    ),
    ("KVM_SET_PMU_EVENT_FILTER", &[libc::EINVAL, libc::E2BIG]),
    ("KVM_GET_STATS_FD", &[]),
    ("KVM_SET_NR_MMU_PAGES", &[libc::EINVAL]),
    ("KVM_GET_NR_MMU_PAGES", &[]),
    (
        "KVM_RUN",
        &[libc::EINTR, libc::EAGAIN, libc::EINVAL, libc::EFAULT],
    ),
    ("KVM_GET_REGS", &[]),
    ("KVM_SET_REGS", &[]),
    ("KVM_GET_SREGS", &[]),
    ("KVM_SET_SREGS", &[libc::EINVAL]),
    ("KVM_GET_SREGS2", &[]),
    ("KVM_SET_SREGS2", &[libc::EINVAL]),
    ("KVM_GET_FPU", &[]),
    ("KVM_SET_FPU", &[]),
    ("KVM_GET_LAPIC", &[libc::EINVAL]),
    ("KVM_SET_LAPIC", &[libc::EINVAL]),
    ("KVM_GET_VCPU_EVENTS", &[]),
    ("KVM_SET_VCPU_EVENTS", &[libc::EINVAL]),
    ("KVM_GET_DEBUGREGS", &[]),
    ("KVM_SET_DEBUGREGS", &[libc::EINVAL]),
    ("KVM_GET_XCRS", &[libc::EINVAL]),
    ("KVM_SET_XCRS", &[libc::EINVAL]),
    ("KVM_GET_MP_STATE", &[]),
    ("KVM_SET_MP_STATE", &[libc::EINVAL]),
    ("KVM_GET_XSAVE", &[libc::EINVAL]),
    ("KVM_GET_XSAVE2", &[]),
    ("KVM_SET_XSAVE", &[libc::EINVAL]),
    ("KVM_GET_NESTED_STATE", &[libc::E2BIG]),
    ("KVM_SET_NESTED_STATE", &[libc::EINVAL]),
    ("KVM_GET_CPUID2", &[libc::E2BIG]),
    ("KVM_SET_CPUID2", &[libc::E2BIG, libc::EINVAL]),
    ("KVM_SET_CPUID", &[libc::E2BIG, libc::EINVAL]),
    ("KVM_INTERRUPT", &[libc::EINVAL, libc::ENXIO, libc::EEXIST]),
    ("KVM_NMI", &[]),
    ("KVM_SMI", &[]),
    ("KVM_SET_GUEST_DEBUG", &[libc::EINVAL, libc::EBUSY]),
    ("KVM_TRANSLATE", &[]),
    ("KVM_KVMCLOCK_CTRL", &[libc::EINVAL]),
    ("KVM_SET_VAPIC_ADDR", &[libc::EINVAL]),
    ("KVM_TPR_ACCESS_REPORTING", &[libc::EINVAL]),
    ("KVM_X86_SETUP_MCE", &[libc::EINVAL]),
    ("KVM_X86_SET_MCE", &[libc::EINVAL]),
    ("KVM_SET_SIGNAL_MASK", &[libc::EINVAL]),
    ("KVM_GET_ONE_REG", &[libc::EINVAL]),
    ("KVM_SET_ONE_REG", &[libc::EINVAL]),
    ("KVM_GET_REG_LIST", &[]),
    (
        "KVM_PRE_FAULT_MEMORY",
        &[libc::EINVAL, libc::ENOENT, libc::EINTR],
    ),
];

/// Returns true if the call may fail with this errno. `call` is `None` if the number has no meaning for such a
/// descriptor.
pub(super) fn is_documented(kind: FdKind, number: u32, call: Option<&Call>, errno: i32) -> bool {
    let Some(call) = call else {
        return match kind {
            _ if number >> 8 & 0xff != kvm_abi::numbers::KVM_TYPE => errno == libc::ENOTTY,
            FdKind::System | FdKind::Vcpu => errno == libc::EINVAL,
            FdKind::Vm | FdKind::Device => errno == libc::ENOTTY,
        };
    };
    if let Some(refusal) = call.refusal {
        return errno == refusal;
    }
    // The direction bits say that the argument is an address.
    (errno == libc::EFAULT && takes_pointer(call))
        || ERRNOS
            .iter()
            .any(|(name, list)| *name == call.name && list.contains(&errno))
}

/// Returns true if the number says that the call reads or writes through its argument.
pub(super) fn takes_pointer(call: &Call) -> bool {
    call.number >> 30 != 0 || call.name == "KVM_REINJECT_CONTROL"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_offered_call_has_its_errnos() {
        for call in kvm_abi::calls() {
            let known = ERRNOS.iter().filter(|(name, _)| *name == call.name).count();
            assert!(known == 1 || call.refusal.is_some(), "{}", call.name);
        }
    }
}
