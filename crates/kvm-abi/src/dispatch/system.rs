//! ioctls of the system descriptor.

use std::os::fd::IntoRawFd;

use kvm_bindings::*;

use super::{LIST, Row, count, list_len, no_argument, write_cpuid};
use crate::errno::{Errno, Result};
use crate::numbers::*;
use crate::system;
use crate::user_memory::Arg;

/// KVM_X86_XCOMP_GUEST_SUPP of group 0, the only attribute of the system descriptor.
const XCOMP_GUEST_SUPP: (u32, u64) = (0, 0);

pub(crate) const TABLE: &[Row<()>] = &[
    Row::done("KVM_GET_API_VERSION", KVM_GET_API_VERSION, |(), arg| {
        no_argument(arg)?;
        Ok(system::api_version())
    }),
    Row::done("KVM_CREATE_VM", KVM_CREATE_VM, |(), arg| {
        Ok(system::create_vm(arg.0)?.0.into_raw_fd())
    }),
    Row::done("KVM_CHECK_EXTENSION", KVM_CHECK_EXTENSION, |(), arg| {
        Ok(system::check_extension(arg.0))
    }),
    Row::done(
        "KVM_GET_VCPU_MMAP_SIZE",
        KVM_GET_VCPU_MMAP_SIZE,
        |(), arg| {
            no_argument(arg)?;
            count(system::vcpu_mmap_size())
        },
    ),
    Row::done(
        "KVM_GET_SUPPORTED_CPUID",
        KVM_GET_SUPPORTED_CPUID,
        |(), arg| write_cpuid(arg, system::supported_cpuid),
    ),
    Row::done(
        "KVM_GET_EMULATED_CPUID",
        KVM_GET_EMULATED_CPUID,
        |(), arg| write_cpuid(arg, system::emulated_cpuid),
    ),
    Row::done(
        "KVM_GET_MSR_INDEX_LIST",
        KVM_GET_MSR_INDEX_LIST,
        |(), arg| write_msr_list(arg, &system::msr_index_list()),
    ),
    Row::done(
        "KVM_GET_MSR_FEATURE_INDEX_LIST",
        KVM_GET_MSR_FEATURE_INDEX_LIST,
        |(), arg| write_msr_list(arg, &system::msr_feature_index_list()),
    ),
    Row::done("KVM_GET_MSRS", KVM_GET_MSRS, |(), arg| {
        let len = list_len(arg, system::MAX_IO_MSRS - 1)?;
        let mut entries = arg.offset(LIST).read_list::<kvm_msr_entry>(len)?;
        let read = system::feature_msrs(&mut entries)?;
        arg.offset(LIST).write_list(&entries)?;
        count(read)
    }),
    Row::done(
        "KVM_X86_GET_MCE_CAP_SUPPORTED",
        KVM_X86_GET_MCE_CAP_SUPPORTED,
        |(), arg| arg.write(&system::mce_cap_supported()),
    ),
    Row::done("KVM_GET_DEVICE_ATTR", KVM_GET_DEVICE_ATTR, |(), arg| {
        let attr = device_attr(arg)?;
        Arg(attr.addr).write(&system::guest_xcr0_supported())
    }),
    Row::done("KVM_HAS_DEVICE_ATTR", KVM_HAS_DEVICE_ATTR, |(), arg| {
        device_attr(arg).map(|_| 0)
    }),
    Row::done(
        "KVM_GET_SUPPORTED_HV_CPUID",
        KVM_GET_SUPPORTED_HV_CPUID,
        |(), arg| write_cpuid(arg, system::supported_hv_cpuid),
    ),
];

/// Returns the attribute's structure if it names the only attribute, ENXIO otherwise.
fn device_attr(arg: Arg) -> Result<kvm_device_attr> {
    let attr: kvm_device_attr = arg.read()?;
    if (attr.group, attr.attr) == XCOMP_GUEST_SUPP {
        Ok(attr)
    } else {
        Err(Errno::new(libc::ENXIO))
    }
}

/// Stores the list's length in any case, because a VMM learns it by asking with 0, and the list if it fits.
fn write_msr_list(arg: Arg, list: &[u32]) -> Result<i32> {
    let capacity = arg.read::<u32>()? as usize;
    arg.write(&(list.len() as u32))?;
    if list.len() > capacity {
        return Err(Errno::new(libc::E2BIG));
    }
    arg.offset(size_of::<u32>()).write_list(list)
}
