//! The dirty ring in a vCPU's file (KVM API document, KVM_CAP_DIRTY_LOG_RING).
//!
//! The VMM maps the same pages and may write anything there: each field is an atomic access.

use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use hypervisor::DirtyRingMemory;
use kvm_bindings::{KVM_DIRTY_LOG_PAGE_OFFSET, kvm_dirty_gfn};

use crate::errno::Result;
use crate::run_page::PAGE_SIZE;

const OFFSET: usize = KVM_DIRTY_LOG_PAGE_OFFSET as usize * PAGE_SIZE;

/// Size in bytes of the file of a vCPU with a ring.
pub(crate) const fn file_size(entries: u32) -> usize {
    OFFSET + ring_size(entries)
}

const fn ring_size(entries: u32) -> usize {
    entries as usize * size_of::<kvm_dirty_gfn>()
}

/// anykvm's mapping of the ring.
#[derive(Debug)]
pub(crate) struct DirtyRing {
    first: NonNull<kvm_dirty_gfn>,
    entries: u32,
}

// SAFETY: shared memory that belongs to no thread.
unsafe impl Send for DirtyRing {}
// SAFETY: what is shared is accessed atomically alone.
unsafe impl Sync for DirtyRing {}

impl DirtyRing {
    pub(crate) fn map(fd: BorrowedFd<'_>, entries: u32) -> Result<Self> {
        // The memory stays, because the file's size is sealed.
        let first = host::system::map_shared(fd, OFFSET, ring_size(entries))?.cast();
        Ok(Self { first, entries })
    }

    fn entry(&self, index: u32) -> *mut kvm_dirty_gfn {
        let index = index & (self.entries - 1);
        // SAFETY: the number of entries is a power of two: the index is inside the mapping.
        unsafe { self.first.as_ptr().add(index as usize) }
    }

    fn flags(&self, index: u32) -> &AtomicU32 {
        // SAFETY: mapped as long as `self` lives and aligned; only accessed atomically here.
        unsafe { AtomicU32::from_ptr(&raw mut (*self.entry(index)).flags) }
    }

    fn slot(&self, index: u32) -> &AtomicU32 {
        // SAFETY: mapped as long as `self` lives and aligned; only accessed atomically here.
        unsafe { AtomicU32::from_ptr(&raw mut (*self.entry(index)).slot) }
    }

    fn offset(&self, index: u32) -> &AtomicU64 {
        // SAFETY: mapped as long as `self` lives and aligned; only accessed atomically here.
        unsafe { AtomicU64::from_ptr((&raw mut (*self.entry(index)).offset).cast()) }
    }
}

impl DirtyRingMemory for DirtyRing {
    fn flags(&self, index: u32) -> u32 {
        self.flags(index).load(Ordering::Acquire)
    }
    fn set_flags(&self, index: u32, flags: u32) {
        Self::flags(self, index).store(flags, Ordering::Release);
    }
    fn place(&self, index: u32) -> (u32, u64) {
        let slot = self.slot(index).load(Ordering::Relaxed);
        (slot, self.offset(index).load(Ordering::Relaxed))
    }
    fn fill(&self, index: u32, (slot, page): (u32, u64), flags: u32) {
        self.slot(index).store(slot, Ordering::Relaxed);
        self.offset(index).store(page, Ordering::Relaxed);
        self.set_flags(index, flags);
    }
}

impl Drop for DirtyRing {
    fn drop(&mut self) {
        let len = ring_size(self.entries);
        // SAFETY: our own mapping, to which no reference outlives `self`.
        unsafe { host::system::unmap(self.first.cast(), len) };
    }
}
