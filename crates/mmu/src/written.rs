//! [`Written`]: which pages this vCPU may write, or may have written, unnoticed.
//!
//! A bit is set when a write tag is made and stays set when the tag goes, be it
//! by eviction or flush: if the page turns out to be code, the vCPU has to
//! assume that it wrote it after another vCPU fetched it.
//!
//! Where the tags are is kept beside the bit. Most pages have been written by one or two addresses
//! (a kernel clears them by its own), and to search all tables for each page that a program is read
//! or compiled into takes longer than translating its code.

use guest_memory::{SlotTable, table::ADDRESS_SPACES};

use crate::l1::ENTRIES;

/// Where a page is in the slot table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub space: usize,
    pub slot: usize,
    pub index: usize,
}

/// Where write tags of a page are in each view's table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tags {
    /// At these indices only, if anywhere.
    At([usize; 2]),
    Anywhere,
}

/// [`Slot::tags`] of a page that was written by more addresses than that.
const SEVERAL: u16 = u16::MAX;

const _: () = assert!(ENTRIES < SEVERAL as usize);

/// The pages of a slot.
#[derive(Debug)]
struct Slot {
    /// A bit per page.
    bits: Vec<u64>,
    /// Indices of its tags, of pages whose bit is set; twice the same if there is one.
    tags: Vec<[u16; 2]>,
}

/// Pages of each slot.
#[derive(Debug, Default)]
pub(crate) struct Written {
    slots: [Vec<Slot>; ADDRESS_SPACES],
    /// Some host page is in two slots: one of them does not know of the other's tags.
    shared: bool,
}

impl Written {
    /// Forgets everything; the places are from now on those of `table`.
    pub(crate) fn reset(&mut self, table: &SlotTable) {
        let mut hosts = Vec::new();
        for (space, slots) in self.slots.iter_mut().enumerate() {
            *slots = table
                .slots(space)
                .iter()
                .map(|s| {
                    let pages = (s.config().size >> 12) as usize;
                    hosts.push((s.config().hva, s.config().size));
                    Slot {
                        bits: vec![0; pages.div_ceil(64)],
                        tags: vec![[0; 2]; pages],
                    }
                })
                .collect();
        }
        hosts.sort_unstable();
        let overlap = |w: &[(u64, u64)]| w[0].0.saturating_add(w[0].1) > w[1].0;
        self.shared = hosts.windows(2).any(overlap);
    }

    fn page(&mut self, at: Place) -> Option<(&mut u64, &mut [u16; 2])> {
        let slot = self.slots.get_mut(at.space)?.get_mut(at.slot)?;
        Some((
            slot.bits.get_mut(at.index / 64)?,
            slot.tags.get_mut(at.index)?,
        ))
    }

    /// A write tag is made for `gva`.
    pub(crate) fn add(&mut self, at: Place, gva: u64) {
        let tag = ((gva >> 12) as usize % ENTRIES) as u16;
        if let Some((word, tags)) = self.page(at) {
            let bit = 1 << (at.index % 64);
            if *word & bit == 0 {
                *tags = [tag; 2];
            } else if !tags.contains(&tag) {
                let is_alone = tags[0] == tags[1] && tags[0] != SEVERAL;
                *tags = if is_alone {
                    [tags[0], tag]
                } else {
                    [SEVERAL; 2]
                };
            }
            *word |= bit;
        }
    }

    /// Clears the page's bit; returns where its tags may be if it was set.
    pub(crate) fn take(&mut self, at: Place) -> Option<Tags> {
        let shared = self.shared;
        let (word, tags) = self.page(at)?;
        let bit = 1 << (at.index % 64);
        let was = *word & bit != 0;
        *word &= !bit;
        was.then_some(match *tags {
            [SEVERAL, _] => Tags::Anywhere,
            _ if shared => Tags::Anywhere,
            tags => Tags::At(tags.map(usize::from)),
        })
    }

    /// All pages whose bit is set.
    pub(crate) fn places(&self) -> Vec<Place> {
        let mut places = Vec::new();
        for (space, slots) in self.slots.iter().enumerate() {
            for (slot, pages) in slots.iter().enumerate() {
                for (i, word) in pages.bits.iter().enumerate().filter(|(_, w)| **w != 0) {
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

#[cfg(test)]
mod tests {
    use guest_memory::{GuestMemory, SlotConfig};
    use host::Mapping;

    use super::*;

    #[test]
    fn tags_are_where_they_were_made() {
        const SIZE: usize = 1 << 20;
        let ram = Mapping::anonymous(2 * SIZE).unwrap();
        let hva = ram.as_ptr() as u64;
        let at = |slot, index| Place {
            space: 0,
            slot,
            index,
        };
        let same = ENTRIES as u64 * 0x1000;
        // The second slot has other memory, or half of the first one's.
        for (second, is_shared) in [(SIZE, false), (SIZE / 2, true)] {
            let memory = GuestMemory::new();
            for (slot, gpa, hva) in [(0, 0, hva), (1, 1 << 30, hva + second as u64)] {
                let config = SlotConfig {
                    slot,
                    flags: 0,
                    gpa,
                    size: SIZE as u64,
                    hva,
                };
                memory.set_slot(config).unwrap();
            }
            let mut written = Written::default();
            written.reset(&memory.table());
            let known = |one, other| {
                if is_shared {
                    Tags::Anywhere
                } else {
                    Tags::At([one, other])
                }
            };
            assert_eq!(written.take(at(0, 5)), None);
            written.add(at(0, 5), 0x7000);
            written.add(at(0, 5), 0x7fff);
            written.add(at(0, 5), same + 0x7000);
            written.add(at(1, 5), 0);
            assert_eq!(written.places(), [at(0, 5), at(1, 5)]);
            assert_eq!(written.take(at(0, 5)), Some(known(7, 7)));
            assert_eq!(written.take(at(0, 5)), None);
            assert_eq!(written.take(at(1, 5)), Some(known(0, 0)));
            for gva in [0x9000, 0x7000, 0x9000] {
                written.add(at(0, 5), gva);
            }
            assert_eq!(written.take(at(0, 5)), Some(known(9, 7)));
            for gva in [0x9000, 0x7000, 0x8000, 0x7000] {
                written.add(at(0, 5), gva);
            }
            assert_eq!(written.take(at(0, 5)), Some(Tags::Anywhere));
        }
    }
}
