//! The performance counters of a vCPU: the state machine of `pmu`, the tally that it works on, and its interrupt.
//!
//! Retired events come from the engines (`x86_cpu::Retired`). Cycles are ticks of the host's TSC while the guest runs,
//! not while it sleeps in HLT nor while the VMM has the vCPU. A counter of cycles needs no tally of instructions: its
//! overflow is a point in time, like a timer's. But polls are at branches, so the interrupt would always come there.
//! Therefore a random number of instructions is interpreted before it, so that a profile's samples are where the time
//! is spent.

use pmu::{CYCLES, Pmu, Tally};
use x86_cpu::Retired;
use x86_defs::retired::INSTRUCTIONS;

use crate::limits::PERF_CAPABILITIES;

/// A time that never comes.
pub(super) const NEVER: u64 = u64::MAX;

/// A vCPU's counters.
#[derive(Debug)]
pub(crate) struct VirtualPmu {
    pub(super) state: Pmu,
    /// IA32_PERF_CAPABILITIES.
    pub(super) capabilities: u64,
    /// Cycles at CPL 0, and at other levels, counted up to `since`.
    pub(super) cycles: [u64; 2],
    /// The host's TSC up to which cycles are counted. `None` while the vCPU does not run.
    pub(super) since: Option<u64>,
    /// Index in `cycles` of the level that the vCPU runs at.
    pub(super) level: usize,
    pub(super) has_cycles: bool,
    pub(super) splits_cycles: bool,
    /// The host's TSC at which a counter of cycles overflows.
    pub(super) due_tsc: u64,
    /// A counter of cycles has overflowed: its interrupt comes at this number of retired instructions, of both levels
    /// together.
    pub(super) landing: Option<u64>,
    /// The value of [`Retired::levels`] when there is no such interrupt to come.
    pub(super) levels: u8,
    pub(super) random: u64,
    /// Generation of `VmState`'s filter that is in force.
    pub(super) filter_generation: u64,
}

impl Default for VirtualPmu {
    fn default() -> Self {
        Self {
            state: Pmu::default(),
            capabilities: if crate::system::is_amd() {
                0
            } else {
                PERF_CAPABILITIES
            },
            cycles: [0; 2],
            since: None,
            level: 0,
            has_cycles: false,
            splits_cycles: false,
            due_tsc: NEVER,
            landing: None,
            levels: 0,
            random: 0x9e37_79b9_7f4a_7c15,
            filter_generation: 0,
        }
    }
}

impl VirtualPmu {
    /// Adds the cycles since they were last counted.
    pub(super) fn count_cycles(&mut self) {
        if let Some(since) = &mut self.since {
            let now = host::cpu::rdtsc();
            self.cycles[self.level] += now.saturating_sub(*since);
            *since = now.max(*since);
        }
    }
    pub(super) fn tally(&mut self, retired: &Retired) -> Tally {
        if self.has_cycles {
            self.count_cycles();
        }
        let mut tally = Tally::default();
        for (to, (from, cycles)) in tally
            .0
            .iter_mut()
            .zip(retired.counts.iter().zip(self.cycles))
        {
            to[..from.len()].copy_from_slice(from);
            to[CYCLES] = cycles;
        }
        tally
    }
    /// Returns how many instructions were retired, at all levels that were counted.
    pub(super) fn instructions(retired: &Retired) -> u64 {
        retired.total(INSTRUCTIONS)
    }
}
