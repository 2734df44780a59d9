//! [`Written`]: which pages this vCPU may write, or may have written, unnoticed.
//!
//! The bits are in the VM's reverse map ([`guest_memory::writers`]). One is set before a write tag is made and stays set when the
//! tag goes, be it by eviction or flush: if the page turns out to be code, the vCPU has to
//! assume that it wrote it after another vCPU fetched it.
//!
//! This module keeps where the tags are. Most pages have been written by one or two addresses
//! (a kernel clears them by its own), and to search all tables for each page that a program is read
//! or compiled into takes longer than translating its code.

use std::sync::Arc;

use guest_memory::{Mailbox, SlotTable, Writer, table::ADDRESS_SPACES};

use crate::l1::LARGE_ENTRIES;

/// A page's place in the slot table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SlotPage {
    pub space: usize,
    pub slot: usize,
    pub index: usize,
}

/// The indices at which each view's table, if it has grown, may have write tags of a page. Others have these modulo their number of entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tags {
    /// At no other indices than these.
    At([usize; 2]),
    Anywhere,
}

/// [`Slot::tags`] of a page that was written by more than two addresses.
const SEVERAL: u32 = u32::MAX;

const _: () = assert!(LARGE_ENTRIES < SEVERAL as usize);

/// What is kept of a slot's pages.
#[derive(Debug)]
struct Slot {
    /// `None` before the first page is written.
    writer: Option<Arc<Writer>>,
    /// The two indices of each page's tags, for pages whose bit is set. A page with one index has it twice.
    tags: Vec<[u32; 2]>,
}

/// The pages of each slot. A host page that is in two slots (all RAM of a VM with SMM is) is in each with the tags that were made
/// by way of that slot: what is asked of a slot's page concerns no other's.
#[derive(Debug, Default)]
pub(crate) struct Written {
    slots: [Vec<Slot>; ADDRESS_SPACES],
}

/// Some of 64 pages of a slot: those whose bit is set.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pages {
    pub space: usize,
    pub slot: usize,
    pub word: usize,
    pub bits: u64,
}

impl Pages {
    /// Returns the pages one by one.
    pub(crate) fn places(self) -> impl Iterator<Item = SlotPage> {
        let Self {
            space, slot, word, ..
        } = self;
        guest_memory::writers::each_page(word, self.bits).map(move |index| SlotPage {
            space,
            slot,
            index,
        })
    }
}

impl Written {
    /// Takes over the places in `table`. All pages were taken before.
    pub(crate) fn reset(&mut self, table: &SlotTable) {
        for (space, slots) in self.slots.iter_mut().enumerate() {
            *slots = table
                .slots(space)
                .iter()
                .map(|s| Slot {
                    writer: None,
                    tags: vec![[0; 2]; (s.config().size >> 12) as usize],
                })
                .collect();
        }
    }

    fn slot(&mut self, at: SlotPage) -> Option<&mut Slot> {
        self.slots.get_mut(at.space)?.get_mut(at.slot)
    }

    /// Returns the vCPU's part of the slot's reverse map, if the vCPU has written any page of the slot.
    pub(crate) fn writer(&self, space: usize, slot: usize) -> Option<&Arc<Writer>> {
        self.slots.get(space)?.get(slot)?.writer.as_ref()
    }

    /// Notes that a write tag is about to be made for `gva`. Who takes the page's write permission after this finds the
    /// page here; so the caller looks after this whether it may make the tag. Returns true if the page was not here before,
    /// and `None` if no tag can be made, because the host has no memory.
    #[inline]
    pub(crate) fn add(
        &mut self,
        table: &SlotTable,
        own: &Arc<Mailbox>,
        at: SlotPage,
        gva: u64,
    ) -> Option<bool> {
        let slot = self.slot(at)?;
        if slot.writer.is_none() {
            let pages = table.slots(at.space).get(at.slot)?;
            slot.writer = Some(pages.writer(own).ok()?);
        }
        let tag = ((gva >> 12) as usize % LARGE_ENTRIES) as u32;
        let is_new = slot.writer.as_ref()?.add(at.index);
        let tags = slot.tags.get_mut(at.index)?;
        if is_new {
            *tags = [tag; 2];
        } else if !tags.contains(&tag) {
            let is_alone = tags[0] == tags[1] && tags[0] != SEVERAL;
            *tags = if is_alone {
                [tags[0], tag]
            } else {
                [SEVERAL; 2]
            };
        }
        Some(is_new)
    }

    /// Returns true if a write tag for `gva` can be made without [`Self::add`]: the page is here, and so is the tag's index.
    #[inline]
    pub(crate) fn has(&self, at: SlotPage, gva: u64) -> bool {
        let tag = ((gva >> 12) as usize % LARGE_ENTRIES) as u32;
        let slot = self.slots.get(at.space).and_then(|s| s.get(at.slot));
        slot.is_some_and(|slot| {
            let tags = slot.tags.get(at.index);
            tags.is_some_and(|tags| tags.contains(&tag) || tags[0] == SEVERAL)
                && slot.writer.as_ref().is_some_and(|w| w.may_write(at.index))
        })
    }

    /// Returns true if the page is here.
    pub(crate) fn may_write(&self, at: SlotPage) -> bool {
        self.writer(at.space, at.slot)
            .is_some_and(|w| w.may_write(at.index))
    }

    /// Returns where the tags of a page may be, if it has any.
    pub(crate) fn tags(&self, at: SlotPage) -> Tags {
        let slot = self.slots.get(at.space).and_then(|s| s.get(at.slot));
        match slot.and_then(|s| s.tags.get(at.index)) {
            Some([SEVERAL, _]) | None => Tags::Anywhere,
            Some(tags) => Tags::At(tags.map(|tag| tag as usize)),
        }
    }

    /// Takes the page away. Returns where its tags may be, if it was here.
    pub(crate) fn take(&mut self, at: SlotPage) -> Option<Tags> {
        let writer = self.writer(at.space, at.slot)?;
        let was =
            writer.may_write(at.index) && writer.remove(at.index / 64, 1 << (at.index % 64)) != 0;
        was.then(|| self.tags(at))
    }

    /// Takes the pages away that other threads have asked for.
    pub(crate) fn take_asked(&mut self, taken: &mut Vec<Pages>) {
        self.take_from(|writer, f| writer.take_asked(f), |_, _| true, taken);
    }

    /// Takes all pages of the slots away for which `f` is true.
    pub(crate) fn take_all(&mut self, f: impl FnMut(usize, usize) -> bool, taken: &mut Vec<Pages>) {
        self.take_from(|writer, f| writer.take_all(f), f, taken);
    }

    fn take_from(
        &mut self,
        take: impl Fn(&Writer, &mut dyn FnMut(usize, u64)),
        mut is_meant: impl FnMut(usize, usize) -> bool,
        taken: &mut Vec<Pages>,
    ) {
        for (space, slots) in self.slots.iter().enumerate() {
            for (slot, pages) in slots.iter().enumerate() {
                if let Some(writer) = &pages.writer
                    && is_meant(space, slot)
                {
                    take(writer, &mut |word, bits| {
                        if bits != 0 {
                            taken.push(Pages {
                                space,
                                slot,
                                word,
                                bits,
                            });
                        }
                    });
                }
            }
        }
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
        let at = |slot, index| SlotPage {
            space: 0,
            slot,
            index,
        };
        let same = LARGE_ENTRIES as u64 * 0x1000;
        // The second slot has other memory, or half of the first one's.
        for second in [SIZE, SIZE / 2] {
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
            let (table, own) = (memory.table(), Arc::default());
            written.reset(&table);
            let known = |one, other| Tags::At([one, other]);
            assert_eq!(written.take(at(0, 5)), None);
            written.add(&table, &own, at(0, 5), 0x7000);
            written.add(&table, &own, at(0, 5), 0x7fff);
            written.add(&table, &own, at(0, 5), same + 0x7000);
            written.add(&table, &own, at(1, 5), 0);
            let mut all = Vec::new();
            written.take_all(|_, _| true, &mut all);
            let all: Vec<SlotPage> = all.into_iter().flat_map(Pages::places).collect();
            assert_eq!(all, [at(0, 5), at(1, 5)]);
            written.add(&table, &own, at(0, 5), 0x7000);
            written.add(&table, &own, at(1, 5), 0);
            assert_eq!(written.take(at(0, 5)), Some(known(7, 7)));
            assert_eq!(written.take(at(0, 5)), None);
            assert_eq!(written.take(at(1, 5)), Some(known(0, 0)));
            for gva in [0x9000, 0x7000, 0x9000] {
                written.add(&table, &own, at(0, 5), gva);
            }
            assert_eq!(written.take(at(0, 5)), Some(known(9, 7)));
            for gva in [0x9000, 0x7000, 0x8000, 0x7000] {
                written.add(&table, &own, at(0, 5), gva);
            }
            assert_eq!(written.take(at(0, 5)), Some(Tags::Anywhere));
        }
    }
}
