//! One file per kind of descriptor, and the mappings of a vCPU's descriptor.

use std::fs::File;
use std::mem::size_of;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::ptr::{NonNull, null_mut};

use kvm_bindings::{
    KVM_COALESCED_MMIO_PAGE_OFFSET, kvm_coalesced_mmio, kvm_coalesced_mmio_ring, kvm_run,
};
use vmm_sys_util::errno;

/// [`DeviceFd`](device::DeviceFd).
pub(crate) mod device;
pub(crate) mod dirty;
pub(crate) mod doorbell;
pub(crate) mod memory_change;
mod static_memory;
/// [`Kvm`](system::Kvm).
pub(crate) mod system;
/// [`VcpuFd`](vcpu::VcpuFd) and what KVM_RUN returns.
pub(crate) mod vcpu;
/// [`VmFd`](vm::VmFd).
pub(crate) mod vm;

/// Result of every method of this crate.
pub(crate) type Result<T> = std::result::Result<T, errno::Error>;

const PAGE_SIZE: usize = 4096;

/// A descriptor that leaves `kvm-abi`'s table when it is closed.
#[derive(Debug)]
pub(crate) struct Descriptor(File);

impl Descriptor {
    /// # Safety
    ///
    /// As [`FromRawFd::from_raw_fd`]: the number is open and the caller's to give away.
    pub(crate) unsafe fn from_raw(fd: RawFd) -> Self {
        // SAFETY: the caller's promise.
        Self(unsafe { File::from_raw_fd(fd) })
    }
}

impl From<OwnedFd> for Descriptor {
    fn from(fd: OwnedFd) -> Self {
        Self(fd.into())
    }
}

impl AsRawFd for Descriptor {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        kvm_abi::forget(self.0.as_raw_fd());
    }
}

/// A mapping of a vCPU's descriptor.
#[derive(Debug)]
struct Mapping {
    address: NonNull<libc::c_void>,
    len: usize,
}

// SAFETY: memory shared with the hypervisor anyway; who may touch it when is decided by the
// borrows of the types below.
unsafe impl Send for Mapping {}
// SAFETY: memory shared with the hypervisor anyway; who may touch it when is decided by the
// borrows of the types below.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new<F: AsRawFd>(fd: &F, len: usize, offset: usize) -> Result<Self> {
        let offset = libc::off_t::try_from(offset).map_err(|_| errno::Error::new(libc::EINVAL))?;
        // SAFETY: a new mapping at an address of the kernel's choice disturbs nothing.
        let address = unsafe {
            libc::mmap(
                null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                fd.as_raw_fd(),
                offset,
            )
        };
        match NonNull::new(address) {
            Some(address) if address.as_ptr() != libc::MAP_FAILED => Ok(Self { address, len }),
            _ => Err(errno::Error::last()),
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: our own mapping; the types below do not let references outlive it.
        unsafe { libc::munmap(self.address.as_ptr(), self.len) };
    }
}

/// The run page of a vCPU as the VMM sees it: `kvm_run`, followed by the PIO page.
#[derive(Debug)]
pub struct KvmRunWrapper(Mapping);

impl KvmRunWrapper {
    /// Maps `size` bytes of a vCPU's descriptor; [`crate::Kvm::get_vcpu_mmap_size`] says how many.
    ///
    /// # Errors
    ///
    /// That of `mmap(2)`, and EINVAL when `size` cannot hold a `kvm_run`.
    pub fn mmap_from_fd<F: AsRawFd>(fd: &F, size: usize) -> Result<KvmRunWrapper> {
        if size < size_of::<kvm_run>() {
            return Err(errno::Error::new(libc::EINVAL));
        }
        Mapping::new(fd, size, 0).map(Self)
    }

    /// The shared structure, exclusively as far as this mapping goes.
    pub fn as_mut_ref(&mut self) -> &mut kvm_run {
        // SAFETY: the mapping is page-aligned, holds a `kvm_run` (checked in `mmap_from_fd`) and is
        // borrowed exclusively; any bytes are a `kvm_run`. The hypervisor writes through its own
        // mapping, and only inside KVM_RUN, which borrows the vCPU exclusively as well.
        unsafe { self.0.address.cast().as_mut() }
    }

    /// `len` bytes at `offset`, if they are inside the mapping.
    fn bytes_mut(&mut self, offset: u64, len: usize) -> Option<&mut [u8]> {
        let offset = usize::try_from(offset).ok()?;
        if offset.checked_add(len)? > self.0.len {
            return None;
        }
        // SAFETY: inside the mapping as just checked, borrowed exclusively, bytes need no alignment.
        Some(unsafe {
            std::slice::from_raw_parts_mut(self.0.address.cast::<u8>().as_ptr().add(offset), len)
        })
    }
}

impl AsRef<kvm_run> for KvmRunWrapper {
    fn as_ref(&self) -> &kvm_run {
        // SAFETY: the mapping is page-aligned, holds a `kvm_run` (checked in `mmap_from_fd`) and is
        // borrowed shared; any bytes are a `kvm_run`. The hypervisor writes only inside KVM_RUN,
        // which borrows the vCPU exclusively.
        unsafe { self.0.address.cast().as_ref() }
    }
}

/// The ring of coalesced writes, third page of a vCPU's descriptor.
#[derive(Debug)]
pub(crate) struct KvmCoalescedIoRing(Mapping);

/// Entries that fit into the page behind the two indices.
const RING_MAX: u32 =
    ((PAGE_SIZE - size_of::<kvm_coalesced_mmio_ring>()) / size_of::<kvm_coalesced_mmio>()) as u32;

impl KvmCoalescedIoRing {
    pub(crate) fn mmap_from_fd<F: AsRawFd>(fd: &F) -> Result<Self> {
        let offset = KVM_COALESCED_MMIO_PAGE_OFFSET as usize * PAGE_SIZE;
        Mapping::new(fd, PAGE_SIZE, offset).map(Self)
    }

    /// Takes the oldest entry. The page is writable by others, so an index that is out of range
    /// counts as an empty ring instead of being followed.
    pub(crate) fn read_entry(&mut self) -> Option<kvm_coalesced_mmio> {
        use std::sync::atomic::{AtomicU32, Ordering};

        let ring = self.0.address.cast::<kvm_coalesced_mmio_ring>().as_ptr();
        // SAFETY: the indices are inside the mapping and aligned; both sides use atomics.
        let (first, last) = unsafe {
            (
                AtomicU32::from_ptr(&raw mut (*ring).first),
                AtomicU32::from_ptr(&raw mut (*ring).last),
            )
        };
        let index = first.load(Ordering::Relaxed);
        // Acquire: the entry was written before `last` moved past it.
        if index == last.load(Ordering::Acquire) || index >= RING_MAX {
            return None;
        }
        // SAFETY: `index` is below RING_MAX, so the entry is inside the page.
        let entry = unsafe {
            (&raw const (*ring).coalesced_mmio)
                .cast::<kvm_coalesced_mmio>()
                .add(index as usize)
                .read_volatile()
        };
        // Release: the entry is read before its place is free again.
        first.store((index + 1) % RING_MAX, Ordering::Release);
        Some(entry)
    }
}
