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
//! The low 16 bits of the base are a number that the base's user chooses. BEXTR takes the position and length of the
//! bits to extract from the low bits of a register, so the base serves as that operand as well. The words used between
//! calls lie so close below the base that their displacements take one byte.

use core::{mem::offset_of, ptr::NonNull};

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

/// The base's low bits: `start | length << 8` of the bits that BEXTR extracts.
pub const BASE: usize = 0x0e0c;
/// Offset from the base of the indexed entries' pages.
pub const PAGES: i32 = 4;
/// Offset from the base of the tags of `N` indexed entries for reads (`kind` 0) or writes (1).
pub const fn tags<const N: usize>(kind: usize) -> i32 {
    PAGES + 8 * (N * (1 + kind)) as i32
}
/// Offset from the base of the single entry, which needs no index.
pub const SINGLE: i32 = PAGES - size_of::<TaggedPage>() as i32;
/// Number of per-site entries.
pub const SITE_ENTRIES: usize = 512;
/// Offset from the base of per-site entry `n`, with `N` indexed entries.
pub const fn site_entry<const N: usize>(n: usize) -> i32 {
    tags::<N>(2) + (n * size_of::<TaggedPage>()) as i32
}
/// Offset from the base of the bits that say which per-site entries are used.
pub const fn site_entries_used<const N: usize>() -> i32 {
    site_entry::<N>(SITE_ENTRIES)
}
/// Offset from the base of the [`SEEN`] bits for the pages that per-site entries have held.
pub const fn site_entries_seen<const N: usize>() -> i32 {
    site_entries_used::<N>() + SITE_ENTRIES as i32 / 8
}
/// Number of bits for the pages that per-site entries have held.
pub const SEEN: usize = 1024;
/// Offset from the base of the 32-bit counts, one for each per-site entry, which generated code maintains.
pub const fn site_entry_counts<const N: usize>() -> i32 {
    site_entries_seen::<N>() + SEEN as i32 / 8
}
/// Offset from the base of the room for [`BOUNCE_LEN`] bytes from each of two pages, which generated code uses.
pub const fn bounce<const N: usize>() -> i32 {
    site_entry_counts::<N>() + 4 * SITE_ENTRIES as i32
}
/// Bytes of the largest operand that is not a block of memory.
pub const BOUNCE_LEN: usize = 32;
/// Number of page guards.
pub const PAGE_GUARDS: usize = 4096;
/// Offset from the base of page guard `n`, with `N` indexed entries.
pub const fn page_guard<const N: usize>(n: usize) -> i32 {
    bounce::<N>() + (2 * BOUNCE_LEN + n * size_of::<u64>()) as i32
}

/// Number of inline caches.
pub const INLINE_CACHES: usize = 1024;
/// Offset from the base of the bits that say which inline caches are used.
pub const fn inline_caches_used<const N: usize>() -> i32 {
    page_guard::<N>(PAGE_GUARDS)
}
/// Offset from the base of inline cache `n`, with `N` indexed entries.
pub const fn inline_cache<const N: usize>(n: usize) -> i32 {
    inline_caches_used::<N>() + (INLINE_CACHES / 8 + n * size_of::<InlineCache>()) as i32
}
/// Three words that generated code defines.
pub type InlineCache = [u64; 3];

/// Offset from the base of [`Reach`].
pub const fn reach<const N: usize>() -> i32 {
    inline_cache::<N>(INLINE_CACHES)
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
const GROUPS: usize = (1 << 14) / GROUP;

/// What generated code needs to serve a miss from the second level: the keys of its entries, the rights that this view
/// gives to them, and where to note which first-level entries are filled.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
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
    /// Bit per entry: it may have been filled with a global page.
    pub global: [u64; GROUPS],
    /// Bit per entry: it was filled with a page that is not global since all such were flushed last.
    pub private: [u64; GROUPS],
    /// Bit per group: some entry of it may be filled.
    pub used: [u64; GROUPS / 64],
    /// Number of the view that the entries belong to, which generated code compares.
    pub view: u64,
    /// For each page number modulo [`SEEN_PAGES`], the bits above of the last such page that was found in a large entry and
    /// did not enter the first level. Generated code uses it as a hint.
    pub seen_pages: [u8; SEEN_PAGES],
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

/// All bases are equal modulo this.
const ALIGN: usize = 1 << 16;

/// The layout around the base.
#[repr(C)]
struct Inside<const N: usize> {
    /// Words that belong to generated code.
    words: [u64; WORDS],
    single: TaggedPage,
    pages: [HostPage; N],
    tags: [[u64; N]; 2],
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

/// A TLB's entries: `N` indexed ones with a tag for reads and one for writes, and all that lies beside them.
pub struct TaggedPages<const N: usize> {
    /// From `Box`, and zero at first, so that host pages that are not written take no memory.
    all: NonNull<[u64]>,
    /// Points into `all`. Generated code writes here while no Rust code runs, so Rust forms references only for the
    /// length of a call.
    inside: NonNull<Inside<N>>,
}

// SAFETY: the object owns what its pointers point to.
unsafe impl<const N: usize> Send for TaggedPages<N> {}
// SAFETY: through a shared reference the memory is only read; generated code, which writes it, runs on the thread of
// the vCPU that owns the object.
unsafe impl<const N: usize> Sync for TaggedPages<N> {}

impl<const N: usize> core::fmt::Debug for TaggedPages<N> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("TaggedPages").finish_non_exhaustive()
    }
}

impl<const N: usize> TaggedPages<N> {
    /// Offset of the base in [`Inside`].
    const BEFORE: usize = offset_of!(Inside<N>, pages) - PAGES as usize;
    const PLACES: () = assert!(
        offset_of!(Inside<N>, single) as i32 == Self::BEFORE as i32 + SINGLE
            && offset_of!(Inside<N>, words) as i32 == Self::BEFORE as i32 + word(WORDS - 1)
            && offset_of!(Inside<N>, tags) as i32 == Self::BEFORE as i32 + tags::<N>(0)
            && offset_of!(Inside<N>, site_entries) as i32
                == Self::BEFORE as i32 + site_entry::<N>(0)
            && offset_of!(Inside<N>, used) as i32 == Self::BEFORE as i32 + site_entries_used::<N>()
            && offset_of!(Inside<N>, seen) as i32 == Self::BEFORE as i32 + site_entries_seen::<N>()
            && offset_of!(Inside<N>, counts) as i32
                == Self::BEFORE as i32 + site_entry_counts::<N>()
            && offset_of!(Inside<N>, bounce) as i32 == Self::BEFORE as i32 + bounce::<N>()
            && offset_of!(Inside<N>, page_guards) as i32
                == Self::BEFORE as i32 + page_guard::<N>(0)
            && offset_of!(Inside<N>, inline_caches_used) as i32
                == Self::BEFORE as i32 + inline_caches_used::<N>()
            && offset_of!(Inside<N>, inline_caches) as i32
                == Self::BEFORE as i32 + inline_cache::<N>(0)
            && offset_of!(Inside<N>, reach) as i32 == Self::BEFORE as i32 + reach::<N>()
            && N <= GROUPS * GROUP
            && word(SHORT_WORDS - 1) >= -128
            && (BASE - Self::BEFORE).is_multiple_of(align_of::<Inside<N>>())
    );

    /// Bytes that are used of it.
    pub const BYTES: usize = size_of::<Inside<N>>();

    /// Makes an object that is all zero.
    pub fn zeroed() -> Self {
        const { Self::PLACES };
        let words = (size_of::<Inside<N>>() + ALIGN) / size_of::<u64>();
        // SAFETY: zero is a valid `u64`.
        let all: Box<[u64]> = unsafe { Box::new_zeroed_slice(words).assume_init() };
        let all = NonNull::from(Box::leak(all));
        let start = all.cast::<u8>();
        let skipped = (BASE - Self::BEFORE).wrapping_sub(start.addr().get()) % ALIGN;
        // SAFETY: `skipped` is less than ALIGN, and the allocation has ALIGN bytes more than `Inside`, so all of
        // `Inside` fits behind it; the address is aligned (see PLACES), and zero is a valid integer and a valid raw
        // pointer.
        let inside = unsafe { start.add(skipped).cast() };
        Self { all, inside }
    }

    /// Returns the base for generated code, which may write the words, the single entry, the per-site entries and their
    /// counts.
    pub fn base(&self) -> u64 {
        (self.inside.addr().get() + Self::BEFORE) as u64
    }

    /// Returns the single entry.
    #[inline(always)]
    pub fn single(&mut self) -> &mut TaggedPage {
        // SAFETY: `inside` is this object's own and valid; generated code, the only other user, does not run while Rust
        // has `&mut self`.
        unsafe { &mut self.inside.as_mut().single }
    }

    /// Returns all per-site entries, and the bits that say which are used.
    #[inline(always)]
    pub fn site_entries(
        &mut self,
    ) -> (
        &mut [TaggedPage; SITE_ENTRIES],
        &mut [u64; SITE_ENTRIES / 64],
    ) {
        // SAFETY: `inside` is this object's own and valid; generated code, the only other user, does not
        // run while Rust has `&mut self`.
        let inside = unsafe { self.inside.as_mut() };
        (&mut inside.site_entries, &mut inside.used)
    }

    /// Returns the bits of the pages that per-site entries have held.
    #[inline(always)]
    pub fn site_entries_seen(&mut self) -> &mut [u64; SEEN / 64] {
        // SAFETY: `inside` is this object's own and valid; generated code, the only other user, does not
        // run while Rust has `&mut self`.
        unsafe { &mut self.inside.as_mut().seen }
    }

    /// Returns the per-site entries' counts.
    pub fn site_entry_counts(&mut self) -> &mut [u32; SITE_ENTRIES] {
        // SAFETY: `inside` is this object's own and valid; generated code, the only other user, does not
        // run while Rust has `&mut self`.
        unsafe { &mut self.inside.as_mut().counts }
    }

    /// Returns page guard `n`.
    pub fn page_guard(&self, n: usize) -> u64 {
        // SAFETY: `inside` is this object's own and valid; generated code, which alone writes it without
        // `&mut self`, does not run while Rust does.
        unsafe { self.inside.as_ref() }.page_guards[n]
    }

    /// Returns all page guards.
    #[inline(always)]
    pub fn page_guards(&mut self) -> &mut [u64; PAGE_GUARDS] {
        // SAFETY: `inside` is this object's own and valid; generated code, the only other user, does not
        // run while Rust has `&mut self`.
        unsafe { &mut self.inside.as_mut().page_guards }
    }

    /// Returns the words by which misses are served.
    #[inline(always)]
    pub fn reach(&self) -> &Reach {
        // SAFETY: `inside` is this object's own and valid; generated code, which alone writes it without `&mut self`,
        // does not run while Rust does.
        unsafe { &self.inside.as_ref().reach }
    }

    /// Returns the words by which misses are served, to be changed.
    #[inline(always)]
    pub fn reach_mut(&mut self) -> &mut Reach {
        // SAFETY: `inside` is this object's own and valid; generated code, the only other user, does not run while Rust
        // has `&mut self`.
        unsafe { &mut self.inside.as_mut().reach }
    }

    /// Zeroes the inline caches that are used.
    #[inline(always)]
    pub fn clear_inline_caches(&mut self) {
        // SAFETY: `inside` is this object's own and valid; generated code, the only other user, does not
        // run while Rust has `&mut self`.
        let inside = unsafe { self.inside.as_mut() };
        for (n, used) in inside.inline_caches_used.iter_mut().enumerate() {
            let mut bits = core::mem::take(used);
            while bits != 0 {
                inside.inline_caches[n * 64 + bits.trailing_zeros() as usize] = [0; 3];
                bits &= bits - 1;
            }
        }
    }

    /// Returns page and tag of indexed entry `i` for an access of `kind` (0 read, 1 write).
    #[inline(always)]
    pub fn get(&self, kind: usize, i: usize) -> TaggedPage {
        // SAFETY: `inside` is this object's own and valid; generated code, which alone writes it without
        // `&mut self`, does not run while Rust does.
        let inside = unsafe { self.inside.as_ref() };
        TaggedPage {
            tag: inside.tags[kind][i],
            host: inside.pages[i],
        }
    }

    /// Sets the tag of indexed entry `i` for an access of `kind` (0 read, 1 write).
    #[inline(always)]
    pub fn set_tag(&mut self, kind: usize, i: usize, tag: u64) {
        // SAFETY: `inside` is this object's own and valid; generated code, the only other user, does not
        // run while Rust has `&mut self`.
        unsafe { self.inside.as_mut() }.tags[kind][i] = tag;
    }

    /// Sets the page of indexed entry `i`, for reads and writes.
    #[inline(always)]
    pub fn set_page(&mut self, i: usize, host: HostPage) {
        // SAFETY: `inside` is this object's own and valid; generated code, the only other user, does not
        // run while Rust has `&mut self`.
        unsafe { self.inside.as_mut() }.pages[i] = host;
    }
}

impl<const N: usize> Drop for TaggedPages<N> {
    fn drop(&mut self) {
        // SAFETY: `all` comes from `Box::leak`, and nothing else frees it.
        drop(unsafe { Box::from_raw(self.all.as_ptr()) });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_base_says_what_it_has_to() {
        let all: Vec<_> = (0..20).map(|_| TaggedPages::<100>::zeroed()).collect();
        for mut t in all {
            assert_eq!(t.base() as usize % ALIGN, BASE);
            // SAFETY: `inside` is the object's own and valid.
            let inside = unsafe { t.inside.as_ref() };
            let pages = inside.pages.as_ptr().addr() as u64;
            assert_eq!(pages, t.base() + PAGES as u64);
            let kinds = inside.tags.each_ref().map(|k| k.as_ptr().addr() as u64);
            assert_eq!(kinds, [0, 1].map(|k| t.base() + tags::<100>(k) as u64));
            assert!((0..200).all(|n| t.get(n / 100, n % 100).tag == 0));
            t.set_tag(1, 3, 0x5000);
            assert_eq!([t.get(1, 3).tag, t.get(0, 3).tag], [0x5000, 0]);
            let single = core::ptr::from_mut(t.single()).addr() as u64;
            assert_eq!(single, t.base().wrapping_add_signed(SINGLE.into()));
        }
    }
}
