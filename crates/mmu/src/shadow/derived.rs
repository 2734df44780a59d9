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

use crate::{
    shadow::words::{Word, Words},
    walk::{Trail, Walk},
};

/// Maximum number of entries of a context. A context with more is flushed where others only catch up.
const MAX_ENTRIES: usize = 1024;
/// Number of places at which an entry is looked for before it is taken to be new.
const PLACES: usize = 256;
/// Maximum number of pages that are dropped one by one.
const MAX_CHANGED: usize = 128;
/// Maximum number of changed entries above the lowest level whose pages are dropped one by one.
const MAX_CHANGED_TABLES: usize = 16;
/// Number of entries up to which a context is not flushed from time to time, so that entries that it does not use any
/// more are forgotten.
const FEW_ENTRIES: usize = 64;

/// An entry of a guest table.
#[derive(Clone, Copy, Debug)]
struct Entry {
    /// The host address.
    hva: u64,
    /// The first address that the entry maps.
    gva: u64,
    /// Log2 of the number of bytes that the entry maps.
    shift: u8,
    /// True if the entry maps a large page.
    is_large: bool,
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
    /// These pages have other translations, as entries above the lowest level have changed.
    Tables,
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
    words: Words,
    /// The place at which the last entry with a hash was put.
    places: Box<[u16; PLACES]>,
    /// The place at which the last entry of the lowest level for a page was put.
    of_page: Box<[u16; PLACES]>,
    /// True if there are more entries than `entries` has room for.
    has_more: bool,
    /// The PDPTE registers, in PAE paging.
    pub(crate) pdpte: [u64; 4],
}

impl Derived {
    /// Makes the entries of a context that has no translations yet.
    pub(crate) fn new(pdpte: [u64; 4]) -> Self {
        Self {
            entries: Vec::new(),
            words: Words::new(),
            places: Box::new([u16::MAX; PLACES]),
            of_page: Box::new([u16::MAX; PLACES]),
            has_more: false,
            pdpte,
        }
    }

    /// Forgets all entries, because the context's translations are gone.
    pub(crate) fn clear(&mut self) {
        self.entries.clear();
        self.words.clear();
        self.has_more = false;
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
            let bits = if step.size == 4 { 10 } else { 9 };
            let shift = 12 + bits * (step.level - 1);
            let entry = Entry {
                hva: step.page.hva() + step.offset,
                gva: gva >> shift << shift,
                shift,
                is_large: step.level > 1 && step.level == walk.level,
                leaf: (step.level == 1).then_some(leaf),
            };
            self.add(entry, Word::of(&step));
        }
    }

    fn add(&mut self, new: Entry, word: Word) {
        let hash = new.hva.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let place = &mut self.places[(hash >> 56) as usize % PLACES];
        let n = usize::from(*place);
        if let Some(old) = self.entries.get_mut(n)
            && (old.hva, old.shift, old.gva) == (new.hva, new.shift, new.gva)
            && self.words.merge(n, &word)
        {
            if let (Some(old), Some(new)) = (&mut old.leaf, &new.leaf) {
                old.walk.dirty |= new.walk.dirty;
            }
            return;
        }
        if self.entries.len() == MAX_ENTRIES {
            self.has_more = true;
            self.words.are_not_all();
            return;
        }
        *place = self.entries.len() as u16;
        if new.leaf.is_some() {
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
            && entry.gva == gva
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
        let is_long_used = self.words.take_use() && self.entries.len() > FEW_ENTRIES;
        if self.has_more || is_long_used {
            return Found::Everything;
        }
        if self.words.are_same() {
            return Found::Pages;
        }
        let mut tables = 0;
        let mut n = 0;
        while let Some(entry) = self.entries.get(n) {
            if !self.words.has_changed(n) {
                n += 1;
                continue;
            }
            let entry = *entry;
            if entry.leaf.is_none() {
                if tables == MAX_CHANGED_TABLES || !self.remove_below(&entry, changed) {
                    return Found::Everything;
                }
                tables += 1;
                // Others have come to places in front of this one.
                n = 0;
            } else if changed.len() < MAX_CHANGED {
                changed.push(entry.gva);
                self.remove(n);
            } else {
                return Found::Everything;
            }
        }
        if tables != 0 {
            Found::Tables
        } else {
            Found::Pages
        }
    }

    fn remove(&mut self, n: usize) {
        self.entries.swap_remove(n);
        self.words.swap_remove(n);
    }

    /// Forgets an entry above the lowest level, and all entries for what it mapped, whose pages come to `changed`. Returns
    /// false if they are too many, or if there are large pages among them, which are not remembered one by one.
    fn remove_below(&mut self, table: &Entry, changed: &mut Vec<u64>) -> bool {
        let mut n = 0;
        while let Some(e) = self.entries.get(n) {
            if e.shift > table.shift || (e.gva ^ table.gva) >> table.shift != 0 {
                n += 1;
                continue;
            }
            let is_page = e.leaf.is_some();
            if e.is_large || is_page && changed.len() == MAX_CHANGED {
                return false;
            }
            if is_page {
                changed.push(e.gva);
            }
            self.remove(n);
        }
        true
    }

    /// Returns true if the guest has most likely taken down the address space. (It may have it still, with other tables.)
    pub(crate) fn is_gone(&self) -> bool {
        self.words.are_gone()
    }

    /// Returns the address of what generated code compares.
    pub(crate) fn head(&self) -> u64 {
        self.words.head()
    }

    /// Returns the number of entries.
    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }
}
