//! Contexts and the tables of their views.
//!
//! A context is a pair of paging mode and PCID, as in the hardware's tags (SDM
//! vol. 3, 4.10.1): CR3's address is no part of it, as a PCID may keep its
//! translations over a change of CR3 only if software asks for it. A *tracked* context
//! is that of a root instead: see [`crate::shadow`].
//!
//! Flushes reach a context that is not current when it becomes current: ticks say whether
//! there was one since it was left.

use guest_memory::tagged;
use x86_cpu::{CpuState, Privilege};

use crate::{
    Mmu, View,
    families::Membership,
    l1::RegionFilter,
    l2::Owner,
    shadow::{derived::Derived, flushes::Seen, promised::MAX_ROOTS, roots::Policy},
    tables::{PrivateUses, Tables},
    view::Recent,
};

/// Number of contexts that are kept. Linux uses six PCIDs, twice that with page-table isolation.
const MAX_CONTEXTS: usize = 16;
/// Number of contexts that are kept where roots are tracked. A context takes a few KiB.
pub(crate) const MAX_TRACKED: usize = 1024;
const _: () = assert!(MAX_CONTEXTS + MAX_ROOTS <= MAX_TRACKED);
/// [`Context::left`] of the current context.
pub(crate) const CURRENT: u64 = u64::MAX;
/// Number of views that a context keeps. A program that changes PKRU has up to four for each value: its own, and the kernel's with and without
/// RFLAGS.AC.
const MAX_VIEWS: usize = 16;

/// Bit of [`ContextKey::world`]: SMM's address space of slots.
pub(crate) const SPACE_SHIFT: u32 = 3;
/// Number of worlds. [`ContextKey::world`] is less.
pub(crate) const WORLDS: usize = 32;

/// What distinguishes contexts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ContextKey {
    pub world: u8,
    pub pcid: u16,
    /// A tracked context's identity ([`crate::shadow::roots::Roots::id`]). Its `pcid` is that of the root's last load.
    pub root: Option<u64>,
}

impl ContextKey {
    /// The key that the context is found by.
    pub(crate) fn id(self) -> u64 {
        let shared = 1 << 63 | u64::from(self.world) << 16 | u64::from(self.pcid);
        self.root.unwrap_or(shared)
    }
}

/// An address space whose translations are kept.
#[derive(Debug)]
pub(crate) struct Context {
    pub key: ContextKey,
    /// L2 entries of this context up to this tick are flushed.
    pub flushed: u64,
    /// The tick of the last flush of a page: see [`crate::structures`].
    pub(crate) page_flushed: u64,
    /// The key of the context's entries in the second level.
    pub reach: tagged::L2Key,
    /// The keys of the second level that the context's views have been given.
    published: [tagged::L2Key; 2],
    /// The regions of large pages that are not global.
    pub regions: RegionFilter,
    /// The tick at which the context ceased to be current. Flushes since then are still to be carried out.
    pub left: u64,
    /// Up to where the context has seen the logs of page flushes.
    pub seen: Seen,
    /// True if translations that are not global may be out of date, whatever was flushed.
    pub is_stale: bool,
    /// The entries that a tracked context's translations were derived from: see [`crate::shadow`].
    pub derived: Option<Derived>,
    /// The context's part in a family of roots with the same kernel code.
    pub membership: Membership,
    pub(crate) used: u64,
    pub(crate) views: Vec<(View, usize)>,
    /// True if the context shares no tables: see [`crate::shared`].
    pub(crate) owns_all: bool,
    pub(crate) private_uses: PrivateUses,
    /// True if the context's tables were taken before there were as many as there may be.
    pub(crate) gave_tables: bool,
    /// The views that were live last, by whether they are a user's and by RFLAGS.AC.
    pub(crate) recent: [Option<Recent>; 4],
}

impl Context {
    pub(crate) fn nr_views(&self) -> usize {
        self.views.len()
    }
    /// Returns the index of the tables of one of them.
    pub(crate) fn tables_of_view(&self, n: usize) -> usize {
        self.views[n].1
    }
}

impl Mmu {
    pub(crate) fn next_tick(&mut self) -> u64 {
        self.tick += 1;
        self.tick
    }

    /// Returns how the current context's entries in L2 are marked.
    #[inline]
    pub(crate) fn owner(&self) -> Owner {
        let c = &self.contexts[self.current];
        Owner {
            context: self.current as u16,
            world: c.key.world,
            flushed: c.flushed,
            flushed_structures: c.flushed.max(c.page_flushed),
        }
    }

    /// Returns the [`ContextKey::world`] of `self.paging`.
    pub(crate) fn world(&self) -> u8 {
        let p = &self.paging;
        p.mode as u8 | p.space << SPACE_SHIFT | u8::from(p.nxe) << 4
    }

    /// Makes the context of `self.paging` current and carries out the flushes that it has missed.
    /// `flushes` says that the load of CR3 which asks for the context flushes its PCID.
    pub(crate) fn select_context(&mut self, flushes: bool) {
        self.clear_shared();
        self.forget_pages();
        self.leave_context();
        let (world, pcid) = (self.world(), self.paging.pcid);
        let tracked = self.tracked_context(world, flushes);
        self.current = tracked.unwrap_or_else(|| {
            let key = ContextKey {
                world,
                pcid,
                root: None,
            };
            let found = self.roots.find(key.id());
            found.unwrap_or_else(|| self.new_context(key))
        });
        let used = self.next_tick();
        let pdpte = self.paging.pdpte;
        let context = &mut self.contexts[self.current];
        context.used = used;
        self.switch_epochs.note_used(self.current);
        context.is_stale |= context.key.pcid != pcid;
        // (A shared context has the same.)
        context.key.pcid = pcid;
        if let Some(derived) = &mut context.derived
            && derived.pdpte != pdpte
        {
            derived.pdpte = pdpte;
            context.left = 0;
        }
        self.apply_flushes();
        self.publish_new_keys();
    }

    /// Notes that the current context has carried out all flushes so far. It is no more current for those to come.
    pub(crate) fn leave_context(&mut self) {
        let tick = self.next_tick();
        let seen = self.flushes.seen();
        if let Some(context) = self.contexts.get_mut(self.current)
            && context.left == CURRENT
        {
            context.left = tick;
            context.seen = seen;
            self.note_last(self.current);
        }
    }

    /// Makes a context, in the place of another one if there are too many.
    pub(crate) fn is_full(&self) -> bool {
        let limit = match self.roots.policy {
            Policy::Tdp => MAX_CONTEXTS + self.promised_roots(),
            Policy::Shadow | Policy::Auto => MAX_TRACKED,
        };
        self.contexts.len() >= limit.min(self.budget.contexts)
    }

    pub(crate) fn new_context(&mut self, key: ContextKey) -> usize {
        self.views_made += 1;
        self.forget_switches();
        self.stats.contexts_made += 1;
        let flushed = self.next_tick();
        let world = usize::from(key.world);
        if self.global_keys[world].token == 0 {
            self.renew_global_key(world);
        }
        let fresh = Context {
            key,
            flushed,
            page_flushed: flushed,
            reach: self.new_reach_key(),
            published: [tagged::L2Key::default(); 2],
            regions: RegionFilter::default(),
            left: flushed,
            seen: self.flushes.seen(),
            is_stale: false,
            derived: key.root.map(|_| Derived::new(self.paging.pdpte)),
            membership: Membership::None,
            used: 0,
            views: Vec::with_capacity(MAX_VIEWS),
            owns_all: self.begins_alone(),
            private_uses: PrivateUses::default(),
            gave_tables: false,
            recent: [None; 4],
        };
        if !self.is_full() {
            self.contexts.push(fresh);
            self.roots.insert(key.id(), self.contexts.len() - 1);
            return self.contexts.len() - 1;
        }
        self.stats.contexts_dropped += 1;
        let oldest = self.long_unused(|_| true);
        let old = core::mem::replace(&mut self.contexts[oldest], fresh);
        self.roots.remove(old.key.id());
        self.free_tables(&old.views);
        self.roots.insert(key.id(), oldest);
        oldest
    }

    /// Drops all contexts. The caller then selects one.
    pub(crate) fn forget_contexts(&mut self) {
        self.views_made += 1;
        self.forget_switches();
        for tables in &mut self.views {
            tables.flush();
            tables.taken = false;
        }
        self.forget_shared();
        self.contexts.clear();
        self.last.clear();
        self.roots.clear();
        self.current = 0;
    }

    /// Returns log2 of the size of the region around `gva` that may be one large page of the context.
    pub(crate) fn region_shift(&self, context: usize, gva: u64) -> Option<u32> {
        let own = self.contexts[context].regions.region_shift(gva);
        own.max(self.global_regions.region_shift(gva))
    }

    /// Notes that the current context has an entry of the first level, or of the fetch TLB, from a leaf of this level.
    pub(crate) fn note_level(&mut self, gva: u64, level: u8, global: bool) {
        if global {
            self.global_regions.add(gva, level);
        } else {
            self.contexts[self.current].regions.add(gva, level);
        }
    }

    /// Returns a key for the second level by which nothing is found.
    pub(crate) fn new_reach_key(&mut self) -> tagged::L2Key {
        if let Some(key) = self.reach.new_key() {
            return key;
        }
        self.reach.clear();
        for i in 0..self.contexts.len() {
            self.renew_key(i);
        }
        self.renew_global_keys();
        self.renew_shared_key();
        self.reach.new_key().unwrap_or_default()
    }

    /// Makes the second level forget the context, by giving it another key.
    pub(crate) fn renew_key(&mut self, context: usize) {
        self.forget_switches_to(context);
        let key = self.new_reach_key();
        self.contexts[context].reach = key;
        self.contexts[context].regions.clear();
        self.publish_keys(context);
    }

    /// Makes the second level forget this world's global pages. Contexts get the new key when they become current.
    pub(crate) fn renew_global_key(&mut self, world: usize) {
        self.forget_switches();
        self.global_keys[world] = self.new_reach_key();
        self.publish_shared_keys();
        self.publish_new_keys();
    }

    /// Gives the current context's views its keys.
    fn publish_new_keys(&mut self) {
        if let Some(context) = self.contexts.get(self.current)
            && context.published != self.keys_of(self.current)
        {
            self.publish_keys(self.current);
        }
    }

    /// Makes the second level forget all global pages.
    pub(crate) fn renew_global_keys(&mut self) {
        for world in 0..WORLDS {
            if self.global_keys[world].token != 0 {
                self.renew_global_key(world);
            }
        }
        self.global_regions.clear();
    }

    /// Returns the keys of the context's own pages, and of global ones.
    pub(crate) fn keys_of(&self, context: usize) -> [tagged::L2Key; 2] {
        let c = &self.contexts[context];
        [c.reach, self.global_keys[usize::from(c.key.world)]]
    }

    /// Tells the views that the second level's tables, or its round, have changed.
    #[inline]
    pub(crate) fn publish_reach(&mut self) {
        if core::mem::take(&mut self.reach.changed) {
            for tables in &mut self.views {
                self.reach.publish(tables.l1.reach_mut());
            }
        }
    }

    fn publish_keys(&mut self, context: usize) {
        let keys = self.keys_of(context);
        self.contexts[context].published = keys;
        for (_, tables) in &self.contexts[context].views {
            self.views[*tables].l1.set_keys(keys);
        }
    }

    fn for_current_tables(&mut self, mut f: impl FnMut(&mut Tables) -> bool) {
        self.forget_switches_to(self.current);
        for i in 0..self.contexts[self.current].views.len() {
            let (_, tables) = self.contexts[self.current].views[i];
            let epoch = self.next_tick();
            let tables = &mut self.views[tables];
            if f(tables) {
                tables.epoch = epoch;
            }
        }
    }

    pub(crate) fn flush_current(&mut self) {
        self.leave_family();
        self.for_current_tables(Tables::drop_all);
    }
    pub(crate) fn flush_current_non_global(&mut self) {
        self.leave_family();
        self.for_current_tables(Tables::drop_non_global);
    }
    /// Has fetches of the current context's supervisors from pages that are not global look them up again.
    pub(crate) fn forget_private_fetches(&mut self) {
        let forget = |t: &mut Tables| !t.user && t.fetch.flush_non_global();
        self.for_current_tables(forget);
        self.for_shared_tables(|_| true, forget);
    }
    pub(crate) fn flush_current_small_page(&mut self, gva: u64) {
        self.leave_family_of(gva);
        self.for_current_tables(|t| t.drop_small_page(gva));
        let [own, _] = self.keys_of(self.current);
        self.reach.flush_page(gva, own);
    }
    /// Flushes a page in the current context, and all of the context's entries in the paging-structure caches.
    pub(crate) fn flush_current_page(&mut self, gva: u64) {
        let tick = self.next_tick();
        self.contexts[self.current].page_flushed = tick;
        self.leave_family_of(gva);
        let shift = self.region_shift(self.current, gva);
        self.for_current_tables(|t| t.drop_page(gva, shift));
        self.for_shared_tables(|_| true, |t| t.drop_page(gva, shift));
        self.flush_reach_of(gva, self.current);
    }

    /// Selects the views of the CPU's state.
    #[inline]
    pub(crate) fn select_tables(&mut self, cpu: &CpuState) {
        if !self.is_view_told() {
            self.clear_shared();
        }
        let (place, registers) = Recent::key(cpu);
        if let Some(recent) = &self.contexts[self.current].recent[place]
            && recent.is_of(registers)
        {
            (self.live, self.system) = (recent.live, recent.system);
            self.verify_view();
            return;
        }
        self.find_tables(cpu);
        self.contexts[self.current].recent[place] = Some(Recent {
            registers,
            live: self.live,
            system: self.system,
        });
    }

    #[inline(never)]
    fn find_tables(&mut self, cpu: &CpuState) {
        let view = View::of(cpu, Privilege::Current);
        let system = View::of(cpu, Privilege::System);
        self.live = self.tables_of(view, None);
        self.verify_view();
        self.system = if system == view {
            self.live
        } else {
            self.tables_of(system, Some(self.live))
        };
    }

    /// Returns the view's tables in the current context. The tables `kept` are not taken for it.
    fn tables_of(&mut self, view: View, kept: Option<usize>) -> usize {
        if let Some(tables) = self.shared_tables(view) {
            return tables;
        }
        let used = self.next_tick();
        let context = &self.contexts[self.current];
        if let Some(&(_, tables)) = context.views.iter().find(|(v, _)| *v == view) {
            self.views[tables].used = used;
            return tables;
        }
        let has_room = self.contexts[self.current].views.len() < MAX_VIEWS;
        let tables = has_room.then(|| self.new_tables()).flatten();
        let tables = tables.unwrap_or_else(|| self.take_own_tables(kept));
        self.begin_view(tables, view);
        self.contexts[self.current].views.push((view, tables));
        self.publish_keys(self.current);
        tables
    }

    /// Makes empty tables those of a view.
    pub(crate) fn begin_view(&mut self, tables: usize, view: View) {
        self.forget_pages();
        self.shrink_tables(tables);
        self.contexts[self.current].recent = [None; 4];
        self.stats.views_made += 1;
        self.views_made += 1;
        self.forget_switches_to(self.current);
        let number = self.view_numbers.of(view);
        let used = self.next_tick();
        let t = &mut self.views[tables];
        t.taken = true;
        t.user = view.is_user();
        t.used = used;
        t.epoch = used;
        t.l1.set_rights(view.classes());
        t.l1.set_view(number);
        self.reach.publish(t.l1.reach_mut());
    }

    /// Has each context look for its tables at the next selection of a view.
    pub(crate) fn forget_recent_views(&mut self) {
        for context in &mut self.contexts {
            context.recent = [None; 4];
        }
    }
}
