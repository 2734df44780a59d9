//! Dirty logging of static memory, clearing it by parts, and dirty rings.
//!
//! Not in `kvm-ioctls`, which has KVM_GET_DIRTY_LOG alone.

use kvm_abi::Errno;
use std::mem::size_of;
use std::sync::atomic::{AtomicU32, Ordering};

use kvm_bindings::{
    KVM_DIRTY_LOG_PAGE_OFFSET, KVM_MEM_LOG_DIRTY_PAGES, kvm_dirty_gfn, kvm_userspace_memory_region,
};
use vm_memory::{GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion, bitmap::Bitmap};
use vmm_sys_util::errno;

use super::vcpu::VcpuFd;
use super::vm::VmFd;
use super::{Mapping, PAGE_SIZE, Result};
use crate::kvm_ioctls::refused;

/// KVM_DIRTY_GFN_F_DIRTY and KVM_DIRTY_GFN_F_RESET of the KVM API document.
const DIRTY: u32 = 1;
const RESET: u32 = 2;

impl VmFd {
    /// Begins or ends dirty logging (KVM_MEM_LOG_DIRTY_PAGES) of one slot of
    /// [`Self::set_static_memory`], which is given once more.
    ///
    /// # Errors
    ///
    /// Those of KVM_SET_USER_MEMORY_REGION; EINVAL if `memory` has no such region.
    pub fn log_static_memory<B: Bitmap>(
        &self,
        memory: &'static GuestMemoryMmap<B>,
        slot: u32,
        is_on: bool,
    ) -> Result<()> {
        let region = memory
            .iter()
            .nth(slot as usize)
            .ok_or(errno::Error::new(libc::EINVAL))?;
        let region = kvm_userspace_memory_region {
            slot,
            flags: if is_on { KVM_MEM_LOG_DIRTY_PAGES } else { 0 },
            guest_phys_addr: region.start_addr().0,
            memory_size: region.len(),
            userspace_addr: region.as_ptr() as u64,
        };
        // SAFETY: the address and length are those of a mapping owned by `memory`, which is
        // borrowed for the rest of the process, so that it is never unmapped or reused; all
        // access by the VMM goes through vm-memory's volatile accessors.
        unsafe { self.set_user_memory_region(region) }
    }

    /// The slot's bitmap, in so many words whatever its size.
    pub(super) fn dirty_bitmap(&self, slot: u32, len: usize) -> Result<Vec<u64>> {
        let mut bitmap = vec![0; len];
        self.read_dirty_log(slot, &mut bitmap)?;
        Ok(bitmap)
    }

    /// What [`VmFd::get_dirty_log`] does, for a VMM that keeps its bitmap, as memory for a new one costs more than the
    /// call. Words behind the slot's are left as they are; those that `bitmap` has no room for are lost.
    ///
    /// # Errors
    ///
    /// ENOENT for a slot without dirty logging, EINVAL for a slot number out of range.
    pub fn read_dirty_log(&self, slot: u32, bitmap: &mut [u64]) -> Result<()> {
        let show = |at: usize, words: &[u64]| {
            let room = bitmap.get_mut(at..).unwrap_or_default();
            let count = room.len().min(words.len());
            room[..count].copy_from_slice(&words[..count]);
            Ok::<(), Errno>(())
        };
        self.typed()?.get_dirty_log(slot, show).map_err(refused)
    }

    /// KVM_CLEAR_DIRTY_LOG: the pages from `first` (a multiple of 64) whose bits are set in `mask` count as
    /// clean until they are written again. `pages` is a multiple of 64 or goes to the slot's end.
    ///
    /// # Errors
    ///
    /// EINVAL for pages that are not the slot's, ENOENT for a slot without dirty logging, ENXIO with rings.
    pub fn clear_dirty_log(&self, slot: u32, first: u64, pages: u64, mask: &[u64]) -> Result<()> {
        self.typed()?
            .clear_dirty_log(slot, first, pages, |at, words: &mut [u64]| {
                // What the caller has not given clears nothing.
                let given = mask.get(at..).unwrap_or_default();
                let (from_caller, rest) = words.split_at_mut(given.len().min(words.len()));
                from_caller.copy_from_slice(&given[..from_caller.len()]);
                rest.fill(0);
                Ok::<(), Errno>(())
            })
            .map_err(refused)
    }

    /// KVM_RESET_DIRTY_RINGS: what [`DirtyRing::collect`] has taken counts as clean until it is written
    /// again. Returns the number of pages.
    ///
    /// # Errors
    ///
    /// EINVAL without rings.
    pub fn reset_dirty_rings(&self) -> Result<usize> {
        self.typed()?.reset_dirty_rings().map_err(refused)
    }
}

/// A vCPU's dirty ring (KVM_CAP_DIRTY_LOG_RING).
#[derive(Debug)]
pub struct DirtyRing {
    mapping: Mapping,
    entries: u32,
    next: u32,
}

impl VcpuFd {
    /// Maps the vCPU's dirty ring of so many entries, as was asked for with KVM_CAP_DIRTY_LOG_RING.
    ///
    /// # Errors
    ///
    /// EINVAL for a number that is no power of two or not that of the capability, and those of `mmap(2)`.
    pub fn dirty_ring(&self, entries: u32) -> Result<DirtyRing> {
        if !entries.is_power_of_two() || self.dirty_ring_entries()? != entries {
            return Err(errno::Error::new(libc::EINVAL));
        }
        let len = entries as usize * size_of::<kvm_dirty_gfn>();
        let offset = KVM_DIRTY_LOG_PAGE_OFFSET as usize * PAGE_SIZE;
        Ok(DirtyRing {
            mapping: Mapping::new(self, len, offset)?,
            entries,
            next: 0,
        })
    }
}

impl DirtyRing {
    /// Takes all pages that are there, by slot and page within it; returns how many. They stay writable until
    /// [`VmFd::reset_dirty_rings`].
    pub fn collect(&mut self, mut page: impl FnMut(u32, u64)) -> usize {
        let mut count = 0;
        while count < self.entries as usize {
            let index = self.next & (self.entries - 1);
            // SAFETY: the number of entries is a power of two, so the entry is inside the mapping.
            let entry = unsafe {
                self.mapping
                    .address
                    .cast::<kvm_dirty_gfn>()
                    .add(index as usize)
            }
            .as_ptr();
            // SAFETY: inside the mapping and aligned; both sides use atomics.
            let flags = unsafe { AtomicU32::from_ptr(&raw mut (*entry).flags) };
            // Acquire: the entry was written before its flag.
            if flags.load(Ordering::Acquire) & (DIRTY | RESET) != DIRTY {
                break;
            }
            // SAFETY: inside the mapping; the hypervisor does not write it until it is reset.
            let kvm_dirty_gfn { slot, offset, .. } = unsafe { entry.read_volatile() };
            page(slot, offset);
            flags.store(RESET, Ordering::Release);
            self.next = self.next.wrapping_add(1);
            count += 1;
        }
        count
    }
}
