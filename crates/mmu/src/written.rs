//! [`Written`]: which pages this vCPU may write, or may have written, unnoticed.
//!
//! A bit is set when a write tag is made and stays set when the tag goes, be it
//! by eviction or flush: if the page turns out to be code, the vCPU has to
//! assume that it wrote it after another vCPU fetched it.

use guest_memory::{SlotTable, table::ADDRESS_SPACES};

/// Where a page is in the slot table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub space: usize,
    pub slot: usize,
    pub index: usize,
}

/// A bit per page of each slot.
#[derive(Debug, Default)]
pub(crate) struct Written([Vec<Vec<u64>>; ADDRESS_SPACES]);

impl Written {
    /// Forgets everything; the places are from now on those of `table`.
    pub(crate) fn reset(&mut self, table: &SlotTable) {
        for (space, slots) in self.0.iter_mut().enumerate() {
            *slots = table
                .slots(space)
                .iter()
                .map(|s| vec![0; (s.config().size >> 12).div_ceil(64) as usize])
                .collect();
        }
    }

    fn word(&mut self, at: Place) -> Option<&mut u64> {
        self.0
            .get_mut(at.space)?
            .get_mut(at.slot)?
            .get_mut(at.index / 64)
    }

    /// A write tag is made.
    pub(crate) fn add(&mut self, at: Place) {
        if let Some(word) = self.word(at) {
            *word |= 1 << (at.index % 64);
        }
    }

    /// Clears the page's bit and returns it.
    pub(crate) fn take(&mut self, at: Place) -> bool {
        let bit = 1 << (at.index % 64);
        self.word(at).is_some_and(|word| {
            let was = *word & bit != 0;
            *word &= !bit;
            was
        })
    }

    /// All pages whose bit is set.
    pub(crate) fn places(&self) -> Vec<Place> {
        let mut places = Vec::new();
        for (space, slots) in self.0.iter().enumerate() {
            for (slot, words) in slots.iter().enumerate() {
                for (i, word) in words.iter().enumerate().filter(|(_, w)| **w != 0) {
                    places.extend((0..64).filter(|b| word >> b & 1 != 0).map(|b| Place {
                        space,
                        slot,
                        index: i * 64 + b,
                    }));
                }
            }
        }
        places
    }
}
