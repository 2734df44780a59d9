//! How long generated code may remember where loads of CR3 lead, and the loads that it makes by itself.

use core::mem::offset_of;

use x86_cpu::CpuState;
use x86_defs::control::{cr3, cr4};
use zerocopy::FromZeros;

use crate::{Mmu, context::MAX_TRACKED as CONTEXTS, shadow::roots::Roots};

/// Number of PCIDs.
const PCIDS: usize = 1 << 12;

/// What vouches for remembered loads of CR3, which generated code reads: numbers, and the last load of each PCID. And what
/// generated code notes of the loads that it makes.
///
/// A load is vouched for by the sum of [`Self::keeping`] or [`Self::flushing`] and the number of the context that it leads
/// to. No number ever falls, so while the sum is unchanged, the load leads to the same context, to the same tables for each
/// of its views, and to the same identity of what is fetched through them.
#[repr(C)]
#[derive(Debug, FromZeros)]
pub struct SwitchEpochs {
    /// Vouches for loads that flush nothing: no context has missed a flush either, but for those of loads.
    keeping: u64,
    /// Vouches for loads that flush: of flushes, contexts have missed only those of such loads, so that a context whose
    /// entries are still in memory has missed nothing.
    flushing: u64,
    /// The numbers of contexts: they change with what concerns the loads that lead to one context.
    contexts: [u64; CONTEXTS],
    /// 1 for a context that a load has led to since this was last 0. Generated code sets it, too.
    used: [u8; CONTEXTS],
    /// What was loaded last of each PCID, without bit 63. The root's context has missed no flush of the PCID: each load
    /// has it catch up, and the flush of another root's load is noted here. Generated code notes its own loads, too.
    last: [u64; PCIDS],
    /// The loads that flush which generated code has made.
    flushed: [u64; Self::MAX_FLUSHING],
}

impl SwitchEpochs {
    /// Maximum number of loads that flush which generated code makes before it tells the MMU.
    pub const MAX_FLUSHING: usize = 120;
    /// Offset of the eight bytes that say what was loaded of PCID 0.
    pub const LAST: i32 = offset_of!(Self, last) as i32;
    /// Offset of the list of loads that flush.
    pub const FLUSHED: i32 = offset_of!(Self, flushed) as i32;
    /// Offset of the eight bytes with the number of context 0.
    pub const CONTEXTS: i32 = offset_of!(Self, contexts) as i32;
    /// Offset of the byte that says that context 0 is used.
    pub const USED: i32 = offset_of!(Self, used) as i32;
    /// Offset of [`Self::keeping`].
    pub const KEEPING: i32 = offset_of!(Self, keeping) as i32;
    /// Offset of [`Self::flushing`].
    pub const FLUSHING: i32 = offset_of!(Self, flushing) as i32;

    pub(crate) fn new() -> Box<Self> {
        // An idle vCPU's lists take up no memory.
        let mut new = Self::new_box_zeroed().expect("memory for a vCPU");
        (new.keeping, new.flushing) = (1, 1);
        new
    }

    /// Returns what vouches for loads that lead to the context with this index.
    pub fn of(&self, context: u64, flushes: bool) -> u64 {
        let of_all = if flushes { self.flushing } else { self.keeping };
        of_all + self.contexts[context as usize % CONTEXTS]
    }

    /// True if this value, without bit 63, is what was loaded last of its PCID.
    pub fn is_last(&self, value: u64) -> bool {
        self.last[value as usize % PCIDS] == value
    }

    /// Notes that a load leads to the context.
    #[inline]
    pub(crate) fn note_used(&mut self, context: usize) {
        self.used[context % CONTEXTS] = 1;
    }

    /// True if a load has led to the context since [`Self::take_used`].
    pub(crate) fn is_used(&self, context: usize) -> bool {
        self.used[context % CONTEXTS] != 0
    }

    /// Returns true if a load has led to the context since this was last asked.
    pub(crate) fn take_used(&mut self, context: usize) -> bool {
        core::mem::take(&mut self.used[context % CONTEXTS]) != 0
    }

    /// Notes a load of CR3.
    pub(crate) fn note_load(&mut self, value: u64) {
        self.last[value as usize % PCIDS] = value;
    }
}

impl Mmu {
    /// The remembered loads that lead to this context are forgotten.
    #[inline(always)]
    pub(crate) fn forget_switches_to(&mut self, context: usize) {
        self.switch_epochs.contexts[context % CONTEXTS] += 1;
    }

    /// The remembered loads that lead to the live tables are forgotten.
    pub(crate) fn forget_switches_to_live(&mut self) {
        if self.views[self.live].is_shared {
            self.forget_switches();
        } else {
            self.forget_switches_to(self.current);
        }
    }

    /// Every remembered load is forgotten.
    #[inline(always)]
    pub(crate) fn forget_switches(&mut self) {
        self.switch_epochs.keeping += 1;
        self.switch_epochs.flushing += 1;
    }

    /// Remembered loads that flush nothing are forgotten, because one has flushed.
    #[inline(always)]
    pub(crate) fn forget_keeping_switches(&mut self) {
        self.switch_epochs.keeping += 1;
    }

    /// Remembered loads that flush are forgotten, because the next one has more to do.
    pub(crate) fn forget_flushing_switches(&mut self) {
        self.switch_epochs.flushing += 1;
    }

    /// See [`Front::compared`](crate::Front::compared).
    pub(crate) fn compared(&self) -> Option<u64> {
        let derived = self.contexts[self.current].derived.as_ref();
        derived
            .filter(|_| !self.is_written_by_device)
            .map(|d| d.head())
    }

    /// See [`Front::note_flushing_loads`](crate::Front::note_flushing_loads).
    pub(crate) fn note_flushing_loads(&mut self, cpu: &CpuState, loads: u64) {
        self.stats.flushes += loads;
        self.leave_context();
        let tick = self.next_tick();
        let has_pcids = cpu.cr4 & cr4::PCIDE != 0;
        for value in self.switch_epochs.flushed.iter().take(loads as usize) {
            let pcid = if has_pcids { value & cr3::PCID } else { 0 };
            self.flushes.note_non_global(Some(pcid as u16), tick);
        }
        self.paging.set_long_root(cpu);
        let id = Roots::id(self.world(), self.paging.root);
        let tick = self.next_tick();
        if let Some(found) = self.roots.find(id) {
            // It was compared at the last flush of its PCID, or later.
            let context = &mut self.contexts[found];
            (context.left, context.key.pcid) = (tick, self.paging.pcid);
            context.is_stale = false;
        }
        self.count_loads(loads);
    }
}
