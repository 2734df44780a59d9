//! Requests of other threads: the vCPU gives up write permission of pages, and takes over other slots.

use std::sync::Arc;

use guest_memory::{HostPage, SlotTable, byte_map::ByteMap, table::ADDRESS_SPACES};

use crate::{
    Mmu,
    fetched::Fetched,
    l1::Half,
    reach::LargeEntries,
    written::{Pages, SlotPage, Tags},
};

/// Maximum number of pages whose tags are dropped one by one. With more pages, one search of all tags is faster.
const MANY: u32 = 1024;

impl Mmu {
    /// Returns true if another thread has asked for something. It is cheap enough for every entry of a block.
    #[inline(always)]
    pub fn needs_sync(&self) -> bool {
        self.memory.epoch() != self.seen_epoch || self.mailbox.posted() != self.seen_posted
    }

    /// Carries out the requests of other threads, and acknowledges them.
    pub fn sync(&mut self) {
        if self.memory.epoch() != self.seen_epoch {
            self.stats.syncs += 1;
            let (table, epoch) = self.memory.table_and_epoch();
            self.take_table(table);
            self.take_write_flush();
            self.seen_epoch = epoch;
            self.mailbox.set_epoch(epoch);
        }
        let posted = self.mailbox.posted();
        if posted != self.seen_posted {
            let start = host::cpu::rdtsc();
            self.stats.posts += posted.wrapping_sub(self.seen_posted);
            let memory = Arc::clone(&self.memory);
            let _lock = memory.fault_lock();
            self.give_up(|mmu, pages| mmu.written.take_asked(pages));
            self.seen_posted = posted;
            self.mailbox.set_done(posted);
            self.stats.stall_tsc += host::cpu::rdtsc().wrapping_sub(start);
        }
    }

    /// Takes over other slots, or other flags of the same slots.
    fn take_table(&mut self, table: Arc<SlotTable>) {
        if self.seen_generation == table.generation() {
            if !Arc::ptr_eq(&table, &self.table) {
                self.take_flags(table);
            }
            return;
        }
        // This comes first: the places of written pages are still those in the old table.
        self.invalidate_written_code();
        self.seen_generation = table.generation();
        self.table = table;
        self.generations.clear();
        self.exact.clear();
        self.flush_everything();
        self.forget_promised();
        // Contexts that are not current are flushed, too: all entries point into old slots.
        for i in 0..self.views.len() {
            let epoch = self.next_tick();
            self.views[i].flush();
            self.views[i].epoch = epoch;
        }
        self.lists().for_each(Fetched::clear);
        self.written.reset(&self.table);
        self.look_for_logging();
    }

    /// Takes over the flags of the same slots. Write permission goes where a slot begins to log writes; all else stays.
    fn take_flags(&mut self, table: Arc<SlotTable>) {
        let old = core::mem::replace(&mut self.table, table);
        self.look_for_logging();
        let start = host::cpu::rdtsc();
        self.give_up(|mmu, pages| {
            let notes_more = |space: usize, slot: usize| {
                let pair = mmu
                    .table
                    .slots(space)
                    .get(slot)
                    .zip(old.slots(space).get(slot));
                pair.is_none_or(|(new, old)| new.notes_more_than(old))
            };
            mmu.written.take_all(notes_more, pages);
        });
        self.stats.stall_tsc += host::cpu::rdtsc().wrapping_sub(start);
    }

    fn look_for_logging(&mut self) {
        let mut slots = (0..ADDRESS_SPACES).flat_map(|space| self.table.slots(space));
        self.is_logging = slots.any(|slot| slot.is_logging());
    }

    /// Gives up all write permissions: the way of harvests that is measured against the others.
    fn take_write_flush(&mut self) {
        let write_flushes = self.memory.write_flushes();
        if write_flushes != self.seen_write_flushes {
            self.seen_write_flushes = write_flushes;
            self.begin_round();
            for t in &mut self.views {
                t.l1.flush(&[Half::Write]);
            }
            self.mixed.forget_addresses();
        }
    }

    /// Drops the tags of the pages that `take` has taken from [`Self::written`].
    fn give_up(&mut self, take: impl FnOnce(&mut Self, &mut Vec<Pages>)) {
        let mut pages = core::mem::take(&mut self.given_up);
        take(self, &mut pages);
        let count: u32 = pages.iter().map(|p| p.bits.count_ones()).sum();
        self.stats.pages_given_up += u64::from(count);
        let is_anywhere = || {
            let mut places = pages.iter().flat_map(|p| p.places());
            places.any(|at| self.written.tags(at) == Tags::Anywhere)
        };
        if count > MANY || is_anywhere() {
            self.drop_all_given_up(&pages);
        } else {
            let mut last = None;
            for at in pages.iter().flat_map(|p| p.places()) {
                if let Some(host) = self.host_of(at) {
                    self.drop_tags(self.written.tags(at), host, &mut last);
                }
            }
        }
        // The pages that were written unnoticed may have code that another vCPU has fetched before.
        host::cpu::barrier();
        let table = Arc::clone(&self.table);
        for some in &mut pages {
            let slot = table.slots(some.space).get(some.slot);
            some.bits &= slot.map_or(0, |slot| slot.pages_with_code(some.word));
            for at in some.places() {
                let spared = self.mixed.take(at);
                self.bump_unless_spared(at, spared.as_ref());
            }
        }
        pages.clear();
        self.given_up = pages;
    }

    /// Drops the tags of pages that the vCPU may not write any more, by one search of all tags.
    fn drop_all_given_up(&mut self, pages: &[Pages]) {
        let mut slots: Vec<(usize, usize)> = pages.iter().map(|p| (p.space, p.slot)).collect();
        slots.dedup();
        let slots: Vec<_> = slots
            .into_iter()
            .filter_map(|(space, slot)| {
                let writer = Arc::clone(self.written.writer(space, slot)?);
                Some((*self.table.slots(space).get(slot)?.config(), writer))
            })
            .collect();
        self.begin_round();
        for t in &mut self.views {
            t.l1.flush_where(&[Half::Write], |e| {
                slots.iter().any(|(config, writer)| {
                    let offset = e.host.hva().wrapping_sub(config.hva);
                    offset < config.size && !writer.may_write((offset >> 12) as usize)
                })
            });
        }
    }

    fn host_of(&self, at: SlotPage) -> Option<HostPage> {
        self.table.slots(at.space).get(at.slot)?.page(at.index)
    }

    /// Makes this vCPU's writes to the page take the slow way. Code counts as changed that the vCPU may have written
    /// unnoticed since the last call.
    pub(crate) fn drop_write_tags(&mut self, at: SlotPage, host: HostPage) {
        let Some(tags) = self.written.take(at) else {
            return;
        };
        let spared = self.mixed.take(at);
        if spared.is_none() {
            self.drop_tags(tags, host, &mut None);
        }
        self.bump_unless_spared(at, spared.as_ref());
    }

    /// Drops the page's tags. `last` is as for [`Reach::forbid_writes`](crate::reach::Reach::forbid_writes).
    fn drop_tags(&mut self, tags: Tags, host: HostPage, last: &mut Option<LargeEntries>) {
        self.writes_epoch += 1;
        match tags {
            Tags::At([one, other]) => {
                self.reach.forbid_writes(one, host.hva(), last);
                if other != one {
                    self.reach.forbid_writes(other, host.hva(), last);
                }
                for t in &mut self.views {
                    t.l1.flush_at(Half::Write, one, host);
                    if other != one {
                        t.l1.flush_at(Half::Write, other, host);
                    }
                }
            }
            Tags::Anywhere => {
                self.begin_round();
                for t in &mut self.views {
                    t.l1.flush_where(&[Half::Write], |e| e.host == host);
                }
            }
        }
    }

    /// Notes that code that was fetched from the page is out of date, unless this vCPU could write none of it unnoticed:
    /// `spared` are the bytes that it could not.
    pub(crate) fn bump_unless_spared(&self, at: SlotPage, spared: Option<&ByteMap>) {
        let Some(slot) = self.table.slots(at.space).get(at.slot) else {
            return;
        };
        let is_changed = match spared {
            Some(spared) => !slot.code_map(at.index).is_subset(spared),
            None => slot.code_chunks(at.index) != 0,
        };
        if is_changed {
            slot.bump_code_generation(at.index);
        }
    }

    /// Notes that code is out of date that was fetched from any page which this vCPU could write. Drops no tags.
    fn invalidate_written_code(&mut self) {
        let mut pages = Vec::new();
        self.written.take_all(|_, _| true, &mut pages);
        for at in pages.into_iter().flat_map(Pages::places) {
            self.bump_unless_spared(at, None);
        }
        self.mixed.clear();
    }
}
