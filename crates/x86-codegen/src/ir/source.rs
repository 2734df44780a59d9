//! The code that a block is translated from: pages and their generations.

use crate::frame::page_guard::PageGuard;

/// A page of code that a block is translated from.
#[derive(Clone, Copy, Debug, Default)]
pub struct Source {
    /// Host address of the page's code generation.
    pub page_guard: u64,
    /// The generation that was translated.
    pub generation: u32,
}

/// A page that a trace has code of.
#[derive(Clone, Copy, Debug)]
pub struct TracePage {
    /// Distance from the page that the trace begins in, in bytes.
    pub distance: i32,
    /// Its generation.
    pub source: Source,
    /// The gva of the page, if its blocks are executed at no other address.
    pub bound: Option<i32>,
    /// The guard that says that the live view has the page there; `None` for the page that the trace begins in.
    pub page_guard: Option<PageGuard>,
    /// The page's identity.
    pub id: u64,
}

impl TracePage {
    /// Returns the page that a block begins in, whose identity is in `id`.
    pub fn own(source: Source, bound: Option<i32>, id: u64) -> Self {
        Self {
            distance: 0,
            source,
            bound,
            page_guard: None,
            id: id & !0xfff,
        }
    }
}
