//! Guest RAM: anonymous private mappings of this process, given to the hypervisor as memslots.

use kvm_bindings::kvm_userspace_memory_region;
use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};

use crate::error::BootError;
use crate::layout::{HOLE_END, HOLE_START};

/// What the VMM and its devices share.
pub(crate) type GuestMemory = GuestMemoryMmap<()>;

/// The RAM ranges of a guest with `size` bytes: below the hole, and what is left from 4 GiB on.
pub(crate) fn ram_ranges(size: u64) -> Vec<(u64, u64)> {
    let low = size.min(HOLE_START);
    let mut ranges = vec![(0, low)];
    if size > low {
        ranges.push((HOLE_END, size - low));
    }
    ranges
}

/// Maps `size` bytes of guest RAM. Pages cost nothing until the guest touches them.
pub(crate) fn allocate(size: u64) -> Result<GuestMemory, BootError> {
    let mib = size >> 20;
    let mut ranges = Vec::new();
    for (start, len) in ram_ranges(size) {
        let len = usize::try_from(len).map_err(|e| BootError::Allocate {
            mib,
            reason: e.to_string(),
        })?;
        ranges.push((GuestAddress(start), len));
    }
    GuestMemory::from_ranges(&ranges).map_err(|e| BootError::Allocate {
        mib,
        reason: e.to_string(),
    })
}

/// Makes each RAM range a memslot of `vm`.
pub(crate) fn register(vm: &anykvm_ioctls::VmFd, memory: &GuestMemory) -> Result<(), BootError> {
    for (slot, region) in memory.iter().enumerate() {
        let hva = memory
            .get_host_address(region.start_addr())
            .map_err(BootError::guest("a memslot"))?;
        let slot = kvm_userspace_memory_region {
            slot: u32::try_from(slot).unwrap_or(u32::MAX),
            flags: 0,
            guest_phys_addr: region.start_addr().0,
            memory_size: region.len(),
            userspace_addr: hva as u64,
        };
        // SAFETY: the range is a live mapping of `memory`, which `Machine` keeps until the process
        // ends, after every vCPU.
        unsafe { vm.set_user_memory_region(slot) }
            .map_err(BootError::kvm("KVM_SET_USER_MEMORY_REGION"))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ram_skips_the_hole() {
        assert_eq!(ram_ranges(1 << 20), [(0, 1 << 20)]);
        assert_eq!(ram_ranges(3 << 30), [(0, 3 << 30)]);
        assert_eq!(ram_ranges(6 << 30), [(0, 3 << 30), (4 << 30, 3 << 30)]);
    }
}
