//! Guest memory whose mapping changes while guests run.
//!
//! Not in `kvm-ioctls`: there the kernel tells KVM.

use vmm_sys_util::errno;

use super::Result;

/// A change of guest memory under way; see [`begin_memory_change`].
#[derive(Debug)]
#[must_use = "the change is over when it is dropped"]
pub struct MemoryChange(
    #[expect(dead_code, reason = "its end is what it is for")]
    Option<kvm_abi::host_memory::MemoryChange>,
);

/// To be called before the process changes how it can access memory of its guests, whose memslots stay: before mprotect(2),
/// munmap(2), mmap(2) with MAP_FIXED, mremap(2), or before a file becomes shorter that is mapped there. All that is dropped behind the call.
///
/// ```no_run
/// # let (address, len) = (0 as *mut libc::c_void, 0);
/// let change = anykvm_ioctls::begin_memory_change(address.cast(), len)?;
/// // SAFETY: guest memory, to which there are no references.
/// unsafe { libc::mprotect(address, len, libc::PROT_READ) };
/// drop(change);
/// # Ok::<(), anykvm_ioctls::Error>(())
/// ```
///
/// When it returns no vCPU accesses that memory; what comes there waits until the change is over. An access that is not allowed then
/// makes KVM_RUN give EFAULT, as KVM does, with the guest before the instruction; the next KVM_RUN tries again. Addresses without a
/// memslot cost next to nothing. Under `anykvm exec` it is done for the VMM. A change that nobody has announced is a fault of the
/// process when a guest comes there.
///
/// The calling thread may not be inside KVM_RUN, in a handler of a signal.
///
/// # Errors
///
/// ENOMEM: the change must not be made.
pub fn begin_memory_change(address: *const u8, len: usize) -> Result<MemoryChange> {
    kvm_abi::host_memory::begin(address as u64, len as u64)
        .map(MemoryChange)
        .map_err(|error| errno::Error::new(error.get()))
}
