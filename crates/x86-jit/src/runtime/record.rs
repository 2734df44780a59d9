//! Records the path that is executed from a block on, by the interpreter, and decodes a trace along it.

use x86_cpu::CpuState;
use x86_defs::reg;
use x86_interp::{Interp, RunStop};

use crate::code::source::source_of;
use crate::{Jit, JitBus, code::cache::Cache, runtime::state::is_translatable};
use x86_codegen::{
    ir::mode::{BlockKey, Mode},
    ir::source::TracePage,
    region::block::{self},
    region::trace::{MAX_DISTANCE, MAX_TRACE, Tracer},
};

impl<B: JitBus> Jit<B> {
    /// Has the interpreter execute from RIP on, until the function there returns or RIP and RSP are again what they
    /// were. Returns the path as distances from the first page, empty if nothing was called.
    pub(crate) fn record(
        &mut self,
        interp: &mut Interp<B>,
        cpu: &mut CpuState,
        bus: &mut B,
    ) -> (Vec<i32>, RunStop) {
        let first_page = cpu.rip() & !0xfff;
        let mode = self.mode_now(cpu);
        let mut path = Vec::with_capacity(MAX_TRACE + 1);
        let stack = cpu.gpr[reg::RSP];
        let (mut depth, mut calls) = (0, false);
        let mut stop = RunStop::Poll;
        for _ in 0..=MAX_TRACE {
            let at = cpu.rip().wrapping_sub(first_page) as i64;
            let Some(at) = i32::try_from(at).ok().filter(|_| at.abs() < MAX_DISTANCE) else {
                break;
            };
            if !is_translatable(cpu) || self.mode_now(cpu) != mode || bus.must_return(cpu) {
                break;
            }
            // All repetitions of a string instruction have the same address.
            if path.last() != Some(&at) {
                path.push(at);
            }
            let is_back = path.len() > 1 && path.first() == Some(&at);
            if depth < 0 || is_back && cpu.gpr[reg::RSP] == stack {
                break;
            }
            let before = (cpu.rip(), cpu.gpr[reg::RSP]);
            stop = interp.one(cpu, bus);
            if stop != RunStop::Poll {
                break;
            }
            let is_branch = cpu.rip().wrapping_sub(before.0) > block::MAX_LEN as u64;
            match cpu.gpr[reg::RSP].wrapping_sub(before.1) as i64 {
                -8 if is_branch => (depth, calls) = (depth + 1, true),
                8.. if is_branch => depth -= 1,
                _ => {}
            }
        }
        if !calls {
            path.clear();
        }
        (path, stop)
    }

    /// Decodes the block at `gva` along its recorded path, if a trace can follow that. Returns false if there is no
    /// trace, so that the block is to be decoded as others are.
    pub(crate) fn follow_path(
        &mut self,
        cpu: &mut CpuState,
        bus: &mut B,
        (gva, mode): (u64, Mode),
        own: TracePage,
    ) -> bool {
        self.builder.translator.input.pages.clear();
        self.builder.translator.input.pages.push(own);
        let hot = self.builder.translator.input.hot.as_mut();
        let Some(hot) = hot.filter(|h| mode.has_page_guards() && !h.path.is_empty()) else {
            return false;
        };
        let path = core::mem::take(&mut hot.path);
        let breakpoints = &self.session.breakpoints;
        let is_trace = {
            let cache = &mut self.code.cache;
            let find_page = |cpu: &mut CpuState, bus: &mut B, gva| {
                // Code of such a page is entered by `Jit::find`, which notes the places.
                let is_free = !breakpoints.has_page(gva);
                is_free.then(|| page_of(cache, cpu, bus, (gva, mode)))?
            };
            let mut tracer = Tracer {
                cpu,
                bus,
                forms: &mut self.builder.forms,
                decoded: &mut self.builder.decoded,
                pages: &mut self.builder.translator.input.pages,
                find_page,
                first_page: gva & !0xfff,
                mode,
                stops: &breakpoints.offsets(),
            };
            tracer.decode(&path)
        };
        if is_trace {
            let branches = self.builder.decoded.iter().filter(|d| d.onto.is_some());
            self.stats.inlined += branches.count() as u64;
        } else {
            self.builder.translator.input.pages.truncate(1);
        }
        if let Some(hot) = &mut self.builder.translator.input.hot {
            hot.path = path;
        }
        is_trace
    }
}

/// Returns the page at `gva` if a trace can have code of it, and sets the page guard that says that it is mapped there.
fn page_of<B: JitBus>(
    cache: &mut Cache,
    cpu: &mut CpuState,
    bus: &mut B,
    (gva, mode): (u64, Mode),
) -> Option<TracePage> {
    // Only pages that the guest has fetched from: to fetch from another one would show in accessed flags.
    if !bus.mmu().is_fetched(gva) {
        return None;
    }
    // The generation is read before the bytes, so that a change in between makes the trace stale.
    let page = bus.code_page(cpu, gva).ok()?;
    let source = source_of(bus, page.id)?;
    if cache.blocks.mode_at(gva, &page, mode.without(Mode::BOUND)) != mode {
        return None;
    }
    let page_guard = cache.take_page_guard(BlockKey::new(page.id, mode))?;
    cache.set_page_guard(bus, page_guard, gva);
    Some(TracePage {
        distance: 0,
        source,
        bound: mode.bound(gva),
        page_guard: Some(page_guard),
        id: page.id,
    })
}
