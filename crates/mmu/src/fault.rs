//! From a miss of the first level to a page that may be accessed, in this order:
//!
//! 1. the device page that was accessed last;
//! 2. the second level ([`crate::reach`]);
//! 3. the page's translation, from the [`crate::source`];
//! 4. its place in the slots; without one it is a device's ([`Mmu::mapped`], which is also the way of fetches, and of
//!    translations without an access);
//! 5. for a write, what has to be noted so that further writes need not be;
//! 6. entries in both levels.

use std::sync::Arc;

use guest_memory::HostPage;
use x86_cpu::{Access, CpuState, Privilege};
use x86_defs::paging::PAGE_SIZE;

use crate::{
    Miss, Mmu, Mode,
    l1::Half,
    reach::{Leaf, PIECE_PAGES, PIECE_SHIFT},
    source::Translated,
    walk::Walk,
    written::SlotPage,
};

/// One in this many faults of dirty logging is timed and stands for all, because reading the time would slow each fault.
const TIMED: u64 = 16;

/// A page of RAM on which the access is allowed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Resolved {
    pub host: HostPage,
    /// Slot in this vCPU's table, and page in the slot.
    pub slot: usize,
    pub index: usize,
    /// True if a write has to be noted after it was made, because the page has no write tag.
    pub note: bool,
    /// False if the first level does not have the page.
    pub entered: bool,
}

/// A page of RAM that an access leads to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mapped {
    pub translated: Translated,
    pub at: SlotPage,
    pub host: HostPage,
}

impl Mmu {
    /// Resolves a data access to the page of `gva` and fills L1 if the page
    /// needs no bookkeeping from now on.
    pub(crate) fn resolve(
        &mut self,
        cpu: &mut CpuState,
        gva: u64,
        access: Access,
        who: Privilege,
    ) -> Result<Resolved, Miss> {
        self.stats.l1_misses += 1;
        let write = access == Access::Write;
        if let Some(gpa) = self.known_device(gva, write, who) {
            return Err(Miss::Device { gpa });
        }
        if let Some(page) = self.find_in_reach(gva, write, who) {
            return Ok(page);
        }
        let mapped = match self.mapped(cpu, gva, access, who) {
            Err(Miss::Device { gpa }) => {
                self.note_device(gva, gpa, write, who);
                return Err(Miss::Device { gpa });
            }
            mapped => mapped?,
        };
        let Mapped {
            translated: Translated { walk, is_walked },
            at,
            host,
        } = mapped;
        let note = write && !(walk.dirty && self.begin_to_write(at, gva));
        let is_private = !walk.global && self.is_private_use(self.tables_for(who));
        if !is_private && !self.is_watched(gva) {
            if note && walk.dirty {
                self.allow_beside_code(at, gva, host, who);
            }
            self.note_level(gva, walk.level, walk.global);
            let tables = self.tables_for(who);
            let l1 = &mut self.views[tables].l1;
            l1.insert(Half::of(write && !note), gva, host, walk.global);
            self.enter_in_reach(gva, &walk, at, host, write && !note);
        }
        if is_walked {
            self.take_neighbours(gva, at);
        }
        Ok(Resolved {
            host,
            slot: at.slot,
            index: at.index,
            note,
            entered: !is_private,
        })
    }

    /// Returns the page of RAM that an access leads to, with A and D bits set as the access sets them.
    ///
    /// # Errors
    /// [`Miss`].
    #[inline(always)]
    pub(crate) fn mapped(
        &mut self,
        cpu: &mut CpuState,
        gva: u64,
        access: Access,
        who: Privilege,
    ) -> Result<Mapped, Miss> {
        let translated = self.translation(cpu, gva, access, who)?;
        let mapped = self.mapped_by(translated, access);
        let is_data = mapped.is_ok() && access != Access::Fetch;
        if !is_data && !translated.walk.global {
            self.note_private(self.tables_for(who));
        }
        mapped
    }

    /// Returns the page of RAM that a translation leads to.
    #[inline(always)]
    fn mapped_by(&self, translated: Translated, access: Access) -> Result<Mapped, Miss> {
        let gpa = translated.walk.gpa;
        let device = Miss::Device { gpa };
        let space = self.space();
        if self.apic_page == Some(gpa & !0xfff) {
            return Err(device);
        }
        let slot = self.table.find_near(space, gpa, self.near).ok_or(device)?;
        let write = access == Access::Write;
        let pages = self.slot(slot).filter(|s| !(write && s.is_readonly()));
        let pages = pages.ok_or(device)?;
        let index = pages.page_index(gpa).ok_or(device)?;
        let host = pages.page_for(index, write).ok_or(Miss::Host {
            gpa: pages.page_gpa(index),
        })?;
        Ok(Mapped {
            translated,
            at: SlotPage { space, slot, index },
            host,
        })
    }

    /// Prepares the page for a write tag: makes it findable for other threads, and dirty. Returns false if the page cannot
    /// have a tag, because it is code or because the host has no memory.
    fn begin_to_write(&mut self, at: SlotPage, gva: u64) -> bool {
        let is_timed = self.is_logging && self.stats.dirty_faults.is_multiple_of(TIMED);
        let start = is_timed.then(host::cpu::rdtsc);
        let held = self.memory.locks_faults().then(|| Arc::clone(&self.memory));
        let _lock = held.as_ref().and_then(|memory| memory.fault_lock());
        // This comes first: who clears the dirty bit, or marks the page as code, asks the vCPUs that it finds here.
        let Some(is_new) = self.written.add(&self.table, &self.mailbox, at, gva) else {
            return false;
        };
        let Some(slot) = self.table.slots(at.space).get(at.slot) else {
            return false;
        };
        if slot.code_chunks(at.index) != 0 {
            if is_new {
                self.written.take(at);
            }
            return false;
        }
        // The page is written as a whole from now on.
        self.mixed.take(at);
        if slot.mark_dirty(at.index) {
            self.stats.dirty_faults += 1;
            if let Some(start) = start {
                let took = host::cpu::rdtsc().wrapping_sub(start);
                self.stats.stall_tsc += took * TIMED;
            }
        }
        true
    }

    /// Returns the page of the second level for an access that needs no bookkeeping.
    fn find_in_reach(&mut self, gva: u64, write: bool, who: Privilege) -> Option<Resolved> {
        let keys = self.keys_of(self.current);
        // Most of the upper half is global.
        let is_upper = gva >> 63 != 0;
        let of_global = is_upper.then(|| self.reach.find(gva, keys[1])).flatten();
        let found = match of_global {
            Some(found) => found,
            None => self.reach.find(gva, keys[0])?,
        };
        let tables = self.tables_for(who);
        let may = self.views[tables]
            .l1
            .rights()
            .map(|r| r >> found.class & 1 != 0);
        let may_write = may[1] && found.writable;
        if !may[0] || write && !may_write {
            // The write is made after it was noted. The prefetch lets its cache and TLB misses begin before that.
            host::cpu::prefetch_to_write(found.hva + gva % PAGE_SIZE);
            return None;
        }
        if !found.global && self.views[tables].is_shared {
            return None;
        }
        let (slot, index, host) = self.page_at(found.hva, write)?;
        self.stats.reach_hits += 1;
        let l1 = &mut self.views[tables].l1;
        l1.insert(Half::of(may_write), gva, host, found.global);
        Some(Resolved {
            host,
            slot,
            index,
            note: false,
            entered: true,
        })
    }

    /// Returns the slot's page at a host address.
    fn page_at(&self, hva: u64, write: bool) -> Option<(usize, usize, HostPage)> {
        let slots = self.table.slots(self.space());
        let index_in = |n: usize| {
            let config = slots.get(n)?.config();
            let offset = hva.wrapping_sub(config.hva);
            (offset < config.size).then_some((n, (offset >> 12) as usize))
        };
        let (slot, index) = index_in(self.near).or_else(|| (0..slots.len()).find_map(index_in))?;
        let host = slots.get(slot)?.page_for(index, write)?;
        (host.hva() == hva).then_some((slot, index, host))
    }

    /// Enters the page in the second level.
    fn enter_in_reach(
        &mut self,
        gva: u64,
        walk: &Walk,
        at: SlotPage,
        host: HostPage,
        writable: bool,
    ) {
        let keys = self.keys_of(self.current);
        let key = keys[usize::from(walk.global && gva >> 63 != 0)];
        let mut leaf = Leaf {
            gva,
            hva: host.hva(),
            class: walk.rights.class(),
            global: walk.global,
            writable,
        };
        if walk.level == 1 && self.paging.mode != Mode::None {
            self.reach.insert(&leaf, key, keys);
            self.publish_reach();
            if let Some(derived) = &mut self.contexts[self.current].derived {
                let writes = if writable { self.writes_epoch } else { 0 };
                derived.note_page(gva, leaf.hva, writes);
            }
            return;
        }
        // The number of the piece's pages before this one. The slot may begin with one of these.
        let before = (gva >> 12) as usize % PIECE_PAGES;
        leaf.hva = leaf.hva.wrapping_sub((before as u64) << 12);
        let Some(slot) = self.table.slots(at.space).get(at.slot) else {
            return;
        };
        let apic = self.apic_page.and_then(|gpa| slot.page_index(gpa));
        let apic = apic.and_then(|n| (n + before).checked_sub(at.index));
        let piece = gva >> PIECE_SHIFT;
        let watched = self.watched.iter().filter(|w| **w >> PIECE_SHIFT == piece);
        let watched = watched.map(|w| (w >> 12) as usize % PIECE_PAGES);
        self.reach.insert_large(&leaf, key, |bits| {
            slot.readable_pages(at.index as isize - before as isize, bits);
            for n in apic.into_iter().chain(watched) {
                if let Some(word) = bits.get_mut(n / 64) {
                    *word &= !(1 << (n % 64));
                }
            }
        });
    }
}
