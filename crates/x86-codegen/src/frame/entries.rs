//! Tables of changes of the view that generated code makes by itself, as they were made before.

use zerocopy::FromZeros;

/// An entry, as generated code reads it. Zeros are none.
pub trait Entry: Copy + FromZeros {
    /// Returns the word that the entry is found by, which is its first.
    fn by(&self) -> u64;
}

/// Number of places; [`place`] selects one. An entry is there or in the next.
const LEN: usize = 4096;
/// Multiplier of the lower half of the word. The upper [`BITS`] bits of the product are the entry's index.
pub(crate) const HASH: u32 = 0x9e37_79b1;
pub(crate) const BITS: u32 = LEN.trailing_zeros();
/// log2 of an entry's size.
pub(crate) const SHIFT: u8 = 6;

fn place(by: u64) -> usize {
    ((by as u32).wrapping_mul(HASH) >> (u32::BITS - BITS)) as usize
}

/// All entries of a vCPU. They do not move in memory, and take up none before there are any.
#[derive(Debug)]
pub struct Entries<E> {
    all: Box<[E; LEN + 1]>,
    is_used: bool,
    /// True if the next entry that needs another's place gets the second of its two.
    takes_second: bool,
}

impl<E: Entry> Default for Entries<E> {
    /// Makes a table without entries.
    fn default() -> Self {
        const { assert!(size_of::<E>() == 1 << SHIFT) };
        Self {
            all: FromZeros::new_box_zeroed().expect("memory for a table"),
            is_used: false,
            takes_second: false,
        }
    }
}

impl<E: Entry> Entries<E> {
    /// Returns the table's address, for generated code.
    pub fn address(&self) -> u64 {
        self.all.as_ptr() as u64
    }

    /// Enters a change, in the place of another one if need be.
    pub fn set(&mut self, entry: E) {
        self.is_used = true;
        let second = usize::from(self.takes_second);
        let places = self.places(entry.by());
        let is_of = |by: u64| places.iter().position(|e| e.by() == by);
        let found = is_of(entry.by()).or_else(|| is_of(0));
        let n = found.unwrap_or(second);
        places[n] = entry;
        self.takes_second ^= found.is_none();
    }

    /// Returns the entry that is found by this word.
    pub fn get_mut(&mut self, by: u64) -> Option<&mut E> {
        self.places(by).iter_mut().find(|e| e.by() == by)
    }

    fn places(&mut self, by: u64) -> &mut [E] {
        let first = place(by);
        &mut self.all[first..first + 2]
    }

    /// Forgets all entries.
    pub fn clear(&mut self) {
        if core::mem::take(&mut self.is_used) {
            self.all.fill(E::new_zeroed());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Clone, Copy, Debug, FromZeros)]
    struct Known {
        by: u64,
        value: u64,
        _other: [u64; 6],
    }

    impl Entry for Known {
        fn by(&self) -> u64 {
            self.by
        }
    }

    #[test]
    fn two_words_of_one_place_are_both_found() {
        let entry = |by, value| Known {
            by,
            value,
            _other: [0; 6],
        };
        let mut entries = Entries::default();
        let same: Vec<u64> = (1..).filter(|by| place(*by) == LEN - 1).take(3).collect();
        for value in 1..3 {
            for by in &same[..2] {
                entries.set(entry(*by, value));
            }
            for by in &same[..2] {
                assert_eq!(entries.get_mut(*by).map(|e| e.value), Some(value));
            }
        }
        // A third takes the place of one of them.
        entries.set(entry(same[2], 3));
        assert_eq!(
            same.iter()
                .filter(|by| entries.get_mut(**by).is_some())
                .count(),
            2
        );
        entries.clear();
        assert!(same.iter().all(|by| entries.get_mut(*by).is_none()));
    }
}
