//! [`CodeLayout`]: where in the code buffer the next block goes.
//!
//! What a block executes and what it needs once (misses, first branches, ends) are
//! kept apart: a page and a cache line of the first kind has nothing of the second.

use core::ops::Range;

use crate::asm::{CACHE_LINE, MAX_BLOCK};

/// Blocks begin at a multiple of this.
const ALIGN: usize = 16;

/// Two regions that fill up.
#[derive(Debug)]
pub(crate) struct CodeLayout {
    whole: Range<usize>,
    /// Where the second region begins.
    border: usize,
    hot: usize,
    cold: usize,
    /// Where the last block's first part ends.
    end: usize,
}

impl CodeLayout {
    /// Bytes that a buffer has at least.
    pub(crate) const LEAST: usize = 8 * MAX_BLOCK;

    /// All of `whole`, [`Self::LEAST`] bytes or more, is free.
    pub(crate) fn new(whole: Range<usize>) -> Self {
        let border = whole.start + whole.len() * 5 / 8;
        Self {
            hot: whole.start,
            cold: border,
            end: whole.start,
            border,
            whole,
        }
    }

    /// Offsets of the next block's two parts.
    pub(crate) fn next(&self) -> (usize, usize) {
        (self.hot, self.cold)
    }

    /// A block may not fit.
    pub(crate) fn is_full(&self) -> bool {
        self.hot + CACHE_LINE + MAX_BLOCK > self.border || self.cold + MAX_BLOCK > self.whole.end
    }

    /// Where the last block's first part ends.
    pub(crate) fn end(&self) -> usize {
        self.end
    }

    /// The next block's first part ends there, and its second has that length.
    pub(crate) fn take(&mut self, end: usize, cold: usize) {
        self.end = end;
        self.hot = end.next_multiple_of(ALIGN);
        self.cold += cold;
    }

    /// Everything is free again; the regions become as large as they had to be.
    pub(crate) fn clear(&mut self) {
        let (hot, cold) = (self.hot - self.whole.start, self.cold - self.border);
        let len = self.whole.len();
        if hot + cold > len / 4 {
            let share = (len / 64 * (64 * hot / (hot + cold))).clamp(len / 4, len * 3 / 4);
            self.border = (self.whole.start + share).next_multiple_of(64);
        }
        self.hot = self.whole.start;
        self.end = self.hot;
        self.cold = self.border;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_regions_are_used_up() {
        let len = 1 << 20;
        let mut layout = CodeLayout::new(4096..4096 + len);
        for round in 0..3 {
            let mut n = 0;
            while !layout.is_full() {
                let (hot, cold) = layout.next();
                assert!(hot < cold && hot + MAX_BLOCK <= layout.border);
                assert!(cold + MAX_BLOCK <= 4096 + len);
                layout.take(hot + 1000, 1000);
                assert_eq!(layout.end(), hot + 1000);
                n += 1;
            }
            // At first three eighths are for what are two halves.
            let least = if round == 0 { 350 } else { 450 };
            assert!(n > least, "{n}");
            layout.clear();
        }
    }
}
