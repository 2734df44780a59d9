//! Instructions that have translated code, which gives up: a driver's accesses to its device most of
//! all. They are decoded once for the interpreter, when they come for the second time.

use x86_cpu::{CodePage, CpuState};
use x86_interp::{Insn, Interp, Transfer};

use crate::{
    JitBus,
    ir::mode::Mode,
    ir::segment::{code_at, has_pages},
};

const ENTRIES: usize = 64;

/// An instruction, by all that it depends on.
#[derive(Debug)]
struct Entry<B> {
    rip: u64,
    /// Mapping and mode, and `GuestBus::code_changes`: while they stay, so does all that follows.
    key: u64,
    changes: u64,
    /// The page's identity and its code's generation.
    page: Option<CodePage>,
    mode: Mode,
    /// It has come twice.
    is_tried: bool,
    /// Absent as well if it cannot be decoded from one page's bytes.
    insn: Option<Insn<B>>,
    /// The same, if it is one.
    transfer: Option<Transfer>,
}

/// Direct-mapped.
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
    /// The instruction at RIP, if it has been found before under the same key and with the same
    /// code, and is one.
    #[inline]
    pub(crate) fn transfer(&self, cpu: &CpuState, bus: &B) -> Option<&Transfer> {
        let entry = self.0.get(place(cpu.rip()))?;
        let now = (cpu.rip(), cpu.engine.key, bus.code_changes());
        let is_same = (entry.rip, entry.key, entry.changes) == now;
        entry.transfer.as_ref().filter(|_| is_same)
    }

    /// The instruction at RIP.
    pub(crate) fn find(
        &mut self,
        interp: &mut Interp<B>,
        cpu: &mut CpuState,
        bus: &mut B,
        mode: Mode,
    ) -> Option<&Insn<B>> {
        if mode.has(Mode::SEGMENTED) && !has_pages(cpu, 0) {
            // CS's limit is to be looked at.
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
                };
                return None;
            }
            (entry.key, entry.changes) = (key, changes);
        }
        if !entry.is_tried {
            entry.is_tried = true;
            let resets = interp.resets();
            let mut bytes = [0; 15];
            let n = bus.code_bytes(cpu, code_at(cpu), &mut bytes).ok()?;
            let insn = interp.prepare(cpu, bytes.get(..n)?);
            // To be dropped with everything else, soon.
            entry.insn = insn.filter(|_| interp.resets() == resets);
            // Fetching may have had the page compared.
            if bus.code_changes() != entry.changes {
                entry.insn = None;
            }
            entry.transfer = entry.insn.as_ref().and_then(Transfer::of);
        }
        entry.insn.as_ref()
    }
}
