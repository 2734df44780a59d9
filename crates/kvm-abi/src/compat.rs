//! `docs/compat.md`: every ioctl and capability of x86 and how anykvm answers it, generated from the tables that answer
//! them.

use std::fmt::{self, Write};

use kvm_bindings::*;

use crate::dispatch::{Row, Status, device, system, vcpu, vm};
use crate::errno::Errno;

/// Pairs of name and number, from the constants of `kvm-bindings`.
macro_rules! capabilities {
    ($($name:ident),* $(,)?) => {
        &[$((stringify!($name), $name)),*]
    };
}

/// The capabilities of x86 and of all architectures.
const CAPABILITIES: &[(&str, u32)] = capabilities![
    KVM_CAP_IRQCHIP,
    KVM_CAP_HLT,
    KVM_CAP_MMU_SHADOW_CACHE_CONTROL,
    KVM_CAP_USER_MEMORY,
    KVM_CAP_SET_TSS_ADDR,
    KVM_CAP_VAPIC,
    KVM_CAP_EXT_CPUID,
    KVM_CAP_CLOCKSOURCE,
    KVM_CAP_NR_VCPUS,
    KVM_CAP_NR_MEMSLOTS,
    KVM_CAP_PIT,
    KVM_CAP_NOP_IO_DELAY,
    KVM_CAP_PV_MMU,
    KVM_CAP_MP_STATE,
    KVM_CAP_COALESCED_MMIO,
    KVM_CAP_SYNC_MMU,
    KVM_CAP_IOMMU,
    KVM_CAP_DESTROY_MEMORY_REGION_WORKS,
    KVM_CAP_USER_NMI,
    KVM_CAP_SET_GUEST_DEBUG,
    KVM_CAP_REINJECT_CONTROL,
    KVM_CAP_IRQ_ROUTING,
    KVM_CAP_IRQ_INJECT_STATUS,
    KVM_CAP_ASSIGN_DEV_IRQ,
    KVM_CAP_JOIN_MEMORY_REGIONS_WORKS,
    KVM_CAP_MCE,
    KVM_CAP_IRQFD,
    KVM_CAP_PIT2,
    KVM_CAP_SET_BOOT_CPU_ID,
    KVM_CAP_PIT_STATE2,
    KVM_CAP_IOEVENTFD,
    KVM_CAP_SET_IDENTITY_MAP_ADDR,
    KVM_CAP_XEN_HVM,
    KVM_CAP_ADJUST_CLOCK,
    KVM_CAP_INTERNAL_ERROR_DATA,
    KVM_CAP_VCPU_EVENTS,
    KVM_CAP_HYPERV,
    KVM_CAP_HYPERV_VAPIC,
    KVM_CAP_HYPERV_SPIN,
    KVM_CAP_PCI_SEGMENT,
    KVM_CAP_INTR_SHADOW,
    KVM_CAP_DEBUGREGS,
    KVM_CAP_X86_ROBUST_SINGLESTEP,
    KVM_CAP_ENABLE_CAP,
    KVM_CAP_XSAVE,
    KVM_CAP_XCRS,
    KVM_CAP_ASYNC_PF,
    KVM_CAP_TSC_CONTROL,
    KVM_CAP_GET_TSC_KHZ,
    KVM_CAP_MAX_VCPUS,
    KVM_CAP_ONE_REG,
    KVM_CAP_TSC_DEADLINE_TIMER,
    KVM_CAP_SYNC_REGS,
    KVM_CAP_PCI_2_3,
    KVM_CAP_KVMCLOCK_CTRL,
    KVM_CAP_SIGNAL_MSI,
    KVM_CAP_READONLY_MEM,
    KVM_CAP_IRQFD_RESAMPLE,
    KVM_CAP_DEVICE_CTRL,
    KVM_CAP_EXT_EMUL_CPUID,
    KVM_CAP_HYPERV_TIME,
    KVM_CAP_IOAPIC_POLARITY_IGNORED,
    KVM_CAP_ENABLE_CAP_VM,
    KVM_CAP_IOEVENTFD_NO_LENGTH,
    KVM_CAP_VM_ATTRIBUTES,
    KVM_CAP_CHECK_EXTENSION_VM,
    KVM_CAP_DISABLE_QUIRKS,
    KVM_CAP_X86_SMM,
    KVM_CAP_MULTI_ADDRESS_SPACE,
    KVM_CAP_GUEST_DEBUG_HW_BPS,
    KVM_CAP_GUEST_DEBUG_HW_WPS,
    KVM_CAP_SPLIT_IRQCHIP,
    KVM_CAP_IOEVENTFD_ANY_LENGTH,
    KVM_CAP_HYPERV_SYNIC,
    KVM_CAP_VCPU_ATTRIBUTES,
    KVM_CAP_MAX_VCPU_ID,
    KVM_CAP_X2APIC_API,
    KVM_CAP_MSI_DEVID,
    KVM_CAP_IMMEDIATE_EXIT,
    KVM_CAP_X86_DISABLE_EXITS,
    KVM_CAP_HYPERV_SYNIC2,
    KVM_CAP_HYPERV_VP_INDEX,
    KVM_CAP_GET_MSR_FEATURES,
    KVM_CAP_HYPERV_EVENTFD,
    KVM_CAP_HYPERV_TLBFLUSH,
    KVM_CAP_NESTED_STATE,
    KVM_CAP_MSR_PLATFORM_INFO,
    KVM_CAP_HYPERV_SEND_IPI,
    KVM_CAP_COALESCED_PIO,
    KVM_CAP_HYPERV_ENLIGHTENED_VMCS,
    KVM_CAP_EXCEPTION_PAYLOAD,
    KVM_CAP_MANUAL_DIRTY_LOG_PROTECT,
    KVM_CAP_HYPERV_CPUID,
    KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2,
    KVM_CAP_PMU_EVENT_FILTER,
    KVM_CAP_HYPERV_DIRECT_TLBFLUSH,
    KVM_CAP_HALT_POLL,
    KVM_CAP_ASYNC_PF_INT,
    KVM_CAP_LAST_CPU,
    KVM_CAP_SMALLER_MAXPHYADDR,
    KVM_CAP_STEAL_TIME,
    KVM_CAP_X86_USER_SPACE_MSR,
    KVM_CAP_X86_MSR_FILTER,
    KVM_CAP_ENFORCE_PV_FEATURE_CPUID,
    KVM_CAP_SYS_HYPERV_CPUID,
    KVM_CAP_DIRTY_LOG_RING,
    KVM_CAP_X86_BUS_LOCK_EXIT,
    KVM_CAP_SET_GUEST_DEBUG2,
    KVM_CAP_SGX_ATTRIBUTE,
    KVM_CAP_VM_COPY_ENC_CONTEXT_FROM,
    KVM_CAP_PTP_KVM,
    KVM_CAP_HYPERV_ENFORCE_CPUID,
    KVM_CAP_SREGS2,
    KVM_CAP_EXIT_HYPERCALL,
    KVM_CAP_BINARY_STATS_FD,
    KVM_CAP_EXIT_ON_EMULATION_FAILURE,
    KVM_CAP_VM_MOVE_ENC_CONTEXT_FROM,
    KVM_CAP_VM_GPA_BITS,
    KVM_CAP_XSAVE2,
    KVM_CAP_SYS_ATTRIBUTES,
    KVM_CAP_PMU_CAPABILITY,
    KVM_CAP_DISABLE_QUIRKS2,
    KVM_CAP_VM_TSC_CONTROL,
    KVM_CAP_SYSTEM_EVENT_DATA,
    KVM_CAP_X86_TRIPLE_FAULT_EVENT,
    KVM_CAP_X86_NOTIFY_VMEXIT,
    KVM_CAP_VM_DISABLE_NX_HUGE_PAGES,
    KVM_CAP_DIRTY_LOG_RING_ACQ_REL,
    KVM_CAP_DIRTY_LOG_RING_WITH_BITMAP,
    KVM_CAP_PMU_EVENT_MASKED_EVENTS,
    KVM_CAP_COUNTER_OFFSET,
    KVM_CAP_USER_MEMORY2,
    KVM_CAP_MEMORY_FAULT_INFO,
    KVM_CAP_MEMORY_ATTRIBUTES,
    KVM_CAP_GUEST_MEMFD,
    KVM_CAP_VM_TYPES,
    KVM_CAP_PRE_FAULT_MEMORY,
    KVM_CAP_X86_APIC_BUS_CYCLES_NS,
    KVM_CAP_X86_GUEST_MODE,
];

/// The whole page as Markdown.
pub fn compat_page() -> String {
    let mut page = String::new();
    // Writing to a String does not fail.
    let _ = write_page(&mut page);
    page
}

fn write_page(page: &mut String) -> fmt::Result {
    page.push_str(INTRODUCTION);
    write_table(page, "System descriptor", system::TABLE)?;
    write_table(page, "VM descriptor", vm::TABLE)?;
    write_table(page, "vCPU descriptor", vcpu::TABLE)?;
    write_table(page, "Device descriptor", device::TABLE)?;
    page.push_str("\n## Capabilities\n\n| capability | number | offered |\n|---|--:|---|\n");
    for (name, number) in CAPABILITIES {
        // Limits differ between hosts, so the page only says whether the answer is nonzero.
        let offered = hypervisor::system::check_extension(*number) > 0;
        writeln!(
            page,
            "| {name} | {number} | {} |",
            if offered { "yes" } else { "no" }
        )?;
    }
    Ok(())
}

const INTRODUCTION: &str = "\
# Compatibility with KVM

Made from the tables in `crates/kvm-abi` by `UPDATE_EXPECT=1 cargo test -p kvm-abi --test compat`.

*done*: decoded and handed to the hypervisor, which may still refuse single arguments.
An errno: refused as a KVM without the feature would, and counted. A number in no table gets
EINVAL on system and vCPU descriptors, ENOTTY on VMs and devices.

## ioctls
";

fn write_table<T>(page: &mut String, title: &str, rows: &[Row<T>]) -> fmt::Result {
    write!(
        page,
        "\n### {title}\n\n| ioctl | status | why |\n|---|---|---|\n"
    )?;
    for row in rows {
        match row.status {
            Status::Done(_) => writeln!(page, "| {} | done | |", row.name)?,
            Status::Refused(errno, reason) => {
                writeln!(
                    page,
                    "| {} | {:?} | {reason} |",
                    row.name,
                    Errno::new(errno)
                )?;
            }
        }
    }
    Ok(())
}
