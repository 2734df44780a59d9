//! What is known of pages that code is fetched from: the fetch tables of views, and the global pages that all views
//! share.

use guest_memory::HostPage;

use crate::{View, sum::sum_of, written::SlotPage};

/// Lowest bit of the address space in a page's identity.
pub(crate) const SPACE_SHIFT: u32 = 60;
/// Entries of a fetch table: a large program, such as a compiler, has thousands of pages of code.
const FETCH_ENTRIES: usize = 1024;
/// Entries of a fetch table whose memory is taken together, when the first of them is made.
const CHUNK: usize = 4;
/// Words of a filter of pages. With few words, a program with much code would seem to have fetched from any page that
/// is flushed.
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
    /// The checksum that `crate::Mmu::sums` had for the page when [`crate::Mmu::remembered`] was `known`.
    pub(crate) sum: Sum,
    pub(crate) known: u64,
    /// The guest could write the page through the same translation.
    pub(crate) writable: bool,
    /// Value of [`FetchTable::now`] when the entry was made.
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

/// Fetch TLB of a (context, view); allocated when the view first executes.
///
/// Engines keep results of [`crate::Mmu::code_page`] for longer than an entry lives here, namely as long as the epoch
/// stays the same. So the table also keeps, as a filter, which pages were fetched from since the last flush, including
/// those whose entries were replaced.
#[derive(Debug, Default)]
pub(crate) struct FetchTable {
    entries: Vec<Option<Box<[Option<FetchEntry>; CHUNK]>>>,
    pub(crate) filled: bool,
    /// A page that is not global was fetched from in this epoch.
    pub(crate) private: bool,
    /// Counts flushes. An entry that was made before `global_since` or `private_since`, whichever applies to it, is
    /// flushed.
    pub(crate) now: u32,
    /// Value of `now` at the last flush of global entries.
    pub(crate) global_since: u32,
    /// Value of `now` at the last flush of entries that are not global.
    pub(crate) private_since: u32,
    pub(crate) pages: Filter<PAGE_WORDS>,
    /// The 4 MiB regions that were fetched from.
    pub(crate) regions: Filter<REGION_WORDS>,
}

impl FetchTable {
    /// Bytes of memory that it takes.
    pub(crate) const BYTES: usize = FETCH_ENTRIES * size_of::<Option<FetchEntry>>()
        + 8 * (FETCH_ENTRIES / CHUNK + PAGE_WORDS + REGION_WORDS);
}

/// A set of numbers with false positives: it may report members that were never added.
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
    fn place(gva: u64) -> (usize, usize) {
        let place = (gva >> 12) as usize % FETCH_ENTRIES;
        (place / CHUNK, place % CHUNK)
    }
    #[inline]
    pub(crate) fn find(&self, gva: u64) -> Option<&FetchEntry> {
        let (chunk, n) = Self::place(gva);
        let e = self.entries.get(chunk)?.as_ref()?[n].as_ref()?;
        let since = if e.global {
            self.global_since
        } else {
            self.private_since
        };
        (e.tag == gva & !0xfff && e.made >= since).then_some(e)
    }
    /// Returns a number for new entries. Flushed entries stay in place and are recognised by their older numbers.
    pub(crate) fn next(&mut self) -> u32 {
        if self.now == u32::MAX {
            self.entries.clear();
            (self.now, self.global_since, self.private_since) = (0, 0, 0);
        }
        self.now += 1;
        self.now
    }
    pub(crate) fn insert(&mut self, mut entry: FetchEntry) {
        if self.entries.is_empty() {
            self.entries.resize_with(FETCH_ENTRIES / CHUNK, || None);
        }
        entry.made = self.now;
        self.filled = true;
        self.private |= !entry.global;
        self.pages.add(entry.tag >> 12);
        self.regions.add(entry.tag >> 22);
        self.replace(entry);
    }
    /// Replaces the entry in the page's place.
    pub(crate) fn replace(&mut self, entry: FetchEntry) {
        let (chunk, n) = Self::place(entry.tag);
        if let Some(chunk) = self.entries.get_mut(chunk) {
            chunk.get_or_insert_default()[n] = Some(entry);
        }
    }
    /// True if the page of `gva` may have been fetched from; with `shift`, if the aligned region of `1 << shift` bytes
    /// may have been.
    pub(crate) fn may_have(&self, gva: u64, shift: Option<u32>) -> bool {
        match shift {
            None => self.pages.may_have(gva >> 12),
            Some(0..=22) => self.regions.may_have(gva >> 22),
            Some(_) => true,
        }
    }
    /// Flushes entries that are not global. Like the other flushes, returns true if anything fetched in this epoch is
    /// affected.
    pub(crate) fn flush_non_global(&mut self) -> bool {
        if !self.private {
            return false;
        }
        self.private_since = self.next();
        // The filters are kept, because they also cover the global entries, which stay.
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
    /// Flushes one page; with `shift`, which says that the page may be large, everything.
    pub(crate) fn flush_page(&mut self, gva: u64, shift: Option<u32>) -> bool {
        if !self.may_have(gva, shift) {
            return false;
        }
        if shift.is_some() {
            return self.flush();
        }
        // Engines may have kept the result of an entry that was replaced. They drop it with the epoch.
        let (chunk, n) = Self::place(gva);
        if let Some(Some(chunk)) = self.entries.get_mut(chunk) {
            chunk[n] = chunk[n].filter(|e| e.tag != gva & !0xfff);
        }
        true
    }
}

/// Which global pages code was fetched from, in any context: processors keep global translations when CR3 changes.
#[derive(Debug, Default)]
pub(crate) struct GlobalFetch {
    /// Changes when a flush may have dropped one of the pages.
    pub(crate) epoch: u64,
    /// The paging mode and controls that `epoch` is for.
    pub(crate) controls: u64,
    pub(crate) pages: Filter<PAGE_WORDS>,
    /// The 4 MiB regions that contain large pages.
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
    /// Forgets all pages.
    pub(crate) fn clear(&mut self) {
        self.pages.clear();
        self.regions.clear();
        self.huge = false;
    }
    pub(crate) fn may_have(&self, gva: u64) -> bool {
        self.huge || self.pages.may_have(gva >> 12) || self.regions.may_have(gva >> 22)
    }
}

/// Pages that a supervisor fetched from by global translations. All address spaces share these, so none of them has to
/// find the pages anew. Direct-mapped.
#[derive(Debug, Default)]
pub(crate) struct GlobalPages(Vec<Option<GlobalPage>>);

#[derive(Clone, Copy, Debug)]
pub(crate) struct GlobalPage {
    /// The `GlobalFetch::epoch` in which the entry was made; in any other epoch it is void.
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
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
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

/// Returns the address space in a page's identity.
pub(crate) fn space_of(id: u64) -> usize {
    (id >> SPACE_SHIFT & 7) as usize
}
