//! What generated code may remember of a load of CR3 that flushes nothing, and how long.

use crate::Mmu;

impl Mmu {
    /// While this stays the same, so does what a load of CR3 that flushes nothing has led to: the
    /// context, the tables of each of its views, which have missed no flush, and what fetching
    /// through them is identified by.
    pub fn switches_epoch(&self) -> u64 {
        self.switches_epoch
    }

    /// Where [`Self::switches_epoch`] is.
    pub fn switches_epoch_cell(&self) -> *const u64 {
        &raw const self.switches_epoch
    }

    /// A number that the tables of the live view have in common with those of the same view in other
    /// contexts, and with no others.
    pub fn live_view(&self) -> u64 {
        self.views[self.live].l1.view()
    }

    #[inline(always)]
    pub(crate) fn forget_switches(&mut self) {
        self.switches_epoch += 1;
    }
}
