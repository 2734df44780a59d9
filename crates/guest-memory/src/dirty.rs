//! [`Dirty`]: the pages of a slot that were written since they were last harvested.
//!
//! vCPUs set bits and take no lock; a harvest waits only for other harvests of the same slot. Each block of 4096 pages
//! has a bit of its own which says that all its pages count as dirty. So a slot can begin as wholly dirty, and a block
//! can be cleared as a whole, without a loop over its pages.

use std::{
    io,
    sync::{PoisonError, atomic::Ordering},
};

use crate::{
    page_set::{PageSet, bits},
    words::{Mutex, MutexGuard, Words},
};

/// Bitmap words in a block: one word of [`PageSet`]'s first summary covers them.
pub(crate) const BLOCK: usize = 64;
/// Bitmap words that are passed to `show` at once.
pub(crate) const CHUNK: usize = 8 * BLOCK;

/// The dirty state of a slot that logs.
#[derive(Debug)]
pub(crate) struct Dirty {
    pages: usize,
    set: PageSet,
    /// A bit per block: all its pages are dirty, whatever `set` says.
    whole: Words,
    /// All pages were dirty when logging began.
    began_whole: bool,
    harvest: Mutex<()>,
}

/// Receives the pages that a harvest has cleaned, as a bitmap word's index and the bits.
pub(crate) trait Clean {
    /// Notes that these pages are not dirty any more. Pages that were clean before may be among them.
    fn clean(&mut self, n: usize, pages: u64);
}

impl Dirty {
    pub(crate) fn new(pages: usize, is_whole: bool) -> io::Result<Self> {
        let set = PageSet::new(pages)?;
        let blocks = set.len().div_ceil(BLOCK);
        let whole = Words::new(blocks.div_ceil(64))?;
        if is_whole {
            for (n, word) in whole.iter().enumerate() {
                let rest = (blocks - n * 64).min(64);
                word.store(u64::MAX >> (64 - rest), Ordering::Release);
            }
        }
        Ok(Self {
            pages,
            set,
            whole,
            began_whole: is_whole,
            harvest: Mutex::new(()),
        })
    }

    /// True if all pages were dirty when logging began: vCPUs that could write them unnoticed then may continue to do
    /// so.
    pub(crate) fn began_whole(&self) -> bool {
        self.began_whole
    }

    /// Number of 64-bit words of the bitmap.
    pub(crate) fn len(&self) -> usize {
        self.set.len()
    }

    /// Returns the bits of word `n` that stand for pages.
    fn valid(&self, n: usize) -> u64 {
        match self.pages.saturating_sub(n * 64) {
            0 => 0,
            rest => u64::MAX >> (64 - rest.min(64)),
        }
    }

    #[inline]
    fn is_whole(&self, block: usize) -> bool {
        self.whole
            .get(block / 64)
            .is_some_and(|w| w.load(Ordering::Acquire) >> (block % 64) & 1 != 0)
    }

    /// Marks the page as dirty; returns true if it was clean. Once this has returned, the next harvest reports the
    /// page.
    #[inline]
    pub(crate) fn mark(&self, page: usize) -> bool {
        !self.is_whole(page / (64 * BLOCK)) && self.set.insert(page)
    }

    /// True if the page is dirty.
    #[cfg_attr(loom, allow(dead_code, reason = "no model asks"))]
    pub(crate) fn is_set(&self, page: usize) -> bool {
        self.is_whole(page / (64 * BLOCK)) || self.set.contains(page)
    }

    fn lock(&self) -> MutexGuard<'_, ()> {
        self.harvest.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Clears the block's bit; returns true if the block was wholly dirty.
    fn take_whole(&self, block: usize) -> bool {
        let bit = 1 << (block % 64);
        self.is_whole(block)
            && self
                .whole
                .get(block / 64)
                .is_some_and(|w| w.fetch_and(!bit, Ordering::AcqRel) & bit != 0)
    }

    fn words_of(&self, block: usize) -> core::ops::Range<usize> {
        block * BLOCK..((block + 1) * BLOCK).min(self.len())
    }

    /// Passes the words of the bitmap from start to end to `show`, a chunk at a time with the index of its first word.
    /// `fill` computes the words of one block. Stops if `show` fails.
    fn chunks<E>(
        &self,
        mut fill: impl FnMut(usize, &mut [u64]),
        mut show: impl FnMut(usize, &[u64]) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut buffer = [0; CHUNK];
        for first in (0..self.len()).step_by(CHUNK) {
            let count = (self.len() - first).min(CHUNK);
            let words = &mut buffer[..count];
            words.fill(0);
            for (n, words) in words.chunks_mut(BLOCK).enumerate() {
                fill(first / BLOCK + n, words);
            }
            show(first, words)?;
        }
        Ok(())
    }

    /// Passes the bitmap to `show` and clears it. If `show` fails, the chunks that it has not been called for keep
    /// their bits.
    pub(crate) fn take<E>(
        &self,
        clean: &mut impl Clean,
        show: impl FnMut(usize, &[u64]) -> Result<(), E>,
    ) -> Result<(), E> {
        let _lock = self.lock();
        let fill = |block: usize, words: &mut [u64]| {
            let first = block * BLOCK;
            let mut is_any = self.take_whole(block);
            if is_any {
                for (n, word) in words.iter_mut().enumerate() {
                    *word = self.valid(first + n);
                }
            }
            self.set.take_group(block, |n, pages| {
                is_any = true;
                if let Some(word) = words.get_mut(n - first) {
                    *word |= pages;
                }
            });
            if !is_any {
                return;
            }
            for (n, pages) in words.iter().enumerate().filter(|(_, w)| **w != 0) {
                clean.clean(first + n, *pages);
            }
        };
        self.chunks(fill, show)
    }

    /// Passes the bitmap to `show` and leaves it as it is.
    pub(crate) fn peek<E>(
        &self,
        show: impl FnMut(usize, &[u64]) -> Result<(), E>,
    ) -> Result<(), E> {
        // Without the lock, a block that is being converted from its own bit to its pages' bits would be seen as clean.
        let _lock = self.lock();
        let fill = |block: usize, words: &mut [u64]| {
            let first = block * BLOCK;
            if self.is_whole(block) {
                for (n, word) in words.iter_mut().enumerate() {
                    *word = self.valid(first + n);
                }
                return;
            }
            for bit in bits(self.set.summary(block)) {
                if let Some(word) = words.get_mut(bit) {
                    *word = self.set.word(first + bit);
                }
            }
        };
        self.chunks(fill, show)
    }

    /// Clears the pages whose bits are set in `mask`, which covers the words of the bitmap from `first` on.
    pub(crate) fn clear(&self, first: usize, mask: &[u64], clean: &mut impl Clean) {
        let _lock = self.lock();
        let mut at = first;
        let mut mask = mask;
        while !mask.is_empty() && at < self.len() {
            let block = at / BLOCK;
            let words = self.words_of(block);
            let (now, rest) = mask.split_at(mask.len().min(words.end - at));
            self.clear_in_block(block, at, now, clean);
            at += now.len();
            mask = rest;
        }
    }

    fn clear_in_block(&self, block: usize, at: usize, mask: &[u64], clean: &mut impl Clean) {
        if mask.iter().all(|m| *m == 0) {
            return;
        }
        let words = self.words_of(block);
        if self.is_whole(block) {
            let mut all = mask.iter().enumerate();
            let is_all =
                mask.len() == words.len() && all.all(|(n, m)| !m & self.valid(at + n) == 0);
            if !is_all {
                for n in words {
                    self.set.insert_word(n, self.valid(n));
                }
            }
            self.take_whole(block);
            if is_all {
                // vCPUs that could write these pages unnoticed may have set no bit, so each page is passed on.
                for (n, mask) in mask.iter().enumerate() {
                    self.set.remove_word(at + n, *mask);
                    clean.clean(at + n, *mask);
                }
                return;
            }
        }
        for (n, mask) in mask.iter().enumerate().filter(|(_, m)| **m != 0) {
            if self.set.remove_word(at + n, *mask) != 0 {
                clean.clean(at + n, *mask);
            }
        }
    }

    /// Clears the pages of `mask` in word `n`.
    pub(crate) fn clear_word(&self, n: usize, mask: u64, clean: &mut impl Clean) {
        if n < self.len() {
            let _lock = self.lock();
            self.clear_in_block(n / BLOCK, n, &[mask], clean);
        }
    }
}

#[cfg(all(test, not(loom)))]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    /// The pages that `clean` was called for.
    #[derive(Default)]
    struct Told(std::collections::BTreeMap<usize, u64>);

    impl Clean for Told {
        fn clean(&mut self, n: usize, pages: u64) {
            *self.0.entry(n).or_default() |= pages;
        }
    }

    fn all(d: &Dirty, take: Option<&mut Told>) -> Vec<u64> {
        let mut seen = Vec::new();
        let show = |first: usize, words: &[u64]| {
            assert_eq!(first, seen.len());
            seen.extend_from_slice(words);
            Ok::<(), ()>(())
        };
        match take {
            Some(told) => d.take(told, show),
            None => d.peek(show),
        }
        .unwrap();
        seen
    }

    /// Compares random calls with a plain bitmap.
    #[test]
    fn it_is_a_bitmap_however_it_begins() {
        for (pages, is_whole) in [
            (1, true),
            (64, false),
            (5000, true),
            (70_001, true),
            (70_001, false),
        ] {
            let d = Dirty::new(pages, is_whole).unwrap();
            let words = pages.div_ceil(64);
            let mut model = vec![0u64; words];
            if is_whole {
                for (n, word) in model.iter_mut().enumerate() {
                    *word = d.valid(n);
                }
            }
            let mut state = 7u64;
            let mut random = |n: usize| {
                state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
                (state >> 33) as usize % n
            };
            for round in 0..400 {
                let mut told = Told::default();
                match random(5) {
                    0 | 1 => {
                        let page = random(pages);
                        let was = model[page / 64] >> (page % 64) & 1 != 0;
                        assert_eq!(d.is_set(page), was);
                        assert_eq!(d.mark(page), !was);
                        model[page / 64] |= 1 << (page % 64);
                    }
                    2 | 3 => {
                        let first = random(words) & if random(2) == 0 { !63 } else { !0 };
                        let count = (words - first).min([1, 3, 64, 128, words][random(5)]);
                        let kind = random(3);
                        let mask: Vec<u64> = (0..count)
                            .map(|n| match kind {
                                0 => u64::MAX,
                                1 => 1 << random(64),
                                _ if n % 3 == 0 => u64::MAX,
                                _ => 0,
                            })
                            .collect();
                        d.clear(first, &mask, &mut told);
                        for (n, mask) in mask.iter().enumerate() {
                            let gone = model[first + n] & mask;
                            let told = told.0.get(&(first + n)).copied().unwrap_or_default();
                            assert_eq!(gone & !told, 0, "told of all that goes");
                            model[first + n] &= !mask;
                        }
                    }
                    _ if round % 3 == 0 => {
                        assert_eq!(all(&d, Some(&mut told)), model);
                        for (n, word) in model.iter_mut().enumerate() {
                            let told = told.0.get(&n).copied().unwrap_or_default();
                            assert_eq!(told, *word);
                            *word = 0;
                        }
                    }
                    _ => {}
                }
                assert_eq!(all(&d, None), model, "{pages} {round}");
            }
        }
    }
}
