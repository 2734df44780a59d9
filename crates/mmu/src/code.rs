//! Fetching: which page code comes from, its bytes, and whether they changed.
//!
//! An engine calls [`Mmu::code_page`], keeps the generation, and then reads
//! bytes with [`Mmu::code_bytes`]: in this order a change between the two shows
//! in the generation.

use std::sync::atomic::Ordering;

use guest_memory::slot::CODE_CHUNK;
use x86_cpu::{Access, CodePage, CpuState, Privilege};
use x86_defs::paging::PAGE_SIZE;

use crate::{
    Miss, Mmu, View,
    fault::Mapped,
    fetch::{FetchEntry, GlobalPage, SPACE_SHIFT, Sum, space_of},
    fetched::{Fetched, Page},
    source::Translated,
    sum::sum_of,
    written::SlotPage,
};

/// Number of pages whose code is remembered for comparison.
const MAX_SUMS: usize = 1 << 16;
/// A bit that is set in each page's identity, so that no identity is 0.
const IDENTITY: u64 = 1 << 63;

/// A direct-mapped table from a page's identity to the place of its generation.
#[derive(Debug)]
pub(crate) struct GenerationCache(Box<[(u64, usize, usize); 256]>);

impl Default for GenerationCache {
    fn default() -> Self {
        Self(Box::new([(0, 0, 0); 256]))
    }
}

impl GenerationCache {
    /// Forgets everything, because the slots have changed.
    pub(crate) fn clear(&mut self) {
        self.0.fill((0, 0, 0));
    }
}

impl Mmu {
    /// The page that code at `gva` is fetched from. `Device` if it is not RAM.
    ///
    /// # Errors
    /// [`Miss`].
    #[inline]
    pub fn code_page(&mut self, cpu: &mut CpuState, gva: u64) -> Result<CodePage, Miss> {
        if let Some(e) = self.views[self.live].fetch.find(gva)
            && e.verified == self.verification()
            && let Some(slot) = self.slot(e.slot)
        {
            return Ok(CodePage {
                id: e.id,
                generation: slot.code_generation(e.index),
            });
        }
        self.code_page_slow(cpu, gva)
    }

    #[inline(never)]
    fn code_page_slow(&mut self, cpu: &mut CpuState, gva: u64) -> Result<CodePage, Miss> {
        if let Some(e) = self.views[self.live].fetch.find(gva).copied() {
            return Ok(self.verify(e));
        }
        let view = View::of(cpu, Privilege::Current);
        if cpu.cpl == 0
            && let Some(g) = self.global_pages.find(gva, self.global_fetch.epoch, view)
        {
            let (entry, level) = (g.entry, g.level);
            self.note_level(gva, level, true);
            self.views[self.live].fetch.insert(entry);
            self.expose(entry);
            return Ok(CodePage {
                id: entry.id,
                generation: self.generation_of(&entry),
            });
        }
        self.stats.fetch_misses += 1;
        let Mapped {
            translated: Translated { walk, .. },
            at: SlotPage { space, slot, index },
            host,
        } = self.mapped(cpu, gva, Access::Fetch, Privilege::Current)?;
        let entry = FetchEntry {
            tag: gva & !0xfff,
            id: walk.gpa & !0xfff | IDENTITY | (space as u64) << SPACE_SHIFT,
            host,
            slot,
            index,
            global: walk.global,
            verified: self.verification(),
            sum: Sum::default(),
            known: 0,
            writable: walk.rights.write,
            made: 0,
        };
        // From here on our own writes to the page are noticed. Those before may
        // have hit code that another vCPU has fetched.
        self.drop_write_tags(entry.place(), host);
        self.compare_sum(&entry);
        if walk.global {
            self.global_fetch.add(gva, walk.level);
            if cpu.cpl == 0 {
                self.global_pages.insert(GlobalPage {
                    epoch: self.global_fetch.epoch,
                    view,
                    level: walk.level,
                    entry,
                });
            }
        }
        self.note_level(gva, walk.level, walk.global);
        if !walk.global {
            // The number that identifies targets may change here.
            self.forget_switches_to_live();
            if !self.views[self.live].user {
                self.note_common(cpu, gva, &walk);
            }
        }
        self.views[self.live].fetch.insert(entry);
        self.expose(entry);
        Ok(CodePage {
            id: entry.id,
            generation: self.generation_of(&entry),
        })
    }

    /// Returns the page of an entry of the fetch TLB. The VMM may have written the page since it was compared.
    fn verify(&mut self, mut e: FetchEntry) -> CodePage {
        self.compare(&mut e);
        e.verified = self.verification();
        self.views[self.live].fetch.replace(e);
        self.expose(e);
        CodePage {
            id: e.id,
            generation: self.generation_of(&e),
        }
    }

    /// Returns the generation of the entry's page, which may be one of the address space that is not current.
    fn generation_of(&self, e: &FetchEntry) -> u32 {
        let slot = self.table.slots(space_of(e.id)).get(e.slot);
        slot.map_or(0, |s| s.code_generation(e.index))
    }

    /// Returns all lists of pages that were fetched from.
    pub(crate) fn lists(&mut self) -> impl Iterator<Item = &mut Fetched> {
        self.fetched.iter_mut().chain([&mut self.exposed])
    }

    /// Notes a page that has just been compared, for [`Self::recheck_code`] and [`Self::recheck_exposed`].
    fn expose(&mut self, mut e: FetchEntry) {
        self.find_sum(&mut e);
        self.fetched[usize::from(self.views[self.live].user)].add(e);
        if e.writable {
            self.exposed.add(e);
        }
    }

    /// Compares the page with the code that was fetched from it.
    fn compare(&mut self, e: &mut FetchEntry) {
        self.stats.code_rechecks += 1;
        self.find_sum(e);
        let is_current = e.sum.generation == self.generation_of(e);
        if is_current && sum_of(e.host, e.sum.chunks) == e.sum.sum {
            return;
        }
        if is_current {
            self.compare_sum(e);
            self.find_sum(e);
            if e.sum.generation == self.generation_of(e) {
                return;
            }
        }
        // None of what was fetched is used any more.
        e.sum = Sum::default();
    }

    /// Sets the entry's checksum.
    fn find_sum(&self, e: &mut FetchEntry) {
        if e.known != self.remembered {
            e.known = self.remembered;
            e.sum = self.sums.get(&e.id).copied().unwrap_or_default();
        }
    }

    /// The VMM writes guest RAM without telling: what this vCPU has fetched from
    /// the page must still be there when the page is mapped for fetching again.
    fn compare_sum(&mut self, e: &FetchEntry) {
        let Some(slot) = self.table.slots(space_of(e.id)).get(e.slot) else {
            return;
        };
        let Some(sum) = self.sums.get_mut(&e.id) else {
            return;
        };
        let generation = slot.code_generation(e.index);
        let now = sum_of(e.host, sum.chunks);
        if sum.generation == generation && now != sum.sum {
            // Behind the sum: what is written after this shows in the next comparison.
            if self.exact.is_same(e.id, generation, e.host) {
                sum.sum = now;
                let sum = *sum;
                self.remembered += 1;
                self.lists().for_each(|list| list.set_sum(e.id, sum));
                return;
            }
            slot.bump_code_generation(e.index);
            self.stats.code_changed_by_vmm += 1;
        }
        if sum.generation != slot.code_generation(e.index) {
            self.sums.remove(&e.id);
            self.exact.forget(e.id);
        }
    }

    /// Reads up to `buf.len()` code bytes, not beyond the page's end, and tracks
    /// them as code. Returns how many there are.
    ///
    /// # Errors
    /// [`Miss`].
    pub fn code_bytes(
        &mut self,
        cpu: &mut CpuState,
        gva: u64,
        buf: &mut [u8],
    ) -> Result<usize, Miss> {
        let Some((e, buf)) = self.fetched_from(cpu, gva, buf)? else {
            return Ok(0);
        };
        let (offset, n) = (gva % PAGE_SIZE, buf.len());
        if !self.is_spared(e.place(), offset, n as u64) {
            self.drop_write_tags(e.place(), e.host);
        }
        let Some(slot) = self.slot(e.slot) else {
            return Ok(0);
        };
        let generation = slot.code_generation(e.index);
        let is_exact = slot.is_exact(e.index);
        if slot.track_code(e.index, offset, n as u64) {
            self.memory.ask_for_code(e.host);
        }
        e.host.read_bytes(offset, buf);
        if is_exact {
            let known = self.sums.get(&e.id);
            let is_first = known.is_none_or(|sum| sum.generation != generation);
            let generation = (generation, is_first);
            self.exact.remember(e.id, generation, offset, buf);
        }
        self.remember(&e, generation, offset, n as u64);
        Ok(n)
    }

    /// As [`Self::code_bytes`], but tracks nothing.
    ///
    /// # Errors
    /// [`Miss`].
    pub fn peek_code(
        &mut self,
        cpu: &mut CpuState,
        gva: u64,
        buf: &mut [u8],
    ) -> Result<usize, Miss> {
        let Some((e, buf)) = self.fetched_from(cpu, gva, buf)? else {
            return Ok(0);
        };
        e.host.read_bytes(gva % PAGE_SIZE, buf);
        Ok(buf.len())
    }

    /// Returns the page that code at `gva` is fetched from, and the part of `buf` that lies before the page's end.
    #[inline(always)]
    fn fetched_from<'a>(
        &mut self,
        cpu: &mut CpuState,
        gva: u64,
        buf: &'a mut [u8],
    ) -> Result<Option<(FetchEntry, &'a mut [u8])>, Miss> {
        self.code_page(cpu, gva)?;
        let n = buf.len().min((PAGE_SIZE - gva % PAGE_SIZE) as usize);
        let found = self.views[self.live].fetch.find(gva).copied();
        Ok(found.zip(buf.get_mut(..n)))
    }

    fn remember(&mut self, e: &FetchEntry, generation: u32, offset: u64, len: u64) {
        if len == 0 {
            return;
        }
        let (first, last) = (offset / CODE_CHUNK, (offset + len - 1) / CODE_CHUNK);
        let chunks = 1 << first | 1 << last;
        if self.sums.len() >= MAX_SUMS && !self.sums.contains_key(&e.id) {
            // Code that cannot be compared any more must not be used any more.
            for id in self.sums.drain().map(|(id, _)| id).collect::<Vec<_>>() {
                if let Some((slot, index)) = self.find_id(id)
                    && let Some(slot) = self.table.slots(space_of(id)).get(slot)
                {
                    slot.bump_code_generation(index);
                }
            }
        }
        let sum = self.sums.entry(e.id).or_insert(Sum {
            generation,
            ..Sum::default()
        });
        let before = *sum;
        if sum.generation != generation {
            *sum = Sum {
                generation,
                ..Sum::default()
            };
        }
        sum.add(e.host, chunks);
        let sum = *sum;
        if sum != before {
            self.remembered += 1;
            self.lists().for_each(|list| list.set_sum(e.id, sum));
        }
    }

    /// Changes when this vCPU takes over other slots.
    pub fn slots_generation(&self) -> u64 {
        self.seen_generation
    }

    /// Slot and page of a [`CodePage::id`](x86_cpu::CodePage).
    pub(crate) fn find_id(&self, id: u64) -> Option<(usize, usize)> {
        let gpa = id & ((1 << 52) - 1) & !0xfff;
        let slot = self.table.find(space_of(id), gpa)?;
        let index = self.table.slots(space_of(id)).get(slot)?.page_index(gpa)?;
        Some((slot, index))
    }

    /// The current generation of a page that [`Self::code_page`] returned.
    #[inline]
    pub fn code_generation(&mut self, id: u64) -> u32 {
        let place = (id >> 12) as usize % 256;
        let (cached, slot, index) = self.generations.0[place];
        if cached == id
            && let Some(slot) = self.table.slots(space_of(id)).get(slot)
        {
            return slot.code_generation(index);
        }
        match self.find_id(id) {
            Some((slot, index)) => {
                self.generations.0[place] = (id, slot, index);
                self.table
                    .slots(space_of(id))
                    .get(slot)
                    .map_or(0, |s| s.code_generation(index))
            }
            // The slot is gone; its code must not match.
            None => (self.seen_generation as u32).wrapping_mul(0x85eb_ca6b) ^ 0x5a5a_5a5a,
        }
    }

    /// While it stays the same, so do the generations of all pages.
    #[inline(always)]
    pub fn code_changes(&self) -> u64 {
        self.code_changes.load(Ordering::Acquire)
    }

    /// Changes with the live (context, view) and with every flush of it: what
    /// [`Self::code_page`] has returned under one value it would return again.
    /// Coming back to a view that was not flushed gives its value again.
    #[inline(always)]
    pub fn fetch_epoch(&self) -> u64 {
        self.views[self.live].epoch
    }

    /// Carries out a flush of `gva`, or of everything, for global pages of code.
    pub(crate) fn flush_global_fetch(&mut self, gva: Option<u64>) {
        if gva.is_none_or(|gva| self.global_fetch.may_have(gva)) {
            self.renew_families();
            self.global_fetch.epoch = self.next_tick();
            self.global_fetch.clear();
        }
    }

    /// Has each page compared with what was fetched from it before it is executed again, as the VMM may have written code:
    /// all pages now, if that costs little and if none has been forgotten, or else each when it is fetched from. In the
    /// first case what engines keep for the present epoch stays.
    pub fn recheck_code(&mut self) {
        if !self.compare_fetched(0) {
            self.begin_verification();
        }
    }

    /// Does the same at an instruction that serialises. One that a user executes says nothing about the kernel's code. (A
    /// program that starts executes CPUID some thirty times.)
    pub fn serialize(&mut self) {
        if !self.views[self.live].user {
            self.recheck_code();
        } else if !self.compare_fetched(1) {
            self.forget_switches();
            self.verification[1] += 1;
            self.fetched[1].clear();
            self.verify_view();
        }
    }

    /// Has each page compared when it is fetched from next.
    fn begin_verification(&mut self) {
        self.renew_families();
        self.verification = self.verification.map(|v| v + 1);
        self.lists().for_each(Fetched::clear);
        self.global_fetch.epoch = self.next_tick();
        self.other_fetch.epoch = self.next_tick();
        self.verify_view();
    }

    /// Compares the pages that users have fetched from, and with `from` 0 those of supervisors as well, if it is
    /// worthwhile to compare them at once. Returns true if it was.
    pub(crate) fn compare_fetched(&mut self, from: usize) -> bool {
        let is_worthwhile = self.fetched[from..].iter().all(Fetched::is_worthwhile);
        if is_worthwhile {
            for n in from..self.fetched.len() {
                let mut fetched = core::mem::take(&mut self.fetched[n]);
                self.compare_pages(&mut fetched);
                self.fetched[n] = fetched;
            }
        }
        is_worthwhile
    }

    /// Returns the number of rechecks that concern the live view.
    #[inline(always)]
    fn verification(&self) -> u64 {
        self.verification[usize::from(self.views[self.live].user)]
    }

    /// As [`Self::recheck_exposed`] says. An operating system that has code read from a disk
    /// maps it afterwards, by which it is compared; firmware and bare programs just execute it.
    /// So only pages count that the guest can write by the address by which it executes them.
    #[inline]
    pub(crate) fn look_at_exposed(&mut self) {
        if self.exposed.len() == 0 {
            return;
        }
        if self.exposed.is_worthwhile() {
            let mut exposed = core::mem::take(&mut self.exposed);
            self.compare_pages(&mut exposed);
            self.exposed = exposed;
        } else {
            self.begin_verification();
        }
    }

    #[inline]
    fn compare_pages(&mut self, fetched: &mut Fetched) {
        for (n, page) in fetched.look().iter_mut().enumerate() {
            if !page.is_same(n) {
                self.compare_changed(page);
            }
        }
    }

    #[cold]
    fn compare_changed(&mut self, page: &mut Page) {
        let mut e = page.entry;
        self.compare(&mut e);
        page.set_sum(e.sum);
    }

    /// Notes that the live view's epoch belongs to the current [`Self::verification`].
    #[inline]
    pub(crate) fn verify_view(&mut self) {
        let verification = self.verification();
        if self.views[self.live].verification != verification {
            self.forget_switches_to_live();
            let epoch = self.next_tick();
            let tables = &mut self.views[self.live];
            tables.verification = verification;
            tables.epoch = epoch;
        }
    }
}
