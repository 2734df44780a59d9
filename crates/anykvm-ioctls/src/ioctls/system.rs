//! The system descriptor.

use std::ffi::{CStr, c_ulong};
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, RawFd};

use kvm_abi::Object;
use kvm_bindings::{CpuId, KVM_MAX_CPUID_ENTRIES, MsrList, Msrs, kvm_cpuid_entry2};
use vmm_sys_util::errno;

use crate::cap::Cap;
use crate::ioctls::vm::{VmFd, new_vmfd};
use crate::ioctls::{Descriptor, Result};
use crate::kvm_ioctls::refused;

/// What `/dev/kvm` is to KVM: tells what exists and creates VMs.
#[derive(Debug)]
pub struct Kvm {
    kvm: Descriptor,
}

impl Kvm {
    /// A system descriptor that is closed on `exec`.
    ///
    /// # Errors
    ///
    /// Those of `memfd_create(2)`.
    ///
    /// ```
    /// let kvm = anykvm_ioctls::Kvm::new()?;
    /// # Ok::<(), anykvm_ioctls::Error>(())
    /// ```
    pub fn new() -> Result<Self> {
        let fd = Self::open_with_cloexec(true)?;
        // SAFETY: just opened, and nobody else has it.
        Ok(unsafe { Self::from_raw_fd(fd) })
    }

    /// As [`Self::new`]; `kvm_path` must be `/dev/kvm`.
    ///
    /// # Errors
    ///
    /// As [`Self::open_with_cloexec_at`].
    pub fn new_with_path<P>(kvm_path: P) -> Result<Self>
    where
        P: AsRef<CStr>,
    {
        let fd = Self::open_with_cloexec_at(kvm_path, true)?;
        // SAFETY: just opened, and nobody else has it.
        Ok(unsafe { Self::from_raw_fd(fd) })
    }

    /// A system descriptor as a number that the caller owns.
    ///
    /// # Errors
    ///
    /// Those of `memfd_create(2)`.
    pub fn open_with_cloexec(close_on_exec: bool) -> Result<RawFd> {
        kvm_abi::system::open(close_on_exec)
            .map(IntoRawFd::into_raw_fd)
            .map_err(refused)
    }

    /// As [`Self::open_with_cloexec`]; `path` must be `/dev/kvm`.
    ///
    /// # Errors
    ///
    /// ENOENT for any other path: no file is opened, so a device elsewhere cannot be meant.
    pub fn open_with_cloexec_at<P>(path: P, close_on_exec: bool) -> Result<RawFd>
    where
        P: AsRef<CStr>,
    {
        // DEVIATION: kvm-ioctls opens whatever device node the path names.
        if path.as_ref() != c"/dev/kvm" {
            return Err(errno::Error::new(libc::ENOENT));
        }
        Self::open_with_cloexec(close_on_exec)
    }

    fn check(&self) -> Result<()> {
        match kvm_abi::lookup(self.as_raw_fd()).map_err(refused)? {
            Object::System => Ok(()),
            _ => Err(errno::Error::new(libc::ENOTTY)),
        }
    }

    /// KVM_GET_API_VERSION, which is 12; -1 when the descriptor is not a system descriptor.
    pub fn get_api_version(&self) -> i32 {
        self.check().map_or(-1, |()| kvm_abi::system::api_version())
    }

    /// KVM_CHECK_EXTENSION for a capability by number; 0 for an unknown one.
    pub fn check_extension_raw(&self, c: c_ulong) -> i32 {
        self.check()
            .map_or(-1, |()| kvm_abi::system::check_extension(c))
    }

    /// KVM_CHECK_EXTENSION: 0 means no, more may be a limit.
    pub fn check_extension_int(&self, c: Cap) -> i32 {
        self.check_extension_raw(c as c_ulong)
    }

    /// KVM_CHECK_EXTENSION as yes or no.
    pub fn check_extension(&self, c: Cap) -> bool {
        self.check_extension_int(c) > 0
    }

    /// KVM_GET_VCPU_MMAP_SIZE: bytes to map of a vCPU's descriptor.
    ///
    /// # Errors
    ///
    /// ENOTTY or EBADF when the descriptor is not a system descriptor.
    pub fn get_vcpu_mmap_size(&self) -> Result<usize> {
        self.check()?;
        Ok(kvm_abi::system::vcpu_mmap_size())
    }

    /// KVM_CAP_NR_VCPUS: vCPUs that a VM should have at most.
    pub fn get_nr_vcpus(&self) -> usize {
        self.limit(Cap::NrVcpus).unwrap_or(4)
    }

    /// KVM_CAP_NR_MEMSLOTS.
    pub fn get_nr_memslots(&self) -> usize {
        self.limit(Cap::NrMemslots).unwrap_or(32)
    }

    /// KVM_CAP_MAX_VCPUS: vCPUs that a VM can have at most.
    pub fn get_max_vcpus(&self) -> usize {
        self.limit(Cap::MaxVcpus)
            .unwrap_or_else(|| self.get_nr_vcpus())
    }

    /// KVM_CAP_MAX_VCPU_ID: ids are below this.
    pub fn get_max_vcpu_id(&self) -> usize {
        self.limit(Cap::MaxVcpuId)
            .unwrap_or_else(|| self.get_max_vcpus())
    }

    fn limit(&self, cap: Cap) -> Option<usize> {
        usize::try_from(self.check_extension_int(cap))
            .ok()
            .filter(|limit| *limit > 0)
    }

    /// KVM_GET_EMULATED_CPUID.
    ///
    /// # Errors
    ///
    /// ENOMEM for more than [`KVM_MAX_CPUID_ENTRIES`], E2BIG when `num_entries` are too few.
    pub fn get_emulated_cpuid(&self, num_entries: usize) -> Result<CpuId> {
        self.check()?;
        cpuid(num_entries, kvm_abi::system::emulated_cpuid)
    }

    /// KVM_GET_SUPPORTED_CPUID.
    ///
    /// # Errors
    ///
    /// ENOMEM for more than [`KVM_MAX_CPUID_ENTRIES`], E2BIG when `num_entries` are too few.
    ///
    /// ```
    /// use kvm_bindings::KVM_MAX_CPUID_ENTRIES;
    ///
    /// let kvm = anykvm_ioctls::Kvm::new()?;
    /// let cpuid = kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)?;
    /// assert!(cpuid.as_slice().iter().any(|entry| entry.function == 1));
    /// # Ok::<(), anykvm_ioctls::Error>(())
    /// ```
    pub fn get_supported_cpuid(&self, num_entries: usize) -> Result<CpuId> {
        self.check()?;
        cpuid(num_entries, kvm_abi::system::supported_cpuid)
    }

    /// KVM_GET_MSR_INDEX_LIST: MSRs that a VMM saves and restores.
    ///
    /// # Errors
    ///
    /// ENOMEM when there are more than the list type holds.
    pub fn get_msr_index_list(&self) -> Result<MsrList> {
        self.check()?;
        msr_list(&kvm_abi::system::msr_index_list())
    }

    /// KVM_GET_MSR_FEATURE_INDEX_LIST: MSRs that [`Self::get_msrs`] reads.
    ///
    /// # Errors
    ///
    /// ENOMEM when there are more than the list type holds.
    pub fn get_msr_feature_index_list(&self) -> Result<MsrList> {
        self.check()?;
        msr_list(&kvm_abi::system::msr_feature_index_list())
    }

    /// KVM_GET_MSRS on the system descriptor: values of feature MSRs; how many were read.
    ///
    /// # Errors
    ///
    /// E2BIG for 256 entries and more.
    pub fn get_msrs(&self, msrs: &mut Msrs) -> Result<usize> {
        self.check()?;
        kvm_abi::system::feature_msrs(msrs.as_mut_slice()).map_err(refused)
    }

    /// KVM_CREATE_VM.
    ///
    /// # Errors
    ///
    /// ENOMEM, and those of `memfd_create(2)`.
    pub fn create_vm(&self) -> Result<VmFd> {
        self.create_vm_with_type(0)
    }

    /// KVM_CREATE_VM with a machine type, of which only 0 exists.
    ///
    /// # Errors
    ///
    /// EINVAL for another type.
    pub fn create_vm_with_type(&self, vm_type: u64) -> Result<VmFd> {
        self.check()?;
        let (fd, vm) = kvm_abi::system::create_vm(vm_type).map_err(refused)?;
        Ok(new_vmfd(
            fd.into(),
            Ok(vm),
            kvm_abi::system::vcpu_mmap_size(),
        ))
    }

    /// A [`VmFd`] from the number of a VM's descriptor.
    ///
    /// # Errors
    ///
    /// ENOTTY or EBADF when this is not a system descriptor. If `fd` is no VM, it is the methods
    /// of the result that fail.
    ///
    /// # Safety
    ///
    /// `fd` is open and the caller's to give away.
    pub unsafe fn create_vmfd_from_rawfd(&self, fd: RawFd) -> Result<VmFd> {
        let run_size = self.get_vcpu_mmap_size()?;
        // SAFETY: the caller's promise.
        let descriptor = unsafe { Descriptor::from_raw(fd) };
        let vm = match kvm_abi::lookup(fd) {
            Ok(Object::Vm(vm)) => Ok(vm),
            Ok(_) => Err(kvm_abi::Errno::new(libc::ENOTTY)),
            Err(error) => Err(error),
        };
        Ok(new_vmfd(descriptor, vm, run_size))
    }
}

fn cpuid(
    capacity: usize,
    entries: impl FnOnce(usize) -> kvm_abi::Result<Vec<kvm_cpuid_entry2>>,
) -> Result<CpuId> {
    let no_memory = errno::Error::new(libc::ENOMEM);
    if capacity > KVM_MAX_CPUID_ENTRIES {
        return Err(no_memory);
    }
    let entries = entries(capacity).map_err(refused)?;
    CpuId::from_entries(&entries).map_err(|_| no_memory)
}

fn msr_list(indices: &[u32]) -> Result<MsrList> {
    MsrList::from_entries(indices).map_err(|_| errno::Error::new(libc::ENOMEM))
}

impl AsRawFd for Kvm {
    fn as_raw_fd(&self) -> RawFd {
        self.kvm.as_raw_fd()
    }
}

impl FromRawFd for Kvm {
    unsafe fn from_raw_fd(fd: RawFd) -> Self {
        Self {
            // SAFETY: the caller's promise.
            kvm: unsafe { Descriptor::from_raw(fd) },
        }
    }
}
