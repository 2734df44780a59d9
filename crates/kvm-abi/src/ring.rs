//! The ring of coalesced writes in a vCPU's file (KVM API document, KVM_REGISTER_COALESCED_MMIO).
//!
//! The VMM maps the same page and may write anything there, so each field is an atomic or a
//! volatile access, and indices are checked by `io_bus::coalesced`.

use std::mem::size_of;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};

use hypervisor::{RingEntry, RingMemory};
use kvm_bindings::*;

use crate::errno::Result;
use crate::run_page::PAGE_SIZE;

/// anykvm's mapping of the page.
#[derive(Debug)]
pub(crate) struct Ring(NonNull<kvm_coalesced_mmio_ring>);

// SAFETY: shared memory that belongs to no thread.
unsafe impl Send for Ring {}

/// Offset of the entries, which follow the two indices.
const ENTRIES: usize =
    (PAGE_SIZE - size_of::<kvm_coalesced_mmio_ring>()) / size_of::<kvm_coalesced_mmio>();

impl Ring {
    pub(crate) fn map(fd: BorrowedFd<'_>) -> Result<Self> {
        let offset = KVM_COALESCED_MMIO_PAGE_OFFSET as usize * PAGE_SIZE;
        // The memory stays, because the file's size is sealed.
        Ok(Self(
            host::system::map_shared(fd, offset, PAGE_SIZE)?.cast(),
        ))
    }

    fn first_index(&self) -> &AtomicU32 {
        // SAFETY: mapped as long as `self` lives and aligned; only accessed atomically here.
        unsafe { AtomicU32::from_ptr(&raw mut (*self.0.as_ptr()).first) }
    }

    fn last_index(&self) -> &AtomicU32 {
        // SAFETY: mapped as long as `self` lives and aligned; only accessed atomically here.
        unsafe { AtomicU32::from_ptr(&raw mut (*self.0.as_ptr()).last) }
    }
}

impl RingMemory for Ring {
    fn first(&self) -> u32 {
        // Acquire: the VMM has read the entry before it moved the index past it.
        self.first_index().load(Ordering::Acquire)
    }
    fn last(&self) -> u32 {
        self.last_index().load(Ordering::Relaxed)
    }
    fn store(&mut self, index: u32, entry: RingEntry) {
        if index as usize >= ENTRIES {
            return;
        }
        // SAFETY: `index` is inside the page, whose entries follow the two indices; the layout
        // of `RingEntry` is that of `kvm_coalesced_mmio` (checked by a test in io-bus).
        unsafe {
            (&raw mut (*self.0.as_ptr()).coalesced_mmio)
                .cast::<RingEntry>()
                .add(index as usize)
                .write_volatile(entry);
        }
    }
    fn publish(&mut self, last: u32) {
        self.last_index().store(last, Ordering::Release);
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // SAFETY: our own mapping, to which no reference outlives `self`.
        unsafe { host::system::unmap(self.0.cast(), PAGE_SIZE) };
    }
}
