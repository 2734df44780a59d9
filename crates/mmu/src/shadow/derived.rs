//! [`Derived`]: the entries of the guest's tables that a context's translations were derived from.
//!
//! A translation of the context is in L1, L2 or the fetch TLB only if every entry that its walk
//! went through is here, with the value that the walk saw or left. While all of them are still in
//! memory, a walk would find the same.
//!
//! A context that has lost its tables of the first level is given back what its entries say when it is
//! compared ([`Derived::leaves`]): that is less than to walk again for each page.
//!
//! Accessed and dirty flags count as changed only if they were set and are not any more: then
//! hardware would have to set them again.

use guest_memory::HostWord;
use x86_defs::paging::{A, D};

use crate::walk::{Step, Trail, Walk};

/// Maximum number of entries of a context. A context with more is flushed where others only catch up.
const MAX_ENTRIES: usize = 1024;
/// Number of places at which an entry is looked for before it is taken to be new.
const PLACES: usize = 256;
/// Maximum number of pages that are dropped one by one.
const MAX_CHANGED: usize = 64;
/// Number of comparisons after which the context is flushed, so that entries that it does not use any more are forgotten.
const MAX_USES: u32 = 1024;
/// Number of entries up to which a context is not flushed for that reason.
const FEW_ENTRIES: usize = 64;

/// The word of guest memory with an entry of a guest table, as the walk saw it.
///
/// Words are kept apart from the rest of their entries, so that a comparison reads little.
#[derive(Clone, Copy, Debug)]
struct Word {
    at: HostWord,
    /// The entry, with the flags that the walk has set.
    value: u64,
    /// The bits that are compared.
    mask: u64,
}

impl Word {
    fn of(step: &Step) -> Self {
        let (bytes, shift) = match step.size {
            4 => (u64::from(u32::MAX), step.offset % 8 * 8),
            _ => (u64::MAX, 0),
        };
        Self {
            at: step.page.word(step.offset),
            value: (step.value & bytes) << shift,
            mask: ((step.value | !(A | D)) & bytes) << shift,
        }
    }

    /// The bits that have changed in memory.
    #[inline(always)]
    fn changed(&self) -> u64 {
        (self.at.load() ^ self.value) & self.mask
    }

    /// Returns true if `new` differs in accessed and dirty flags only.
    fn is_same(&self, new: &Self) -> bool {
        (self.value ^ new.value) & self.mask & new.mask == 0
    }
}

/// An entry of a guest table.
#[derive(Clone, Copy, Debug)]
struct Entry {
    /// The host address.
    hva: u64,
    /// The page that the entry maps; 0 for an entry above the lowest level.
    gva: u64,
    level: u8,
    /// Where an entry of the lowest level leads.
    leaf: Option<Leaf>,
}

/// Where an entry of the lowest level leads.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Leaf {
    pub walk: Walk,
    /// Host address of the page; 0: no data was accessed in it.
    pub hva: u64,
    /// The value of `Mmu::writes_epoch` during which the page may be written without any bookkeeping; 0 if it may not.
    pub writes: u64,
}

impl Derived {
    /// Bytes of memory that it takes.
    pub(crate) const BYTES: usize =
        MAX_ENTRIES * (size_of::<Entry>() + size_of::<Word>()) + 2 * size_of::<[u16; PLACES]>();
}

/// The result of a comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Found {
    /// No pages, or these pages, have other translations.
    Pages,
    /// More has changed than can be told.
    Everything,
}

fn page_place(gva: u64) -> usize {
    let hash = (gva >> 12).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (hash >> 56) as usize % PLACES
}

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Derived {
    entries: Vec<Entry>,
    /// The words of `entries`, in the same order.
    words: Vec<Word>,
    /// The place at which the last entry with a hash was put.
    places: Box<[u16; PLACES]>,
    /// The place at which the last entry of the lowest level for a page was put.
    of_page: Box<[u16; PLACES]>,
    /// True if there are more entries than `entries` has room for.
    has_more: bool,
    uses: u32,
    /// The PDPTE registers, in PAE paging.
    pub(crate) pdpte: [u64; 4],
}

impl Derived {
    /// Makes the entries of a context that has no translations yet.
    pub(crate) fn new(pdpte: [u64; 4]) -> Self {
        Self {
            entries: Vec::new(),
            words: Vec::new(),
            places: Box::new([u16::MAX; PLACES]),
            of_page: Box::new([u16::MAX; PLACES]),
            has_more: false,
            uses: 0,
            pdpte,
        }
    }

    /// Forgets all entries, because the context's translations are gone.
    pub(crate) fn clear(&mut self) {
        self.entries.clear();
        self.words.clear();
        self.has_more = false;
        self.uses = 0;
    }

    /// Notes the entries of a walk whose translation is not global.
    pub(crate) fn note(&mut self, gva: u64, walk: &Walk, trail: &Trail) {
        let leaf = Leaf {
            walk: Walk {
                gpa: walk.gpa & !0xfff,
                ..*walk
            },
            hva: 0,
            writes: 0,
        };
        for step in trail.steps() {
            let is_leaf = step.level == 1;
            let entry = Entry {
                hva: step.page.hva() + step.offset,
                gva: if is_leaf { gva & !0xfff } else { 0 },
                level: step.level,
                leaf: is_leaf.then_some(leaf),
            };
            self.add(entry, Word::of(&step));
        }
    }

    fn add(&mut self, new: Entry, word: Word) {
        let hash = new.hva.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let place = &mut self.places[(hash >> 56) as usize % PLACES];
        let n = usize::from(*place);
        if let (Some(old), Some(seen)) = (self.entries.get_mut(n), self.words.get_mut(n))
            && (old.hva, old.level, old.gva) == (new.hva, new.level, new.gva)
            && seen.is_same(&word)
        {
            seen.value |= word.value;
            seen.mask |= word.mask;
            if let (Some(old), Some(new)) = (&mut old.leaf, &new.leaf) {
                old.walk.dirty |= new.walk.dirty;
            }
            return;
        }
        if self.entries.len() == MAX_ENTRIES {
            self.has_more = true;
            return;
        }
        *place = self.entries.len() as u16;
        if new.level == 1 {
            self.of_page[page_place(new.gva)] = self.entries.len() as u16;
        }
        self.entries.push(new);
        self.words.push(word);
    }

    /// Notes that the page at `gva`, whose entry is known, was accessed. The page is at `hva`, and if `writes` is not 0 it
    /// may be written unnoticed while `Mmu::writes_epoch` is `writes`.
    pub(crate) fn note_page(&mut self, gva: u64, hva: u64, writes: u64) {
        let gva = gva & !0xfff;
        let place = usize::from(self.of_page[page_place(gva)]);
        if let Some(entry) = self.entries.get_mut(place)
            && (entry.gva, entry.level) == (gva, 1)
            && let Some(leaf) = &mut entry.leaf
        {
            if leaf.hva != hva || writes != 0 {
                leaf.writes = writes;
            }
            leaf.hva = hva;
        }
    }

    /// Returns the pages of the lowest level's entries, and where they lead.
    pub(crate) fn leaves(&self) -> impl Iterator<Item = (u64, Leaf)> {
        let leaf = |e: &Entry| Some((e.gva, e.leaf?));
        self.entries.iter().filter_map(leaf)
    }

    /// Compares all entries with memory. Pages that have to be dropped come to `changed`, and their entries are forgotten.
    pub(crate) fn compare(&mut self, changed: &mut Vec<u64>) -> Found {
        self.uses += 1;
        let is_long_used = self.uses > MAX_USES && self.entries.len() > FEW_ENTRIES;
        if self.has_more || is_long_used {
            return Found::Everything;
        }
        if self.words.iter().fold(0, |all, w| all | w.changed()) == 0 {
            return Found::Pages;
        }
        let mut n = 0;
        while let (Some(e), Some(word)) = (self.entries.get(n), self.words.get(n)) {
            if word.changed() == 0 {
                n += 1;
                continue;
            }
            if e.level != 1 || changed.len() == MAX_CHANGED {
                return Found::Everything;
            }
            changed.push(e.gva);
            self.entries.swap_remove(n);
            self.words.swap_remove(n);
        }
        Found::Pages
    }

    /// Returns the number of entries.
    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }
}

#[cfg(test)]
mod tests {
    use guest_memory::{GuestMemory, SlotConfig};
    use host::Mapping;
    use x86_defs::paging::{P, RW};

    use super::*;

    /// Of two entries of four bytes in one word.
    #[test]
    fn the_other_half_of_a_word_is_not_compared() {
        let ram = Mapping::anonymous(0x1000).unwrap();
        let memory = GuestMemory::new();
        let config = SlotConfig {
            slot: 0,
            flags: 0,
            gpa: 0,
            size: 0x1000,
            hva: ram.as_ptr() as u64,
        };
        memory.set_slot(config).unwrap();
        let page = memory.table().host_page(0, 0, true).unwrap();
        let value = 0x8000_5000 | P | RW | A;
        for (offset, other) in [(0x10, 0x14), (0x14, 0x10)] {
            page.store(offset, 4, value.into()).unwrap();
            let word = Word::of(&Step {
                level: 1,
                page,
                offset,
                size: 4,
                value,
            });
            let changed = |at, now: u64| {
                page.store(at, 4, now.into()).unwrap();
                word.changed() != 0
            };
            assert!(!changed(other, 0x1234_5678));
            assert!(!changed(offset, value | D));
            assert!(changed(offset, value & !A));
            assert!(changed(offset, value ^ 0x8000_0000));
            assert!(!changed(offset, value));
            assert!(!changed(other, 0));
        }
    }
}
