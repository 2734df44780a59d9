//! [`Tables`]: what the first level has of a view.

use crate::{
    fetch::FetchTable,
    l1::{Half, L1},
};

/// L1 of a (context, view).
#[derive(Debug)]
pub(crate) struct Tables {
    pub l1: L1,
    pub fetch: FetchTable,
    /// A number that only these contents of `fetch` have: see [`crate::Mmu::fetch_epoch`].
    pub epoch: u64,
    /// The value of `Mmu::verification` that `epoch` belongs to.
    pub verification: u64,
    /// True if the view is a user's.
    pub user: bool,
    /// True if contexts share the tables: see [`crate::shared`].
    pub is_shared: bool,
    /// Tick of the last selection.
    pub used: u64,
    /// True if the tables belong to a context, or are shared; false if they can be reused.
    pub taken: bool,
}

impl Tables {
    pub(crate) fn new(l1: L1) -> Self {
        Self {
            l1,
            fetch: FetchTable::default(),
            epoch: 0,
            verification: 0,
            user: false,
            is_shared: false,
            used: 0,
            taken: false,
        }
    }

    pub(crate) fn flush(&mut self) {
        self.drop_all();
    }

    /// These flushes return whether anything was dropped that code was fetched
    /// through in this epoch.
    pub(crate) fn drop_all(&mut self) -> bool {
        self.l1.flush(&Half::ALL);
        self.fetch.flush()
    }

    pub(crate) fn drop_non_global(&mut self) -> bool {
        self.l1.flush_non_global();
        self.fetch.flush_non_global()
    }

    /// `shift` is log2 of the size of a region, if the page may be part of a large page in it.
    pub(crate) fn drop_page(&mut self, gva: u64, shift: Option<u32>) -> bool {
        match shift {
            None => self.l1.flush_page(gva),
            Some(shift) => self.l1.flush_region(gva, shift),
        }
        self.fetch.flush_page(gva, shift)
    }

    /// Drops a page that is not part of a large one.
    pub(crate) fn drop_small_page(&mut self, gva: u64) -> bool {
        self.l1.flush_page(gva);
        self.fetch.flush_page(gva, None)
    }
}

/// A context's accesses to pages that are not global, while its tables are shared
/// ([`crate::shared`]).
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct PrivateUses {
    /// The tick from which on they are counted.
    pub since: u64,
    pub count: u32,
}
