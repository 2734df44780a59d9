//! Tables that contexts share: those of a kernel that keeps off the user's pages.
//!
//! With SMAP, a supervisor accesses user pages only while RFLAGS.AC is set. Without it, a kernel accesses its own pages,
//! which it maps as global: the same in each address space, for as long as it asks for no flush of them. So one set of
//! tables serves this view in all contexts. It stays filled when the address space changes, and a new process finds it
//! filled.
//!
//! Shared tables have global pages only. Other pages of data do not enter them, so that each access is a miss: Linux has
//! some, where it has changed rights of its own pages. A context that makes many such accesses, or executes code in such
//! a page, has tables of its own for the view, from the next selection of a view on that generated code has not made by
//! itself. Until then the code's page may be in the shared tables. It is dropped before another context is current:
//! generated code makes no load of CR3 that it remembers.

use guest_memory::tagged::L2Key;

use crate::{
    Mmu, Mode, View,
    budget::{LEAST_TO_SHARE, MAX_SHARED},
    context::SPACE_SHIFT,
    tables::{PrivateUses, Tables},
};

/// Number of accesses to pages that are not global, within [`PERIOD`], from which on a context shares no tables.
const MANY_USES: u32 = 64;
/// Number of ticks after which such accesses are counted anew.
const PERIOD: u64 = 1 << 16;
/// Number of contexts that share no tables any more, since the last flush of everything, from which on new ones share none
/// either if most have come to that: the kernel does not map its pages as global.
const MAX_REFUSALS: u32 = 32;

/// The tables that contexts share.
#[derive(Debug, Default)]
pub(crate) struct Shared {
    /// World and view, and the index of the tables.
    tables: Vec<(u8, View, usize)>,
    /// A key by which nothing is found in the second level: shared tables take no page of a context's own from there.
    nothing: L2Key,
    /// The context that has used other than global pages, which may be in the tables.
    private_of: Option<usize>,
    /// True if generated code has selected the next view, and goes on with its tables.
    is_told: bool,
    /// Number of contexts that began to share tables since the last flush of everything, and of those that share none any
    /// more.
    began: u32,
    refusals: u32,
}

impl Mmu {
    /// True if some tables are shared.
    pub(crate) fn shares_tables(&self) -> bool {
        !self.shared.tables.is_empty()
    }

    /// Returns the shared tables of the view, if the current context shares any.
    pub(crate) fn shared_tables(&mut self, view: View) -> Option<usize> {
        let is_long = matches!(self.paging.mode, Mode::Level4 | Mode::Level5);
        let may_share = view.keeps_off_users() && self.paging.global_pages && is_long;
        if !may_share || self.contexts[self.current].owns_all || self.budget.tables < LEAST_TO_SHARE
        {
            return None;
        }
        let world = self.contexts[self.current].key.world;
        let known = |(w, v, _): &&(u8, View, usize)| *w == world && *v == view;
        if let Some((_, _, tables)) = self.shared.tables.iter().find(known) {
            return Some(*tables);
        }
        if self.shared.tables.len() == MAX_SHARED {
            return None;
        }
        if self.shared.nothing.token == 0 {
            self.renew_shared_key();
        }
        let tables = self.new_tables()?;
        self.begin_view(tables, view);
        self.views[tables].is_shared = true;
        self.forget_switches();
        self.shared.tables.push((world, view, tables));
        self.publish_shared_keys();
        Some(tables)
    }

    /// Notes that the current context uses a page that is not global through these tables, which enters them or is a
    /// device's.
    #[inline(always)]
    pub(crate) fn note_private(&mut self, tables: usize) {
        if self.views[tables].is_shared {
            self.leave_shared();
        }
    }

    /// Notes an access to data in a page that is not global. Returns true if the page may not enter these tables.
    #[inline(always)]
    pub(crate) fn is_private_use(&mut self, tables: usize) -> bool {
        let is_shared = self.views[tables].is_shared;
        if is_shared {
            self.count_private_use();
        }
        is_shared
    }

    #[cold]
    fn count_private_use(&mut self) {
        let tick = self.next_tick();
        let uses = &mut self.contexts[self.current].private_uses;
        if tick - uses.since > PERIOD {
            *uses = PrivateUses {
                since: tick,
                count: 0,
            };
        }
        uses.count += 1;
        if uses.count >= MANY_USES {
            self.leave_shared();
        }
    }

    #[cold]
    fn leave_shared(&mut self) {
        if self.shared.private_of.is_none() {
            self.shared.private_of = Some(self.current);
            self.forget_switches();
            self.views_made += 1;
        }
    }

    /// Returns true if a new context is to have tables of its own for each view.
    pub(crate) fn begins_alone(&mut self) -> bool {
        let Shared {
            began, refusals, ..
        } = self.shared;
        let is_alone = refusals >= MAX_REFUSALS && refusals > began / 2;
        self.shared.began += u32::from(!is_alone);
        is_alone
    }

    /// The current context, whose translations are all dropped, may share tables.
    pub(crate) fn share_again(&mut self) {
        if self.contexts[self.current].owns_all && !self.begins_alone() {
            let context = &mut self.contexts[self.current];
            context.owns_all = false;
            context.recent = [None; 4];
        }
    }

    /// Notes that the next view that is selected is one that generated code has changed to by itself.
    pub(crate) fn tell_view(&mut self) {
        self.shared.is_told = true;
    }

    /// Returns true if generated code has selected the view that is selected now.
    #[inline(always)]
    pub(crate) fn is_view_told(&mut self) -> bool {
        core::mem::take(&mut self.shared.is_told)
    }

    /// Drops what is not global from shared tables. The context that has used it shares none any more.
    #[inline(always)]
    pub(crate) fn clear_shared(&mut self) {
        if let Some(context) = self.shared.private_of.take() {
            self.drop_private(context);
        }
    }

    #[cold]
    fn drop_private(&mut self, context: usize) {
        self.views_made += 1;
        self.for_shared_tables(|_| true, Tables::drop_non_global);
        self.forget_switches_to(context);
        let context = &mut self.contexts[context];
        context.recent = [None; 4];
        self.shared.refusals += u32::from(!core::mem::replace(&mut context.owns_all, true));
    }

    /// Drops all of the shared tables of this address space of slots, or of all.
    pub(crate) fn flush_shared(&mut self, space: Option<u8>) {
        (self.shared.began, self.shared.refusals) = (0, 0);
        let is_of = |world: u8| space.is_none_or(|space| world >> SPACE_SHIFT & 1 == space);
        self.for_shared_tables(is_of, Tables::drop_all);
    }

    /// `f` returns true if it drops something that code was fetched through.
    pub(crate) fn for_shared_tables(
        &mut self,
        is_of: impl Fn(u8) -> bool,
        mut f: impl FnMut(&mut Tables) -> bool,
    ) {
        for i in 0..self.shared.tables.len() {
            let (world, _, tables) = self.shared.tables[i];
            if is_of(world) && f(&mut self.views[tables]) {
                self.forget_switches();
                self.views[tables].epoch = self.next_tick();
            }
        }
    }

    /// Forgets a page of data in shared tables.
    pub(crate) fn forget_shared_page(&mut self, gva: u64) {
        for (_, _, tables) in &self.shared.tables {
            self.views[*tables].l1.flush_page(gva);
        }
    }

    /// Forgets that tables are shared: they belong to nobody any more.
    pub(crate) fn forget_shared(&mut self) {
        for (_, _, tables) in self.shared.tables.drain(..) {
            self.views[tables].is_shared = false;
        }
        self.shared.private_of = None;
        (self.shared.began, self.shared.refusals) = (0, 0);
    }

    /// Has shared tables find nothing in the second level that was there before, but for global pages.
    pub(crate) fn renew_shared_key(&mut self) {
        self.shared.nothing = self.new_reach_key();
        self.publish_shared_keys();
    }

    /// Gives the shared tables their keys of the second level.
    pub(crate) fn publish_shared_keys(&mut self) {
        for (world, _, tables) in &self.shared.tables {
            let keys = [self.shared.nothing, self.global_keys[usize::from(*world)]];
            self.views[*tables].l1.set_keys(keys);
        }
    }
}
