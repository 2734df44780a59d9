//! Finds the code generation of a page.

use core::sync::atomic::Ordering;

use x86_codegen::ir::source::Source;

use crate::JitBus;

/// Returns the page of an identity, with the generation that it has now. `None`: there is no such page any more.
pub(crate) fn source_of<B: JitBus>(bus: &mut B, id: u64) -> Option<Source> {
    let cell = bus.mmu().code_generation_cell(id)?;
    Some(Source {
        page_guard: cell.as_ptr() as u64,
        generation: cell.load(Ordering::Acquire),
    })
}
