//! KVM_CAP_DIRTY_LOG_RING: vCPUs tell by rings which pages they have made dirty.

use super::Vm;
use crate::{
    Error, Result,
    limits::{MAX_DIRTY_RING, RING_ENTRY},
};

impl Vm {
    /// KVM_ENABLE_CAP: rings of so many bytes. EINVAL for no power of two, less than a page, a
    /// second time, and once there are vCPUs; E2BIG for more than the capability tells.
    pub(super) fn set_dirty_ring(&self, bytes: u64) -> Result<()> {
        if !bytes.is_power_of_two() || bytes < host::PAGE_SIZE as u64 {
            return Err(Error::InvalidArgument);
        }
        if bytes > MAX_DIRTY_RING {
            return Err(Error::TooBig((MAX_DIRTY_RING / RING_ENTRY) as usize));
        }
        // The lock keeps vCPUs from appearing meanwhile.
        let vcpus = self.state.vcpus();
        if !vcpus.is_empty()
            || !self
                .state
                .memory
                .rings()
                .enable((bytes / RING_ENTRY) as u32)
        {
            return Err(Error::InvalidArgument);
        }
        Ok(())
    }

    /// Entries of the vCPUs' rings; 0 if the VM has bitmaps.
    pub fn dirty_ring_entries(&self) -> u32 {
        self.state.memory.rings().entries()
    }

    /// KVM_RESET_DIRTY_RINGS: how many entries the VMM has given back. Returns when their pages are
    /// watched again; EINVAL without rings.
    pub fn reset_dirty_rings(&self) -> Result<usize> {
        if self.dirty_ring_entries() == 0 {
            return Err(Error::InvalidArgument);
        }
        let (count, epoch) = self.state.memory.reset_rings();
        self.state.wait_for_harvest(epoch);
        Ok(count)
    }
}
