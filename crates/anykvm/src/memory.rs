//! Guest RAM: anonymous private mappings of this process, which the hypervisor gets as memslots.

use vm_memory::bitmap::AtomicBitmap;
use vm_memory::{GuestAddress, GuestMemoryBackend as _, GuestMemoryMmap};

use crate::error::BootError;
use crate::layout::{HOLE_END, HOLE_START};

/// Guest memory as the VMM and its devices share it. The bitmap has the pages that they write, which KVM's dirty log
/// does not have.
pub(crate) type GuestMemory = GuestMemoryMmap<AtomicBitmap>;

/// Returns the RAM ranges of a guest with `size` bytes: below the hole, and the rest from 4 GiB on.
pub(crate) fn ram_ranges(size: u64) -> Vec<(u64, u64)> {
    let low = size.min(HOLE_START);
    let mut ranges = vec![(0, low)];
    if size > low {
        ranges.push((HOLE_END, size - low));
    }
    ranges
}

/// Maps `size` bytes of guest RAM. Pages take no memory until the guest touches them.
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
    let refused = |e: &dyn std::fmt::Display| BootError::Allocate {
        mib,
        reason: e.to_string(),
    };
    // A bitmap that is larger than the address space would end the process, so the ranges are tried without one first.
    GuestMemoryMmap::<()>::from_ranges(&ranges).map_err(|e| refused(&e))?;
    let memory = GuestMemory::from_ranges(&ranges).map_err(|e| refused(&e))?;
    // Otherwise random accesses to more than a few MiB miss the host's TLB, whatever our software TLB does.
    for region in memory.iter() {
        host::mapping::advise_huge(region.as_ptr().addr(), region.size());
    }
    Ok(memory)
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
