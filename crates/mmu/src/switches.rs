//! How long generated code may remember where loads of CR3 lead, and the loads that it makes by itself.

use core::mem::offset_of;

use x86_cpu::CpuState;

use crate::{Mmu, shadow::roots::Roots};

/// Numbers that vouch for remembered loads of CR3, which generated code reads.
///
/// While a number is unchanged, a load that it vouches for leads to the same context, to the same tables for each of its
/// views, and to the same identity of what is fetched through them.
#[repr(C)]
#[derive(Debug)]
pub struct SwitchEpochs {
    /// Vouches for loads that flush nothing: no context has missed a flush either.
    pub keeping: u64,
    /// Vouches for loads that flush: of flushes, contexts have missed only those of such loads, so that a context whose
    /// entries are still in memory has missed nothing.
    pub flushing: u64,
}

impl SwitchEpochs {
    /// Offset of [`Self::keeping`].
    pub const KEEPING: i32 = offset_of!(Self, keeping) as i32;
    /// Offset of [`Self::flushing`].
    pub const FLUSHING: i32 = offset_of!(Self, flushing) as i32;
    pub(crate) const FIRST: Self = Self {
        keeping: 1,
        flushing: 1,
    };
}

impl Mmu {
    /// Every remembered load is forgotten.
    #[inline(always)]
    pub(crate) fn forget_switches(&mut self) {
        self.switch_epochs.keeping += 1;
        self.switch_epochs.flushing += 1;
    }

    /// Remembered loads that flush nothing are forgotten, because one has flushed.
    #[inline(always)]
    pub(crate) fn forget_keeping_switches(&mut self) {
        self.switch_epochs.keeping += 1;
    }

    /// Remembered loads that flush are forgotten, because the next one has more to do.
    pub(crate) fn forget_flushing_switches(&mut self) {
        self.switch_epochs.flushing += 1;
    }

    /// See [`Front::compared`](crate::Front::compared).
    pub(crate) fn compared(&self) -> Option<u64> {
        let derived = self.contexts[self.current].derived.as_ref();
        derived
            .filter(|_| !self.is_written_by_device)
            .map(|d| d.head())
    }

    /// See [`Front::note_flushing_loads`](crate::Front::note_flushing_loads).
    pub(crate) fn note_flushing_loads(&mut self, cpu: &CpuState, loads: u64) {
        self.stats.flushes += loads;
        self.leave_context();
        let tick = self.next_tick();
        self.flushes.note_non_global(Some(self.paging.pcid), tick);
        self.paging.set_long_root(cpu);
        let id = Roots::id(self.world(), self.paging.root);
        let tick = self.next_tick();
        if let Some(found) = self.roots.find(id) {
            // The last of these loads has compared it.
            self.contexts[found].left = tick;
        }
        self.count_loads(loads);
    }
}
