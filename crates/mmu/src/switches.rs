//! How long generated code may remember where a load of CR3 that flushes nothing leads.

use crate::Mmu;

impl Mmu {
    /// Every remembered load is forgotten ([`Front::switches_epoch`](crate::Front::switches_epoch)).
    #[inline(always)]
    pub(crate) fn forget_switches(&mut self) {
        self.switches_epoch += 1;
    }
}
