//! L1: direct-mapped tables from guest page to host page.
//!
//! ```text
//! entry = table[(gva >> 12) & (len - 1)]        16 bytes: {tag, host page}
//! offset = gva - entry.tag                      in the page if and only if hit
//! hit  ⇔  offset <= 4096 - size                 one compare, any alignment
//! ```
//!
//! Generated code probes the tables inline: the layout is fixed.

use guest_memory::HostPage;

/// Tag of the empty entry `i`: a page that another entry holds, so that no
/// address which selects entry `i` can match it. (No single constant would do:
/// generated code compares nothing but the offset from the tag.)
pub const fn empty_tag(i: usize) -> u64 {
    if i == 0 { 0x1000 } else { 0 }
}
/// Entries of a new table.
pub const MIN_ENTRIES: usize = 1 << 10;
/// Entries of the largest table.
pub const MAX_ENTRIES: usize = 1 << 14;

/// An entry.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Entry {
    /// Guest page, or [`empty_tag`].
    pub tag: u64,
    /// Its host page.
    pub host: HostPage,
}

const _: () = assert!(size_of::<Entry>() == 16);
const _: () = assert!(core::mem::offset_of!(Entry, tag) == 0);
const _: () = assert!(core::mem::offset_of!(Entry, host) == 8);
const _: () = assert!(MIN_ENTRIES.is_power_of_two() && MAX_ENTRIES.is_power_of_two());

impl Entry {
    fn empty(i: usize) -> Self {
        Self {
            tag: empty_tag(i),
            host: HostPage::nowhere(),
        }
    }
}

/// A direct-mapped table.
#[derive(Debug)]
pub struct Table {
    entries: Box<[Entry]>,
    /// Bit per entry: the translation is global.
    global: Box<[u64]>,
    /// Entries filled since the last flush.
    filled: usize,
    /// Live entries replaced since the last change of size.
    conflicts: usize,
    /// Flushes in a row that found the table nearly empty.
    idle_flushes: u8,
}

impl Default for Table {
    fn default() -> Self {
        Self::with_entries(MIN_ENTRIES)
    }
}

impl Table {
    fn with_entries(n: usize) -> Self {
        Self {
            entries: (0..n).map(Entry::empty).collect(),
            global: vec![0; n / 64].into_boxed_slice(),
            filled: 0,
            conflicts: 0,
            idle_flushes: 0,
        }
    }

    /// The entries, for generated code; valid until the next call that takes `&mut self`.
    pub fn as_ptr(&self) -> *const Entry {
        self.entries.as_ptr()
    }

    /// Number of entries, a power of two.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Never true.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    #[inline(always)]
    fn index(&self, gva: u64) -> usize {
        (gva >> 12) as usize & (self.entries.len() - 1)
    }

    /// The entry that would hold `gva`'s page, and `gva`'s offset from its tag.
    /// It is a hit if the access's bytes are in the page at that offset, which
    /// [`HostPage`]'s accessors check.
    #[inline(always)]
    pub fn probe(&self, gva: u64) -> (HostPage, u64) {
        let e = &self.entries[self.index(gva)];
        (e.host, gva.wrapping_sub(e.tag))
    }

    /// Host page of `gva`'s page.
    #[inline]
    pub fn find(&self, gva: u64) -> Option<HostPage> {
        let (host, offset) = self.probe(gva);
        (offset < 4096).then_some(host)
    }

    /// Enters a translation.
    pub fn insert(&mut self, gva: u64, host: HostPage, global: bool) {
        let tag = gva & !0xfff;
        let old = self.entries[self.index(gva)].tag;
        if old == empty_tag(self.index(gva)) {
            self.filled += 1;
        } else if old != tag {
            self.conflicts += 1;
            // Each entry was replaced twice: the working set is larger than the table.
            if self.conflicts > 2 * self.entries.len() && self.entries.len() < MAX_ENTRIES {
                self.resize(self.entries.len() * 2);
            }
        }
        let i = self.index(gva);
        self.entries[i] = Entry { tag, host };
        let bit = 1 << (i % 64);
        if global {
            self.global[i / 64] |= bit;
        } else {
            self.global[i / 64] &= !bit;
        }
    }

    fn resize(&mut self, n: usize) {
        let old = core::mem::replace(self, Self::with_entries(n));
        for (i, e) in old.entries.iter().enumerate() {
            if e.tag != empty_tag(i) {
                let global = old.global[i / 64] >> (i % 64) & 1 != 0;
                self.insert(e.tag, e.host, global);
            }
        }
        self.conflicts = 0;
    }

    /// Forgets everything.
    pub fn flush(&mut self) {
        if self.filled == 0 {
            return;
        }
        if self.entries.len() > MIN_ENTRIES && self.filled < self.entries.len() / 8 {
            self.idle_flushes += 1;
            if self.idle_flushes == 8 {
                *self = Self::with_entries(self.entries.len() / 2);
                return;
            }
        } else {
            self.idle_flushes = 0;
        }
        self.fill_empty(0..self.entries.len());
        self.global.fill(0);
        self.filled = 0;
    }

    /// Forgets what is not global.
    pub fn flush_non_global(&mut self) {
        if self.filled == 0 {
            return;
        }
        if self.global.iter().all(|w| *w == 0) {
            self.flush();
            return;
        }
        self.filled = 0;
        for word in 0..self.global.len() {
            let kept = self.global[word];
            self.filled += kept.count_ones() as usize;
            if kept == 0 {
                self.fill_empty(word * 64..(word + 1) * 64);
                continue;
            }
            for i in (0..64).filter(|i| kept >> i & 1 == 0) {
                self.entries[word * 64 + i] = Entry::empty(word * 64 + i);
            }
        }
    }

    fn fill_empty(&mut self, range: core::ops::Range<usize>) {
        let first = range.start == 0;
        self.entries[range].fill(Entry::empty(1));
        if first {
            self.entries[0] = Entry::empty(0);
        }
    }

    /// Forgets one page.
    pub fn flush_page(&mut self, gva: u64) {
        let i = self.index(gva);
        if self.entries[i].tag == gva & !0xfff {
            self.clear(i);
        }
    }

    fn clear(&mut self, i: usize) {
        self.entries[i] = Entry::empty(i);
        self.global[i / 64] &= !(1 << (i % 64));
    }

    /// Forgets the entries for which `f` is true; returns how many.
    pub fn flush_where(&mut self, mut f: impl FnMut(&Entry) -> bool) -> usize {
        if self.filled == 0 {
            return 0;
        }
        let mut n = 0;
        for i in 0..self.entries.len() {
            let e = &self.entries[i];
            if e.tag != empty_tag(i) && f(e) {
                self.clear(i);
                n += 1;
            }
        }
        n
    }
}

/// Which aligned regions of the address space have entries that come from large
/// pages: INVLPG has to drop all of such a page (SDM vol. 3, 4.10.4.1), and most
/// addresses need no search.
#[derive(Clone, Debug, Default)]
pub struct RegionFilter {
    /// 2 MiB regions, hashed.
    large: [u64; 16],
    /// 1 GiB regions, hashed.
    huge: u64,
}

impl RegionFilter {
    fn large(gva: u64) -> (usize, u64) {
        let h = (gva >> 21).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 54;
        ((h / 64) as usize % 16, 1 << (h % 64))
    }
    fn huge(gva: u64) -> u64 {
        1 << ((gva >> 30).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 58)
    }
    /// An entry at `gva` comes from a leaf of this level.
    pub fn add(&mut self, gva: u64, level: u8) {
        match level {
            0 | 1 => {}
            2 => {
                let (word, bit) = Self::large(gva);
                self.large[word] |= bit;
                // A 4 MiB page is two such regions.
                let (word, bit) = Self::large(gva ^ 1 << 21);
                self.large[word] |= bit;
            }
            _ => self.huge |= Self::huge(gva),
        }
    }
    /// log2 of the region around `gva` that has to be searched, if any.
    pub fn region_shift(&self, gva: u64) -> Option<u32> {
        if self.huge & Self::huge(gva) != 0 {
            return Some(30);
        }
        let (word, bit) = Self::large(gva);
        // 22: covers 4 MiB pages as well.
        (self.large[word] & bit != 0).then_some(22)
    }
    /// Nothing comes from large pages.
    pub fn clear(&mut self) {
        *self = Self::default();
    }
}
