//! ioctls of a VM's descriptor.

use std::os::fd::{AsRawFd, IntoRawFd};
use std::sync::Arc;

use hypervisor::{EventFilter, MsrRange};
use kvm_bindings::*;

use super::{LIST, Row, count, done, list_len};
use crate::errno::{Errno, Result};
use crate::numbers::*;
use crate::objects;
use crate::run_page::PAGE_SIZE;
use crate::user_memory::Arg;
use crate::vm::Vm;
use crate::xen;

const NO_SEV: &str = "encrypted and private memory need hardware";

pub(crate) const TABLE: &[Row<Arc<Vm>>] = &[
    Row::done("KVM_CHECK_EXTENSION", KVM_CHECK_EXTENSION, |vm, arg| {
        Ok(vm.check_extension(arg.0))
    }),
    Row::done("KVM_CREATE_VCPU", KVM_CREATE_VCPU, |vm, arg| {
        Ok(vm.create_vcpu(arg.0)?.0.into_raw_fd())
    }),
    Row::done("KVM_CREATE_DEVICE", KVM_CREATE_DEVICE, |vm, arg| {
        create_device(vm, arg)
    }),
    Row::done(
        "KVM_SET_USER_MEMORY_REGION",
        KVM_SET_USER_MEMORY_REGION,
        |vm, arg| done(vm.set_user_memory_region(&arg.read()?)),
    ),
    Row::done(
        "KVM_SET_USER_MEMORY_REGION2",
        KVM_SET_USER_MEMORY_REGION2,
        |vm, arg| done(vm.set_user_memory_region2(&arg.read()?)),
    ),
    Row::done("KVM_GET_DIRTY_LOG", KVM_GET_DIRTY_LOG, |vm, arg| {
        get_dirty_log(vm, arg)
    }),
    Row::done("KVM_SET_TSS_ADDR", KVM_SET_TSS_ADDR, |vm, arg| {
        done(vm.hypervisor().set_tss_addr(arg.0))
    }),
    Row::done(
        "KVM_SET_IDENTITY_MAP_ADDR",
        KVM_SET_IDENTITY_MAP_ADDR,
        |vm, arg| done(vm.hypervisor().set_identity_map_addr(arg.read()?)),
    ),
    Row::done("KVM_SET_BOOT_CPU_ID", KVM_SET_BOOT_CPU_ID, |vm, arg| {
        let id = u32::try_from(arg.0).map_err(|_| Errno::new(libc::EINVAL))?;
        done(vm.hypervisor().set_boot_cpu_id(id))
    }),
    Row::done("KVM_CREATE_IRQCHIP", KVM_CREATE_IRQCHIP, |vm, _| {
        done(vm.hypervisor().create_irqchip())
    }),
    Row::done("KVM_GET_IRQCHIP", KVM_GET_IRQCHIP, |vm, arg| {
        let mut chip: kvm_irqchip = arg.read()?;
        vm.get_irqchip(&mut chip)?;
        arg.write(&chip)
    }),
    Row::done("KVM_SET_IRQCHIP", KVM_SET_IRQCHIP, |vm, arg| {
        done(vm.set_irqchip(&arg.read()?))
    }),
    Row::done("KVM_CREATE_PIT", KVM_CREATE_PIT, |vm, _| {
        done(vm.create_pit())
    }),
    Row::done("KVM_CREATE_PIT2", KVM_CREATE_PIT2, |vm, arg| {
        done(vm.hypervisor().create_pit2(&arg.read()?))
    }),
    Row::done("KVM_GET_PIT", KVM_GET_PIT, |vm, arg| {
        arg.write(&vm.get_pit()?)
    }),
    Row::done("KVM_SET_PIT", KVM_SET_PIT, |vm, arg| {
        done(vm.set_pit(&arg.read()?))
    }),
    Row::done("KVM_GET_PIT2", KVM_GET_PIT2, |vm, arg| {
        arg.write(&vm.hypervisor().get_pit2()?)
    }),
    Row::done("KVM_SET_PIT2", KVM_SET_PIT2, |vm, arg| {
        done(vm.hypervisor().set_pit2(&arg.read()?))
    }),
    Row::done("KVM_REINJECT_CONTROL", KVM_REINJECT_CONTROL, |vm, arg| {
        let control: kvm_reinject_control = arg.read()?;
        done(vm.hypervisor().reinject_control(control.pit_reinject != 0))
    }),
    Row::done("KVM_IRQ_LINE", KVM_IRQ_LINE, |vm, arg| {
        vm.irq_line(&arg.read()?).map(|_| 0)
    }),
    Row::done("KVM_IRQ_LINE_STATUS", KVM_IRQ_LINE_STATUS, |vm, arg| {
        let mut line: kvm_irq_level = arg.read()?;
        line.__bindgen_anon_1.status = vm.irq_line(&line)?;
        arg.write(&line)
    }),
    Row::done("KVM_SET_GSI_ROUTING", KVM_SET_GSI_ROUTING, |vm, arg| {
        set_gsi_routing(vm, arg)
    }),
    Row::done("KVM_SIGNAL_MSI", KVM_SIGNAL_MSI, |vm, arg| {
        Ok(vm.hypervisor().signal_msi(&arg.read()?)?)
    }),
    Row::done("KVM_IRQFD", KVM_IRQFD, |vm, arg| {
        done(vm.hypervisor().irqfd(&arg.read()?))
    }),
    Row::done("KVM_IOEVENTFD", KVM_IOEVENTFD, |vm, arg| {
        done(vm.hypervisor().ioeventfd(&arg.read()?))
    }),
    Row::done(
        "KVM_REGISTER_COALESCED_MMIO",
        KVM_REGISTER_COALESCED_MMIO,
        |vm, arg| done(vm.register_coalesced_mmio(&arg.read()?)),
    ),
    Row::done(
        "KVM_UNREGISTER_COALESCED_MMIO",
        KVM_UNREGISTER_COALESCED_MMIO,
        |vm, arg| done(vm.unregister_coalesced_mmio(&arg.read()?)),
    ),
    Row::done("KVM_GET_CLOCK", KVM_GET_CLOCK, |vm, arg| {
        arg.write(&vm.hypervisor().get_clock()?)
    }),
    Row::done("KVM_SET_CLOCK", KVM_SET_CLOCK, |vm, arg| {
        done(vm.hypervisor().set_clock(&arg.read()?))
    }),
    Row::done("KVM_SET_TSC_KHZ", KVM_SET_TSC_KHZ, |vm, arg| {
        let khz = u32::try_from(arg.0).map_err(|_| Errno::new(libc::EINVAL))?;
        done(vm.hypervisor().set_tsc_khz(khz))
    }),
    Row::done("KVM_GET_TSC_KHZ", KVM_GET_TSC_KHZ, |vm, _| {
        count(vm.hypervisor().tsc_khz()? as usize)
    }),
    Row::done("KVM_ENABLE_CAP", KVM_ENABLE_CAP, |vm, arg| {
        done(vm.hypervisor().enable_cap(&arg.read()?))
    }),
    Row::done(
        "KVM_X86_SET_MSR_FILTER",
        KVM_X86_SET_MSR_FILTER,
        set_msr_filter,
    ),
    Row::done("KVM_CLEAR_DIRTY_LOG", KVM_CLEAR_DIRTY_LOG, |vm, arg| {
        clear_dirty_log(vm, arg)
    }),
    Row::done("KVM_RESET_DIRTY_RINGS", KVM_RESET_DIRTY_RINGS, |vm, _| {
        count(vm.hypervisor().reset_dirty_rings()?)
    }),
    Row::done("KVM_GET_STATS_FD", KVM_GET_STATS_FD, |vm, _| {
        Ok(vm.stats_fd()?.into_raw_fd())
    }),
    Row::done(
        "KVM_SET_PMU_EVENT_FILTER",
        KVM_SET_PMU_EVENT_FILTER,
        set_pmu_event_filter,
    ),
    Row::done("KVM_SET_NR_MMU_PAGES", KVM_SET_NR_MMU_PAGES, |vm, arg| {
        let pages = u32::try_from(arg.0).map_err(|_| Errno::new(libc::EINVAL))?;
        done(vm.hypervisor().set_nr_mmu_pages(pages))
    }),
    Row::done("KVM_GET_NR_MMU_PAGES", KVM_GET_NR_MMU_PAGES, |vm, _| {
        // The result of ioctl(2) cannot be larger.
        Ok(i32::try_from(vm.hypervisor().nr_mmu_pages()).unwrap_or(i32::MAX))
    }),
    Row::refused(
        "KVM_SET_DEVICE_ATTR",
        KVM_SET_DEVICE_ATTR,
        libc::ENXIO,
        "VMs have no attributes without SEV",
    ),
    Row::refused(
        "KVM_GET_DEVICE_ATTR",
        KVM_GET_DEVICE_ATTR,
        libc::ENXIO,
        "VMs have no attributes without SEV",
    ),
    Row::refused(
        "KVM_HAS_DEVICE_ATTR",
        KVM_HAS_DEVICE_ATTR,
        libc::ENXIO,
        "VMs have no attributes without SEV",
    ),
    Row::refused(
        "KVM_CREATE_GUEST_MEMFD",
        KVM_CREATE_GUEST_MEMFD,
        libc::ENOTTY,
        NO_SEV,
    ),
    Row::refused(
        "KVM_SET_MEMORY_ATTRIBUTES",
        KVM_SET_MEMORY_ATTRIBUTES,
        libc::ENOTTY,
        NO_SEV,
    ),
    Row::refused(
        "KVM_MEMORY_ENCRYPT_OP",
        KVM_MEMORY_ENCRYPT_OP,
        libc::ENOTTY,
        NO_SEV,
    ),
    Row::refused(
        "KVM_MEMORY_ENCRYPT_REG_REGION",
        KVM_MEMORY_ENCRYPT_REG_REGION,
        libc::ENOTTY,
        NO_SEV,
    ),
    Row::refused(
        "KVM_MEMORY_ENCRYPT_UNREG_REGION",
        KVM_MEMORY_ENCRYPT_UNREG_REGION,
        libc::ENOTTY,
        NO_SEV,
    ),
    Row::done("KVM_HYPERV_EVENTFD", KVM_HYPERV_EVENTFD, |vm, arg| {
        done(vm.hypervisor().hyperv_eventfd(&arg.read()?))
    }),
    Row::done("KVM_XEN_HVM_CONFIG", KVM_XEN_HVM_CONFIG, set_xen_hvm_config),
    Row::done("KVM_XEN_HVM_GET_ATTR", KVM_XEN_HVM_GET_ATTR, |vm, arg| {
        let mut attr: kvm_xen_hvm_attr = arg.read()?;
        let value = vm.hypervisor().xen_attr(attr.type_.into())?;
        xen::store_vm_attr(value, &mut attr);
        arg.write(&attr)
    }),
    Row::done("KVM_XEN_HVM_SET_ATTR", KVM_XEN_HVM_SET_ATTR, |vm, arg| {
        done(vm.hypervisor().set_xen_attr(&xen::vm_attr(&arg.read()?)?))
    }),
    Row::done(
        "KVM_XEN_HVM_EVTCHN_SEND",
        KVM_XEN_HVM_EVTCHN_SEND,
        |vm, arg| done(vm.hypervisor().send_xen_event(&arg.read()?)),
    ),
];

fn create_device(vm: &Arc<Vm>, arg: Arg) -> Result<i32> {
    let mut device: kvm_create_device = arg.read()?;
    let Some((fd, _)) = vm.create_device(&device)? else {
        return Ok(0);
    };
    device.fd = fd.as_raw_fd().cast_unsigned();
    let number = fd.into_raw_fd();
    arg.write(&device).inspect_err(|_| {
        // A caller that does not learn the number does not keep the descriptor. It may have guessed the number and
        // closed it.
        let _ = objects::close(number);
    })
}

/// Copies the slot's whole bitmap, one 64-bit word for each 64 pages begun.
fn get_dirty_log(vm: &Arc<Vm>, arg: Arg) -> Result<i32> {
    let log: kvm_dirty_log = arg.read()?;
    // SAFETY: a pointer and the integer of the same size; any bytes are either.
    let bitmap = unsafe { log.__bindgen_anon_1.padding2 };
    let show = |first: usize, words: &[u64]| {
        Arg(bitmap)
            .offset(first * size_of::<u64>())
            .write_list(words)?;
        Ok::<(), Errno>(())
    };
    done(vm.hypervisor().get_dirty_log(log.slot, show))
}

/// Clears the dirty bits of pages whose bits are set in the caller's bitmap.
fn clear_dirty_log(vm: &Arc<Vm>, arg: Arg) -> Result<i32> {
    let log: kvm_clear_dirty_log = arg.read()?;
    // SAFETY: a pointer and the integer of the same size; any bytes are either.
    let bitmap = unsafe { log.__bindgen_anon_1.padding2 };
    let pages = u64::from(log.num_pages);
    // Bounded by the slot, so that no more is read than it has pages.
    if pages > vm.hypervisor().logged_pages(log.slot)? {
        return Err(Errno::new(libc::EINVAL));
    }
    let read = |first: usize, words: &mut [u64]| {
        Arg(bitmap)
            .offset(first * size_of::<u64>())
            .read_words(words)
    };
    done(
        vm.hypervisor()
            .clear_dirty_log(log.slot, log.first_page, pages, read),
    )
}

fn set_xen_hvm_config(vm: &Arc<Vm>, arg: Arg) -> Result<i32> {
    let config: kvm_xen_hvm_config = arg.read()?;
    let intercepts = config.flags & KVM_XEN_HVM_CONFIG_INTERCEPT_HCALL != 0;
    let read = |address: u64, pages: u8| match intercepts {
        true => Ok(Vec::new()),
        false => Arg(address).read_list(usize::from(pages) * PAGE_SIZE),
    };
    let pages = [
        read(config.blob_addr_32, config.blob_size_32)?,
        read(config.blob_addr_64, config.blob_size_64)?,
    ];
    done(vm.hypervisor().set_xen_hvm_config(&config, pages))
}

fn set_msr_filter(vm: &Arc<Vm>, arg: Arg) -> Result<i32> {
    let filter: kvm_msr_filter = arg.read()?;
    let ranges = filter
        .ranges
        .iter()
        .filter(|range| range.nmsrs != 0)
        .map(|range| {
            let len = range.nmsrs.div_ceil(8) as usize;
            if len > KVM_MSR_FILTER_MAX_BITMAP_SIZE as usize {
                return Err(Errno::new(libc::EINVAL));
            }
            Ok(MsrRange {
                flags: range.flags,
                base: range.base,
                count: range.nmsrs,
                bitmap: Arg(range.bitmap as u64).read_list(len)?,
            })
        })
        .collect::<Result<Vec<_>>>()?;
    done(vm.hypervisor().set_msr_filter(filter.flags, ranges))
}

fn set_pmu_event_filter(vm: &Arc<Vm>, arg: Arg) -> Result<i32> {
    /// Offset of the list: the structure's head has eight words, four of them reserved.
    const EVENTS: usize = size_of::<kvm_pmu_event_filter>();
    let head = arg.read_list::<u32>(4)?;
    let &[action, nevents, fixed, flags] = head.as_slice() else {
        return Err(Errno::new(libc::EFAULT));
    };
    if nevents as usize > hypervisor::MAX_FILTERED_EVENTS {
        return Err(Errno::new(libc::E2BIG));
    }
    let events = arg.offset(EVENTS).read_list::<u64>(nevents as usize)?;
    done(vm.hypervisor().set_pmu_event_filter(&EventFilter {
        action,
        fixed,
        flags,
        events: &events,
    }))
}

fn set_gsi_routing(vm: &Arc<Vm>, arg: Arg) -> Result<i32> {
    let einval = Errno::new(libc::EINVAL);
    let len = list_len(arg, KVM_MAX_IRQ_ROUTES).map_err(|error| {
        // Too many routes are EINVAL, unlike too many of anything else.
        if error.get() == libc::E2BIG {
            einval
        } else {
            error
        }
    })?;
    let flags: u32 = arg.offset(size_of::<u32>()).read()?;
    if flags != 0 {
        return Err(einval);
    }
    let entries = arg.offset(LIST).read_list::<kvm_irq_routing_entry>(len)?;
    done(vm.set_gsi_routing(&entries))
}
