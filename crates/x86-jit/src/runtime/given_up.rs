//! Instructions that translated code gives up, mostly a driver's accesses to its device. They are decoded for the
//! interpreter once, when they come for the second time.

use x86_cpu::{CodePage, CpuState};
use x86_interp::{Insn, Interp, Transfer};

use crate::{JitBus, runtime::quiet::Change};
use x86_codegen::{
    ir::mode::Mode,
    ir::segment::{code_at, has_pages},
};

const ENTRIES: usize = 64;

/// An instruction, by all that its decoding depends on.
#[derive(Debug)]
struct Entry<B> {
    rip: u64,
    /// The target key, and `GuestBus::code_changes`. While both stay the same, so do `page` and `mode`.
    key: u64,
    changes: u64,
    /// The page's identity and its code's generation.
    page: Option<CodePage>,
    mode: Mode,
    /// The instruction has come a second time.
    is_tried: bool,
    /// The decoded instruction; `None` until it has come twice, and if it cannot be decoded from one page's bytes.
    insn: Option<Insn<B>>,
    /// The instruction as a transfer, if it is one.
    transfer: Option<Transfer>,
    /// What the instruction may change of what translated code depends on.
    change: Change,
}

/// A direct-mapped table of instructions.
#[derive(Debug)]
pub(crate) struct GivenUp<B>(Vec<Entry<B>>);

impl<B> Default for GivenUp<B> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

fn place(rip: u64) -> usize {
    (rip ^ rip >> 6) as usize % ENTRIES
}

impl<B: JitBus> GivenUp<B> {
    /// Returns the instruction at RIP if it is a transfer and was found before under the same key and with the same
    /// code.
    #[inline]
    pub(crate) fn transfer(&self, cpu: &CpuState, bus: &B) -> Option<&Transfer> {
        let entry = self.0.get(place(cpu.rip()))?;
        let now = (cpu.rip(), cpu.engine.key, bus.code_changes());
        let is_same = (entry.rip, entry.key, entry.changes) == now;
        entry.transfer.as_ref().filter(|_| is_same)
    }

    /// Returns the instruction at RIP and what it may change, if it was found before under the same key and with the
    /// same code.
    #[inline]
    pub(crate) fn known(&self, cpu: &CpuState, bus: &B) -> Option<(&Insn<B>, Change)> {
        let entry = self.0.get(place(cpu.rip()))?;
        let now = (cpu.rip(), cpu.engine.key, bus.code_changes());
        let is_same = (entry.rip, entry.key, entry.changes) == now;
        let insn = entry.insn.as_ref().filter(|_| is_same)?;
        Some((insn, entry.change))
    }

    /// Returns the decoded instruction at RIP; `None` when it comes for the first time, or cannot be decoded here.
    pub(crate) fn find(
        &mut self,
        interp: &mut Interp<B>,
        cpu: &mut CpuState,
        bus: &mut B,
        mode: Mode,
    ) -> Option<&Insn<B>> {
        if mode.has(Mode::SEGMENTED) && !has_pages(cpu, 0) {
            // CS's limit has to be checked, which the interpreter does when it decodes.
            return None;
        }
        let (rip, key) = (cpu.rip(), cpu.engine.key);
        let changes = bus.code_changes();
        if self.0.is_empty() {
            self.0.resize_with(ENTRIES, || Entry {
                rip: 0,
                key: 0,
                changes: 0,
                page: None,
                mode: Mode::NONE,
                is_tried: false,
                insn: None,
                transfer: None,
                change: Change::Any,
            });
        }
        let entry = self.0.get_mut(place(rip))?;
        if (entry.rip, entry.key, entry.changes) != (rip, key, changes) {
            let page = bus.code_page(cpu, code_at(cpu)).ok();
            let is_same =
                page.is_some() && (entry.rip, entry.page, entry.mode) == (rip, page, mode);
            if !is_same {
                *entry = Entry {
                    rip,
                    key,
                    changes,
                    page,
                    mode,
                    is_tried: false,
                    insn: None,
                    transfer: None,
                    change: Change::Any,
                };
                return None;
            }
            (entry.key, entry.changes) = (key, changes);
        }
        if !entry.is_tried {
            entry.is_tried = true;
            let resets = interp.resets();
            let mut bytes = [0; 15];
            let n = bus.peek_code(cpu, code_at(cpu), &mut bytes).ok()?;
            let insn = interp.prepare(cpu, bytes.get(..n)?);
            // The instruction's own bytes are tracked as code, and no others.
            let len = insn.as_ref().map_or(0, |i| usize::from(i.len));
            let mut tracked = [0; 15];
            let tracked = tracked.get_mut(..len)?;
            let n = bus.code_bytes(cpu, code_at(cpu), tracked).ok()?;
            let insn = insn.filter(|_| n == len && bytes.get(..len) == Some(tracked));
            // If the interpreter was reset meanwhile, the instruction is about to be dropped with all others.
            entry.insn = insn.filter(|_| interp.resets() == resets);
            // Fetching may have compared the page with what was translated, and found a change.
            if bus.code_changes() != entry.changes {
                entry.insn = None;
            }
            entry.change = entry.insn.as_ref().map_or(Change::Any, Change::of);
            entry.transfer = entry.insn.as_ref().and_then(Transfer::of);
        }
        entry.insn.as_ref()
    }
}
