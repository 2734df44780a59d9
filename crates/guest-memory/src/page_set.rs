//! [`PageSet`]: a bitmap of a slot's pages with two levels of summaries above it.
//!
//! Any thread may add pages, without waiting. A set summary bit says that the word below it may be nonzero.
//! [`PageSet::insert`] sets the summary bit after the page's bit, and checks it even if the page's bit is set already.
//! So once `insert` has returned, every later [`PageSet::take`] finds the page, whichever thread added it. `take` works
//! from the top down: it clears a summary word before it reads the words below, so a page that is added meanwhile is
//! either taken or has its summary bit set again.

use std::{io, sync::atomic::Ordering};

use crate::words::Words;

/// Levels of the bitmap: the pages' bits and two summaries.
const LEVELS: usize = 3;

/// A set of pages.
#[derive(Debug)]
pub(crate) struct PageSet {
    /// Level 0 has a bit per page, each other level a bit per word of the level below.
    levels: [Words; LEVELS],
}

/// Yields the numbers of the bits set in `word`, lowest first.
pub(crate) fn bits(mut word: u64) -> impl Iterator<Item = usize> {
    core::iter::from_fn(move || {
        let bit = word.trailing_zeros() as usize;
        word &= word.wrapping_sub(1);
        (bit < 64).then_some(bit)
    })
}

impl PageSet {
    /// An empty set for `pages` pages.
    pub(crate) fn new(pages: usize) -> io::Result<Self> {
        let words = pages.div_ceil(64);
        Ok(Self {
            levels: [
                Words::new(words)?,
                Words::new(words.div_ceil(64))?,
                Words::new(words.div_ceil(64 * 64))?,
            ],
        })
    }

    /// Number of words on level 0, each for 64 pages.
    pub(crate) fn len(&self) -> usize {
        self.levels[0].len()
    }

    /// Returns the bits of pages `64 * n` to `64 * n + 63`.
    #[inline]
    pub(crate) fn word(&self, n: usize) -> u64 {
        self.levels[0]
            .get(n)
            .map_or(0, |w| w.load(Ordering::Acquire))
    }

    /// True if the set contains the page.
    #[inline]
    pub(crate) fn contains(&self, page: usize) -> bool {
        self.word(page / 64) >> (page % 64) & 1 != 0
    }

    /// Adds a page; returns true if it was absent.
    #[inline]
    pub(crate) fn insert(&self, page: usize) -> bool {
        self.insert_word(page / 64, 1 << (page % 64)) != 0
    }

    /// Adds the pages of `mask` in word `n`; returns the bits of those that were absent.
    #[inline]
    pub(crate) fn insert_word(&self, n: usize, mask: u64) -> u64 {
        let [words, summaries @ ..] = &self.levels;
        let Some(word) = words.get(n) else {
            return 0;
        };
        let mut new = mask & !word.load(Ordering::Acquire);
        if new != 0 {
            new &= !word.fetch_or(mask, Ordering::AcqRel);
        }
        // Also if the pages were present: the thread that added them may not have set the summary bits yet.
        let mut n = n;
        for level in summaries {
            let bit = 1 << (n % 64);
            n /= 64;
            if let Some(word) = level.get(n)
                && word.load(Ordering::Acquire) & bit == 0
            {
                word.fetch_or(bit, Ordering::AcqRel);
            }
        }
        new
    }

    /// Removes the pages of `mask` in word `n`; returns the bits of those that were present.
    #[inline]
    pub(crate) fn remove_word(&self, n: usize, mask: u64) -> u64 {
        match self.levels[0].get(n) {
            Some(word) if word.load(Ordering::Acquire) & mask != 0 => {
                word.fetch_and(!mask, Ordering::AcqRel) & mask
            }
            _ => 0,
        }
    }

    /// Returns one bit for each of the group's 64 words: the word may be nonzero.
    #[inline]
    pub(crate) fn summary(&self, group: usize) -> u64 {
        self.levels[1]
            .get(group)
            .map_or(0, |w| w.load(Ordering::Acquire))
    }

    /// Removes all pages of a group of 64 words. Calls `f` with the index and the bits of each nonzero word.
    pub(crate) fn take_group(&self, group: usize, mut f: impl FnMut(usize, u64)) {
        let taken = self.levels[1].get(group).map_or(0, take);
        for bit in bits(taken) {
            let n = group * 64 + bit;
            let pages = self.levels[0].get(n).map_or(0, take);
            if pages != 0 {
                f(n, pages);
            }
        }
    }

    /// Removes all pages; `f` is called as by [`Self::take_group`].
    pub(crate) fn take(&self, mut f: impl FnMut(usize, u64)) {
        for (n, top) in self.levels[2].iter().enumerate() {
            for bit in bits(take(top)) {
                self.take_group(n * 64 + bit, &mut f);
            }
        }
    }
}

/// Clears the word and returns its previous value.
fn take(word: &crate::words::AtomicU64) -> u64 {
    match word.load(Ordering::Acquire) {
        0 => 0,
        _ => word.swap(0, Ordering::AcqRel),
    }
}

#[cfg(all(test, not(loom)))]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn what_is_added_is_taken_once() {
        let set = PageSet::new(300_000).unwrap();
        let mut model = std::collections::BTreeSet::new();
        let mut state = 1u64;
        for round in 0..200 {
            for _ in 0..round * 3 {
                state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
                let page = (state >> 33) as usize % 300_000;
                assert_eq!(set.insert(page), model.insert(page));
                assert!(set.contains(page));
                if state >> 20 & 7 == 0 {
                    let gone = set.remove_word(page / 64, u64::MAX);
                    for bit in bits(gone) {
                        assert!(model.remove(&(page / 64 * 64 + bit)));
                    }
                    assert!(!set.contains(page));
                }
            }
            let mut taken = Vec::new();
            set.take(|n, word| taken.extend(bits(word).map(|bit| n * 64 + bit)));
            assert!(taken.iter().eq(model.iter()));
            model.clear();
        }
        // The set contains no page beyond its end.
        assert!(!set.insert(1 << 40) && !set.contains(1 << 40));
        set.take(|_, _| panic!("it is empty"));
    }

    /// No page is lost while one thread takes pages and two others add the same ones.
    #[test]
    fn pages_come_out_while_others_go_in() {
        const PAGES: usize = 9000;
        let set = PageSet::new(PAGES).unwrap();
        let seen: Vec<_> = (0..PAGES)
            .map(|_| std::sync::atomic::AtomicU64::new(0))
            .collect();
        let mut taken = vec![0u64; PAGES];
        let note = |n: usize, word, taken: &mut Vec<u64>| {
            for bit in bits(word) {
                taken[n * 64 + bit] = seen[n * 64 + bit].load(Ordering::SeqCst);
            }
        };
        std::thread::scope(|s| {
            let adders: Vec<_> = (0..2)
                .map(|n| {
                    let (set, seen) = (&set, &seen);
                    s.spawn(move || {
                        for i in 0..100_000usize {
                            let page = i * (31 + n) % 500 * 17;
                            seen[page].fetch_add(1, Ordering::SeqCst);
                            set.insert(page);
                        }
                    })
                })
                .collect();
            while adders.iter().any(|a| !a.is_finished()) {
                set.take(|n, word| note(n, word, &mut taken));
            }
        });
        set.take(|n, word| note(n, word, &mut taken));
        for (page, seen) in seen.iter().enumerate() {
            assert_eq!(taken[page], seen.load(Ordering::SeqCst), "{page}");
        }
    }
}
