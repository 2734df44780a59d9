//! Pages of code that a device may have written: the fetched bytes are compared at each exit.
//!
//! Firmware polls devices in loops, with an exit for each poll, and executes from pages that it can write. Hashing all
//! fetched bytes would take longer than the exit, so from the second comparison on the page is compared with a copy.

use guest_memory::{HostPage, PageCopy};

use crate::sum::sum_of_chunks;

/// A page that is compared.
#[derive(Debug)]
pub(crate) struct Exposed<E> {
    /// The fetch entry of the page, or what its holder knows of it.
    pub(crate) entry: E,
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

impl<E> Exposed<E> {
    pub(crate) fn new(entry: E) -> Self {
        Self {
            entry,
            was_compared: false,
            copy: None,
        }
    }

    /// True if the page still has all the bytes that were fetched from it: those of `chunks`, whose checksum is `sum`.
    #[inline]
    pub(crate) fn is_same(&mut self, host: HostPage, chunks: u64, sum: u64) -> bool {
        if let Some(copy) = &self.copy
            && copy.chunks == chunks
        {
            return host.has_chunks(chunks, &copy.words);
        }
        self.is_same_by_sum(host, chunks, sum)
    }

    #[inline(never)]
    fn is_same_by_sum(&mut self, host: HostPage, chunks: u64, sum: u64) -> bool {
        if !core::mem::replace(&mut self.was_compared, true) {
            return sum_of_chunks(chunks, |chunk| host.chunk(chunk)) == sum;
        }
        // The checksum is taken of the copy, not of the page, which may change at any time.
        let copy = Copy::of(host, chunks);
        let is_same = copy.sum() == sum;
        self.copy = is_same.then_some(copy);
        is_same
    }

    /// Replaces the entry after the page's checksum has changed.
    pub(crate) fn set_entry(&mut self, entry: E) {
        self.entry = entry;
        self.copy = None;
    }
}
