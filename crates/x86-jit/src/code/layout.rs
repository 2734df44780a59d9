//! [`CodeLayout`]: where in the code buffer the next block goes.
//!
//! The two parts of a block are kept apart: the first is executed again and again, the second rarely (misses, first
//! branches, ends). So pages and cache lines of the first parts have nothing of the second.

use core::ops::Range;

use x86_codegen::asm::{CACHE_LINE, MAX_BLOCK};

/// Blocks begin at a multiple of this.
const ALIGN: usize = 16;

/// Two regions that fill up: one with the first parts of blocks, one with the second.
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
    /// Smallest length of a buffer, in bytes.
    pub(crate) const LEAST: usize = 8 * MAX_BLOCK;

    /// Makes a layout in which all of `whole` is free, which has [`Self::LEAST`] bytes or more.
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

    /// Returns the offsets at which the next block's two parts begin.
    pub(crate) fn next(&self) -> (usize, usize) {
        (self.hot, self.cold)
    }

    /// Returns true if the next block may not fit.
    pub(crate) fn is_full(&self) -> bool {
        self.hot + CACHE_LINE + MAX_BLOCK > self.border || self.cold + MAX_BLOCK > self.whole.end
    }

    /// Returns where the last block's first part ends.
    pub(crate) fn end(&self) -> usize {
        self.end
    }

    /// Takes the space of the next block, whose first part ends at `end` and whose second part has `cold` bytes.
    pub(crate) fn take(&mut self, end: usize, cold: usize) {
        self.end = end;
        self.hot = end.next_multiple_of(ALIGN);
        self.cold += cold;
    }

    /// Frees everything, and divides the buffer by what the two regions have needed so far.
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
            // At first the second region has three eighths of the buffer, though each part takes half.
            let least = if round == 0 { 350 } else { 450 };
            assert!(n > least, "{n}");
            layout.clear();
        }
    }
}
