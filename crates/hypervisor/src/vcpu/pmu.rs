//! The performance counters of a vCPU: `pmu`'s state machine, the tally that it works on, and its
//! interrupt.
//!
//! Retired events come from the engines (`x86_cpu::Retired`). Cycles are those of the host's TSC
//! while the guest runs: not while it sleeps in HLT, nor while the VMM has the vCPU. A counter of
//! cycles needs no tally of instructions: its overflow is a point in time, as a timer is. But as
//! polls are at branches, the interrupt would always be there, so a random number of
//! instructions is interpreted first: a profile has its samples where the time goes.

use pmu::{CYCLES, Pmu, Tally};
use x86_cpu::Retired;
use x86_defs::retired::INSTRUCTIONS;

use crate::limits::PERF_CAPABILITIES;

/// No point in time.
pub(super) const NEVER: u64 = u64::MAX;

/// A vCPU's counters.
#[derive(Debug)]
pub(crate) struct VirtualPmu {
    pub(super) state: Pmu,
    /// IA32_PERF_CAPABILITIES.
    pub(super) capabilities: u64,
    /// Cycles at CPL 0, and at other levels, until `since`.
    pub(super) cycles: [u64; 2],
    /// The host's TSC at which the vCPU last began to run, or they were last counted.
    pub(super) since: Option<u64>,
    /// Which of them grow.
    pub(super) level: usize,
    pub(super) has_cycles: bool,
    pub(super) splits_cycles: bool,
    /// The host's TSC at which a counter of cycles overflows.
    pub(super) due_tsc: u64,
    /// One has: instructions retired, of both levels, at which it interrupts.
    pub(super) landing: Option<u64>,
    /// What [`Retired::levels`] are but for that.
    pub(super) levels: u8,
    pub(super) random: u64,
    /// `VmState`'s filter that is in force.
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
    /// Instructions retired while any were counted.
    pub(super) fn instructions(retired: &Retired) -> u64 {
        retired.counts.iter().map(|c| c[INSTRUCTIONS]).sum()
    }
}
