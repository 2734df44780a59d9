//! Contexts that catch up in place of being flushed: see [`crate::shadow`].

use std::sync::atomic::{Ordering, fence};

use x86_cpu::{CpuState, Exception};

use crate::{
    Mmu, Mode,
    context::{CURRENT, ContextKey},
    fetched::Fetched,
    reach,
    shadow::{
        derived::Found,
        roots::{Policy, Roots},
    },
    walk::Walk,
};

/// Maximum number of pages of code that are compared at a flush. A guest whose devices are busy flushes often.
const MAX_AT_FLUSH: usize = 64;

impl Mmu {
    /// Sets how translations are kept when CR3 changes, and forgets all translations.
    pub fn set_policy(&mut self, cpu: &CpuState, policy: Policy) {
        self.flush_everything();
        self.forget_contexts();
        self.roots.policy = policy;
        self.set_root(cpu);
    }

    /// Carries out a MOV to CR3, whose value `cpu` has already: selects the context and, if `flushes` is true, flushes the
    /// PCID's translations that are not global.
    ///
    /// # Errors
    /// As [`Self::load_root`].
    pub fn load_cr3(&mut self, cpu: &mut CpuState, flushes: bool) -> Result<(), Exception> {
        // The instruction is a barrier (SDM vol. 3, 9.3), and kernels use it as one.
        fence(Ordering::SeqCst);
        self.load_pdptes(cpu)?;
        self.stats.flushes += u64::from(flushes);
        self.count_loads(1);
        self.take_root(cpu, flushes);
        Ok(())
    }

    /// Returns the tracked context of the root in `self.paging`, which is made now if the root deserves one.
    pub(crate) fn tracked_context(&mut self, world: u8, flushes: bool) -> Option<usize> {
        if self.roots.policy == Policy::Tdp || self.paging.mode == Mode::None || self.is_promised()
        {
            return None;
        }
        let id = Roots::id(world, self.paging.root);
        if let Some(found) = self.roots.find(id) {
            return Some(found);
        }
        let is_full = self.is_full();
        if !flushes || !self.roots.comes_back(id, is_full) {
            return None;
        }
        Some(self.new_context(ContextKey {
            world,
            pcid: self.paging.pcid,
            root: Some(id),
        }))
    }

    /// Notes what a translation was derived from. This comes before the translation enters any table.
    #[inline]
    pub(crate) fn note_walk(&mut self, gva: u64, walk: &Walk) {
        if walk.global {
            self.flushes.has_global_users |= gva >> 63 == 0;
        } else if let Some(derived) = &mut self.contexts[self.current].derived {
            derived.note(gva, walk, &self.trail);
        }
    }

    /// Carries out the flushes since the current context was current last.
    pub(crate) fn apply_flushes(&mut self) {
        let context = &mut self.contexts[self.current];
        let left = core::mem::replace(&mut context.left, CURRENT);
        let is_stale = core::mem::take(&mut context.is_stale);
        let pcid = context.key.pcid;
        let mut seen = context.seen;
        if left < self.flushes.everything {
            self.drop_current();
            return;
        }
        let mut is_fresh = false;
        if is_stale || left < self.flushes.non_global(pcid) {
            self.catch_up();
            is_fresh = true;
        }
        if seen == self.flushes.seen() {
            return;
        }
        let Some(pages) = self.flushes.global_since(&mut seen, pcid) else {
            self.drop_current();
            return;
        };
        let mut pages: Vec<u64> = pages.collect();
        if !is_fresh {
            let more = self.flushes.private_since(&mut seen, pcid);
            let is_known = more.is_some();
            pages.extend(more.into_iter().flatten());
            if !is_known {
                self.catch_up();
            }
        }
        for gva in pages {
            self.flush_current_page(gva);
        }
    }

    /// Drops all translations of the current context.
    pub(crate) fn drop_current(&mut self) {
        let tick = self.next_tick();
        let context = &mut self.contexts[self.current];
        context.flushed = tick;
        if let Some(derived) = &mut context.derived {
            derived.clear();
        }
        self.share_again();
        self.flush_current();
        self.renew_key(self.current);
        self.next_tick();
    }

    /// Drops the current context's translations that are not global, as far as they are out of date.
    pub(crate) fn catch_up(&mut self) {
        let tick = self.next_tick();
        let context = &mut self.contexts[self.current];
        let Some(derived) = &mut context.derived else {
            context.flushed = tick;
            self.flush_current_non_global();
            self.renew_key(self.current);
            self.next_tick();
            return;
        };
        self.stats.catch_ups += 1;
        self.stats.entries_compared += derived.len() as u64;
        let mut changed = core::mem::take(&mut self.changed);
        changed.clear();
        let found = derived.compare(&mut changed);
        match found {
            Found::Pages | Found::Tables => {
                if found == Found::Tables {
                    context.page_flushed = tick;
                }
                self.stats.entries_changed += changed.len() as u64;
                for gva in &changed {
                    self.l2.flush_page(*gva);
                    self.flush_current_small_page(*gva);
                }
                if self.contexts[self.current].nr_views() == 0 {
                    self.give_back();
                }
            }
            Found::Everything => {
                self.stats.catch_ups_failed += 1;
                derived.clear();
                context.flushed = tick;
                self.flush_current_non_global();
                self.renew_key(self.current);
            }
        }
        self.changed = changed;
        self.recheck_code_of_flush();
        self.next_tick();
    }

    /// Gives a context that has lost its tables the translations of its remembered entries, which were compared with
    /// memory: they come to the second level and, for fetches, to L2.
    fn give_back(&mut self) {
        let Some(derived) = self.contexts[self.current].derived.take() else {
            return;
        };
        let (owner, keys) = (self.owner(), self.keys_of(self.current));
        for (gva, leaf) in derived.leaves() {
            let tick = self.next_tick();
            self.l2.insert(gva, &leaf.walk, owner, tick);
            if leaf.hva != 0 && !self.is_watched(gva) {
                let leaf = reach::Leaf {
                    gva,
                    hva: leaf.hva,
                    class: leaf.walk.rights.class(),
                    global: false,
                    writable: leaf.writes == self.writes_epoch,
                };
                self.reach.insert(&leaf, keys[0], [keys[0]; 2]);
            }
        }
        self.publish_reach();
        self.contexts[self.current].derived = Some(derived);
    }

    /// Notes that a device may have written guest memory.
    #[inline]
    pub fn recheck_exposed(&mut self) {
        if !core::mem::replace(&mut self.is_written_by_device, true) {
            self.forget_flushing_switches();
        }
        self.look_at_exposed();
    }

    /// Has code compared again if a device may have written it: few pages now, and many when they are fetched from next,
    /// as a flush would have done. In the second case what is kept for global code stays.
    fn recheck_code_of_flush(&mut self) {
        if !core::mem::take(&mut self.is_written_by_device) {
            return;
        }
        let pages: usize = self.fetched.iter().map(Fetched::len).sum();
        if pages > MAX_AT_FLUSH || !self.compare_fetched(0) {
            self.renew_families();
            self.verification = self.verification.map(|v| v + 1);
            let [supervisors, users] = &mut self.fetched;
            supervisors.set_incomplete();
            users.clear();
        }
    }
}
