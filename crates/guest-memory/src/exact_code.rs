//! Which bytes of a page were fetched as code, of pages whose chunks are too coarse.
//!
//! A program may have a variable among its instructions, in the same 64 bytes. Each write of the variable would change
//! the page's code. So the bytes are tracked of a page whose code has changed several times.

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

/// Number of times that a page's code has changed before its bytes are tracked. Pages of data that were code once reach
/// it rarely.
pub(crate) const CHANGES: u32 = 8;

/// A bit for each byte of a page.
pub type ByteMap = [u64; 64];

/// The bytes of a slot's pages that were fetched as code.
#[derive(Debug, Default)]
pub(crate) struct ExactCode(Mutex<HashMap<usize, Box<ByteMap>>>);

impl ExactCode {
    fn pages(&self) -> MutexGuard<'_, HashMap<usize, Box<ByteMap>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tracks bytes of a page. Returns true if any of them was not tracked. Call this *before* reading them.
    #[cold]
    pub(crate) fn track(&self, index: usize, offset: u64, len: u64) -> bool {
        let mut pages = self.pages();
        let bytes = pages.entry(index).or_insert_with(|| Box::new([0; 64]));
        let mut is_new = false;
        for (word, bits) in words(offset, len) {
            is_new |= !bytes[word] & bits != 0;
            bytes[word] |= bits;
        }
        is_new
    }

    /// Takes the bytes away from `map` that were not fetched.
    #[cold]
    pub(crate) fn narrow(&self, index: usize, map: &mut ByteMap) {
        let pages = self.pages();
        let bytes = pages.get(&index).map_or(&[0; 64], |bytes| &**bytes);
        map.iter_mut().zip(bytes).for_each(|(word, b)| *word &= b);
    }

    /// Returns true if the page's bytes are tracked and none of these was fetched. If one was, nothing of the page is
    /// tracked any more. Call this *after* writing them.
    #[cold]
    pub(crate) fn spares(&self, index: usize, offset: u64, len: u64) -> bool {
        let mut pages = self.pages();
        let Some(bytes) = pages.get(&index) else {
            return false;
        };
        let spares = words(offset, len).all(|(word, bits)| bytes[word] & bits == 0);
        if !spares {
            pages.remove(&index);
        }
        spares
    }
}

/// Yields the words of a [`ByteMap`] that a range touches, with the bits of the range, cut at the page's end.
pub fn words(offset: u64, len: u64) -> impl Iterator<Item = (usize, u64)> {
    let (first, end) = (offset.min(4096), offset.saturating_add(len).min(4096));
    let words = match first < end {
        true => first / 64..end.div_ceil(64),
        false => 0..0,
    };
    words.map(move |word| {
        let from = first.max(word * 64) - word * 64;
        let to = end.min(word * 64 + 64) - word * 64;
        (word as usize, u64::MAX >> (64 - (to - from)) << from)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_have_each_byte_of_the_range() {
        for (offset, len) in [
            (0, 1),
            (0, 64),
            (0, 4096),
            (63, 2),
            (100, 200),
            (4095, 9),
            (64, 64),
        ] {
            let mut bits = [0_u64; 64];
            for (word, b) in words(offset, len) {
                assert_ne!(b, 0);
                bits[word] |= b;
            }
            for byte in 0..4096 {
                let is_set = bits[byte as usize / 64] >> (byte % 64) & 1 != 0;
                assert_eq!(
                    is_set,
                    (offset..offset + len).contains(&byte),
                    "{offset} {len} {byte}"
                );
            }
        }
        assert_eq!(words(5, 0).count(), 0);
    }

    #[test]
    fn only_bytes_that_were_fetched_are_code() {
        let code = ExactCode::default();
        assert!(!code.spares(3, 0, 8));
        assert!(code.track(3, 60, 8) && code.track(3, 61, 8) && !code.track(3, 60, 9));
        let mut map = [u64::MAX; 64];
        code.narrow(3, &mut map);
        assert_eq!((map[0], map[1], map[2]), (0xf << 60, 0x1f, 0));
        assert!(code.spares(3, 0, 60) && code.spares(3, 69, 100));
        assert!(!code.spares(4, 0, 8));
        assert!(!code.spares(3, 67, 1));
        assert!(!code.spares(3, 0, 1), "forgotten");
    }
}
