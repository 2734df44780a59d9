//! Watched pages: those with data breakpoints. Neither level of the TLB that generated code looks at has one, so that each
//! access to it comes to [`Mmu::resolve`], and generated code leaves the instruction to the interpreter, which looks at the
//! breakpoints. A breakpoint is a linear address, whatever the address space, so a page is watched in all contexts.

use crate::Mmu;

impl Mmu {
    /// Watches these pages and no others.
    pub(crate) fn watch(&mut self, pages: &[u64]) {
        let is_more = pages.iter().any(|page| !self.is_watched(*page));
        self.watched.clear();
        self.watched.extend_from_slice(pages);
        if is_more {
            self.flush_everything();
        }
    }

    /// Returns true if the page of `gva` is watched.
    #[inline]
    pub(crate) fn is_watched(&self, gva: u64) -> bool {
        self.watched.contains(&(gva & !0xfff))
    }
}
