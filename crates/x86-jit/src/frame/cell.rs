//! Page guards: which word of a view says that a page with code is mapped where it was.

use mmu::l1::CELLS;

/// Which of a view's cells belongs to a page with code, and what its gva plus is there: cells are fewer than pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Cell {
    pub(crate) number: usize,
    /// From 1 on.
    pub(crate) tag: i8,
}

impl Cell {
    /// That of the `n`th page.
    pub(crate) fn new(n: usize) -> Option<Self> {
        Some(Self {
            number: n % CELLS,
            tag: i8::try_from(n / CELLS + 1).ok()?,
        })
    }
}
