//! [`TaggedPages`]: a TLB's entries, where generated code finds them by one register.
//!
//! ```text
//! base - 128 … base - 13   words of generated code's own
//! base - 12                the entry that is compared without an index
//! base + 4                 the other entries
//! ```
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
/// Where the entries are from the base.
pub const ENTRIES: i32 = 4;
/// Where the entry without an index is from the base.
pub const SINGLE: i32 = ENTRIES - size_of::<TaggedPage>() as i32;
/// Words below it that take a displacement of one byte.
pub const WORDS: usize = 14;
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
    entries: [TaggedPage; N],
}

/// `N` entries.
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
    const BEFORE: usize = offset_of!(Inside<N>, entries) - ENTRIES as usize;
    const PLACES: () = assert!(
        offset_of!(Inside<N>, single) as i32 == Self::BEFORE as i32 + SINGLE
            && offset_of!(Inside<N>, words) as i32 == Self::BEFORE as i32 + word(WORDS - 1)
            && word(WORDS - 1) >= -128
            && (BASE - Self::BEFORE).is_multiple_of(align_of::<Inside<N>>())
    );

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

    /// For generated code, which may write the words and the single entry.
    pub fn base(&self) -> u64 {
        (self.inside.addr().get() + Self::BEFORE) as u64
    }

    /// The entry without an index.
    #[inline(always)]
    pub fn single(&mut self) -> &mut TaggedPage {
        // SAFETY: it is its own and valid, and generated code does not run now.
        unsafe { &mut self.inside.as_mut().single }
    }

    /// The others.
    #[inline(always)]
    pub fn entries(&self) -> &[TaggedPage; N] {
        // SAFETY: as above.
        unsafe { &self.inside.as_ref().entries }
    }

    /// The others, to be changed.
    #[inline(always)]
    pub fn entries_mut(&mut self) -> &mut [TaggedPage; N] {
        // SAFETY: as above.
        unsafe { &mut self.inside.as_mut().entries }
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
            let entries = t.entries_mut().as_ptr().addr() as u64;
            assert_eq!(entries, t.base() + ENTRIES as u64);
            assert!(t.entries().iter().all(|e| e.tag == 0));
            let single = core::ptr::from_mut(t.single()).addr() as u64;
            assert_eq!(single, t.base().wrapping_add_signed(SINGLE.into()));
        }
    }
}
