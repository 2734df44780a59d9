//! Whether G in the guest's tables counts.
//!
//! A global translation outlives loads of CR3, so it needs no entries to compare it with memory ([`crate::shadow`]). But
//! Xen, and other systems that have no PCIDs, flush global translations nearly as often as they load CR3, and each time
//! all of them would have to be found anew. For such a guest G is ignored, as processors may: every translation
//! belongs to a root, and a flush of everything becomes catching up, too.

use x86_cpu::CpuState;

use crate::Mmu;

/// Number of loads of CR3, and of flushes of everything, after which it is decided anew whether G counts.
const PERIOD: u64 = 256;
/// Number of flushes of everything in a period from which on G is ignored.
const MANY: u64 = 16;
/// Number of flushes of everything in a period below which G counts again.
const FEW: u64 = 4;

/// How often the guest flushes global translations.
#[derive(Debug, Default)]
pub(crate) struct Globals {
    /// True if G is ignored.
    pub(crate) are_ignored: bool,
    loads: u64,
    flushes: u64,
}

impl Globals {
    /// Counts loads of CR3, and flushes of everything. Returns true if [`Self::are_ignored`] has changed.
    fn count(&mut self, loads: u64, flushes: u64) -> bool {
        self.loads += loads;
        self.flushes += flushes;
        if self.loads + self.flushes < PERIOD {
            return false;
        }
        let enough = if self.are_ignored { FEW } else { MANY };
        let are_ignored = self.flushes >= enough;
        (self.loads, self.flushes) = (0, 0);
        core::mem::replace(&mut self.are_ignored, are_ignored) != are_ignored
    }
}

impl Mmu {
    /// Counts loads of CR3. The caller then takes over the registers.
    pub(crate) fn count_loads(&mut self, loads: u64) {
        self.count(loads, 0);
    }

    /// Flushes all translations, as a guest's instruction or call asks for.
    pub(crate) fn flush_globals(&mut self, cpu: &CpuState, tick: u64) {
        // Only a tracked context can catch up.
        let counts = self.contexts[self.current].derived.is_some();
        if self.count(0, counts.into()) {
            self.set_root(cpu);
        } else if self.globals.are_ignored {
            self.flush_non_global(tick, None);
        } else {
            self.flush_everything();
        }
    }

    /// If it changes whether G counts, flushes everything and returns true. The registers then have to be taken over.
    fn count(&mut self, loads: u64, flushes: u64) -> bool {
        let has_changed = self.globals.count(loads, flushes);
        if has_changed {
            self.flush_everything();
            self.controls = None;
            // Tables may be shared only while G counts.
            self.forget_recent_views();
        }
        has_changed
    }
}
