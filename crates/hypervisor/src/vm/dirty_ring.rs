//! KVM_CAP_DIRTY_LOG_RING: vCPUs report the pages that they have made dirty in rings.

use super::Vm;
use crate::{
    Error, Result,
    limits::{MAX_DIRTY_RING, RING_ENTRY},
};

impl Vm {
    /// KVM_ENABLE_CAP: gives each vCPU a ring of `bytes` bytes. EINVAL if that is no power of two or less than a page,
    /// if rings are enabled already, and once there are vCPUs; E2BIG if it exceeds the capability's value.
    pub(super) fn set_dirty_ring(&self, bytes: u64) -> Result<()> {
        if !bytes.is_power_of_two() || bytes < host::PAGE_SIZE as u64 {
            return Err(Error::InvalidArgument);
        }
        if bytes > MAX_DIRTY_RING {
            return Err(Error::TooBig((MAX_DIRTY_RING / RING_ENTRY) as usize));
        }
        // While the lock is held, no vCPU can be added.
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

    /// Number of entries of each vCPU's ring; 0 if the VM uses bitmaps.
    pub fn dirty_ring_entries(&self) -> u32 {
        self.state.memory.rings().entries()
    }

    /// KVM_RESET_DIRTY_RINGS: returns the number of entries that the VMM has given back, once writes to their pages are
    /// noticed again. EINVAL without rings.
    pub fn reset_dirty_rings(&self) -> Result<usize> {
        if self.dirty_ring_entries() == 0 {
            return Err(Error::InvalidArgument);
        }
        let (count, epoch) = self.state.memory.reset_rings();
        self.state.wait_for_harvest(epoch);
        Ok(count)
    }
}
