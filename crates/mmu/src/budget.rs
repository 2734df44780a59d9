//! [`Budget`]: how many contexts and first-level tables an MMU keeps at most (KVM_SET_NR_MMU_PAGES).
//!
//! KVM counts pages of shadow tables. What takes their place here are the tables of views and the entries of
//! guest tables that tracked contexts remember, both counted as large as they may become, so that the bound
//! holds whatever the guest does. A context that does not fit takes the place of one that has not been current
//! for long, and tables those of another context or view: nothing is lost but time. The second level and L2
//! have bounds of their own, and are not counted, as KVM does not count a processor's TLBs.

use x86_cpu::CpuState;

use crate::{
    Mmu,
    context::{Context, MAX_TRACKED},
    fetch::FetchTable,
    growth::MOST,
    l1::{L1, Size},
    shadow::derived::Derived,
    tables::Tables,
};

/// A context's tables are half a MiB that is touched, so those of more contexts would
/// come from memory at each switch; a context without gets others' ([`Mmu::new_tables`]).
pub(crate) const MAX_TABLES: usize = 192;
/// Number of first-level tables beyond which others' are taken first, until that has turned out to be wrong: those of
/// processes that have ended.
pub(crate) const FEW_TABLES: usize = 16;
/// Maximum number of shared sets of tables. A kernel has two if it clears CR0.WP at times, and SMM has others.
pub(crate) const MAX_SHARED: usize = 4;
/// Least number of tables with which contexts share some: they need others at the same time.
pub(crate) const LEAST_TO_SHARE: usize = 4 * MAX_SHARED;
/// Number of views that need tables at once: the live one, and that of accesses by the system.
const MIN_TABLES: usize = 2;
/// Least number of contexts: the guest's and SMM's, each before and after the change of a root.
const MIN_CONTEXTS: usize = 4;

const PAGE: usize = 4096;
/// Number of pages of one view's tables.
const TABLES_PAGES: usize =
    (size_of::<Tables>() + L1::bytes(Size::Small) + FetchTable::BYTES).div_ceil(PAGE);
/// Number of pages of tables that have grown.
const LARGE_PAGES: usize = L1::bytes(Size::Large).div_ceil(PAGE);
/// Number of pages of a tracked context.
const CONTEXT_PAGES: usize = (size_of::<Context>() + Derived::BYTES).div_ceil(PAGE);

/// See the module's documentation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Budget {
    pub(crate) contexts: usize,
    pub(crate) tables: usize,
    /// Number of sets of large tables, in addition.
    pub(crate) large: usize,
}

impl Default for Budget {
    fn default() -> Self {
        Self {
            contexts: MAX_TRACKED,
            tables: MAX_TABLES,
            large: MOST,
        }
    }
}

impl Budget {
    /// Shares out the pages: a quarter is for contexts, or less if that would not leave room for the fewest tables. Large
    /// tables take what is left when there can be no more small ones.
    fn of_pages(pages: usize) -> Self {
        let left = pages.saturating_sub(MIN_TABLES * TABLES_PAGES);
        let contexts = (pages / 4).min(left) / CONTEXT_PAGES;
        let contexts = contexts.clamp(MIN_CONTEXTS, MAX_TRACKED);
        let rest = pages.saturating_sub(contexts * CONTEXT_PAGES);
        let tables = (rest / TABLES_PAGES).clamp(MIN_TABLES, MAX_TABLES);
        let left = rest.saturating_sub(tables * TABLES_PAGES);
        Self {
            contexts,
            tables,
            large: (left / LARGE_PAGES).min(MOST),
        }
    }
}

impl Mmu {
    /// Sets the maximum number of pages of 4 KiB for contexts and their tables, but for the least that an MMU works with. An
    /// MMU that has more now begins anew.
    pub fn set_budget(&mut self, cpu: &CpuState, pages: usize) {
        self.begin_with(cpu, Budget::of_pages(pages));
    }

    fn begin_with(&mut self, cpu: &CpuState, budget: Budget) {
        self.budget = budget;
        let fits = self.contexts.len() <= budget.contexts
            && self.views.len() <= budget.tables
            && self.growth.large <= budget.large;
        if fits && (budget.tables >= LEAST_TO_SHARE || !self.shares_tables()) {
            return;
        }
        self.flush_everything();
        self.forget_contexts();
        let gone = self.views.drain(self.budget.tables.min(self.views.len())..);
        self.reach_hits_gone += gone.map(|t| t.l1.reach_hits()).sum::<u64>();
        self.forget_large_tables();
        (self.live, self.system) = (0, 0);
        self.contexts.shrink_to_fit();
        self.set_root(cpu);
    }

    /// Sets the maximum number of first-level tables, to fewer than by default, for tests.
    pub fn set_max_tables(&mut self, cpu: &CpuState, tables: usize) {
        let tables = tables.clamp(MIN_TABLES, MAX_TABLES);
        self.enough_tables = MIN_TABLES;
        self.begin_with(
            cpu,
            Budget {
                tables,
                ..self.budget
            },
        );
    }

    /// Returns the numbers of contexts and first-level tables, and of the pages that they may take.
    pub fn kept(&self) -> Kept {
        Kept {
            contexts: self.contexts.len(),
            tables: self.views.len(),
            pages: self.contexts.len() * CONTEXT_PAGES
                + self.views.len() * TABLES_PAGES
                + self.growth.large * LARGE_PAGES,
        }
    }
}

/// What an MMU keeps ([`Mmu::kept`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kept {
    /// Number of contexts.
    pub contexts: usize,
    /// Number of first-level tables.
    pub tables: usize,
    /// Number of pages of 4 KiB.
    pub pages: usize,
}

impl Kept {
    /// Returns the least budget that an MMU works with.
    pub const LEAST_PAGES: usize = MIN_CONTEXTS * CONTEXT_PAGES + MIN_TABLES * TABLES_PAGES;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_is_not_exceeded() {
        for pages in (0..2_000).chain((2_000..100_000).step_by(97)) {
            let budget = Budget::of_pages(pages);
            let all = budget.contexts * CONTEXT_PAGES
                + budget.tables * TABLES_PAGES
                + budget.large * LARGE_PAGES;
            assert!(all <= pages.max(Kept::LEAST_PAGES), "{pages}: {budget:?}");
            assert!(budget.contexts >= MIN_CONTEXTS && budget.tables >= MIN_TABLES);
        }
        assert_eq!(Budget::of_pages(usize::MAX), Budget::default());
    }
}
