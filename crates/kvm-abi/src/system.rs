//! Calls on the system descriptor, `/dev/kvm` (KVM API document, "system ioctls").

use std::os::fd::OwnedFd;
use std::sync::Arc;

use kvm_bindings::*;

use crate::errno::{Errno, Result};
use crate::lists::{check_msr_count, fit};
use crate::objects::{Object, SYSTEM_NAME, publish};
use crate::run_page::VCPU_MMAP_SIZE;
use crate::vm::Vm;

pub use crate::lists::MAX_IO_MSRS;

/// A new system descriptor, as `open("/dev/kvm", O_RDWR)` gives.
pub fn open(close_on_exec: bool) -> Result<OwnedFd> {
    // Read now, because the VMM may filter system calls later.
    host::thread::cores();
    hypervisor::system::note_host();
    publish(Object::System, SYSTEM_NAME, close_on_exec)
}

/// KVM_GET_API_VERSION: the only version there ever was.
pub fn api_version() -> i32 {
    KVM_API_VERSION as i32
}

/// KVM_GET_VCPU_MMAP_SIZE: run page, PIO page, coalesced ring.
pub fn vcpu_mmap_size() -> usize {
    VCPU_MMAP_SIZE
}

/// KVM_CHECK_EXTENSION: 0 for an unknown capability.
pub fn check_extension(cap: u64) -> i32 {
    u32::try_from(cap).map_or(0, hypervisor::system::check_extension)
}

/// KVM_CREATE_VM.
///
/// # Errors
///
/// EINVAL for a machine type other than 0, KVM_X86_DEFAULT_VM: protected VMs need hardware.
pub fn create_vm(machine_type: u64) -> Result<(OwnedFd, Arc<Vm>)> {
    if machine_type != u64::from(KVM_X86_DEFAULT_VM) {
        return Err(Errno::new(libc::EINVAL));
    }
    let vm = Arc::new(Vm::new()?);
    let fd = publish(Object::Vm(Arc::clone(&vm)), c"kvm-vm", true)?;
    Ok((fd, vm))
}

/// KVM_GET_SUPPORTED_CPUID into a list of `capacity` entries.
///
/// # Errors
///
/// E2BIG when they do not fit.
pub fn supported_cpuid(capacity: usize) -> Result<Vec<kvm_cpuid_entry2>> {
    fit(hypervisor::system::supported_cpuid(), capacity)
}

/// KVM_GET_SUPPORTED_HV_CPUID into a list of `capacity` entries.
///
/// # Errors
///
/// E2BIG when they do not fit.
pub fn supported_hv_cpuid(capacity: usize) -> Result<Vec<kvm_cpuid_entry2>> {
    fit(hypervisor::system::supported_hv_cpuid(true), capacity)
}

/// KVM_GET_SUPPORTED_HV_CPUID on a vCPU.
///
/// # Errors
///
/// E2BIG when they do not fit.
pub(crate) fn vcpu_hv_cpuid(
    vcpu: &hypervisor::Vcpu,
    capacity: usize,
) -> Result<Vec<kvm_cpuid_entry2>> {
    let leaves = hypervisor::system::supported_hv_cpuid(vcpu.has_lapic());
    fit(leaves, capacity)
}

/// KVM_GET_EMULATED_CPUID into a list of `capacity` entries.
///
/// # Errors
///
/// E2BIG when they do not fit.
pub fn emulated_cpuid(capacity: usize) -> Result<Vec<kvm_cpuid_entry2>> {
    fit(hypervisor::system::emulated_cpuid(), capacity)
}

/// KVM_GET_MSR_INDEX_LIST.
pub fn msr_index_list() -> Vec<u32> {
    hypervisor::system::msr_index_list()
}

/// KVM_GET_MSR_FEATURE_INDEX_LIST.
pub fn msr_feature_index_list() -> Vec<u32> {
    hypervisor::system::msr_feature_index_list()
}

/// KVM_GET_MSRS on the system descriptor: reads feature MSRs into `entries` up to the first that does not exist, and
/// returns how many were read.
///
/// # Errors
///
/// E2BIG for [`MAX_IO_MSRS`] entries and more.
pub fn feature_msrs(entries: &mut [kvm_msr_entry]) -> Result<usize> {
    check_msr_count(entries.len())?;
    let mut read = 0;
    for entry in entries {
        let Some(data) = hypervisor::system::feature_msr(entry.index) else {
            break;
        };
        entry.data = data;
        read += 1;
    }
    Ok(read)
}

/// KVM_X86_GET_MCE_CAP_SUPPORTED: the bits that KVM_X86_SETUP_MCE accepts, besides the number of banks.
pub use hypervisor::system::{mce_cap_supported, pkru_offset, signature};

/// Value of KVM_X86_XCOMP_GUEST_SUPP, KVM_GET_DEVICE_ATTR on the system descriptor: the XCR0
/// bits that a guest may have, as leaf 0xd of the supported CPUID says.
pub fn guest_xcr0_supported() -> u64 {
    hypervisor::system::supported_cpuid()
        .iter()
        .find(|entry| entry.function == 0xd && entry.index == 0)
        .map_or(0, |entry| u64::from(entry.eax) | u64::from(entry.edx) << 32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capabilities_beyond_32_bits_do_not_alias() {
        let user_memory = u64::from(KVM_CAP_USER_MEMORY);
        assert_eq!(check_extension(user_memory | 1 << 32), 0);
        assert_eq!(check_extension(696_969), 0);
    }

    #[test]
    fn only_the_default_machine_type_exists() {
        for machine_type in [1, 4, u64::MAX, 1 << 32] {
            assert_eq!(create_vm(machine_type).unwrap_err().get(), libc::EINVAL);
        }
    }
}
