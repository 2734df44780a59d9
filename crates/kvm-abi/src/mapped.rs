//! Mappings of vCPU descriptors, for code that intercepts `mmap(2)`: what a memfd does not do by itself.

use std::os::fd::{AsFd, AsRawFd, RawFd};

use kvm_bindings::{KVM_COALESCED_MMIO_PAGE_OFFSET, KVM_DIRTY_LOG_PAGE_OFFSET};

use crate::objects::{Object, known};
use crate::run_page::PAGE_SIZE;

/// A part of a mapping that must be mapped from another file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Patch {
    /// Offset in bytes from the mapping's start.
    pub at: usize,
    /// Length in bytes.
    pub len: usize,
    /// The file.
    pub fd: RawFd,
    /// Offset in bytes in the file.
    pub offset: usize,
}

/// Whether a mapping is allowed, and which part of it must be replaced afterwards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Allowed as it is.
    Good,
    /// Allowed, with a part to replace: all vCPUs of a VM share one ring of coalesced writes.
    Patched(Patch),
    /// Refused with EINVAL.
    Bad,
}

/// Judges a mapping of `len` bytes of `fd` from `offset` on. `is_plain` says that it is shared and not executable,
/// which a mapping of the dirty ring must be.
pub fn judge_mapping(fd: RawFd, len: usize, offset: usize, is_plain: bool) -> Verdict {
    let Some(Object::Vcpu(vcpu)) = known(fd) else {
        return Verdict::Good;
    };
    let end = offset.saturating_add(len);
    let ring = KVM_DIRTY_LOG_PAGE_OFFSET as usize * PAGE_SIZE;
    let has_ring = vcpu.vm().hypervisor().dirty_ring_entries() != 0;
    if has_ring && end > ring && !is_plain {
        return Verdict::Bad;
    }
    let page = KVM_COALESCED_MMIO_PAGE_OFFSET as usize * PAGE_SIZE;
    match vcpu.vm().ring_file() {
        Some(file) if !vcpu.has_ring() && (offset..end).contains(&page) => {
            Verdict::Patched(Patch {
                at: page - offset,
                len: PAGE_SIZE,
                fd: file.as_fd().as_raw_fd(),
                offset: page,
            })
        }
        _ => Verdict::Good,
    }
}
