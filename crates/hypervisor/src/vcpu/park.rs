//! Waiting inside KVM_RUN: HLT, and vCPUs that have not been started.

use std::{sync::atomic::Ordering, time::Duration};

use host::futex::Wait;
use x86_cpu::CpuState;

use super::{Inner, bus::Bus};
use crate::shared::request;
use crate::{Error, Result, RunInput};

/// How often a VMM's signal mask is compared with the pending signals.
const SIGNAL_CHECK_NS: u64 = 1_000_000;

/// How long HLT looks around before it sleeps. A wake-up from a futex takes about 12 µs across
/// cores, so a little spinning pays where the next event is near and comes from another core.
/// Where the sender waits for this very core it costs twice (20 µs a round trip become 100 µs), so
/// a failure ends it for a while, and for longer each time.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct HaltPoll {
    ns: u64,
    /// HLTs to sleep through before the next attempt.
    rest: u32,
    /// Doubled by each failure.
    penalty: u32,
}

/// First value after zero.
const POLL_START_NS: u64 = 10_000;
/// Most HLTs between two attempts.
const MAX_REST: u32 = 4096;

impl HaltPoll {
    /// How long to look around now.
    fn begin(&mut self, max: u64) -> u64 {
        if self.rest > 0 {
            self.rest -= 1;
            return 0;
        }
        self.ns.min(max)
    }
    /// The event came while looking around.
    fn paid(&mut self, max: u64) {
        self.ns = (self.ns * 2).min(max);
        self.penalty = 0;
    }
    /// It did not.
    fn failed(&mut self) {
        self.ns = 0;
        self.penalty = (self.penalty * 2).clamp(16, MAX_REST);
        self.rest = self.penalty;
    }
    /// A sleep of `slept` ns has ended.
    fn slept(&mut self, slept: u64, max: u64) {
        if self.ns == 0 && slept <= max {
            self.ns = POLL_START_NS.min(max);
        }
    }
}

impl Bus {
    /// Too many PAUSEs since the last look for code that makes progress. Looks that only a device's answer
    /// brings do not count: a guest may wait by reading a timer of the VMM's.
    pub(super) fn is_spinning(&mut self, is_answer: bool) -> bool {
        const PAUSES: u32 = 64;
        let is_spinning = self.pauses >= PAUSES;
        if is_spinning || !is_answer {
            self.pauses = 0;
        }
        if !is_spinning && !is_answer {
            self.ways_given = 0;
        }
        is_spinning
    }

    /// The guest waits for another vCPU: lets that one have the core, if there are more
    /// vCPUs that want to run than cores, or a core was taken from one not long ago.
    pub(super) fn give_way(&mut self, cpu: &mut CpuState) {
        const SLICE: Duration = Duration::from_micros(20);
        /// Doublings, while the wait goes on: 640 µs at most, about as long as it has taken so far.
        const DOUBLINGS: u8 = 5;
        if self.vm.is_crowded() || self.vm.load.is_contended(self.looked.0) {
            let slice = SLICE * (1 << self.ways_given.min(DOUBLINGS));
            self.ways_given = self.ways_given.saturating_add(1);
            self.shared.set_asleep(true);
            // A request ends it, and so does the time; a signal is seen by its own means.
            let _ = self.shared.park(slice);
            self.shared.set_asleep(false);
            self.serve_flushes(cpu);
            self.note_pause();
        }
    }
}

impl Inner {
    /// HLT: waits for a request, a timer or a signal.
    pub(super) fn sleep(&mut self, input: &RunInput<'_>) -> Result<()> {
        let due = self.bus.next_timer_ns();
        let begin = host::clock::monotonic_ns();
        let max = self.bus.vm.load.halt_poll_ns();
        let limit = if self.bus.pv.guest_polls || !self.bus.vm.has_room() {
            0
        } else {
            self.poll.begin(max)
        };
        if limit > 0 {
            self.bus.counters.halt_attempted_poll += 1;
            if self.spin(input, begin.saturating_add(limit), due) {
                self.bus.counters.halt_successful_poll += 1;
                self.poll.paid(max);
                return Ok(());
            }
            self.poll.failed();
        }
        self.bus.mark_preempted();
        self.bus.counters.is_blocking = true;
        self.bus.show_stats();
        let result = self.park(input, due);
        self.bus.unmark_preempted(&mut self.cpu);
        let slept = host::clock::monotonic_ns().saturating_sub(begin);
        self.bus.counters.is_blocking = false;
        self.bus.counters.halt_wakeup += 1;
        self.bus.counters.halt_wait_ns += slept;
        self.poll.slept(slept, max);
        result
    }

    /// Looks for a reason to go on until `end`; true if there is one.
    fn spin(&mut self, input: &RunInput<'_>, end: u64, due: u64) -> bool {
        loop {
            if self.bus.shared.is_requested() || input.immediate_exit.load(Ordering::Relaxed) != 0 {
                return true;
            }
            let now = host::clock::monotonic_ns();
            if now >= due {
                return true;
            }
            if now >= end {
                return false;
            }
            for _ in 0..8 {
                core::hint::spin_loop();
            }
        }
    }

    /// A vCPU that was never started sleeps until something is asked of it;
    /// KVM then has the VMM call again.
    pub(super) fn wait_for_startup<T>(&mut self, input: &RunInput<'_>) -> Result<T> {
        let is_asked = || input.immediate_exit.load(Ordering::Relaxed) != 0;
        if is_asked() {
            return Err(Error::Interrupted);
        }
        if !self.bus.shared.is_requested() {
            self.park(input, u64::MAX)?;
        }
        let requests = self.bus.shared.take();
        self.serve(requests);
        if is_asked() || requests & request::KICK != 0 {
            return Err(Error::Interrupted);
        }
        Err(Error::Again)
    }

    /// Sleeps until `due`, a request or a signal.
    fn park(&mut self, input: &RunInput<'_>, due: u64) -> Result<()> {
        let now = host::clock::monotonic_ns();
        let mut ns = due.saturating_sub(now);
        if input.blocked_signals.is_some() {
            // Nothing tells of a blocked signal.
            ns = ns.min(SIGNAL_CHECK_NS);
        }
        self.bus.note_pause();
        self.bus.shared.set_halted(true);
        let wait = self.bus.shared.park(Duration::from_nanos(ns));
        self.bus.shared.set_halted(false);
        match wait {
            Wait::Interrupted => Err(Error::Interrupted),
            Wait::Woken | Wait::Changed | Wait::TimedOut => self.check_signals(input, now),
        }
    }

    /// KVM_SET_SIGNAL_MASK: EINTR if a signal is pending that the mask lets through.
    ///
    /// The VMM has it blocked outside, so no handler runs and nobody tells; asking
    /// costs a system call, which only VMMs with a mask pay, once a millisecond.
    pub(super) fn check_signals(&mut self, input: &RunInput<'_>, now_ns: u64) -> Result<()> {
        let Some(blocked) = input.blocked_signals else {
            return Ok(());
        };
        if now_ns < self.signals_checked_ns.saturating_add(SIGNAL_CHECK_NS) {
            return Ok(());
        }
        self.signals_checked_ns = now_ns;
        if host::signal::pending() & !blocked != 0 {
            return Err(Error::Interrupted);
        }
        Ok(())
    }
}
