//! The code that a block is translated from: pages and their generations.

use crate::{JitBus, frame::page_guard::PageGuard};

/// A page of code that a block is translated from.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Source {
    /// Host address of the page's code generation.
    pub(crate) page_guard: u64,
    /// The generation that was translated.
    pub(crate) generation: u32,
}

impl Source {
    pub(crate) fn of<B: JitBus>(bus: &mut B, id: u64) -> Option<Self> {
        let page_guard = bus.mmu().code_generation_cell(id)?;
        Some(Self {
            page_guard: page_guard.as_ptr() as u64,
            generation: page_guard.load(core::sync::atomic::Ordering::Acquire),
        })
    }
}

/// A page that a trace has code of.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TracePage {
    /// Distance from the page that the trace begins in, in bytes.
    pub(crate) distance: i32,
    pub(crate) source: Source,
    /// The gva of the page, if its blocks are executed at no other address.
    pub(crate) bound: Option<i32>,
    /// The guard that says that the live view has the page there; `None` for the page that the trace begins in.
    pub(crate) page_guard: Option<PageGuard>,
    /// The page's identity.
    pub(crate) id: u64,
}

impl TracePage {
    /// Returns the page that a block begins in, whose identity is in `id`.
    pub(crate) fn own(source: Source, bound: Option<i32>, id: u64) -> Self {
        Self {
            distance: 0,
            source,
            bound,
            page_guard: None,
            id: id & !0xfff,
        }
    }
}
