//! Waiting inside KVM_RUN: in HLT, while spinning, and of vCPUs that have not been started.

use std::{sync::atomic::Ordering, time::Duration};

use host::futex::Wait;
use x86_cpu::CpuState;

use super::{Inner, bus::Bus};
use crate::shared::request;
use crate::{Error, Result, RunInput};

/// How often a VMM's signal mask is compared with the pending signals.
const SIGNAL_CHECK_NS: u64 = 1_000_000;

/// How long HLT spins before it sleeps. A futex wake-up takes about 12 µs across cores, so a little spinning pays if
/// the next event is near and comes from another core. If the sender waits for this very core, spinning makes a round
/// trip five times as long. So a failure suspends spinning for a while, and each further failure for longer.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct HaltPoll {
    ns: u64,
    /// HLTs that sleep at once before the next attempt to spin.
    rest: u32,
    /// Length of the next suspension, doubled by each failure.
    penalty: u32,
}

/// First spinning time after a time of zero.
const POLL_START_NS: u64 = 10_000;
/// Largest number of HLTs between two attempts.
const MAX_REST: u32 = 4096;

impl HaltPoll {
    /// Returns how long to spin now.
    fn begin(&mut self, max: u64) -> u64 {
        if self.rest > 0 {
            self.rest -= 1;
            return 0;
        }
        self.ns.min(max)
    }
    /// Notes that the event came during spinning.
    fn paid(&mut self, max: u64) {
        self.ns = (self.ns * 2).min(max);
        self.penalty = 0;
    }
    /// Notes that the event did not come during spinning.
    fn failed(&mut self) {
        self.ns = 0;
        self.penalty = (self.penalty * 2).clamp(16, MAX_REST);
        self.rest = self.penalty;
    }
    /// Notes that a sleep of `slept` ns has ended.
    fn slept(&mut self, slept: u64, max: u64) {
        if self.ns == 0 && slept <= max {
            self.ns = POLL_START_NS.min(max);
        }
    }
}

impl Bus {
    /// True if the guest has executed more PAUSEs since the last check than code that makes progress would. A check
    /// that only follows a device's answer resets nothing: a guest may wait by reading a timer of the VMM's.
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

    /// Gives up the core for a while, because the guest waits for another vCPU. Does so only if more vCPUs want to run
    /// than there are cores, or a core was taken from a vCPU not long ago.
    pub(super) fn give_way(&mut self, cpu: &mut CpuState) {
        const SLICE: Duration = Duration::from_micros(20);
        /// Largest number of doublings while the wait goes on: to 640 µs, about as long as the wait has taken by then.
        const DOUBLINGS: u8 = 5;
        if self.vm.is_crowded() || self.vm.load.is_contended(self.looked.0) {
            let slice = SLICE * (1 << self.ways_given.min(DOUBLINGS));
            self.ways_given = self.ways_given.saturating_add(1);
            self.shared.set_asleep(true);
            // A request or the end of the slice ends it. Signals are seen by their own means.
            let _ = self.shared.park(slice);
            self.shared.set_asleep(false);
            self.serve_flushes(cpu);
            self.note_pause();
        }
    }
}

impl Inner {
    /// Executes HLT: waits for a request, a timer or a signal.
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

    /// Spins until there is a reason to go on, which is true, or until `end`, which is false.
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

    /// Lets a vCPU that was never started sleep until a request comes; as with KVM, the VMM must then call again.
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
            // A blocked signal does not end the sleep, so it is checked for at intervals.
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

    /// KVM_SET_SIGNAL_MASK: EINTR if a signal is pending that the VMM's mask lets through.
    ///
    /// The VMM has the signal blocked outside of KVM_RUN, so no handler runs and nothing announces the signal. Asking
    /// takes a system call, which is made once a millisecond and only for VMMs with a mask.
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
