//! Memslots without unsafe code, for VMMs whose guest memory lives as long as the process.
//!
//! Not in `kvm-ioctls`: there every memslot is the caller's promise about a raw address.

use kvm_bindings::kvm_userspace_memory_region;
use vm_memory::{GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion, bitmap::Bitmap};

use super::Result;
use super::vm::VmFd;

/// How memory is mapped that need not be asked for.
const WRITABLE: i32 = libc::PROT_READ | libc::PROT_WRITE;

impl VmFd {
    /// KVM_SET_USER_MEMORY_REGION for each region of `memory`, numbered from slot 0. The host is
    /// asked to use huge pages for it.
    ///
    /// # Errors
    ///
    /// Those of the ioctl; regions before the refused one stay.
    pub fn set_static_memory<B: Bitmap>(&self, memory: &'static GuestMemoryMmap<B>) -> Result<()> {
        self.set_static_memory_of(0, memory)
    }

    /// The same in one of the two address spaces of slots: 1 is SMM's.
    ///
    /// # Errors
    ///
    /// As [`Self::set_static_memory`].
    pub fn set_static_memory_of<B: Bitmap>(
        &self,
        space: u16,
        memory: &'static GuestMemoryMmap<B>,
    ) -> Result<()> {
        for (slot, region) in (u32::from(space) << 16..).zip(memory.iter()) {
            let slot = kvm_userspace_memory_region {
                slot,
                flags: 0,
                guest_phys_addr: region.start_addr().0,
                memory_size: region.len(),
                userspace_addr: region.as_ptr() as u64,
            };
            // SAFETY: advice on a mapping that `memory` owns; it changes no content. A host without
            // huge pages refuses it, which harms nobody.
            let _ = unsafe {
                libc::madvise(
                    region.as_ptr().cast(),
                    slot.memory_size as usize,
                    libc::MADV_HUGEPAGE,
                )
            };
            // SAFETY: the address and length are those of a mapping owned by `memory`, which is
            // borrowed for the rest of the process, so that it is never unmapped or reused; all
            // access by the VMM goes through vm-memory's volatile accessors.
            unsafe { self.set_user_memory_region(slot) }?;
            // A file may be shorter than its mapping.
            if region.file_offset().is_none() && region.prot() & WRITABLE == WRITABLE {
                self.typed()?.set_mapped(slot.slot);
            }
        }
        Ok(())
    }
}
