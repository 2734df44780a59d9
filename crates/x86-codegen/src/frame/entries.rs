//! Tables of changes of the view that generated code makes by itself, as they were made before.

use zerocopy::FromZeros;

/// An entry, as generated code reads it. Zeros are none.
pub trait Entry: Copy + FromZeros {
    /// Returns the word that the entry is found by.
    fn by(&self) -> u64;
}

/// Number of entries; [`place`] selects one.
const LEN: usize = 1024;
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
    all: Box<[E; LEN]>,
    is_used: bool,
}

impl<E: Entry> Default for Entries<E> {
    /// Makes a table without entries.
    fn default() -> Self {
        const { assert!(size_of::<E>() == 1 << SHIFT) };
        Self {
            all: FromZeros::new_box_zeroed().expect("memory for a table"),
            is_used: false,
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
        self.all[place(entry.by())] = entry;
    }

    /// Returns the entry that is found by this word.
    pub fn get_mut(&mut self, by: u64) -> Option<&mut E> {
        let entry = &mut self.all[place(by)];
        (entry.by() == by).then_some(entry)
    }

    /// Forgets all entries.
    pub fn clear(&mut self) {
        if core::mem::take(&mut self.is_used) {
            self.all.fill(E::new_zeroed());
        }
    }
}
