//! [`ByteMap`]: some of a page's bytes.

/// Some of a page's bytes, one bit each. Word `n` has those of the chunk `n` of 64 bytes. Translated code reads it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct ByteMap([u64; 64]);

impl ByteMap {
    /// No byte.
    pub const EMPTY: Self = Self([0; 64]);

    /// Returns all bytes of the chunks whose bits are set.
    pub fn of_chunks(chunks: u64) -> Self {
        Self(core::array::from_fn(|n| (chunks >> n & 1) * u64::MAX))
    }

    /// Returns the words.
    pub const fn words(&self) -> &[u64; 64] {
        &self.0
    }

    /// Adds `len` bytes from `offset`, cut at the page's end. Returns true if any of them was not here.
    pub fn insert(&mut self, offset: u64, len: u64) -> bool {
        let mut is_new = false;
        for (word, bits) in words(offset, len) {
            is_new |= !self.0[word] & bits != 0;
            self.0[word] |= bits;
        }
        is_new
    }

    /// Takes away the bytes that are not in `other`.
    pub fn intersect(&mut self, other: &Self) {
        self.0.iter_mut().zip(other.0).for_each(|(a, b)| *a &= b);
    }

    /// Returns true if any of `len` bytes from `offset` is here.
    pub fn has_any(&self, offset: u64, len: u64) -> bool {
        words(offset, len).any(|(word, bits)| self.0[word] & bits != 0)
    }

    /// Returns true if all of `len` bytes from `offset`, cut at the page's end, are here.
    pub fn has_all(&self, offset: u64, len: u64) -> bool {
        words(offset, len).all(|(word, bits)| self.0[word] & bits == bits)
    }

    /// Returns true if `other` has all bytes that are here.
    pub fn is_subset(&self, other: &Self) -> bool {
        self.0.iter().zip(other.0).all(|(a, b)| a & !b == 0)
    }
}

/// Yields the words of a [`ByteMap`] that a range touches, with the bits of the range, cut at the page's end.
fn words(offset: u64, len: u64) -> impl Iterator<Item = (usize, u64)> {
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
    fn a_map_has_what_was_inserted() {
        let mut map = ByteMap::EMPTY;
        assert!(map.insert(60, 8) && map.insert(61, 8) && !map.insert(60, 9));
        assert!(map.has_all(60, 9) && !map.has_all(60, 10) && !map.has_all(59, 1));
        assert!(map.has_any(68, 100) && !map.has_any(69, 100) && !map.has_any(0, 60));
        let chunks = ByteMap::of_chunks(0b11);
        assert!(map.is_subset(&chunks) && !chunks.is_subset(&map));
        map.intersect(&ByteMap::of_chunks(0b10));
        assert_eq!(map.words()[..3], [0, 0x1f, 0]);
    }
}
