//! [`PageSet`]: a bit for each page of a slot, with two levels of summaries above.
//!
//! Any thread adds pages; nobody waits. A bit of a summary says that the word below it may be other than 0. It is set after
//! the word, and who adds a page that is there already looks for it, too: so once [`PageSet::insert`] has returned, every
//! later [`PageSet::take`] finds the page, whoever put it there. `take` goes from the top: it clears a summary's word before
//! it looks below, so what is added meanwhile is either taken or has its summary set again.

use std::{io, sync::atomic::Ordering};

use crate::words::Words;

/// Levels of words.
const LEVELS: usize = 3;

/// A set of pages.
#[derive(Debug)]
pub(crate) struct PageSet {
    /// A bit per page, then a bit per word of the level below.
    levels: [Words; LEVELS],
}

/// The bits that are set, lowest first.
pub(crate) fn bits(mut word: u64) -> impl Iterator<Item = usize> {
    core::iter::from_fn(move || {
        let bit = word.trailing_zeros() as usize;
        word &= word.wrapping_sub(1);
        (bit < 64).then_some(bit)
    })
}

impl PageSet {
    /// None of so many pages.
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

    /// Words of 64 pages.
    pub(crate) fn len(&self) -> usize {
        self.levels[0].len()
    }

    /// The bits of 64 pages.
    #[inline]
    pub(crate) fn word(&self, n: usize) -> u64 {
        self.levels[0]
            .get(n)
            .map_or(0, |w| w.load(Ordering::Acquire))
    }

    /// True if the page is in it.
    #[inline]
    pub(crate) fn contains(&self, page: usize) -> bool {
        self.word(page / 64) >> (page % 64) & 1 != 0
    }

    /// Adds a page; true if it was not there.
    #[inline]
    pub(crate) fn insert(&self, page: usize) -> bool {
        self.insert_word(page / 64, 1 << (page % 64)) != 0
    }

    /// Adds those of 64 pages; returns which of them were not there.
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
        // Also if they were there: who added them may not have come so far.
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

    /// Takes those of 64 pages away; returns which of them were there.
    #[inline]
    pub(crate) fn remove_word(&self, n: usize, mask: u64) -> u64 {
        match self.levels[0].get(n) {
            Some(word) if word.load(Ordering::Acquire) & mask != 0 => {
                word.fetch_and(!mask, Ordering::AcqRel) & mask
            }
            _ => 0,
        }
    }

    /// Which of 64 words may have pages.
    #[inline]
    pub(crate) fn summary(&self, group: usize) -> u64 {
        self.levels[1]
            .get(group)
            .map_or(0, |w| w.load(Ordering::Acquire))
    }

    /// Takes the pages of a group of 64 words: `f` gets the word's place and its bits.
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

    /// Takes all pages.
    pub(crate) fn take(&self, mut f: impl FnMut(usize, u64)) {
        for (n, top) in self.levels[2].iter().enumerate() {
            for bit in bits(take(top)) {
                self.take_group(n * 64 + bit, &mut f);
            }
        }
    }
}

/// What the word was; 0 from now on.
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
        // Beyond the end there is nothing.
        assert!(!set.insert(1 << 40) && !set.contains(1 << 40));
        set.take(|_, _| panic!("it is empty"));
    }

    /// No page is lost while one thread takes and two add the same ones.
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
