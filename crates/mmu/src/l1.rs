//! L1: direct-mapped tables from guest page to host page, for reads and for writes.
//!
//! ```text
//! i = (gva >> 12) & (entries - 1)       BEXTR by the base
//! offset = gva - tags[half][i]          in the page if and only if hit
//! hit  ⇔  offset <= 4096 - size         one compare, any alignment
//! host address = offset + pages[i]      one page for both halves
//! ```
//!
//! Generated code probes the tables inline, from one base: the layout is fixed. A mask or a second base in memory costs
//! 2 ns per access between stores. So the base says how many entries there are: [`ENTRIES`], or 32 times as many
//! ([`crate::growth`]). Tables that are mostly empty cost nothing but address space: flushing them takes as long as
//! they are filled.
//!
//! Before the tables lies the *stack's entry*, a copy of the write entry through which the stack was last accessed.
//! Generated code compares it without computing an index. The copy is dropped with the entry, and also in other cases
//! where that is simpler.
//!
//! Behind the tables lie the *per-site entries*: copies of entries that generated code makes for single instructions,
//! and compares without an index as well. A per-site entry stays when the entry that it was copied from gets another
//! page. So whoever forgets a page has to look for its per-site entries, too.
//!
//! The *page guards* are to fetches what entries are to data. A page guard belongs to a page of memory with code, and
//! says at which gva the view has that page, if that is known. A branch to another page compares its target with the
//! page guard of the page that it led to before. The *inline caches* are for branches through a pointer in memory.

use core::hash::{Hash, Hasher};
use std::{hash::DefaultHasher, sync::OnceLock, time::Instant};

use guest_memory::TaggedPage as Entry;
pub use guest_memory::tagged::{
    Block, L2Key, PAGES as PAGES_OFFSET, Reach, SEEN_PAGES, SHORT_WORDS, SINGLE as STACK_OFFSET,
    SITE_ENTRIES, Size, word,
};
use guest_memory::{
    HostPage, TaggedPages,
    tagged::{self, GROUP},
};

/// Tag of the empty entry `i`: a page that another entry holds, so that no
/// address which selects entry `i` can match it. (No single constant would do:
/// generated code compares nothing but the offset from the tag.)
pub const fn empty_tag(i: usize) -> u64 {
    if i == 0 { 0x1000 } else { 0 }
}

/// Returns the offset of per-site entry `n` from the base.
pub const fn site_entry(n: usize) -> i32 {
    tagged::site_entry(n)
}
/// Offset from the base of a bit for each per-site entry that may have a page.
pub const SITE_ENTRIES_USED: i32 = tagged::site_entries_used();
/// Offset from the base of a bit for each page number modulo [`SITE_ENTRIES_PAGES`] that some per-site entry may have.
pub const SITE_ENTRIES_SEEN: i32 = tagged::site_entries_seen();
pub use tagged::SEEN as SITE_ENTRIES_PAGES;
/// Offset from the base of a counter of 32 bits for each per-site entry. Generated code counts there.
pub const SITE_ENTRY_COUNTS: i32 = tagged::site_entry_counts();
/// Offset from the base of a buffer in which generated code joins [`BOUNCE_LEN`] bytes from each of two pages.
pub const BOUNCE: i32 = tagged::bounce();
pub use tagged::{BOUNCE_LEN, INLINE_CACHES, PAGE_GUARDS};
/// Returns the offset of page guard `n` from the base. A page guard is 0, or what its user has written.
pub const fn page_guard(n: usize) -> i32 {
    tagged::page_guard(n)
}

/// The tag of the stack's entry, and of a per-site entry, while the entry has no page.
///
/// Generated code compares any address with this tag, so some address is equal to it. DEVIATION: the tag is that of a
/// non-canonical page, which a guest would have to guess out of 2^44. An access to that page would go nowhere in place of
/// raising #SS.
fn no_page() -> Entry {
    static TAG: OnceLock<u64> = OnceLock::new();
    let tag = TAG.get_or_init(|| {
        let mut hasher = DefaultHasher::new();
        let place = core::ptr::from_ref(&TAG) as usize;
        (place, Instant::now()).hash(&mut hasher);
        1 << 62 | hasher.finish() >> 20 << 12
    });
    Entry {
        tag: *tag,
        host: HostPage::nowhere(),
    }
}

/// Number of entries of each half, in tables that have not grown.
pub const ENTRIES: usize = Size::Small.entries();
/// The same in tables that have.
pub const LARGE_ENTRIES: usize = Size::Large.entries();
/// The low bits of the base of tables that have not grown.
pub const BASE: usize = Size::Small.base();

/// Offset from the base of the number of the tables' view.
pub const VIEW: i32 = REACH + core::mem::offset_of!(Reach, view) as i32;

/// Offset from the base of a [`Reach`].
pub const REACH: i32 = tagged::reach();

const _: () = assert!(core::mem::offset_of!(Entry, tag) == 0);
const _: () = assert!(core::mem::offset_of!(Entry, host) == 8);
const _: () = assert!(ENTRIES.is_power_of_two() && GROUP == 64);
const _: () = assert!(ENTRIES.is_multiple_of(SITE_ENTRIES_PAGES));

/// Returns the offset of inline cache `n` from the base: three words, which are 0 or written by generated code.
pub const fn inline_cache(n: usize) -> i32 {
    tagged::inline_cache(n)
}
/// Offset from the base of the bits that generated code sets for inline caches that are not 0.
pub const INLINE_CACHES_USED: i32 = tagged::inline_caches_used();

/// The two halves of the tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Half {
    /// Pages that may be read.
    Read,
    /// Pages that may be written without any bookkeeping.
    Write,
}

impl Half {
    /// All halves.
    pub const ALL: [Self; 2] = [Self::Read, Self::Write];
    /// Returns the halves for a page that may be read, and maybe written.
    pub const fn of(may_write: bool) -> &'static [Self] {
        if may_write { &Self::ALL } else { &[Self::Read] }
    }
    /// Returns the offset of the half's tags from the base.
    pub const fn tags(self) -> i32 {
        tagged::tags(self as usize)
    }
}

/// The tables of a view.
#[derive(Debug)]
pub struct L1 {
    /// The tables' memory. Its single entry is the stack's.
    pages: TaggedPages,
    /// Numbers of the page guards that are not 0.
    page_guards_used: Vec<u16>,
    /// The view's fetch epoch, and the generation of who sets page guards, for which the page guards are right.
    page_guards_for: (u64, u64),
}

impl Default for L1 {
    /// Makes tables in memory of their own. Without memory the process ends, as when a `Box` cannot be had.
    fn default() -> Self {
        let pages = Block::new(Size::Small).ok().and_then(|mut b| b.tables());
        let layout = core::alloc::Layout::new::<[u64; ENTRIES]>();
        Self::new(pages.unwrap_or_else(|| std::alloc::handle_alloc_error(layout)))
    }
}

impl L1 {
    /// Makes empty tables of what is all zero.
    pub(crate) fn new(mut pages: TaggedPages) -> Self {
        *pages.single() = no_page();
        pages.site_entries().0.fill(no_page());
        for half in Half::ALL {
            pages.set_tag(half as usize, 0, empty_tag(0));
        }
        Self {
            pages,
            page_guards_used: Vec::new(),
            page_guards_for: (0, 0),
        }
    }
}

impl L1 {
    /// Returns the size of a view's tables in bytes.
    pub(crate) const fn bytes(size: Size) -> usize {
        TaggedPages::bytes(size) + PAGE_GUARDS * size_of::<u16>()
    }

    pub(crate) fn size(&self) -> Size {
        self.pages.size()
    }

    /// Returns the number of entries that may be filled.
    pub(crate) fn nr_filled(&self) -> usize {
        let reach = self.pages.reach();
        core::iter::successors(self.group(0), |group| self.group(group + 1))
            .map(|group| (reach.global[group] | reach.private[group]).count_ones() as usize)
            .sum()
    }

    /// Makes these tables, which are flushed, those of the view that `other` was of. `other` keeps nothing.
    pub(crate) fn take_over(&mut self, other: &mut Self) {
        other.flush(&Half::ALL);
        other.clear_page_guards();
        other.page_guards_for = (0, 0);
        let (to, from) = (self.pages.reach_mut(), other.pages.reach_mut());
        (to.keys, to.rights, to.view) = (from.keys, from.rights, from.view);
        to.hits = core::mem::take(&mut from.hits);
    }

    /// Returns the base for generated code: see [`tagged`]. The tables do not move in memory.
    pub fn base(&self) -> u64 {
        self.pages.base()
    }

    /// Clears page guards and inline caches, unless they were set for the same epoch and generation.
    #[inline]
    pub(crate) fn renew_page_guards(&mut self, page_guards_for: (u64, u64)) {
        if self.page_guards_for != page_guards_for {
            self.page_guards_for = page_guards_for;
            self.clear_page_guards();
        }
    }

    /// Makes all inline caches 0.
    pub(crate) fn clear_inline_caches(&mut self) {
        self.pages.clear_inline_caches();
    }

    /// Makes all inline caches and all page guards 0.
    pub fn clear_page_guards(&mut self) {
        self.clear_inline_caches();
        let page_guards = self.pages.page_guards();
        for n in self.page_guards_used.drain(..) {
            page_guards[usize::from(n)] = 0;
        }
    }

    /// Sets page guard `n` modulo the number of page guards.
    pub fn set_page_guard(&mut self, n: usize, value: u64) {
        let n = n % PAGE_GUARDS;
        if core::mem::replace(&mut self.pages.page_guards()[n], value) == 0 {
            self.page_guards_used.push(n as u16);
        }
    }

    /// Returns the page guards that are not 0, with their numbers.
    pub fn page_guards(&self) -> impl Iterator<Item = (usize, u64)> {
        let used = self.page_guards_used.iter().map(|n| usize::from(*n));
        used.map(|n| (n, self.pages.page_guard(n)))
    }

    /// Sets the address spaces whose entries of the second level generated code may take, and the classes of pages among
    /// them.
    pub(crate) fn set_keys(&mut self, keys: [L2Key; 2]) {
        self.pages.reach_mut().keys = keys;
    }

    /// Returns two masks of classes of pages: those that the view may read, and those that it may write.
    pub(crate) fn set_rights(&mut self, rights: [u64; 2]) {
        self.pages.reach_mut().rights = rights;
    }

    /// Returns the number of the tables' view.
    pub(crate) fn set_view(&mut self, number: u64) {
        self.pages.reach_mut().view = number;
    }

    pub(crate) fn view(&self) -> u64 {
        self.pages.reach().view
    }

    /// Gives these tables the second level of `other`. Generated code that uses them finds nothing there.
    pub fn deny_reach(&mut self, other: &Self) {
        let from = other.pages.reach();
        let to = self.pages.reach_mut();
        to.keys = [L2Key::default(); 2];
        to.rights = [0; 2];
        (to.small, to.small_mask, to.large) = (from.small, from.small_mask, from.large);
    }

    /// Gives these tables the second level of `other`, and what else `other` has for misses.
    pub(crate) fn reach_mut(&mut self) -> &mut Reach {
        self.pages.reach_mut()
    }

    /// Returns the number of misses that the second level has answered in generated code.
    pub(crate) fn reach_hits(&self) -> u64 {
        self.pages.reach().hits
    }

    pub(crate) fn rights(&self) -> [u64; 2] {
        self.pages.reach().rights
    }

    /// Returns entry `i` of a half.
    #[inline(always)]
    fn entry(&self, half: Half, i: usize) -> Entry {
        self.pages.get(half as usize, i)
    }

    #[inline(always)]
    fn empty(&mut self, half: Half, i: usize) {
        self.pages.set_tag(half as usize, i, empty_tag(i));
    }

    fn drop_stack(&mut self) {
        *self.pages.single() = no_page();
    }

    /// Returns the counters of per-site entries.
    pub fn site_entry_counts(&mut self) -> &mut [u32; SITE_ENTRIES] {
        self.pages.site_entry_counts()
    }

    /// Drops the per-site entries for which `f` is true, and the bits of pages that no per-site entry has any more.
    fn drop_site_entries(&mut self, f: impl Fn(&Entry) -> bool) {
        let (site_entries, used) = self.pages.site_entries();
        let mut seen = [0; SITE_ENTRIES_PAGES / 64];
        for (n, used) in used.iter_mut().enumerate() {
            let mut bits = *used;
            while bits != 0 {
                let bit = bits.trailing_zeros() as usize;
                bits &= bits - 1;
                let site_entry = &mut site_entries[n * 64 + bit];
                if f(site_entry) {
                    *site_entry = no_page();
                    *used &= !(1 << bit);
                } else {
                    let page = (site_entry.tag >> 12) as usize % SITE_ENTRIES_PAGES;
                    seen[page / 64] |= 1 << (page % 64);
                }
            }
        }
        *self.pages.site_entries_seen() = seen;
    }

    /// Drops the stack's entry, and all per-site entries.
    fn drop_copies(&mut self) {
        self.drop_stack();
        self.drop_site_entries(|_| true);
    }

    /// Drops the per-site entries of a page.
    fn drop_site_entries_of(&mut self, tag: u64) {
        let page = (tag >> 12) as usize % SITE_ENTRIES_PAGES;
        if self.pages.site_entries_seen()[page / 64] >> (page % 64) & 1 != 0 {
            self.drop_site_entries(|site_entry| site_entry.tag == tag);
        }
    }

    #[inline(always)]
    fn index(&self, gva: u64) -> usize {
        self.pages.index((gva >> 12) as usize)
    }

    /// Returns the host page of the entry that `gva` selects, and `gva`'s offset from the entry's tag. The entry is a hit
    /// if the access's bytes are in a page at that offset, which [`HostPage`]'s accessors check.
    #[inline(always)]
    pub fn probe(&self, half: Half, gva: u64) -> (HostPage, u64) {
        let e = self.entry(half, self.index(gva));
        (e.host, gva.wrapping_sub(e.tag))
    }

    /// Returns the host page of `gva`'s page.
    #[inline]
    pub fn find(&self, half: Half, gva: u64) -> Option<HostPage> {
        let (host, offset) = self.probe(half, gva);
        (offset < 4096).then_some(host)
    }

    /// Enters a translation. The two halves of an entry have the same page, or one half has none.
    #[inline]
    pub fn insert(&mut self, halves: &[Half], gva: u64, host: HostPage, global: bool) {
        let i = self.index(gva);
        let tag = gva & !0xfff;
        let is_same = self.pages.get(0, i).host == host;
        let tags = Half::ALL.map(|half| self.entry(half, i).tag);
        if tags.contains(&tag) && !is_same {
            self.drop_site_entries_of(tag);
        }
        for half in Half::ALL {
            if halves.contains(&half) {
                self.pages.set_tag(half as usize, i, tag);
            } else if tags[half as usize] != tag || !is_same {
                self.empty(half, i);
            }
        }
        self.pages.set_page(i, host);
        if self.pages.single().tag == tag {
            self.drop_stack();
        }
        let (group, bit) = (i / GROUP, 1 << (i % GROUP));
        let reach = self.pages.reach_mut();
        if global {
            reach.global[group] |= bit;
            reach.private[group] &= !bit;
        } else {
            reach.private[group] |= bit;
        }
        reach.used[group / 64] |= 1 << (group % 64);
    }

    /// Returns the first group from `from` on that may have entries.
    fn group(&self, from: usize) -> Option<usize> {
        let len = self.pages.size().entries() / GROUP / 64;
        let words = &self.pages.reach().used[..len];
        let mut rest = u64::MAX << (from % 64);
        for (n, word) in words.iter().enumerate().skip(from / 64) {
            if word & rest != 0 {
                return Some(n * 64 + (word & rest).trailing_zeros() as usize);
            }
            rest = u64::MAX;
        }
        None
    }

    /// Calls `f` for each group that may have entries.
    fn for_groups(&mut self, mut f: impl FnMut(&mut Self, usize)) {
        let mut from = 0;
        while let Some(group) = self.group(from) {
            f(self, group);
            from = group + 1;
        }
    }

    /// Returns the entries of a group that may not be empty.
    fn filled(&self, group: usize) -> impl Iterator<Item = usize> + use<> {
        let reach = self.pages.reach();
        let mut bits = reach.global[group] | reach.private[group];
        core::iter::from_fn(move || {
            let bit = bits.trailing_zeros() as usize;
            bits &= bits.wrapping_sub(1);
            (bit < GROUP).then_some(group * GROUP + bit)
        })
    }

    /// Forgets everything in these halves.
    pub fn flush(&mut self, halves: &[Half]) {
        self.drop_copies();
        self.for_groups(|t, group| {
            for i in t.filled(group) {
                halves.iter().for_each(|half| t.empty(*half, i));
            }
            if halves.len() == Half::ALL.len() {
                let reach = t.pages.reach_mut();
                reach.global[group] = 0;
                reach.private[group] = 0;
                reach.used[group / 64] &= !(1 << (group % 64));
            }
        });
    }

    /// Forgets pages that are not global.
    pub fn flush_non_global(&mut self) {
        self.drop_copies();
        self.for_groups(|t, group| t.flush_group(group, false));
    }

    /// Forgets pages that are global.
    pub fn flush_global(&mut self) {
        self.drop_copies();
        self.for_groups(|t, group| t.flush_group(group, true));
    }

    fn flush_group(&mut self, group: usize, global: bool) {
        let reach = self.pages.reach_mut();
        let private = reach.private[group];
        let mut dropped = if global {
            core::mem::take(&mut reach.global[group]) & !private
        } else {
            reach.private[group] = 0;
            reach.global[group] &= !private;
            private
        };
        if reach.private[group] | reach.global[group] == 0 {
            reach.used[group / 64] &= !(1 << (group % 64));
        }
        while dropped != 0 {
            let i = group * GROUP + dropped.trailing_zeros() as usize;
            dropped &= dropped - 1;
            Half::ALL.iter().for_each(|half| self.empty(*half, i));
        }
    }

    /// Forgets one page.
    pub fn flush_page(&mut self, gva: u64) {
        let tag = gva & !0xfff;
        if self.pages.single().tag == tag {
            self.drop_stack();
        }
        self.drop_site_entries_of(tag);
        let i = self.index(gva);
        for half in Half::ALL {
            if self.entry(half, i).tag == tag {
                self.empty(half, i);
            }
        }
    }

    /// Forgets an entry that leads to the host page, with the stack's entry and per-site entries that do.
    pub fn flush_at(&mut self, half: Half, index: usize, host: HostPage) {
        if self.pages.single().host == host {
            self.drop_stack();
        }
        // The index is the page's number modulo LARGE_ENTRIES, so it has those modulo less in it.
        let page = index % SITE_ENTRIES_PAGES;
        if self.pages.site_entries_seen()[page / 64] >> (page % 64) & 1 != 0 {
            self.drop_site_entries(|site_entry| site_entry.host == host);
        }
        let i = self.pages.index(index);
        if self.entry(half, i).host == host {
            self.empty(half, i);
        }
    }

    /// Forgets the pages of the aligned region of `1 << shift` bytes around `gva`.
    pub fn flush_region(&mut self, gva: u64, shift: u32) {
        let is_of = |e: &Entry| e.tag >> shift == gva >> shift;
        if is_of(self.pages.single()) {
            self.drop_stack();
        }
        self.drop_site_entries(is_of);
        // The region's pages select entries that are side by side.
        let pages = (1 << (shift - 12)).clamp(GROUP, self.pages.size().entries());
        let first = self.index(gva) & !(pages - 1);
        for group in first / GROUP..(first + pages) / GROUP {
            self.clear_where(&Half::ALL, group, is_of);
        }
    }

    /// Forgets the entries of these halves for which `f` is true.
    pub fn flush_where(&mut self, halves: &[Half], mut f: impl FnMut(&Entry) -> bool) {
        self.drop_copies();
        self.for_groups(|t, group| t.clear_where(halves, group, &mut f));
    }

    /// Forgets the entries of a group for which `f` is true.
    fn clear_where(&mut self, halves: &[Half], group: usize, mut f: impl FnMut(&Entry) -> bool) {
        for i in self.filled(group) {
            for half in halves {
                let e = self.entry(*half, i);
                if e.tag != empty_tag(i) && f(&e) {
                    self.empty(*half, i);
                }
            }
        }
    }
}

/// The aligned regions of the address space that may have entries of large pages. INVLPG has to drop all of a large page
/// (SDM vol. 3, 4.10.4.1); for most addresses the filter says that there is none.
#[derive(Clone, Debug, Default)]
pub struct RegionFilter {
    /// Regions of 2 MiB, hashed, for each half of the address space. (Kernels map all of memory in the upper half.)
    large: [[u64; 16]; 2],
    /// Regions of 1 GiB, likewise.
    huge: [u64; 2],
}

impl RegionFilter {
    fn large(gva: u64) -> (usize, u64) {
        let h = (gva >> 21).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 54;
        ((h / 64) as usize % 16, 1 << (h % 64))
    }
    fn huge(gva: u64) -> u64 {
        1 << ((gva >> 30).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 58)
    }
    /// Notes that an entry at `gva` comes from a leaf of this level.
    pub fn add(&mut self, gva: u64, level: u8) {
        let half = (gva >> 63) as usize;
        match level {
            0 | 1 => {}
            2 => {
                let (word, bit) = Self::large(gva);
                self.large[half][word] |= bit;
                // A 4 MiB page is two such regions.
                let (word, bit) = Self::large(gva ^ 1 << 21);
                self.large[half][word] |= bit;
            }
            _ => self.huge[half] |= Self::huge(gva),
        }
    }
    /// Returns log2 of the size of the region around `gva` that has to be searched. `None`: no region.
    pub fn region_shift(&self, gva: u64) -> Option<u32> {
        let half = (gva >> 63) as usize;
        if self.huge[half] & Self::huge(gva) != 0 {
            return Some(30);
        }
        let (word, bit) = Self::large(gva);
        // 22: covers 4 MiB pages as well.
        (self.large[half][word] & bit != 0).then_some(22)
    }
    /// Notes that no entry comes from a large page.
    pub fn clear(&mut self) {
        *self = Self::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_region_goes_and_nothing_else() {
        for (shift, gva) in [(22, 0x1234_5000_u64), (22, !0xfff), (30, 0x7fff_1234_5000)] {
            let mut t = L1::default();
            let pages: Vec<u64> = (0..12_000_u64)
                .map(|n| gva.wrapping_add((n.wrapping_sub(6000)) << 12))
                .chain([gva ^ 1 << 40, gva ^ 1 << shift])
                .collect();
            for (n, page) in pages.iter().enumerate() {
                t.insert(&[Half::ALL[n % 2]], *page, HostPage::nowhere(), n % 3 == 0);
            }
            let held: Vec<_> = pages
                .iter()
                .map(|p| Half::ALL.map(|h| t.find(h, *p)))
                .collect();
            t.flush_region(gva, shift);
            for (page, held) in pages.iter().zip(held) {
                let is_gone = page >> shift == gva >> shift;
                let left = Half::ALL.map(|h| t.find(h, *page).is_some());
                assert_eq!(left, held.map(|h| h.is_some() && !is_gone), "{page:#x}");
            }
        }
    }

    /// What is global stays, all else goes.
    #[test]
    fn flush_of_private_entries() {
        let pages = |n: u64| (0..n).map(|p| (p * 0x3000, p % 5 == 0));
        let half = Half::Read;
        for n in [0, 1, 7, 100, 3000, 20000] {
            let mut t = L1::default();
            for round in 0..3 {
                for (gva, global) in pages(n) {
                    t.insert(&[half], gva, HostPage::nowhere(), global);
                    t.insert(&[Half::Write], gva, HostPage::nowhere(), global);
                }
                // Private becomes global and back.
                t.insert(&[half], 0x3000, HostPage::nowhere(), true);
                t.insert(&[half], 0, HostPage::nowhere(), false);
                let held: Vec<bool> = pages(n).map(|(g, _)| t.find(half, g).is_some()).collect();
                t.flush_non_global();
                for ((gva, global), held) in pages(n).zip(held) {
                    let global = match gva {
                        0 => false,
                        0x3000 => true,
                        _ => global,
                    };
                    let found = t.find(half, gva).is_some();
                    assert_eq!(found, held && global, "{n} {round} {gva:x}");
                }
                assert!(t.find(half, 0).is_none() && t.find(half, 0x3000).is_some());
                assert!(t.find(Half::Write, 0).is_none());
                let is_kept = |gva| t.find(Half::Write, gva).is_some();
                assert!(pages(n).all(|(gva, global)| global || gva == 0x3000 || !is_kept(gva)));
                if round == 1 {
                    t.flush(&[half]);
                    assert!(pages(n).all(|(gva, _)| t.find(half, gva).is_none()));
                    let kept = pages(n).filter(|(g, _)| t.find(Half::Write, *g).is_some());
                    assert_eq!(kept.count() > 0, n > 1);
                }
            }
        }
    }

    /// A per-site entry goes when its page has to be forgotten, however that is said.
    #[test]
    fn site_entries_go_with_their_entries() {
        type Drop = fn(&mut L1);
        let dropping: [(&str, Drop); 6] = [
            ("its page", |t| t.flush_page(0x5123)),
            ("all of the half", |t| t.flush(&[Half::Read])),
            ("what is not global", L1::flush_non_global),
            ("by its host page", |t| {
                t.flush_at(Half::Write, 5, HostPage::nowhere());
            }),
            ("all that matches", |t| {
                t.flush_where(&[Half::Read], |_| true);
            }),
            ("its page, which has no entry any more", |t| {
                let other = 0x5000 + ((ENTRIES as u64) << 12);
                t.insert(&[Half::Read], other, HostPage::nowhere(), false);
                assert_eq!(site_entries_with(t, 0x5000), 3);
                t.flush_page(0x5123);
            }),
        ];
        for (what, drop) in dropping {
            let mut t = L1::default();
            t.insert(&[Half::Read], 0x5000, HostPage::nowhere(), false);
            for site_entry in [3, 200, SITE_ENTRIES - 1] {
                fill_site_entry(&mut t, site_entry, 0x5000);
            }
            // Another page's stays, or goes: it may be used again only if the entry is there.
            t.insert(&[Half::Read], 0x9000, HostPage::nowhere(), true);
            t.insert(&[Half::Read], 0x5000, HostPage::nowhere(), false);
            assert_eq!(site_entries_with(&mut t, 0x5000), 3, "{what}");
            drop(&mut t);
            assert_eq!(site_entries_with(&mut t, 0x5000), 0, "{what}");
        }
    }

    /// What generated code does.
    fn fill_site_entry(t: &mut L1, n: usize, gva: u64) {
        let (site_entries, used) = t.pages.site_entries();
        site_entries[n] = Entry {
            tag: gva,
            host: HostPage::nowhere(),
        };
        used[n / 64] |= 1 << (n % 64);
        let page = (gva >> 12) as usize % SITE_ENTRIES_PAGES;
        t.pages.site_entries_seen()[page / 64] |= 1 << (page % 64);
    }

    fn site_entries_with(t: &mut L1, gva: u64) -> usize {
        let (site_entries, _) = t.pages.site_entries();
        site_entries.iter().filter(|l| l.tag == gva).count()
    }
}
