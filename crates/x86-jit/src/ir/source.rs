//! The code that a block is made from: pages and their generations.

use crate::{JitBus, frame::page_guard::PageGuard};

/// Code that a block is made from.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Source {
    /// Host address of the page's code generation.
    pub(crate) page_guard: u64,
    /// Its value.
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

/// A page that a block has code of.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TracePage {
    /// How far it is from the page that the block begins in.
    pub(crate) distance: i32,
    pub(crate) source: Source,
    /// Its gva, if its blocks are executed nowhere else.
    pub(crate) bound: Option<i32>,
    /// Says that the live view has it there; none of the block's own page.
    pub(crate) page_guard: Option<PageGuard>,
    /// Its identity.
    pub(crate) id: u64,
}

impl TracePage {
    /// The one that a block begins in, which is at `id`.
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
