//! What generated code may remember of a load of CR3 that flushes nothing, and how long it may.

use crate::Mmu;

impl Mmu {
    /// A number that vouches for remembered loads of CR3 that flush nothing. While it is unchanged, such a load leads
    /// to the same context, to the same tables for each of its views, none of which has missed a flush, and to the same
    /// identity of what is fetched through them.
    pub fn switches_epoch(&self) -> u64 {
        self.switches_epoch
    }

    /// The address of [`Self::switches_epoch`].
    pub fn switches_epoch_cell(&self) -> *const u64 {
        &raw const self.switches_epoch
    }

    /// The number of the live view. The tables of the same view in other contexts have the same number, and tables of
    /// other views have others.
    pub fn live_view(&self) -> u64 {
        self.views[self.live].l1.view()
    }

    #[inline(always)]
    pub(crate) fn forget_switches(&mut self) {
        self.switches_epoch += 1;
    }
}
