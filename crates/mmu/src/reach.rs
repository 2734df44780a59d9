//! [`Reach`]: the second level of the TLB. Generated code probes it when the first level does not have the page.
//!
//! It has two direct-mapped tables, both of entries of 16 bytes:
//!
//! ```text
//! small   a 4 KiB page      index: gva bits 25:12, then bits 26 and up XOR the key's
//! large   a piece of 2 MiB  index: gva bits 25:21, then bits 26 and up XOR the key's
//!
//! tag     gva bits 63:26 | token            bits 25:12 follow from the index
//! data    writes' round | host page | GLOBAL | class
//! ```
//!
//! * The *token* stands for an address space since its last flush, or for what is global. A flush gives the address space
//!   another token; no entry is touched.
//! * The *class* is what the guest's tables and the page's key allow ([`crate::view::Rights::class`]). A view has a bit for each class that it
//!   may read, and write: so contexts and views share entries, and PKRU or CR0.WP change none.
//! * A page may be written with nothing to be noted if its entry's *round* is the current one. This implies all that a
//!   write tag of the first level does (see the crate), and that [`crate::written`] knows at which index the first level
//!   would have the tag: who takes a page's tags away looks at the entries with this index ([`Reach::forbid_writes`]), or begins
//!   another round.
//! * An entry of 2 MiB has two bits for each of its pages: may it be read, may it be written. So slots' borders, devices, code
//!   and dirty logging within it are exact. A leaf of 1 GiB is entered in such pieces as they are accessed.
//!
//! The small table grows by doubling while its entries displace each other. Entries that a larger mask makes unreachable are lost;
//! none becomes wrong, as its tag and the low bits of its place say all of its address.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use guest_memory::tagged::{self, L2Key};
use host::LazyArray;

use crate::l1::ENTRIES;

/// The bits of a tag that are the token.
pub const TOKEN_BITS: u32 = 26;
/// Number of entries of the large table.
pub const LARGE_ENTRIES: usize = 1 << LARGE_BITS;
const LARGE_BITS: u32 = 10;
/// log2 of a large entry's size in guest memory.
pub const PIECE_SHIFT: u32 = 21;
/// Number of pages of a large entry.
pub(crate) const PIECE_PAGES: usize = 1 << (PIECE_SHIFT - 12);
/// log2 of the bytes of an entry: tag and data.
pub const ENTRY_SHIFT: u32 = 4;
const MAP_WORDS: usize = PIECE_PAGES / 64;
/// Offsets in the large table of the first entry's bits for reads, and for writes. The next entry's lie [`MAPS_SCALE`] times
/// as far behind as the entry itself.
pub const LARGE_MAPS: [usize; 2] = [
    LARGE_ENTRIES << ENTRY_SHIFT,
    (LARGE_ENTRIES << ENTRY_SHIFT) + 8 * MAP_WORDS,
];
/// log2 of the bytes of a large entry's maps over those of the entry.
pub const MAPS_SCALE: u32 = 3;
const _: () = assert!(2 * 8 * MAP_WORDS == 1 << (ENTRY_SHIFT + MAPS_SCALE));
/// Bit of an entry's data: the translation is global.
pub const GLOBAL: u64 = 1 << 6;
/// Bits of a large entry's data: all bits of its map for reads, or for writes, are set.
pub const ALL: [u64; 2] = [1 << 7, 1 << 8];
/// Lowest bit of the round in an entry's data.
pub const ROUND_SHIFT: u32 = 48;

/// The bits of an entry's data that are the page.
const PAGE: u64 = ((1 << ROUND_SHIFT) - 1) & !0xfff;
const CLASS: u64 = 63;
/// Bits of a small entry's index that are those of the first level's.
const SAME_INDEX: u32 = ENTRIES.trailing_zeros();
/// The bits of an address that each entry's place implies.
const TAGGED: u64 = !((1 << TOKEN_BITS) - 1);
const _: () = assert!(TOKEN_BITS == 12 + SAME_INDEX);

/// A page that the second level has.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Found {
    pub hva: u64,
    pub class: u64,
    pub global: bool,
    /// True if the page may be written without any bookkeeping.
    pub writable: bool,
}

/// A translation that is entered.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Leaf {
    pub gva: u64,
    pub hva: u64,
    pub class: u64,
    pub global: bool,
    pub writable: bool,
}

impl Leaf {
    fn data(&self, round: u64) -> u64 {
        let global = if self.global { GLOBAL } else { 0 };
        let round = if self.writable { round } else { 0 };
        self.hva & PAGE | self.class | global | round << ROUND_SHIFT
    }
}

/// The second level.
#[derive(Debug)]
pub(crate) struct Reach {
    small: LazyArray<AtomicU64>,
    large: LazyArray<AtomicU64>,
    /// Host page of each large entry, or one that it had: those that may have a page of the same first-level index are neighbours, as all
    /// of them are looked at for each page that is to be noted again.
    hosts: Box<[u64]>,
    /// The current round of writes; never 0.
    round: u64,
    /// True if words have changed that views have copies of.
    pub changed: bool,
    /// Number of entries of the small table: now, and at most.
    entries: usize,
    max_entries: usize,
    /// Number of live entries that were displaced since the small table grew.
    displaced: usize,
    last_token: u64,
}

/// Large entries by the first-level indices that their pages may have.
const GROUPS: usize = ENTRIES / PIECE_PAGES;
const GROUP_LEN: usize = LARGE_ENTRIES / GROUPS;
const _: () = assert!(GROUPS.is_power_of_two() && GROUPS * GROUP_LEN == LARGE_ENTRIES);

/// The large entries of a group that may be of the 2 MiB of host memory from `first` on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LargeEntries {
    group: usize,
    first: u64,
    /// A bit per entry of the group.
    which: u32,
}

const _: () = assert!(GROUP_LEN <= u32::BITS as usize);

/// Number of entries of the small table at first.
const FIRST_ENTRIES: usize = ENTRIES;
/// Number of entries up to which the small table grows also for address spaces that displace each other's. In the smallest
/// table they all have the same places.
const MIXED_ENTRIES: usize = 4 * ENTRIES;
/// Maximum number of bytes that the small table reaches by default, in pages of 4 KiB.
pub(crate) const DEFAULT_PAGES: usize = 1 << 20;

/// Smallest size of the small table. Without memory even for this the process ends, as when a `Box` cannot be had.
fn or_abort(array: std::io::Result<LazyArray<AtomicU64>>) -> LazyArray<AtomicU64> {
    let layout = core::alloc::Layout::new::<[u64; ENTRIES]>();
    array.unwrap_or_else(|_| std::alloc::handle_alloc_error(layout))
}

fn load(words: &[AtomicU64], i: usize) -> u64 {
    words.get(i).map_or(0, |w| w.load(Relaxed))
}

fn store(words: &[AtomicU64], i: usize, value: u64) {
    if let Some(word) = words.get(i) {
        word.store(value, Relaxed);
    }
}

impl Reach {
    /// Makes a second level that reaches `pages` of 4 KiB at most, or fewer if there is no memory for that.
    pub(crate) fn new(pages: usize) -> Self {
        let mut max_entries = pages.next_power_of_two().clamp(FIRST_ENTRIES, 1 << 24);
        let small = loop {
            match LazyArray::new(2 * max_entries) {
                Err(_) if max_entries > FIRST_ENTRIES => max_entries /= 2,
                small => break or_abort(small),
            }
        };
        let large = or_abort(LazyArray::new((2 + 2 * MAP_WORDS) * LARGE_ENTRIES));
        small.advise_huge();
        let mut reach = Self {
            small,
            large,
            hosts: vec![0; LARGE_ENTRIES].into_boxed_slice(),
            round: 1,
            changed: true,
            entries: 0,
            max_entries,
            displaced: 0,
            last_token: 0,
        };
        reach.resize(FIRST_ENTRIES);
        reach
    }

    fn resize(&mut self, entries: usize) {
        self.entries = entries;
        self.displaced = 0;
        self.changed = true;
    }

    /// Returns the words by which generated code finds the tables.
    pub(crate) fn publish(&self, to: &mut tagged::Reach) {
        to.small = self.small.as_ptr() as u64;
        to.small_mask = 16 * (self.entries as u64 - 1);
        to.large = self.large.as_ptr() as u64;
        to.round = self.round << ROUND_SHIFT;
        to.page_mask = PAGE;
    }

    /// Returns the number of pages that the small table has entries for.
    pub(crate) fn entries(&self) -> usize {
        self.entries
    }

    /// Returns a key that no entry has. `None` once all have been given out: the caller then calls [`Self::clear`] and gives
    /// everybody another key.
    pub(crate) fn new_key(&mut self) -> Option<L2Key> {
        self.last_token += 1;
        let token = self.last_token;
        if token >= 1 << TOKEN_BITS {
            return None;
        }
        let hash = token.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        Some(L2Key {
            token,
            small: hash >> 32 << (SAME_INDEX + ENTRY_SHIFT),
            large: hash >> 32 << (TOKEN_BITS - PIECE_SHIFT + ENTRY_SHIFT),
            unused: 0,
        })
    }

    /// Forgets all entries, and all tokens that were given out.
    pub(crate) fn clear(&mut self) {
        for words in [&self.small[..], &self.large[..]] {
            words.iter().for_each(|w| w.store(0, Relaxed));
        }
        self.last_token = 0;
    }

    fn small_place(&self, gva: u64, key: L2Key) -> usize {
        2 * (((gva >> 12) ^ (key.small >> ENTRY_SHIFT)) as usize & (self.entries - 1))
    }

    /// Returns the first word of the piece's entry.
    fn large_place(gva: u64, key: L2Key) -> usize {
        let n = (gva >> PIECE_SHIFT) ^ (key.large >> ENTRY_SHIFT);
        2 * (n as usize & (LARGE_ENTRIES - 1))
    }

    /// Returns the first word of a map, which is at the offset `map` for the first entry.
    fn map_start(place: usize, map: usize) -> usize {
        map / 8 + (place << MAPS_SCALE)
    }

    /// Returns the words that have a page's bits for reads and for writes, and the bit.
    fn map_places(place: usize, gva: u64) -> ([usize; 2], u64) {
        let page = (gva >> 12) as usize % PIECE_PAGES;
        let word = |map: usize| Self::map_start(place, map) + page / 64;
        (LARGE_MAPS.map(word), 1 << (page % 64))
    }

    /// Finds a page, as generated code does.
    pub(crate) fn find(&self, gva: u64, key: L2Key) -> Option<Found> {
        let tag = gva & TAGGED | key.token;
        let found = |data: u64, hva, writable| Found {
            hva,
            class: data & CLASS,
            global: data & GLOBAL != 0,
            writable: writable && data >> ROUND_SHIFT == self.round,
        };
        let place = Self::large_place(gva, key);
        if load(&self.large, place) == tag {
            let data = load(&self.large, place + 1);
            let (words, bit) = Self::map_places(place, gva);
            let [may_read, may_write] = words.map(|word| load(&self.large, word) & bit != 0);
            let offset = gva % (1 << PIECE_SHIFT);
            let hva = (data & PAGE) + (offset & !0xfff);
            return may_read.then(|| found(data, hva, may_write));
        }
        let place = self.small_place(gva, key);
        if load(&self.small, place) != tag {
            return None;
        }
        let data = load(&self.small, place + 1);
        Some(found(data, data & PAGE, true))
    }

    /// Enters a page. Entries with one of the keys `others` are worth keeping.
    pub(crate) fn insert(&mut self, leaf: &Leaf, key: L2Key, others: [L2Key; 2]) {
        let tag = leaf.gva & TAGGED | key.token;
        let mut data = leaf.data(self.round);
        let mut place = self.small_place(leaf.gva, key);
        let old = load(&self.small, place);
        if old == tag {
            // A page that may be written unnoticed stays so.
            let same = |d: u64| d & (PAGE | CLASS);
            let known = load(&self.small, place + 1);
            if !leaf.writable && same(known) == same(data) {
                data = known;
            }
        } else if old != 0
            && (self.entries < MIXED_ENTRIES || others.iter().any(|k| old & !TAGGED == k.token))
        {
            self.displaced += 1;
            if self.displaced > self.entries / 4 && self.entries < self.max_entries {
                self.resize(2 * self.entries);
                place = self.small_place(leaf.gva, key);
            }
        }
        store(&self.small, place, tag);
        store(&self.small, place + 1, data);
    }

    /// Returns true if a page can be entered that was not asked for: it is not here yet, and would not take the place of an
    /// entry with one of these keys.
    pub(crate) fn has_room(&self, gva: u64, key: L2Key, others: [L2Key; 2]) -> bool {
        let old = load(&self.small, self.small_place(gva, key));
        others.iter().all(|k| old & !TAGGED != k.token)
    }

    /// Enters the page of `leaf` in the entry of its 2 MiB, whose first page is at `leaf.hva`. `fresh` is called for an
    /// entry that is new, and gives the bits for reads. The host page of an entry is that of its piece's first page, so it
    /// may lie before the slot.
    pub(crate) fn insert_large(
        &mut self,
        leaf: &Leaf,
        key: L2Key,
        fresh: impl FnOnce(&mut [u64; PIECE_PAGES / 64]),
    ) {
        let tag = leaf.gva & TAGGED | key.token;
        let place = Self::large_place(leaf.gva, key);
        let old = load(&self.large, place + 1);
        let data = Leaf {
            writable: true,
            ..*leaf
        }
        .data(self.round);
        let same = |d: u64| d & (PAGE | CLASS | GLOBAL);
        let is_old = load(&self.large, place) == tag && same(old) == same(data);
        let set = |map: usize, bits: [u64; MAP_WORDS]| {
            for (n, bits) in bits.into_iter().enumerate() {
                store(&self.large, Self::map_start(place, map) + n, bits);
            }
        };
        if !is_old {
            let mut reads = [0; MAP_WORDS];
            fresh(&mut reads);
            set(LARGE_MAPS[0], reads);
        }
        let is_new = !is_old || old >> ROUND_SHIFT != self.round;
        if is_new {
            set(LARGE_MAPS[1], [0; MAP_WORDS]);
            store(&self.large, place, tag);
            store(&self.large, place + 1, data);
            let n = place / 2;
            if let Some(host) = self.hosts.get_mut(n % GROUPS * GROUP_LEN + n / GROUPS) {
                *host = data & PAGE;
            }
        }
        let (words, bit) = Self::map_places(place, leaf.gva);
        let mut may_be_full = is_new;
        for (word, is_set) in words.into_iter().zip([true, leaf.writable]) {
            if is_set {
                let before = load(&self.large, word);
                if before & bit == 0 {
                    store(&self.large, word, before | bit);
                    may_be_full |= before | bit == u64::MAX;
                }
            }
        }
        if may_be_full {
            self.note_full(place);
        }
    }

    /// Notes in a large entry's data which of its maps are full.
    fn note_full(&self, place: usize) {
        let mut data = load(&self.large, place + 1);
        for (map, all) in LARGE_MAPS.into_iter().zip(ALL) {
            let first = Self::map_start(place, map);
            let is_full = (first..first + MAP_WORDS).all(|n| load(&self.large, n) == u64::MAX);
            data = if is_full { data | all } else { data & !all };
        }
        store(&self.large, place + 1, data);
    }

    /// Forgets the page, or the large page that it is part of.
    pub(crate) fn flush_page(&self, gva: u64, key: L2Key) {
        let tag = gva & TAGGED | key.token;
        let (small, large) = (self.small_place(gva, key), Self::large_place(gva, key));
        for (words, place) in [(&self.small, small), (&self.large, large)] {
            if load(words, place) == tag {
                store(words, place, 0);
            }
        }
    }

    /// Forgets the pieces of the aligned region of `1 << shift` bytes around `gva`.
    pub(crate) fn flush_region(&self, gva: u64, shift: u32, key: L2Key) {
        let first = gva >> shift << shift;
        let pieces = (1 << (shift - PIECE_SHIFT)) as u64;
        for n in 0..pieces {
            let piece = first + (n << PIECE_SHIFT);
            let place = Self::large_place(piece, key);
            if load(&self.large, place) == piece & TAGGED | key.token {
                store(&self.large, place, 0);
            }
        }
    }

    /// Makes the next write of the page at `hva` be noted. `index` is the index at which the first level has the page's tags.
    /// `last` is what the last call has found, if no page was entered since.
    pub(crate) fn forbid_writes(&self, index: usize, hva: u64, last: &mut Option<LargeEntries>) {
        const ROUND: u64 = u64::MAX << ROUND_SHIFT;
        for n in (index % ENTRIES..self.entries).step_by(ENTRIES) {
            let data = load(&self.small, 2 * n + 1);
            if data & PAGE == hva {
                store(&self.small, 2 * n + 1, data & !ROUND);
            }
        }
        let gva = (index as u64) << 12;
        let first = hva.wrapping_sub(gva % (1 << PIECE_SHIFT));
        let group = index / PIECE_PAGES % GROUPS;
        let known = last.filter(|known| (known.group, known.first) == (group, first));
        let found = known.unwrap_or_else(|| {
            let hosts = self.hosts.get(group * GROUP_LEN..).unwrap_or_default();
            let is_same = |(n, host): (usize, &u64)| u32::from(*host == first) << n;
            let hosts = (0..GROUP_LEN).zip(hosts);
            LargeEntries {
                group,
                first,
                which: hosts.map(is_same).fold(0, |all, bit| all | bit),
            }
        });
        *last = Some(found);
        let mut which = found.which;
        while which != 0 {
            let n = which.trailing_zeros() as usize;
            which &= which - 1;
            let place = 2 * (n * GROUPS + group);
            let data = load(&self.large, place + 1);
            if data & PAGE == first {
                let ([_, writes], bit) = Self::map_places(place, gva);
                store(&self.large, writes, load(&self.large, writes) & !bit);
                store(&self.large, place + 1, data & !ALL[1]);
            }
        }
    }

    /// Makes the next write of each page be noted again.
    pub(crate) fn begin_round(&mut self) {
        self.round += 1;
        if self.round >> (64 - ROUND_SHIFT) != 0 {
            let keep = self.last_token;
            self.clear();
            self.last_token = keep;
            self.round = 1;
        }
        self.changed = true;
    }
}
