//! [`TaggedPages`]: the entries of a TLB, laid out so that generated code reaches all of them from one base register.
//!
//! ```text
//! base - 160 … base - 13   words that belong to generated code
//! base - 12                the single entry, which is compared without an index
//! base + 4                 the pages of the indexed entries
//! behind the pages         their tags for reads, then their tags for writes
//! behind the tags          the per-site entries, which are compared without an index, too; what is known of their use
//! behind those             room for the bytes of an operand that straddles two pages
//! behind that              the page guards: a cross-page branch compares its target's page with one of them
//! behind those             the inline caches: each has the last target of one branch by a pointer in memory
//! last                     [`Reach`]: how a miss finds second-level entries, and which first-level entries are filled
//! ```
//!
//! In each of the arrays an entry is at eight times its index, which an addressing mode can express. (If tag and page
//! were side by side, each probe would need an addition.) Reads and writes share an entry's page and have a tag each.
//!
//! The low 16 bits of the base are [`Size::base`]. BEXTR takes the position and length of the bits to extract from the low
//! bits of a register, so the base serves as that operand as well, and says how many of the entries are used. The words
//! used between calls lie so close below the base that their displacements take one byte.
//!
//! Offsets are those of the largest size. Of it the small size uses the first part of each array, so that
//! [`SMALL_IN_BLOCK`] sets of tables lie in one another's gaps.

use core::{mem::offset_of, ptr::NonNull, sync::atomic::AtomicU64};
use std::{io, sync::Arc};

use host::LazyArray;

use crate::HostPage;

/// An entry of a TLB, laid out for generated code. In a zeroed entry the page is address 0, so holders make sure that
/// nothing matches its tag.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TaggedPage {
    /// Identifies the guest's page.
    pub tag: u64,
    /// The host page.
    pub host: HostPage,
}

/// How many indexed entries there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Size {
    /// 64 MiB in pages of 4 KiB.
    Small,
    /// 2 GiB in such pages.
    Large,
}

impl Size {
    /// Returns log2 of the number of entries.
    const fn bits(self) -> usize {
        match self {
            Self::Small => 14,
            Self::Large => 19,
        }
    }
    /// Returns the number of entries.
    pub const fn entries(self) -> usize {
        1 << self.bits()
    }
    /// Returns the number of sets of tables in a block.
    const fn sets(self) -> usize {
        match self {
            Self::Small => SMALL_IN_BLOCK,
            Self::Large => 1,
        }
    }
    /// Returns the base's low bits: `start | length << 8` of the bits that BEXTR extracts.
    pub const fn base(self) -> usize {
        12 | self.bits() << 8
    }
}

/// Number of indexed entries of the largest size.
const MOST: usize = Size::Large.entries();
/// Offset from the base of the indexed entries' pages.
pub const PAGES: i32 = 4;
/// Offset from the base of the tags of the indexed entries for reads (`kind` 0) or writes (1).
pub const fn tags(kind: usize) -> i32 {
    PAGES + 8 * (MOST * (1 + kind)) as i32
}
/// Offset from the base of the single entry, which needs no index.
pub const SINGLE: i32 = PAGES - size_of::<TaggedPage>() as i32;
/// Number of per-site entries.
pub const SITE_ENTRIES: usize = 512;
/// Offset from the base of per-site entry `n`.
pub const fn site_entry(n: usize) -> i32 {
    tags(2) + (n * size_of::<TaggedPage>()) as i32
}
/// Offset from the base of the bits that say which per-site entries are used.
pub const fn site_entries_used() -> i32 {
    site_entry(SITE_ENTRIES)
}
/// Offset from the base of the [`SEEN`] bits for the pages that per-site entries have held.
pub const fn site_entries_seen() -> i32 {
    site_entries_used() + SITE_ENTRIES as i32 / 8
}
/// Number of bits for the pages that per-site entries have held.
pub const SEEN: usize = 1024;
/// Offset from the base of the 32-bit counts, one for each per-site entry, which generated code maintains.
pub const fn site_entry_counts() -> i32 {
    site_entries_seen() + SEEN as i32 / 8
}
/// Offset from the base of the room for [`BOUNCE_LEN`] bytes from each of two pages, which generated code uses.
pub const fn bounce() -> i32 {
    site_entry_counts() + 4 * SITE_ENTRIES as i32
}
/// Bytes of the largest operand that is not a block of memory.
pub const BOUNCE_LEN: usize = 32;
/// Number of page guards.
pub const PAGE_GUARDS: usize = 4096;
/// Offset from the base of page guard `n`.
pub const fn page_guard(n: usize) -> i32 {
    bounce() + (2 * BOUNCE_LEN + n * size_of::<u64>()) as i32
}

/// Number of inline caches.
pub const INLINE_CACHES: usize = 1024;
/// Offset from the base of the bits that say which inline caches are used.
pub const fn inline_caches_used() -> i32 {
    page_guard(PAGE_GUARDS)
}
/// Offset from the base of inline cache `n`.
pub const fn inline_cache(n: usize) -> i32 {
    inline_caches_used() + (INLINE_CACHES / 8 + n * size_of::<InlineCache>()) as i32
}
/// Three words that generated code defines.
pub type InlineCache = [u64; 3];

/// Offset from the base of [`Reach`].
pub const fn reach() -> i32 {
    inline_cache(INLINE_CACHES)
}

/// The key by which an address space's entries are found in the second level.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct L2Key {
    /// Identifies the address space since its last flush: no other address space, and no time before the flush, has the
    /// same token.
    pub token: u64,
    /// Number that the byte offset of a 4 KiB page's entry is XORed with.
    pub small: u64,
    /// Number that the byte offset of a 2 MiB piece's entry is XORed with.
    pub large: u64,
    /// Pads the key to a power of two, so that generated code selects a key by one bit.
    pub unused: u64,
}

/// Number of entries whose use is noted together.
pub const GROUP: usize = 64;
/// Largest number of groups.
const GROUPS: usize = MOST / GROUP;

/// What generated code needs to serve a miss from the second level: the keys of its entries, the rights that this view
/// gives to them, and where to note which first-level entries are filled.
#[repr(C)]
#[derive(Debug)]
pub struct Reach {
    /// The keys of the address space and of global pages.
    pub keys: [L2Key; 2],
    /// A bit per class of pages, for reads and for writes: the access is allowed. With no bit set, the second level
    /// serves nothing.
    pub rights: [u64; 2],
    /// Address of the table of small pages.
    pub small: u64,
    /// Mask of the byte offset in that table.
    pub small_mask: u64,
    /// Address of the table of large pages.
    pub large: u64,
    /// The current round, at its place in an entry's data: only entries of this round may be written unnoticed.
    pub round: u64,
    /// The bits of an entry's data that are the host page's address.
    pub page_mask: u64,
    /// Misses served from the second level, counted by generated code.
    pub hits: u64,
    /// Bit per group: some entry of it may be filled.
    pub used: [u64; GROUPS / 64],
    /// Number of the view that the entries belong to, which generated code compares.
    pub view: u64,
    /// For each page number modulo [`SEEN_PAGES`], the bits above of the last such page that was found in a large entry and
    /// did not enter the first level. Generated code uses it as a hint.
    pub seen_pages: [u8; SEEN_PAGES],
    /// Bit per entry: it may have been filled with a global page.
    pub global: [u64; GROUPS],
    /// Bit per entry: it was filled with a page that is not global since all such were flushed last.
    pub private: [u64; GROUPS],
}

/// Number of pages that [`Reach::seen_pages`] remembers.
pub const SEEN_PAGES: usize = 1024;

/// Number of words below the single entry.
pub const WORDS: usize = 18;
/// Number of those words that an 8-bit displacement reaches.
pub const SHORT_WORDS: usize = 14;
/// Offset from the base of word `n`.
pub const fn word(n: usize) -> i32 {
    assert!(n < WORDS);
    SINGLE - 8 * (1 + n as i32)
}

/// Bases of tables of one size are equal modulo this.
const ALIGN: usize = 1 << 16;

/// The layout around the base.
#[repr(C)]
struct Inside {
    /// Words that belong to generated code.
    words: [u64; WORDS],
    single: TaggedPage,
    pages: [HostPage; MOST],
    tags: [[u64; MOST]; 2],
    rest: Rest,
}

/// What lies behind the indexed entries.
#[repr(C)]
struct Rest {
    site_entries: [TaggedPage; SITE_ENTRIES],
    /// Bit per per-site entry: it is used.
    used: [u64; SITE_ENTRIES / 64],
    /// Bit per page number modulo [`SEEN`]: a per-site entry may have held the page.
    seen: [u64; SEEN / 64],
    counts: [u32; SITE_ENTRIES],
    bounce: [[u8; BOUNCE_LEN]; 2],
    page_guards: [u64; PAGE_GUARDS],
    inline_caches_used: [u64; INLINE_CACHES / 64],
    inline_caches: [InlineCache; INLINE_CACHES],
    reach: Reach,
}

/// Offset of the base in [`Inside`].
const BEFORE: usize = offset_of!(Inside, pages) - PAGES as usize;

/// Distance between the small sets of tables of a block.
const STEP: usize = 4 * ALIGN;
/// Number of small sets of tables in a block.
pub const SMALL_IN_BLOCK: usize = 16;

const _: () = {
    // A set's words, its pages, and its tags lie before those of the next set, and the last set's before the next array.
    assert!(BEFORE + 8 * Size::Small.entries() <= STEP);
    assert!((SMALL_IN_BLOCK - 1) * STEP + 8 * Size::Small.entries() <= 8 * MOST);
    assert!(size_of::<Rest>() <= STEP);
};

/// Memory for tables: that of several small sets, or of a large one.
#[derive(Debug)]
pub struct Block {
    memory: Arc<LazyArray<AtomicU64>>,
    size: Size,
    /// Number of sets that have been handed out.
    used: usize,
}

impl Block {
    /// Takes address space, of which nothing has been touched.
    ///
    /// # Errors
    /// Those of `mmap`.
    pub fn new(size: Size) -> io::Result<Self> {
        let bytes = size_of::<Inside>() + (size.sets() - 1) * STEP + ALIGN;
        Ok(Self {
            memory: Arc::new(LazyArray::new(bytes / size_of::<u64>())?),
            size,
            used: 0,
        })
    }

    /// Asks for no huge pages: with few sets of tables, most of one would not be used. A hint.
    pub fn advise_small(&self) {
        self.memory.advise_small();
    }

    /// Returns tables that are all zero. `None` if there is no room.
    pub fn tables(&mut self) -> Option<TaggedPages> {
        let n = self.used;
        if n == self.size.sets() {
            return None;
        }
        self.used += 1;
        let start = NonNull::new(self.memory.as_ptr().cast_mut())?.cast::<u8>();
        let skipped = (self.size.base() - BEFORE).wrapping_sub(start.addr().get()) % ALIGN;
        // SAFETY: `skipped` is less than ALIGN, and the memory has ALIGN bytes more than `n` steps and `Inside`.
        let inside = unsafe { start.add(skipped + n * STEP).cast() };
        Some(TaggedPages {
            _memory: Arc::clone(&self.memory),
            size: self.size,
            inside,
        })
    }
}

/// A TLB's entries: indexed ones with a tag for reads and one for writes, and all that lies beside them.
pub struct TaggedPages {
    /// Atomics, whose memory may be changed through shared references.
    _memory: Arc<LazyArray<AtomicU64>>,
    size: Size,
    /// Points into the memory, to a part that no other object uses: all of [`Inside`] but those indexed entries that
    /// `size` does not have. The address is aligned, and the memory was zero, which is a valid integer and a valid raw pointer. Generated code writes here while
    /// no Rust code runs, so Rust forms references only for the length of a call, and none to what others use.
    inside: NonNull<Inside>,
}

// SAFETY: the object owns what `inside` points to, as said there.
unsafe impl Send for TaggedPages {}
// SAFETY: through a shared reference the memory is only read; generated code, which writes it, runs on the thread of
// the vCPU that owns the object.
unsafe impl Sync for TaggedPages {}

impl core::fmt::Debug for TaggedPages {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("TaggedPages").finish_non_exhaustive()
    }
}

const _: () = assert!(
    offset_of!(Inside, single) as i32 == BEFORE as i32 + SINGLE
        && offset_of!(Inside, words) as i32 == BEFORE as i32 + word(WORDS - 1)
        && offset_of!(Inside, tags) as i32 == BEFORE as i32 + tags(0)
        && offset_of!(Inside, rest.site_entries) as i32 == BEFORE as i32 + site_entry(0)
        && offset_of!(Inside, rest.used) as i32 == BEFORE as i32 + site_entries_used()
        && offset_of!(Inside, rest.seen) as i32 == BEFORE as i32 + site_entries_seen()
        && offset_of!(Inside, rest.counts) as i32 == BEFORE as i32 + site_entry_counts()
        && offset_of!(Inside, rest.bounce) as i32 == BEFORE as i32 + bounce()
        && offset_of!(Inside, rest.page_guards) as i32 == BEFORE as i32 + page_guard(0)
        && offset_of!(Inside, rest.inline_caches_used) as i32
            == BEFORE as i32 + inline_caches_used()
        && offset_of!(Inside, rest.inline_caches) as i32 == BEFORE as i32 + inline_cache(0)
        && offset_of!(Inside, rest.reach) as i32 == BEFORE as i32 + reach()
        && word(SHORT_WORDS - 1) >= -128
        && (Size::Small.base() - BEFORE).is_multiple_of(align_of::<Inside>())
        && (Size::Large.base() - BEFORE).is_multiple_of(align_of::<Inside>())
);

impl TaggedPages {
    /// Returns how many bytes tables of this size use.
    pub const fn bytes(size: Size) -> usize {
        // A page and two tags, and bits in two maps.
        let unused = MOST - size.entries();
        size_of::<Inside>() - 3 * 8 * unused - 2 * unused / 8
    }

    /// Returns the number of indexed entries.
    pub fn size(&self) -> Size {
        self.size
    }

    /// Returns the base for generated code, which may write the words, the single entry, the per-site entries and their
    /// counts.
    pub fn base(&self) -> u64 {
        (self.inside.addr().get() + BEFORE) as u64
    }

    #[inline(always)]
    fn rest(&self) -> &Rest {
        // SAFETY: the rest is this object's own and valid; generated code, which alone writes it without `&mut self`,
        // does not run while Rust does.
        unsafe { &(*self.inside.as_ptr()).rest }
    }

    #[inline(always)]
    fn rest_mut(&mut self) -> &mut Rest {
        // SAFETY: the rest is this object's own and valid; generated code, the only other user, does not run while Rust
        // has `&mut self`.
        unsafe { &mut (*self.inside.as_ptr()).rest }
    }

    /// Returns the single entry.
    #[inline(always)]
    pub fn single(&mut self) -> &mut TaggedPage {
        // SAFETY: the entry is this object's own and valid; generated code, the only other user, does not run while Rust
        // has `&mut self`.
        unsafe { &mut (*self.inside.as_ptr()).single }
    }

    /// Returns all per-site entries, and the bits that say which are used.
    #[inline(always)]
    pub fn site_entries(
        &mut self,
    ) -> (
        &mut [TaggedPage; SITE_ENTRIES],
        &mut [u64; SITE_ENTRIES / 64],
    ) {
        let rest = self.rest_mut();
        (&mut rest.site_entries, &mut rest.used)
    }

    /// Returns the bits of the pages that per-site entries have held.
    #[inline(always)]
    pub fn site_entries_seen(&mut self) -> &mut [u64; SEEN / 64] {
        &mut self.rest_mut().seen
    }

    /// Returns the per-site entries' counts.
    pub fn site_entry_counts(&mut self) -> &mut [u32; SITE_ENTRIES] {
        &mut self.rest_mut().counts
    }

    /// Returns page guard `n`.
    pub fn page_guard(&self, n: usize) -> u64 {
        self.rest().page_guards[n]
    }

    /// Returns all page guards.
    #[inline(always)]
    pub fn page_guards(&mut self) -> &mut [u64; PAGE_GUARDS] {
        &mut self.rest_mut().page_guards
    }

    /// Returns the words by which misses are served.
    #[inline(always)]
    pub fn reach(&self) -> &Reach {
        &self.rest().reach
    }

    /// Returns the words by which misses are served, to be changed.
    #[inline(always)]
    pub fn reach_mut(&mut self) -> &mut Reach {
        &mut self.rest_mut().reach
    }

    /// Zeroes the inline caches that are used.
    #[inline(always)]
    pub fn clear_inline_caches(&mut self) {
        let rest = self.rest_mut();
        for (n, used) in rest.inline_caches_used.iter_mut().enumerate() {
            let mut bits = core::mem::take(used);
            while bits != 0 {
                rest.inline_caches[n * 64 + bits.trailing_zeros() as usize] = [0; 3];
                bits &= bits - 1;
            }
        }
    }

    /// Returns the index of the entry for the page with this number. Behind the last index, others' memory begins.
    #[inline(always)]
    pub fn index(&self, i: usize) -> usize {
        i & (self.size.entries() - 1)
    }

    /// Returns page and tag of an indexed entry, for an access of `kind` (0 read, 1 write). The entry is that of `i` modulo
    /// their number.
    #[inline(always)]
    pub fn get(&self, kind: usize, i: usize) -> TaggedPage {
        let i = self.index(i);
        // SAFETY: the entry is this object's own and valid; generated code, which alone writes it without `&mut self`,
        // does not run while Rust does. No reference is formed.
        unsafe {
            TaggedPage {
                tag: (*self.inside.as_ptr()).tags[kind][i],
                host: (*self.inside.as_ptr()).pages[i],
            }
        }
    }

    /// Sets the tag of that entry.
    #[inline(always)]
    pub fn set_tag(&mut self, kind: usize, i: usize, tag: u64) {
        let i = self.index(i);
        // SAFETY: the entry is this object's own and valid; generated code, the only other user, does not run while Rust
        // has `&mut self`. No reference is formed.
        unsafe { (*self.inside.as_ptr()).tags[kind][i] = tag };
    }

    /// Sets the page of that entry, for reads and writes.
    #[inline(always)]
    pub fn set_page(&mut self, i: usize, host: HostPage) {
        let i = self.index(i);
        // SAFETY: as in `set_tag`.
        unsafe { (*self.inside.as_ptr()).pages[i] = host };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_base_says_what_it_has_to() {
        for size in [Size::Small, Size::Large] {
            let mut block = Block::new(size).unwrap();
            let all: Vec<_> = core::iter::from_fn(|| block.tables()).collect();
            assert_eq!(all.len(), size.sets());
            for mut t in all {
                assert_eq!(t.base() as usize % ALIGN, size.base());
                let inside = t.inside.as_ptr();
                // SAFETY: only addresses are taken.
                let (pages, kinds) =
                    unsafe { (&raw const (*inside).pages, &raw const (*inside).tags) };
                assert_eq!(pages.addr() as u64, t.base() + PAGES as u64);
                assert_eq!(kinds.addr() as u64, t.base() + tags(0) as u64);
                t.set_tag(1, 3, 0x5000);
                assert_eq!([t.get(1, 3).tag, t.get(0, 3).tag], [0x5000, 0]);
                let single = core::ptr::from_mut(t.single()).addr() as u64;
                assert_eq!(single, t.base().wrapping_add_signed(SINGLE.into()));
            }
        }
    }

    /// Fills all of each set with another value than the others', then looks whether it is still there.
    #[test]
    fn small_tables_of_a_block_do_not_overlap() {
        let mut block = Block::new(Size::Small).unwrap();
        let mut all: Vec<_> = core::iter::from_fn(|| block.tables()).collect();
        let entries = Size::Small.entries();
        let bytes = size_of::<Rest>();
        for (n, t) in all.iter_mut().enumerate() {
            let value = 0x101 * (n as u64 + 1);
            t.single().tag = value;
            for i in 0..entries {
                t.set_tag(0, i, value);
                t.set_tag(1, i, value);
                t.set_page(i, HostPage::nowhere());
            }
            let words = core::ptr::from_mut(t.rest_mut()).cast::<u64>();
            // SAFETY: all of the rest is made of integers and raw pointers.
            unsafe { words.write_bytes(n as u8 + 1, bytes / 8) };
        }
        for (n, t) in all.iter_mut().enumerate() {
            let value = 0x101 * (n as u64 + 1);
            assert_eq!(t.single().tag, value);
            assert!((0..entries).all(|i| t.get(0, i).tag == value && t.get(1, i).tag == value));
            assert!((0..entries).all(|i| t.get(0, i).host == HostPage::nowhere()));
            let words = core::ptr::from_ref(t.rest()).cast::<u8>();
            // SAFETY: as above.
            assert!((0..bytes).all(|i| unsafe { words.add(i).read() } == n as u8 + 1));
        }
    }
}
