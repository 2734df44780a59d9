//! Page guards: which word of a view says that a page with code is mapped where it was.

use mmu::l1::PAGE_GUARDS;

/// Which of a view's page guards belongs to a page with code, and what its gva plus is there: page guards are fewer than pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PageGuard {
    pub(crate) number: usize,
    /// From 1 on.
    pub(crate) tag: i8,
}

impl PageGuard {
    /// That of the `n`th page.
    pub(crate) fn new(n: usize) -> Option<Self> {
        Some(Self {
            number: n % PAGE_GUARDS,
            tag: i8::try_from(n / PAGE_GUARDS + 1).ok()?,
        })
    }
}
