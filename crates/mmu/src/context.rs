//! Contexts and the tables of their views.
//!
//! A context is a pair of paging mode and PCID, as in the hardware's tags (SDM
//! vol. 3, 4.10.1): CR3's address is no part of it, as a PCID may keep its
//! translations over a change of CR3 only if software asks for it.

use guest_memory::tagged;
use x86_cpu::{CpuState, Privilege};

use crate::{
    Mmu, View,
    code::FetchTable,
    l1::{Half, L1, RegionFilter},
    l2::Owner,
    view::Recent,
};

/// Contexts that are kept: Linux uses six PCIDs, twice that with page-table isolation.
const MAX_CONTEXTS: usize = 16;
/// Views of a context that are kept.
const MAX_VIEWS: usize = 6;
/// Pages whose flush is recorded one by one for a context that is not current.
const MAX_PENDING_PAGES: usize = 32;

/// Bit of [`Key::world`]: SMM's address space of slots.
pub(crate) const SPACE_SHIFT: u32 = 3;
/// Worlds that there may be: [`Key::world`] is less.
pub(crate) const WORLDS: usize = 32;

/// What distinguishes contexts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Key {
    pub world: u8,
    pub pcid: u16,
}

/// Flushes to carry out when a context becomes current.
#[derive(Debug, Default)]
pub(crate) struct Pending {
    all: bool,
    non_global: bool,
    pages: Vec<u64>,
}

/// An address space whose translations are kept.
#[derive(Debug)]
pub(crate) struct Context {
    pub key: Key,
    /// L2 entries of this context up to this tick are flushed.
    pub flushed: u64,
    pub pending: Pending,
    /// Of its entries in the second level.
    pub reach: tagged::Key,
    /// Regions of large pages that are not global.
    pub regions: RegionFilter,
    used: u64,
    views: Vec<(View, usize)>,
    /// The views that were live last, by whether they are a user's and by RFLAGS.AC.
    recent: [Option<Recent>; 4],
}

/// L1 of a (context, view).
#[derive(Debug, Default)]
pub(crate) struct Tables {
    pub l1: L1,
    pub fetch: FetchTable,
    /// Unique for the contents of `fetch`: see [`Mmu::fetch_epoch`].
    pub epoch: u64,
    /// `Mmu::verification` that `epoch` belongs to.
    pub verification: u64,
    /// The view is a user's.
    pub user: bool,
    used: u64,
    /// Belongs to a context; false for one that can be reused.
    taken: bool,
}

impl Tables {
    pub(crate) fn flush(&mut self) {
        self.drop_all();
    }

    /// These flushes return whether anything was dropped that code was fetched
    /// through in this epoch.
    fn drop_all(&mut self) -> bool {
        self.l1.flush(&Half::ALL);
        self.fetch.flush()
    }

    fn drop_non_global(&mut self) -> bool {
        self.l1.flush_non_global();
        self.fetch.flush_non_global()
    }

    /// `shift`: the page may be part of a large one, of this region.
    fn drop_page(&mut self, gva: u64, shift: Option<u32>) -> bool {
        match shift {
            None => self.l1.flush_page(gva),
            Some(shift) => self.l1.flush_region(gva, shift),
        }
        self.fetch.flush_page(gva, shift)
    }
}

impl Context {
    pub(crate) fn nr_views(&self) -> usize {
        self.views.len()
    }
    /// Index of the tables of one of them.
    pub(crate) fn tables_of_view(&self, n: usize) -> usize {
        self.views[n].1
    }
}

impl Pending {
    pub(crate) fn all(&mut self) {
        *self = Self {
            all: true,
            ..Self::default()
        };
    }
    pub(crate) fn non_global(&mut self) {
        self.non_global = true;
    }
    pub(crate) fn page(&mut self, gva: u64) {
        if self.all {
            return;
        }
        if self.pages.len() == MAX_PENDING_PAGES {
            self.all();
        } else {
            self.pages.push(gva);
        }
    }
    fn is_none(&self) -> bool {
        !self.all && !self.non_global && self.pages.is_empty()
    }
}

impl Mmu {
    pub(crate) fn next_tick(&mut self) -> u64 {
        self.tick += 1;
        self.tick
    }

    /// How the current context's entries in L2 are marked.
    #[inline]
    pub(crate) fn owner(&self) -> Owner {
        let c = &self.contexts[self.current];
        Owner {
            context: self.current as u8,
            world: c.key.world,
            flushed: c.flushed,
        }
    }

    /// Makes the context of `self.paging` current and carries out its pending flushes.
    pub(crate) fn select_context(&mut self) {
        self.forget_devices();
        let p = &self.paging;
        let key = Key {
            world: p.mode as u8 | p.space << SPACE_SHIFT | u8::from(p.nxe) << 4,
            pcid: p.pcid,
        };
        let found = self.contexts.iter().position(|c| c.key == key);
        self.current = found.unwrap_or_else(|| self.new_context(key));
        let used = self.next_tick();
        self.contexts[self.current].used = used;
        self.apply_pending();
    }

    fn new_context(&mut self, key: Key) -> usize {
        self.views_made += 1;
        self.stats.contexts_made += 1;
        let flushed = self.next_tick();
        let world = usize::from(key.world);
        if self.global_keys[world].token == 0 {
            self.renew_global_key(world);
        }
        let fresh = Context {
            key,
            flushed,
            pending: Pending::default(),
            reach: self.new_reach_key(),
            regions: RegionFilter::default(),
            used: 0,
            views: Vec::with_capacity(MAX_VIEWS),
            recent: [None; 4],
        };
        if self.contexts.len() < MAX_CONTEXTS {
            self.contexts.push(fresh);
            return self.contexts.len() - 1;
        }
        self.stats.contexts_dropped += 1;
        let oldest = (0..self.contexts.len())
            .min_by_key(|i| self.contexts[*i].used)
            .unwrap_or(0);
        let old = core::mem::replace(&mut self.contexts[oldest], fresh);
        for (_, tables) in old.views {
            self.views[tables].flush();
            self.views[tables].taken = false;
        }
        oldest
    }

    fn apply_pending(&mut self) {
        if self.contexts[self.current].pending.is_none() {
            return;
        }
        let pending = core::mem::take(&mut self.contexts[self.current].pending);
        if pending.all {
            self.for_current_tables(Tables::drop_all);
            return;
        }
        if pending.non_global {
            self.for_current_tables(Tables::drop_non_global);
        }
        for gva in pending.pages {
            self.flush_current_page(gva);
        }
    }

    /// log2 of the region around `gva` that may be one page of the context's.
    pub(crate) fn region_shift(&self, context: usize, gva: u64) -> Option<u32> {
        let own = self.contexts[context].regions.region_shift(gva);
        own.max(self.global_regions.region_shift(gva))
    }

    /// The current context has an entry of the first level, or fetches, from a leaf of this level.
    pub(crate) fn note_level(&mut self, gva: u64, level: u8, global: bool) {
        if global {
            self.global_regions.add(gva, level);
        } else {
            self.contexts[self.current].regions.add(gva, level);
        }
    }

    /// A key for the second level that nothing is found by.
    fn new_reach_key(&mut self) -> tagged::Key {
        if let Some(key) = self.reach.new_key() {
            return key;
        }
        self.reach.clear();
        for i in 0..self.contexts.len() {
            self.renew_key(i);
        }
        for world in 0..WORLDS {
            if self.global_keys[world].token != 0 {
                self.renew_global_key(world);
            }
        }
        self.reach.new_key().unwrap_or_default()
    }

    /// The second level has nothing of the context any more.
    pub(crate) fn renew_key(&mut self, context: usize) {
        let key = self.new_reach_key();
        self.contexts[context].reach = key;
        self.contexts[context].regions.clear();
        self.publish_keys(context);
    }

    /// The second level has nothing global of this world any more.
    pub(crate) fn renew_global_key(&mut self, world: usize) {
        self.global_keys[world] = self.new_reach_key();
        for i in 0..self.contexts.len() {
            if usize::from(self.contexts[i].key.world) == world {
                self.publish_keys(i);
            }
        }
    }

    /// The second level has nothing any more.
    pub(crate) fn renew_all_keys(&mut self) {
        for i in 0..self.contexts.len() {
            self.renew_key(i);
        }
        for world in 0..WORLDS {
            if self.global_keys[world].token != 0 {
                self.renew_global_key(world);
            }
        }
        self.global_regions.clear();
    }

    /// Of the context's own pages, and of global ones.
    pub(crate) fn keys_of(&self, context: usize) -> [tagged::Key; 2] {
        let c = &self.contexts[context];
        [c.reach, self.global_keys[usize::from(c.key.world)]]
    }

    /// The second level's tables, or the round, have become others.
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
        for (_, tables) in &self.contexts[context].views {
            self.views[*tables].l1.set_keys(keys);
        }
    }

    fn for_current_tables(&mut self, mut f: impl FnMut(&mut Tables) -> bool) {
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
        self.for_current_tables(Tables::drop_all);
    }
    pub(crate) fn flush_current_non_global(&mut self) {
        self.for_current_tables(Tables::drop_non_global);
    }
    pub(crate) fn flush_current_page(&mut self, gva: u64) {
        let shift = self.region_shift(self.current, gva);
        self.for_current_tables(|t| t.drop_page(gva, shift));
    }

    /// Makes the views of the CPU's state the live ones.
    #[inline]
    pub(crate) fn select_tables(&mut self, cpu: &CpuState) {
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
        self.live = self.tables_of(view);
        self.verify_view();
        self.system = if system == view {
            self.live
        } else {
            self.tables_of(system)
        };
    }

    fn tables_of(&mut self, view: View) -> usize {
        let context = &self.contexts[self.current];
        if let Some((_, tables)) = context.views.iter().find(|(v, _)| *v == view) {
            return *tables;
        }
        self.forget_devices();
        self.contexts[self.current].recent = [None; 4];
        self.stats.views_made += 1;
        self.views_made += 1;
        let (used, epoch) = (self.next_tick(), self.next_tick());
        let tables = if self.contexts[self.current].views.len() < MAX_VIEWS {
            let free = self.views.iter().position(|t| !t.taken);
            free.unwrap_or_else(|| {
                self.views.push(Tables::default());
                self.views.len() - 1
            })
        } else {
            // The least recently made; never one of the two in use.
            let victim = self.contexts[self.current]
                .views
                .iter()
                .enumerate()
                .filter(|(_, (_, t))| *t != self.live && *t != self.system)
                .min_by_key(|(_, (_, t))| self.views[*t].used)
                .map_or(0, |(i, _)| i);
            let (_, tables) = self.contexts[self.current].views.swap_remove(victim);
            self.views[tables].flush();
            tables
        };
        let t = &mut self.views[tables];
        t.taken = true;
        t.user = view.is_user();
        t.used = used;
        t.epoch = epoch;
        t.l1.set_rights(view.classes());
        self.reach.publish(t.l1.reach_mut());
        self.contexts[self.current].views.push((view, tables));
        self.publish_keys(self.current);
        tables
    }
}
