//! KVM_GET_DIRTY_LOG and KVM_CLEAR_DIRTY_LOG: which pages were written, and how vCPUs are made to notice their next
//! writes.

use std::sync::atomic::Ordering;

use guest_memory::HostChange;

use super::{Vm, VmState};
use crate::{Error, Result};

/// Number of bitmap words that are processed at once.
const CHUNK: usize = 512;

impl Vm {
    /// KVM_GET_DIRTY_LOG: passes the slot's bitmap to `show`, and clears it unless that is left to KVM_CLEAR_DIRTY_LOG.
    /// `show` gets some words at a time, with the index of the first. The words may be used once this returns.
    pub fn get_dirty_log<E: From<Error>>(
        &self,
        slot: u32,
        show: impl FnMut(usize, &[u64]) -> core::result::Result<(), E>,
    ) -> core::result::Result<(), E> {
        self.has_bitmaps()?;
        let memory = &self.state.memory;
        if self.state.options.is_dirty_log_manual() {
            return memory.peek_dirty(slot, show).map_err(Error::from)?;
        }
        let (shown, epoch) = memory.take_dirty(slot, show).map_err(Error::from)?;
        self.state.wait_for_harvest(epoch);
        shown
    }
    /// Returns the number of pages of a slot that logs. Fails as the dirty log's calls do.
    pub fn logged_pages(&self, slot: u32) -> Result<u64> {
        self.has_bitmaps()?;
        Ok(self.state.memory.logged_pages(slot)?)
    }
    /// Fails with ENXIO if vCPUs have dirty rings.
    fn has_bitmaps(&self) -> Result<()> {
        if self.state.memory.rings().entries() == 0 {
            Ok(())
        } else {
            Err(Error::NoSuchDevice)
        }
    }
    /// KVM_CLEAR_DIRTY_LOG: of the `pages` pages from `first` on, clears those whose bits are set in the mask. `read`
    /// fills in some words of the mask at a time, from the given index on. EINVAL unless `first` is a multiple of 64,
    /// and `pages` is one, too, or reaches to the slot's end.
    pub fn clear_dirty_log<E: From<Error>>(
        &self,
        slot: u32,
        first: u64,
        pages: u64,
        mut read: impl FnMut(usize, &mut [u64]) -> core::result::Result<(), E>,
    ) -> core::result::Result<(), E> {
        if !first.is_multiple_of(64) {
            return Err(Error::InvalidArgument.into());
        }
        let rest = self
            .logged_pages(slot)?
            .checked_sub(first)
            .ok_or(Error::InvalidArgument)?;
        if pages > rest || pages < rest && !pages.is_multiple_of(64) {
            return Err(Error::InvalidArgument.into());
        }
        let memory = &self.state.memory;
        let (words, start) = (pages.div_ceil(64) as usize, (first / 64) as usize);
        let mut mask = [0; CHUNK];
        // A mask that cannot be read must clear nothing. Reading one word of each of its pages checks that.
        for at in (0..words).step_by(CHUNK).chain(words.checked_sub(1)) {
            read(at, &mut mask[..1])?;
        }
        let (mut at, mut epoch) = (0, 0);
        let mut done = Ok(());
        while at < words && done.is_ok() {
            // A piece does not cross a block of the bitmap.
            let count = (CHUNK - (start + at) % CHUNK).min(words - at);
            let mask = &mut mask[..count];
            done = read(at, mask).and_then(|()| {
                if mask.iter().all(|word| *word == 0) {
                    return Ok(());
                }
                let first = first + at as u64 * 64;
                let cleared = memory.clear_dirty(slot, first, mask).map_err(Error::from)?;
                epoch = epoch.max(cleared);
                Ok(())
            });
            at += count;
        }
        self.state.wait_for_harvest(epoch);
        done
    }
}

impl VmState {
    /// Waits until each running vCPU has given up the pages that it was asked for, and has acknowledged `epoch`. Other
    /// vCPUs are not disturbed, and a sleeping vCPU is not woken.
    pub(super) fn wait_for_harvest(&self, epoch: u64) {
        self.wait_for_running(epoch, || true);
    }

    /// Waits until no running vCPU uses the memory that is about to change.
    ///
    /// Returns false if the change has to begin anew, after `patience` looks at vCPUs. The vCPU that is waited for may
    /// itself wait for the change's end: because it writes to a page of the guest's clock, because it needs a lock of a
    /// vCPU that does, or because a harvest has asked it for pages meanwhile.
    pub(super) fn wait_for_host_change(&self, change: &HostChange, patience: u32) -> bool {
        let mut looks = 0;
        let is_worth_waiting = || {
            looks += 1;
            looks <= patience || !change.is_waited_for()
        };
        self.wait_for_running(change.epoch(), is_worth_waiting)
    }

    /// Does what [`Self::wait_for_harvest`] does. Returns false if `goes_on`, which is asked at each look, does first.
    fn wait_for_running(&self, epoch: u64, mut goes_on: impl FnMut() -> bool) -> bool {
        // Waiting is not under the lock, because a vCPU that is waited for may want it. If no vCPU was asked, nothing
        // is allocated.
        let asked: Vec<_> = {
            let vcpus = self.vcpus();
            let asked = vcpus.iter().filter_map(|vcpu| vcpu.ask_for_pages(epoch));
            asked.collect()
        };
        if asked.is_empty() {
            return true;
        }
        self.flush_requests.fetch_add(1, Ordering::Relaxed);
        self.show_stats();
        for (vcpu, posted) in asked {
            while !vcpu.has_given_up(posted, epoch) {
                if !goes_on() {
                    return false;
                }
                host::thread::yield_now();
            }
        }
        true
    }
}
