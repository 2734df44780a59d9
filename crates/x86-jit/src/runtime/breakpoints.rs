//! [`Breakpoints`]: hardware breakpoints beside translated code, the guest's own or a debugger's (SDM vol. 3, 18.2).
//!
//! * **Execution.** No block has an instruction at a breakpoint: a block ends before it, and [`Jit::find_block`] finds none
//!   there. So the interpreter executes it, and raises the exception. Blocks belong to pages of guest-physical memory and
//!   a breakpoint is a linear address: *places* are where breakpoints have been found to be, noted by [`Jit::find`], which
//!   each way to a page at a linear address begins with. A trace has no instruction at the offset of one in any page.
//! * **Data.** The MMU has no entry for a page with one ([`mmu::Front::watch`]).
//! * **I/O.** With one enabled, nothing is translated.
//!
//! A kernel enables breakpoints whenever it switches to a thread that has some. So they stay known when they are disabled,
//! until that has cost more than to find out about them again: translated code is dropped where there is a new one, and
//! not at each switch.
//!
//! Only instructions of the interpreter and the VMM change debug registers. After both, translated code is entered by
//! [`Jit::find`], which looks at them first ([`Jit::resume`] is for instructions that nothing can happen at).

use x86_cpu::{Breakpoint, BreakpointKind, CpuState};
use x86_defs::dr;

use crate::{Jit, JitBus};
use x86_codegen::ir::segment::code_at;

/// Maximum number of addresses, and of pages, that are known.
const MAX_KNOWN: usize = 16;
/// Maximum number of places.
const MAX_PLACES: usize = 256;
/// Number of instructions that are left to the interpreter for breakpoints that are disabled until those are forgotten.
const MAX_IDLE: u32 = 4096;

/// What is known of breakpoints.
#[derive(Debug, Default)]
pub(crate) struct Breakpoints {
    /// The enabled breakpoints that were last looked at.
    seen: [Option<Breakpoint>; 4],
    /// Linear addresses of breakpoints on execution.
    addresses: Vec<u64>,
    /// Places of these: the page's identity plus the offset.
    places: Vec<u64>,
    /// Pages with breakpoints on data.
    watched: Vec<u64>,
    /// Number of instructions left to the interpreter for nothing.
    idle: u32,
}

/// Returns true if an I/O breakpoint is enabled.
pub(crate) fn has_io_breakpoint(cpu: &CpuState) -> bool {
    is_enabled(cpu) && cpu.breakpoints().any(|b| b.kind == BreakpointKind::Io)
}

/// Returns true if any breakpoint is enabled.
#[inline]
pub(crate) fn is_enabled(cpu: &CpuState) -> bool {
    cpu.effective_dr7() & dr::DR7_ENABLES != 0
}

/// Adds what `known` does not have. Returns true if there was any.
fn add(known: &mut Vec<u64>, new: impl Iterator<Item = u64> + Clone) -> bool {
    let before = known.len();
    for n in new.clone() {
        if !known.contains(&n) {
            known.push(n);
        }
    }
    let is_more = known.len() != before;
    if known.len() > MAX_KNOWN {
        known.clear();
        known.extend(new);
    }
    is_more
}

impl Breakpoints {
    /// Returns the offsets of the places in a page of guest-physical memory.
    pub(crate) fn offsets_in(&self, page: u64) -> Vec<u16> {
        let places = self.places.iter().filter(|place| **place & !0xfff == page);
        places.map(|place| *place as u16 & 0xfff).collect()
    }

    /// Returns the offsets of all breakpoints on execution in their pages.
    pub(crate) fn offsets(&self) -> Vec<u16> {
        let addresses = self.addresses.iter();
        addresses.map(|at| *at as u16 & 0xfff).collect()
    }

    /// Returns true if a breakpoint on execution is in the page at `gva`.
    pub(crate) fn has_page(&self, gva: u64) -> bool {
        let mut addresses = self.addresses.iter();
        addresses.any(|at| *at & !0xfff == gva & !0xfff)
    }

    /// Returns true if the interpreter has to execute the instruction at this place, as a breakpoint is there.
    pub(crate) fn stops_at(&mut self, cpu: &CpuState, place: u64) -> bool {
        let stops = self.places.contains(&place);
        if stops && !is_enabled(cpu) {
            self.idle += 1;
        }
        stops
    }

    /// Notes that an access has come to a watched page.
    pub(crate) fn note_access(&mut self, cpu: &CpuState) {
        if !is_enabled(cpu) {
            self.idle += 1;
        }
    }
}

impl<B: JitBus> Jit<B> {
    /// Makes translated code heed the breakpoints that are in force.
    #[inline]
    pub(crate) fn heed_breakpoints(&mut self, cpu: &CpuState, bus: &mut B) {
        if is_enabled(cpu) {
            self.take_breakpoints(cpu, bus);
        } else if self.session.breakpoints.idle > MAX_IDLE {
            self.session.breakpoints = Breakpoints::default();
            bus.mmu().watch(&[]);
            self.flush_all();
        }
    }

    fn take_breakpoints(&mut self, cpu: &CpuState, bus: &mut B) {
        let now = core::array::from_fn(|n| cpu.breakpoint(n));
        let known = &mut self.session.breakpoints;
        if known.seen == now {
            return;
        }
        known.seen = now;
        known.idle = 0;
        let all = now.iter().flatten();
        let data = all.clone().filter_map(Breakpoint::watched_page);
        if add(&mut known.watched, data) {
            bus.mmu().watch(&known.watched);
        }
        let execute = all.filter(|b| b.kind == BreakpointKind::Execute);
        if add(&mut known.addresses, execute.map(|b| b.at)) {
            self.flush_all();
        }
    }

    /// Notes the places of breakpoints in the page that RIP is in. If there is code of it that does not know of them, all
    /// code is dropped.
    #[inline]
    pub(crate) fn note_places(&mut self, cpu: &mut CpuState, bus: &mut B) {
        if self.session.breakpoints.has_page(code_at(cpu)) {
            self.note_places_here(cpu, bus);
        }
    }

    #[inline(never)]
    fn note_places_here(&mut self, cpu: &mut CpuState, bus: &mut B) {
        let Some((key, _)) = self.key_at(cpu, bus) else {
            return;
        };
        let known = &mut self.session.breakpoints;
        let gva = code_at(cpu) & !0xfff;
        let here = known.addresses.iter().filter(|at| **at & !0xfff == gva);
        let here: Vec<_> = here.map(|at| key.page() | at & 0xfff).collect();
        if here.iter().all(|place| known.places.contains(place)) {
            return;
        }
        let is_full = known.places.len() + here.len() > MAX_PLACES;
        if is_full {
            known.places.clear();
        }
        known.places.extend(here);
        if is_full || self.code.cache.blocks.has_page(key.page()) {
            self.flush_all();
            self.select(cpu, bus);
        }
    }
}
