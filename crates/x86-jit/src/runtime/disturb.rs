//! What tests have happen at random.

use x86_cpu::CpuState;

use crate::{Jit, JitBus, runtime::state::is_translatable};

/// Times that a block is looked for until, in tests, what is executed much is translated again, on average.
const AGAIN: u64 = 16;

/// Times that the run loop goes round until, in tests, a trace is made.
const FOLLOWED: u64 = 2;

impl<B: JitBus> Jit<B> {
    pub(crate) fn next_random(&mut self) -> u64 {
        self.disturbance.random ^= self.disturbance.random << 13;
        self.disturbance.random ^= self.disturbance.random >> 7;
        self.disturbance.random ^= self.disturbance.random << 17;
        self.disturbance.random
    }

    /// Now and then, where [`Self::mix_tiers`] asks for it.
    pub(crate) fn is_time_to_follow(&mut self, cpu: &CpuState) -> bool {
        is_translatable(cpu) && self.next_random().is_multiple_of(FOLLOWED)
    }

    /// What [`Self::mix_tiers`] and [`Self::set_random_flushes`] are for.
    pub(crate) fn disturb(&mut self, cpu: &mut CpuState, bus: &mut B) {
        self.next_random();
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
