//! Guest RAM: anonymous private mappings of this process, given to the hypervisor as memslots.

use vm_memory::bitmap::AtomicBitmap;
use vm_memory::{GuestAddress, GuestMemoryBackend as _, GuestMemoryMmap};

use crate::error::BootError;
use crate::layout::{HOLE_END, HOLE_START};

/// What the VMM and its devices share. The bitmap has what they write, which KVM's dirty log does not know of.
pub(crate) type GuestMemory = GuestMemoryMmap<AtomicBitmap>;

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
    let refused = |e: &dyn std::fmt::Display| BootError::Allocate {
        mib,
        reason: e.to_string(),
    };
    // A bitmap for more than there are addresses ends the process: first without.
    GuestMemoryMmap::<()>::from_ranges(&ranges).map_err(|e| refused(&e))?;
    let memory = GuestMemory::from_ranges(&ranges).map_err(|e| refused(&e))?;
    // Random accesses to more than a few MiB miss the host's TLB otherwise, whatever ours does.
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
