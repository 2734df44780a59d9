//! Page guards: which word of a view says that a page with code is mapped where it was.

use mmu::l1::PAGE_GUARDS;

/// The page guard of a page with code: which word of a view it is, and what is added to the page's gva there. The
/// addend tells pages apart that share a word, as there are fewer words than pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageGuard {
    /// The word's number, from 0 to [`PAGE_GUARDS`] - 1.
    pub number: usize,
    /// What is added to the gva, from 1 on.
    pub tag: i8,
}

impl PageGuard {
    /// Returns the page guard of the `n`th page.
    pub fn new(n: usize) -> Option<Self> {
        Some(Self {
            number: n % PAGE_GUARDS,
            tag: i8::try_from(n / PAGE_GUARDS + 1).ok()?,
        })
    }
}
