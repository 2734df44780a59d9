//! The pages that code was fetched from, to be compared with the fetched bytes at once.
//!
//! After each moment at which somebody may have written code, a page has to be compared before it is executed again.
//! To compare the pages one by one, each when it is fetched from, also loses what engines know of them; so all of them
//! are compared at such a moment, as long as they are few beside those that the guest executes between two moments.

use std::collections::HashMap;

use guest_memory::{HostPage, PageCopy};

use crate::{
    fetch::{FetchEntry, Sum},
    hash::ByIdentity,
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
/// Number of times that a page is compared by its checksum before it is copied: most lists do not live long.
const COMPARISONS_BEFORE_COPY: u8 = 8;
/// Number of times that few pages are compared at once. Then those that are still executed are found out anew.
const MAX_LOOKS_AT_FEW: u32 = 1024;
/// The same for more pages.
const MAX_LOOKS: u32 = 64;

/// The pages that were fetched from since the list was cleared.
#[derive(Debug)]
pub(crate) struct Fetched {
    pages: Vec<Page>,
    /// Where pages are in the list, by identity.
    places: HashMap<u64, usize, ByIdentity>,
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
            places: HashMap::default(),
            is_incomplete: false,
            looks: 0,
            limit: MAX_PAGES,
        }
    }
}

impl Fetched {
    /// Adds a page that has just been compared, whose entry has its checksum.
    pub(crate) fn add(&mut self, entry: FetchEntry) {
        if self.is_incomplete || self.places.contains_key(&entry.id) {
            return;
        }
        self.is_incomplete = self.pages.len() == self.limit;
        if !self.is_incomplete {
            self.places.insert(entry.id, self.pages.len());
            self.pages.push(Page::new(entry));
        }
    }

    /// Notes the checksum of the page with this identity.
    pub(crate) fn set_sum(&mut self, id: u64, sum: Sum) {
        if let Some(n) = self.places.get(&id) {
            self.pages[*n].set_sum(sum);
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.pages.len()
    }

    /// Notes that pages are missing which engines still know something of.
    pub(crate) fn set_incomplete(&mut self) {
        self.is_incomplete = true;
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
        if !self.pages.is_empty() {
            if self.looks == 0 {
                self.limit = (self.pages.len() * MAX_GROWTH).clamp(FEW, MAX_PAGES);
            }
            self.looks += 1;
        }
        &mut self.pages
    }

    pub(crate) fn clear(&mut self) {
        self.places.clear();
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
    /// Number of times that the page was compared by its checksum, up to [`COMPARISONS_BEFORE_COPY`].
    compared: u8,
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
            compared: 0,
            copy: None,
        }
    }

    /// True if the page, number `n` of the list, still has all the bytes of which its entry has the checksum. The first
    /// pages are compared with copies after a while.
    #[inline]
    pub(crate) fn is_same(&mut self, n: usize) -> bool {
        let FetchEntry { host, sum, .. } = self.entry;
        if let Some(copy) = &self.copy {
            return host.has_chunks(copy.chunks, &copy.words);
        }
        if n < MAX_COPIES {
            if self.compared == COMPARISONS_BEFORE_COPY {
                return self.is_same_as_new_copy();
            }
            self.compared += 1;
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

    /// Replaces the checksum, because the page was compared or more of it was fetched.
    pub(crate) fn set_sum(&mut self, sum: Sum) {
        if sum != self.entry.sum {
            self.copy = None;
            self.entry.sum = sum;
        }
    }
}
