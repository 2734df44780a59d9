//! What of the guest's code is known to be where: fetch tables by view, and what all views share of global pages.

use guest_memory::HostPage;

use crate::{View, sum::sum_of, written::SlotPage};

/// Where the address space is in a page's identity.
pub(crate) const SPACE_SHIFT: u32 = 60;
/// Entries of a fetch table: the code of a compiler is thousands of pages.
const FETCH_ENTRIES: usize = 1024;
/// Words of a filter of pages: with few of them a program with much code would
/// seem to have fetched whatever page is flushed.
const PAGE_WORDS: usize = 1024;
/// Words of a filter of 4 MiB regions.
const REGION_WORDS: usize = 64;

/// A page that code is fetched from.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FetchEntry {
    pub(crate) tag: u64,
    pub(crate) id: u64,
    pub(crate) host: HostPage,
    pub(crate) slot: usize,
    pub(crate) index: usize,
    pub(crate) global: bool,
    /// [`crate::Mmu::verification`] at which the page's code was last compared.
    pub(crate) verified: u64,
    /// What `crate::Mmu::sums` had for the page when [`crate::Mmu::remembered`] was `known`.
    pub(crate) sum: Sum,
    pub(crate) known: u64,
    /// The guest could write the page by the same address.
    pub(crate) writable: bool,
    /// [`FetchTable::now`] when it was made.
    pub(crate) made: u32,
}

impl FetchEntry {
    pub(crate) fn place(&self) -> SlotPage {
        SlotPage {
            space: space_of(self.id),
            slot: self.slot,
            index: self.index,
        }
    }
}

/// Fetch TLB of a (context, view); made when the view first executes.
///
/// Engines keep what [`crate::Mmu::code_page`] returned for longer than an entry lives
/// here, as long as the epoch stays. So it is also kept, as a filter, which
/// pages were fetched since the last flush, replaced entries included.
#[derive(Debug, Default)]
pub(crate) struct FetchTable {
    pub(crate) entries: Vec<Option<FetchEntry>>,
    pub(crate) filled: bool,
    /// Something fetched in this epoch is not global.
    pub(crate) private: bool,
    /// Counts flushes. Entries made before one of the next two are flushed.
    pub(crate) now: u32,
    /// For those that are global.
    pub(crate) global_since: u32,
    /// For the others.
    pub(crate) private_since: u32,
    pub(crate) pages: Filter<PAGE_WORDS>,
    /// 4 MiB regions.
    pub(crate) regions: Filter<REGION_WORDS>,
}

impl FetchTable {
    /// Bytes of memory that it takes.
    pub(crate) const BYTES: usize =
        FETCH_ENTRIES * size_of::<Option<FetchEntry>>() + 8 * (PAGE_WORDS + REGION_WORDS);
}

/// A set of numbers that may seem to have members it has not.
#[derive(Debug)]
pub(crate) struct Filter<const WORDS: usize> {
    pub(crate) words: Box<[u64; WORDS]>,
    pub(crate) filled: bool,
}

impl<const WORDS: usize> Default for Filter<WORDS> {
    fn default() -> Self {
        Self {
            words: Box::new([0; WORDS]),
            filled: false,
        }
    }
}

impl<const WORDS: usize> Filter<WORDS> {
    pub(crate) fn place(n: u64) -> (usize, u64) {
        let h = n.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
        ((h / 64) as usize % WORDS, 1 << (h % 64))
    }
    pub(crate) fn add(&mut self, n: u64) {
        let (word, bit) = Self::place(n);
        self.words[word] |= bit;
        self.filled = true;
    }
    pub(crate) fn may_have(&self, n: u64) -> bool {
        let (word, bit) = Self::place(n);
        self.words[word] & bit != 0
    }
    pub(crate) fn clear(&mut self) {
        if core::mem::take(&mut self.filled) {
            self.words.fill(0);
        }
    }
}

impl FetchTable {
    pub(crate) fn place(gva: u64) -> usize {
        (gva >> 12) as usize % FETCH_ENTRIES
    }
    #[inline]
    pub(crate) fn find(&self, gva: u64) -> Option<&FetchEntry> {
        let e = self.entries.get(Self::place(gva))?.as_ref()?;
        let since = if e.global {
            self.global_since
        } else {
            self.private_since
        };
        (e.tag == gva & !0xfff && e.made >= since).then_some(e)
    }
    /// Flushed entries stay in their places, older than they may be.
    pub(crate) fn next(&mut self) -> u32 {
        if self.now == u32::MAX {
            self.entries.fill(None);
            (self.now, self.global_since, self.private_since) = (0, 0, 0);
        }
        self.now += 1;
        self.now
    }
    pub(crate) fn insert(&mut self, mut entry: FetchEntry) {
        if self.entries.is_empty() {
            self.entries = vec![None; FETCH_ENTRIES];
        }
        entry.made = self.now;
        self.filled = true;
        self.private |= !entry.global;
        self.pages.add(entry.tag >> 12);
        self.regions.add(entry.tag >> 22);
        if let Some(e) = self.entries.get_mut(Self::place(entry.tag)) {
            *e = Some(entry);
        }
    }
    /// The same page, with other properties.
    pub(crate) fn replace(&mut self, entry: FetchEntry) {
        if let Some(e) = self.entries.get_mut(Self::place(entry.tag)) {
            *e = Some(entry);
        }
    }
    /// True if the page of `gva` may have been fetched from, or for a large page
    /// its aligned region of `1 << shift` bytes.
    pub(crate) fn may_have(&self, gva: u64, shift: Option<u32>) -> bool {
        match shift {
            None => self.pages.may_have(gva >> 12),
            Some(0..=22) => self.regions.may_have(gva >> 22),
            Some(_) => true,
        }
    }
    /// These return whether anything fetched in this epoch is affected.
    pub(crate) fn flush_non_global(&mut self) -> bool {
        if !self.private {
            return false;
        }
        self.private_since = self.next();
        // The filters still cover the global entries that stay.
        self.private = false;
        true
    }
    pub(crate) fn is_private(&self) -> bool {
        self.private
    }
    pub(crate) fn flush(&mut self) -> bool {
        if !self.filled {
            return false;
        }
        self.private_since = self.next();
        self.global_since = self.private_since;
        self.filled = false;
        self.private = false;
        self.pages.clear();
        self.regions.clear();
        true
    }
    /// One page, or all if it may be part of a large one.
    pub(crate) fn flush_page(&mut self, gva: u64, shift: Option<u32>) -> bool {
        if !self.may_have(gva, shift) {
            return false;
        }
        if shift.is_some() {
            return self.flush();
        }
        // What an engine has kept of a replaced entry goes with the epoch.
        if let Some(e) = self.entries.get_mut(Self::place(gva)) {
            *e = e.filter(|e| e.tag != gva & !0xfff);
        }
        true
    }
}

/// What is known of global pages that code was fetched from, in any context:
/// processors keep these translations when CR3 changes.
#[derive(Debug, Default)]
pub(crate) struct GlobalFetch {
    /// Changes when a flush may have dropped one of them.
    pub(crate) epoch: u64,
    /// Paging modes and controls that `epoch` belongs to.
    pub(crate) controls: u64,
    pub(crate) pages: Filter<PAGE_WORDS>,
    /// 4 MiB regions of large pages.
    pub(crate) regions: Filter<REGION_WORDS>,
    pub(crate) huge: bool,
}

impl GlobalFetch {
    pub(crate) fn add(&mut self, gva: u64, level: u8) {
        match level {
            0 | 1 => self.pages.add(gva >> 12),
            2 => self.regions.add(gva >> 22),
            _ => self.huge = true,
        }
    }
    pub(crate) fn may_have(&self, gva: u64) -> bool {
        self.huge || self.pages.may_have(gva >> 12) || self.regions.may_have(gva >> 22)
    }
}

/// Pages that a supervisor fetched from, by global translations: every address space has the
/// same, and need not find them anew. Direct-mapped.
#[derive(Debug, Default)]
pub(crate) struct GlobalPages(Vec<Option<GlobalPage>>);

#[derive(Clone, Copy, Debug)]
pub(crate) struct GlobalPage {
    /// `GlobalFetch::epoch` that it belongs to: any change makes it void.
    pub(crate) epoch: u64,
    pub(crate) view: View,
    pub(crate) level: u8,
    pub(crate) entry: FetchEntry,
}

impl GlobalPages {
    const ENTRIES: usize = 1024;

    pub(crate) fn place(gva: u64) -> usize {
        (gva >> 12) as usize % Self::ENTRIES
    }
    pub(crate) fn find(&self, gva: u64, epoch: u64, view: View) -> Option<&GlobalPage> {
        let g = self.0.get(Self::place(gva))?.as_ref()?;
        (g.entry.tag == gva & !0xfff && g.epoch == epoch && g.view == view).then_some(g)
    }
    pub(crate) fn insert(&mut self, page: GlobalPage) {
        if self.0.is_empty() {
            self.0 = vec![None; Self::ENTRIES];
        }
        if let Some(g) = self.0.get_mut(Self::place(page.entry.tag)) {
            *g = Some(page);
        }
    }
}

/// Checksum of the chunks of a page that this vCPU has fetched.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Sum {
    pub(crate) generation: u32,
    pub(crate) chunks: u64,
    pub(crate) sum: u64,
}

impl Sum {
    pub(crate) fn add(&mut self, host: HostPage, mut chunks: u64) {
        chunks &= !self.chunks;
        self.chunks |= chunks;
        self.sum ^= sum_of(host, chunks);
    }
}

/// Of a page's identity.
pub(crate) fn space_of(id: u64) -> usize {
    (id >> SPACE_SHIFT & 7) as usize
}
