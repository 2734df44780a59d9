//! [`TaggedPages`]: a TLB's entries, where generated code finds them by one register.
//!
//! ```text
//! base - 160 … base - 13   words of generated code's own
//! base - 12                the entry that is compared without an index
//! base + 4                 the pages of the other entries
//! behind them              their tags for one kind of access, then for the other
//! behind those             the per-site entries: entries that are compared without an index, too
//! behind those             room for the bytes of an operand that straddles two pages
//! behind that              the page guards: what generated code compares the target's page of a branch with
//! behind those             the inline caches: where single branches by memory have gone to last
//! last                     [`Reach`]: what a miss finds the second level by, and which entries are filled
//! ```
//!
//! An entry's place in each of the arrays is its index times eight, which addressing does by itself.
//! (With tag and page side by side an addition was part of each probe.) One page serves both kinds of access.
//!
//! The low 16 bits of the base are a number that its user chooses: BEXTR takes what it extracts from
//! the low bits of a register, so that the base says it as well. All of what is used between
//! calls lies so close below the base that its displacement takes one byte.

use core::{mem::offset_of, ptr::NonNull};

use crate::HostPage;

/// An entry of a TLB, laid out for generated code. Zeroed, its page is address
/// 0: holders see to it that nothing matches the tag of such an entry.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TaggedPage {
    /// What identifies the guest's page.
    pub tag: u64,
    /// The page.
    pub host: HostPage,
}

/// The base's low bits: `start | length << 8` of the bits that BEXTR extracts.
pub const BASE: usize = 0x0e0c;
/// Where the entries' pages are from the base.
pub const PAGES: i32 = 4;
/// Where the tags of `N` entries for a kind of access are.
pub const fn tags<const N: usize>(kind: usize) -> i32 {
    PAGES + 8 * (N * (1 + kind)) as i32
}
/// Where the entry without an index is from the base.
pub const SINGLE: i32 = PAGES - size_of::<TaggedPage>() as i32;
/// Per-site entries that there are.
pub const SITE_ENTRIES: usize = 512;
/// Where per-site entry `n` is from the base, where there are `N` other entries.
pub const fn site_entry<const N: usize>(n: usize) -> i32 {
    tags::<N>(2) + (n * size_of::<TaggedPage>()) as i32
}
/// Where the bits are that tell which per-site entries are used.
pub const fn site_entries_used<const N: usize>() -> i32 {
    site_entry::<N>(SITE_ENTRIES)
}
/// Where [`SEEN`] bits are for the pages that per-site entries have had.
pub const fn site_entries_seen<const N: usize>() -> i32 {
    site_entries_used::<N>() + SITE_ENTRIES as i32 / 8
}
/// How many.
pub const SEEN: usize = 1024;
/// Where a number of 32 bits for each per-site entry is, which is generated code's own.
pub const fn site_entry_counts<const N: usize>() -> i32 {
    site_entries_seen::<N>() + SEEN as i32 / 8
}
/// Where room for [`BOUNCE_LEN`] bytes from each of two pages is, which is generated code's own.
pub const fn bounce<const N: usize>() -> i32 {
    site_entry_counts::<N>() + 4 * SITE_ENTRIES as i32
}
/// How many: those of the largest operand that is no block of memory.
pub const BOUNCE_LEN: usize = 32;
/// Cells that there are.
pub const PAGE_GUARDS: usize = 4096;
/// Where page guard `n` is from the base, where there are `N` entries.
pub const fn page_guard<const N: usize>(n: usize) -> i32 {
    bounce::<N>() + (2 * BOUNCE_LEN + n * size_of::<u64>()) as i32
}

/// Inline caches that there are.
pub const INLINE_CACHES: usize = 1024;
/// Where the bits are that tell which of them are used.
pub const fn inline_caches_used<const N: usize>() -> i32 {
    page_guard::<N>(PAGE_GUARDS)
}
/// Where inline cache `n` is from the base, where there are `N` entries.
pub const fn inline_cache<const N: usize>(n: usize) -> i32 {
    inline_caches_used::<N>() + (INLINE_CACHES / 8 + n * size_of::<InlineCache>()) as i32
}
/// Three words of generated code's own.
pub type InlineCache = [u64; 3];

/// Where [`Reach`] is from the base.
pub const fn reach<const N: usize>() -> i32 {
    inline_cache::<N>(INLINE_CACHES)
}

/// What the second level's entries of an address space are found by.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct L2Key {
    /// Whose entries: no other address space, and none before a flush, has the same.
    pub token: u64,
    /// What the index of a 4 KiB page is XORed with.
    pub small: u64,
    /// What the index of a 2 MiB piece is XORed with.
    pub large: u64,
    /// Keys are selected by a bit.
    pub unused: u64,
}

/// Entries whose use is noted together.
pub const GROUP: usize = 64;
/// Groups that there may be.
const GROUPS: usize = (1 << 14) / GROUP;

/// What generated code needs to answer a miss by the second level: whose entries count, what they may be used for, and
/// where to note which entries of the first level are filled.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Reach {
    /// Of the address space, and of what is global.
    pub keys: [L2Key; 2],
    /// Bit per class of pages: reads of such a page are allowed, and writes. All 0: nothing is answered.
    pub rights: [u64; 2],
    /// Address of the table of small pages.
    pub small: u64,
    /// What its byte offsets are masked with.
    pub small_mask: u64,
    /// Address of the table of large pages.
    pub large: u64,
    /// The current round of writes.
    pub round: u64,
    /// The bits of an entry's data that are the page.
    pub page_mask: u64,
    /// Misses answered, counted by generated code.
    pub hits: u64,
    /// Bit per entry: it may be filled with what is global.
    pub global: [u64; GROUPS],
    /// Bit per entry: it was filled, with what is not global, since the last flush of all such.
    pub private: [u64; GROUPS],
    /// Bit per group: it may have entries.
    pub used: [u64; GROUPS / 64],
    /// Which view the entries are of, for generated code to compare.
    pub view: u64,
}

/// Words below it.
pub const WORDS: usize = 18;
/// How many of them take a displacement of one byte.
pub const SHORT_WORDS: usize = 14;
/// Where word `n` is from the base.
pub const fn word(n: usize) -> i32 {
    assert!(n < WORDS);
    SINGLE - 8 * (1 + n as i32)
}

/// What the low bits of a base are all of.
const ALIGN: usize = 1 << 16;

/// What lies around the base.
#[repr(C)]
struct Inside<const N: usize> {
    /// Generated code's own.
    words: [u64; WORDS],
    single: TaggedPage,
    pages: [HostPage; N],
    tags: [[u64; N]; 2],
    site_entries: [TaggedPage; SITE_ENTRIES],
    /// Bit per per-site entry.
    used: [u64; SITE_ENTRIES / 64],
    /// Bit per page number, as far as it fits.
    seen: [u64; SEEN / 64],
    counts: [u32; SITE_ENTRIES],
    bounce: [[u8; BOUNCE_LEN]; 2],
    page_guards: [u64; PAGE_GUARDS],
    inline_caches_used: [u64; INLINE_CACHES / 64],
    inline_caches: [InlineCache; INLINE_CACHES],
    reach: Reach,
}

/// `N` entries for each of two kinds of access.
pub struct TaggedPages<const N: usize> {
    /// From `Box`, and zero at first: pages that are not written take no memory.
    all: NonNull<[u64]>,
    /// In there. Generated code writes it while nobody else looks, so that there is no reference for long.
    inside: NonNull<Inside<N>>,
}

// SAFETY: it owns what it points to.
unsafe impl<const N: usize> Send for TaggedPages<N> {}
// SAFETY: through a shared reference it is only read; generated code runs on the thread of the vCPU
// that owns it.
unsafe impl<const N: usize> Sync for TaggedPages<N> {}

impl<const N: usize> core::fmt::Debug for TaggedPages<N> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("TaggedPages").finish_non_exhaustive()
    }
}

impl<const N: usize> TaggedPages<N> {
    /// Where the base is in [`Inside`].
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

    /// All of it zero.
    pub fn zeroed() -> Self {
        const { Self::PLACES };
        let words = (size_of::<Inside<N>>() + ALIGN) / size_of::<u64>();
        // SAFETY: zero is a valid number.
        let all: Box<[u64]> = unsafe { Box::new_zeroed_slice(words).assume_init() };
        let all = NonNull::from(Box::leak(all));
        let start = all.cast::<u8>();
        let skipped = (BASE - Self::BEFORE).wrapping_sub(start.addr().get()) % ALIGN;
        // SAFETY: less than ALIGN bytes on there is still room for all of `Inside`; it is aligned
        // (see PLACES), and zero is a valid number and a valid raw pointer.
        let inside = unsafe { start.add(skipped).cast() };
        Self { all, inside }
    }

    /// For generated code, which may write the words, the single entry, per-site entries and their numbers.
    pub fn base(&self) -> u64 {
        (self.inside.addr().get() + Self::BEFORE) as u64
    }

    /// The entry without an index.
    #[inline(always)]
    pub fn single(&mut self) -> &mut TaggedPage {
        // SAFETY: it is its own and valid, and generated code does not run now.
        unsafe { &mut self.inside.as_mut().single }
    }

    /// All per-site entries, and which are used.
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

    /// Which pages per-site entries have had.
    #[inline(always)]
    pub fn site_entries_seen(&mut self) -> &mut [u64; SEEN / 64] {
        // SAFETY: `inside` is this object's own and valid; generated code, the only other user, does not
        // run while Rust has `&mut self`.
        unsafe { &mut self.inside.as_mut().seen }
    }

    /// The per-site entries' numbers.
    pub fn site_entry_counts(&mut self) -> &mut [u32; SITE_ENTRIES] {
        // SAFETY: `inside` is this object's own and valid; generated code, the only other user, does not
        // run while Rust has `&mut self`.
        unsafe { &mut self.inside.as_mut().counts }
    }

    /// One of the page guards.
    pub fn page_guard(&self, n: usize) -> u64 {
        // SAFETY: `inside` is this object's own and valid; generated code, which alone writes it without
        // `&mut self`, does not run while Rust does.
        unsafe { self.inside.as_ref() }.page_guards[n]
    }

    /// The page guards.
    #[inline(always)]
    pub fn page_guards(&mut self) -> &mut [u64; PAGE_GUARDS] {
        // SAFETY: `inside` is this object's own and valid; generated code, the only other user, does not
        // run while Rust has `&mut self`.
        unsafe { &mut self.inside.as_mut().page_guards }
    }

    /// What misses go by.
    #[inline(always)]
    pub fn reach(&self) -> &Reach {
        // SAFETY: as above.
        unsafe { &self.inside.as_ref().reach }
    }

    /// The same, to be changed.
    #[inline(always)]
    pub fn reach_mut(&mut self) -> &mut Reach {
        // SAFETY: as above.
        unsafe { &mut self.inside.as_mut().reach }
    }

    /// Makes the inline caches zero that are used.
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

    /// Page and tag of another.
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

    /// Sets the tag of another for a kind of access.
    #[inline(always)]
    pub fn set_tag(&mut self, kind: usize, i: usize, tag: u64) {
        // SAFETY: `inside` is this object's own and valid; generated code, the only other user, does not
        // run while Rust has `&mut self`.
        unsafe { self.inside.as_mut() }.tags[kind][i] = tag;
    }

    /// Sets the page of another, for both kinds.
    #[inline(always)]
    pub fn set_page(&mut self, i: usize, host: HostPage) {
        // SAFETY: `inside` is this object's own and valid; generated code, the only other user, does not
        // run while Rust has `&mut self`.
        unsafe { self.inside.as_mut() }.pages[i] = host;
    }
}

impl<const N: usize> Drop for TaggedPages<N> {
    fn drop(&mut self) {
        // SAFETY: from `Box::leak`, and nothing else has it.
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
            // SAFETY: it is its own.
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
