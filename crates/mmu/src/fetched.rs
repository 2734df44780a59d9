//! The pages that code was fetched from, to be compared with the fetched bytes at once.
//!
//! After each moment at which somebody may have written code, a page has to be compared before it is executed again.
//! To compare the pages one by one, each when it is fetched from, also loses what engines know of them; so all of them
//! are compared at such a moment, as long as they are few beside those that the guest executes between two moments.

use guest_memory::{HostPage, PageCopy};

use crate::{
    fetch::FetchEntry,
    sum::{sum_of, sum_of_chunks},
};

/// Up to this number, pages are compared at once whether or not the guest still executes them.
const FEW: usize = 12;
/// Maximum number of pages that are compared at once.
const MAX_PAGES: usize = 1024;
/// Maximum number of pages, over the number of those that were executed before the first moment.
const MAX_GROWTH: usize = 8;
/// Number of pages that are compared with copies. A copy takes 4 KiB.
const MAX_COPIES: usize = 32;
/// Number of times that few pages are compared at once. Then those that are still executed are found out anew.
const MAX_LOOKS_AT_FEW: u32 = 1024;
/// The same for more pages.
const MAX_LOOKS: u32 = 64;
/// Places of [`Fetched::listed`].
const PLACES: usize = 512;

/// The pages that were fetched from since the list was cleared.
#[derive(Debug)]
pub(crate) struct Fetched {
    pages: Vec<Page>,
    /// Identities of pages that are in the list, each at a place that follows from it. A page that has lost its place
    /// to another may be in the list twice.
    listed: Vec<u64>,
    /// The list has not taken up a page.
    is_incomplete: bool,
    /// Number of times that the pages were compared.
    looks: u32,
    /// Maximum number of pages.
    limit: usize,
}

impl Default for Fetched {
    fn default() -> Self {
        Self {
            pages: Vec::new(),
            listed: Vec::new(),
            is_incomplete: false,
            looks: 0,
            limit: MAX_PAGES,
        }
    }
}

impl Fetched {
    /// Adds a page that has just been compared.
    pub(crate) fn add(&mut self, entry: FetchEntry) {
        if self.is_incomplete {
            return;
        }
        self.listed.resize(PLACES, 0);
        let place = &mut self.listed[(entry.id >> 12) as usize % PLACES];
        if *place == entry.id {
            return;
        }
        *place = entry.id;
        self.is_incomplete = self.pages.len() == self.limit;
        if !self.is_incomplete {
            self.pages.push(Page::new(entry));
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.pages.is_empty()
    }

    /// Returns true if all pages are listed, and to compare them costs less than to find anew those that are executed.
    pub(crate) fn is_worthwhile(&self) -> bool {
        let max_looks = match self.pages.len() {
            0..=FEW => MAX_LOOKS_AT_FEW,
            _ => MAX_LOOKS,
        };
        !self.is_incomplete && self.looks < max_looks
    }

    /// Returns the pages, all of which the caller compares.
    pub(crate) fn look(&mut self) -> &mut [Page] {
        if self.looks == 0 {
            self.limit = (self.pages.len() * MAX_GROWTH).clamp(FEW, MAX_PAGES);
        }
        self.looks += 1;
        &mut self.pages
    }

    pub(crate) fn clear(&mut self) {
        self.listed.clear();
        self.pages.clear();
        self.is_incomplete = false;
        self.looks = 0;
        self.limit = MAX_PAGES;
    }
}

/// A page that is compared.
#[derive(Debug)]
pub(crate) struct Page {
    pub(crate) entry: FetchEntry,
    /// The page was compared by its checksum before.
    was_compared: bool,
    copy: Option<Copy>,
}

/// The fetched chunks, as they were when their checksum was that of the fetched bytes.
#[derive(Debug)]
struct Copy {
    chunks: u64,
    words: Box<PageCopy>,
}

impl Copy {
    fn of(host: HostPage, chunks: u64) -> Self {
        let mut words = Box::new(PageCopy::ZERO);
        for chunk in (0..64).filter(|chunk| chunks >> chunk & 1 != 0) {
            words.set_chunk(chunk, host.chunk(chunk));
        }
        Self { chunks, words }
    }

    fn sum(&self) -> u64 {
        sum_of_chunks(self.chunks, |chunk| self.words.chunk(chunk))
    }
}

impl Page {
    fn new(entry: FetchEntry) -> Self {
        Self {
            entry,
            was_compared: false,
            copy: None,
        }
    }

    /// True if the page, number `n` of the list, still has all the bytes of which its entry has the checksum. From the
    /// second comparison on, the first pages are compared with copies.
    #[inline]
    pub(crate) fn is_same(&mut self, n: usize) -> bool {
        let FetchEntry { host, sum, .. } = self.entry;
        if let Some(copy) = &self.copy {
            return host.has_chunks(copy.chunks, &copy.words);
        }
        if n < MAX_COPIES && core::mem::replace(&mut self.was_compared, true) {
            return self.is_same_as_new_copy();
        }
        sum_of(host, sum.chunks) == sum.sum
    }

    #[inline(never)]
    fn is_same_as_new_copy(&mut self) -> bool {
        let FetchEntry { host, sum, .. } = self.entry;
        // The checksum is taken of the copy, not of the page, which may change at any time.
        let copy = Copy::of(host, sum.chunks);
        let is_same = copy.sum() == sum.sum;
        self.copy = is_same.then_some(copy);
        is_same
    }

    /// Replaces the entry after it was compared.
    pub(crate) fn set_entry(&mut self, entry: FetchEntry) {
        if entry.sum != self.entry.sum {
            self.copy = None;
        }
        self.entry = entry;
    }
}
