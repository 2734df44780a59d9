//! Waiting inside KVM_RUN: HLT, and vCPUs that have not been started.

use std::{sync::atomic::Ordering, time::Duration};

use host::futex::Wait;

use super::{Inner, shared::request};
use crate::{Error, Result, RunInput};

/// How often a VMM's signal mask is compared with the pending signals.
const SIGNAL_CHECK_NS: u64 = 1_000_000;

impl Inner {
    /// HLT: sleeps until a request, a timer or a signal.
    pub(super) fn sleep(&mut self, input: &RunInput<'_>) -> Result<()> {
        let mut due = self.bus.timer_ns;
        if let Some(chips) = self.bus.vm.chips() {
            due = due.min(chips.pit_next_ns());
        }
        self.park(input, due)
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
        match self.bus.shared.park(Duration::from_nanos(ns)) {
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
