//! Events that tests have happen at random.

use x86_cpu::CpuState;

use crate::{Jit, JitBus, runtime::state::is_translatable};

/// Average number of lookups of blocks between two times that, in tests, hot blocks are translated again.
const AGAIN: u64 = 16;

/// The same for two times that the live tables become large or small.
const EXCHANGED: u64 = 24;

/// Average number of rounds of the run loop between two times that, in tests, a path is recorded.
const FOLLOWED: u64 = 2;

impl<B: JitBus> Jit<B> {
    pub(crate) fn next_random(&mut self) -> u64 {
        self.disturbance.random ^= self.disturbance.random << 13;
        self.disturbance.random ^= self.disturbance.random >> 7;
        self.disturbance.random ^= self.disturbance.random << 17;
        self.disturbance.random
    }

    /// Returns true now and then, in tests ([`Self::mix_tiers`]): a path is to be recorded.
    pub(crate) fn is_time_to_follow(&mut self, cpu: &CpuState) -> bool {
        is_translatable(cpu) && self.next_random().is_multiple_of(FOLLOWED)
    }

    /// Does what [`Self::mix_tiers`] and [`Self::set_random_flushes`] ask for.
    pub(crate) fn disturb(&mut self, cpu: &mut CpuState, bus: &mut B) {
        if self.next_random().is_multiple_of(EXCHANGED) {
            bus.mmu().exchange_tables();
        }
        if self.disturbance.flush_every != 0
            && self
                .disturbance
                .random
                .is_multiple_of(self.disturbance.flush_every)
        {
            self.flush_all();
        } else if self.disturbance.random.is_multiple_of(AGAIN) {
            self.translate_some_again(cpu, bus);
        }
    }
}
