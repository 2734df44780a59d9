//! [`Derived`]: the entries of the guest's tables that a context's translations were derived from.
//!
//! A translation of the context is in L1, L2 or the fetch TLB only if every entry that its walk
//! went through is here, with the value that the walk saw or left. While all of them are still in
//! memory, a walk would find the same.
//!
//! Accessed and dirty flags count as changed only if they were set and are not any more: then
//! hardware would have to set them again.

use guest_memory::HostPage;
use x86_defs::paging::{A, D};

use crate::walk::Trail;

/// Entries of a context. One that has more of them is flushed when others only catch up.
const MAX_ENTRIES: usize = 1024;
/// Places where an entry is looked for before it is taken to be new.
const PLACES: usize = 256;
/// Pages that are dropped one by one.
const MAX_CHANGED: usize = 64;
/// After so many comparisons the context is flushed: what it does not use any more then costs no more.
const MAX_USES: u32 = 1024;
/// Unless it has no more entries than that.
const FEW_ENTRIES: usize = 64;

/// An entry of a guest table.
#[derive(Clone, Copy, Debug)]
struct Entry {
    page: HostPage,
    /// What the walk saw, with the flags that it has set.
    value: u64,
    /// Page that it maps; 0 for one above the lowest level.
    gva: u64,
    offset: u16,
    size: u8,
    level: u8,
}

impl Entry {
    #[inline]
    fn is_same(&self, now: u64) -> bool {
        (self.value ^ now) & (self.value | !(A | D)) == 0
    }
}

/// What a comparison has found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Found {
    /// Nothing, or only that these pages have other translations.
    Pages,
    /// Too much to tell.
    Everything,
}

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Derived {
    entries: Vec<Entry>,
    /// Where the entry of a hash was put last.
    places: Box<[u16; PLACES]>,
    /// There are more than `entries` has.
    has_more: bool,
    uses: u32,
    /// PDPTE registers, in PAE paging.
    pub(crate) pdpte: [u64; 4],
}

impl Derived {
    /// Of a context that has no translations yet.
    pub(crate) fn new(pdpte: [u64; 4]) -> Self {
        Self {
            entries: Vec::new(),
            places: Box::new([u16::MAX; PLACES]),
            has_more: false,
            uses: 0,
            pdpte,
        }
    }

    /// The context's translations are gone.
    pub(crate) fn clear(&mut self) {
        self.entries.clear();
        self.has_more = false;
        self.uses = 0;
    }

    /// A walk has been made whose translation is not global.
    pub(crate) fn note(&mut self, gva: u64, trail: &Trail) {
        for step in trail.steps() {
            self.add(Entry {
                page: step.page,
                value: step.value,
                gva: if step.level == 1 { gva & !0xfff } else { 0 },
                offset: step.offset as u16,
                size: step.size,
                level: step.level,
            });
        }
    }

    fn add(&mut self, new: Entry) {
        let hash = (new.page.hva() + u64::from(new.offset)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let place = &mut self.places[(hash >> 56) as usize % PLACES];
        if let Some(old) = self.entries.get_mut(usize::from(*place))
            && old.page == new.page
            && (old.offset, old.level, old.gva) == (new.offset, new.level, new.gva)
            && (old.value ^ new.value) & !(A | D) == 0
        {
            old.value |= new.value;
            return;
        }
        if self.entries.len() == MAX_ENTRIES {
            self.has_more = true;
            return;
        }
        *place = self.entries.len() as u16;
        self.entries.push(new);
    }

    /// Compares all entries with memory. Pages that are to be dropped come to `changed`; their
    /// entries go.
    pub(crate) fn compare(&mut self, changed: &mut Vec<u64>) -> Found {
        self.uses += 1;
        let is_long_used = self.uses > MAX_USES && self.entries.len() > FEW_ENTRIES;
        if self.has_more || is_long_used {
            return Found::Everything;
        }
        let mut n = 0;
        while let Some(e) = self.entries.get(n) {
            let now = e.page.load(e.offset.into(), e.size.into()).unwrap_or(0) as u64;
            if e.is_same(now) {
                n += 1;
                continue;
            }
            if e.level != 1 || changed.len() == MAX_CHANGED {
                return Found::Everything;
            }
            changed.push(e.gva);
            self.entries.swap_remove(n);
        }
        Found::Pages
    }

    /// How many there are.
    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }
}
