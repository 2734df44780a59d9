//! The LAPIC timer: one-shot, periodic, TSC-deadline (SDM vol. 3, 11.5.4).
//!
//! Nothing ticks: the timer knows when it expires. The caller arms a timer of its own for [`Lapic::timer_deadline`] and
//! calls [`Lapic::timer_fire`].

use super::spec::{self, lvt, reg};
use super::{Accepted, Action, Lapic, LocalSource};
use crate::Now;

/// Timer state beyond the registers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Timer {
    /// Expiry on the ns clock, in one-shot and periodic mode.
    target_ns: Option<u64>,
    /// Full period, from the initial count.
    period_ns: u64,
    /// IA32_TSC_DEADLINE; 0 is disarmed.
    tsc_deadline: u64,
}

/// The mode that LVTT selects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    OneShot,
    Periodic,
    TscDeadline,
}

const fn mode(lvtt: u32) -> Mode {
    match lvtt & lvt::TIMER_MODE {
        lvt::TIMER_PERIODIC => Mode::Periodic,
        lvt::TIMER_TSC_DEADLINE => Mode::TscDeadline,
        // Mode 3 is reserved; KVM counts in it as one-shot.
        _ => Mode::OneShot,
    }
}

impl Lapic {
    /// Returns when to call [`Self::timer_fire`], on the ns clock. The time may be in the past.
    pub fn timer_deadline(&self, now: Now) -> Option<u64> {
        if self.timer.tsc_deadline != 0 {
            now.ns_at_tsc(self.timer.tsc_deadline)
        } else {
            self.timer.target_ns
        }
    }

    /// If the timer has expired, requests its vector and, in periodic mode, sets the next expiry. Periods that were
    /// missed entirely are one interrupt.
    pub fn timer_fire(&mut self, now: Now) -> Accepted {
        if self.timer.tsc_deadline != 0 {
            if now.tsc < self.timer.tsc_deadline {
                return Accepted::Ignored;
            }
            self.timer.tsc_deadline = 0;
            return self.local(LocalSource::Timer);
        }
        let Some(target) = self.timer.target_ns.filter(|&t| t <= now.ns) else {
            return Accepted::Ignored;
        };
        let period = self.timer.period_ns;
        self.timer.target_ns = match mode(self.get(reg::LVTT)) {
            Mode::Periodic if period != 0 => {
                let behind = (now.ns - target) / period;
                target.checked_add(period.saturating_mul(behind + 1))
            }
            _ => None,
        };
        self.local(LocalSource::Timer)
    }

    /// IA32_TSC_DEADLINE: zero unless the timer is in that mode.
    pub fn tsc_deadline(&self) -> u64 {
        self.timer.tsc_deadline
    }

    /// Writes IA32_TSC_DEADLINE. Ignored in other timer modes (SDM vol. 3, 11.5.4.1); 0 disarms the timer, and a time
    /// that has passed fires at once.
    pub fn set_tsc_deadline(&mut self, value: u64) -> Action {
        if !self.is_enabled() || mode(self.get(reg::LVTT)) != Mode::TscDeadline {
            return Action::None;
        }
        self.timer.tsc_deadline = value;
        Action::Timer
    }

    /// Returns the current count.
    pub(super) fn current_count(&self, now: Now) -> u32 {
        let (Some(target), Some(divisor)) = (
            self.timer.target_ns,
            core::num::NonZeroU64::new(self.ns_per_count()),
        ) else {
            return 0;
        };
        if self.get(reg::TMICT) == 0 || self.timer.period_ns == 0 {
            return 0;
        }
        let left = target.saturating_sub(now.ns) % self.timer.period_ns.saturating_add(1);
        u32::try_from(left / divisor).unwrap_or(u32::MAX)
    }

    /// Handles a write of the initial count.
    pub(super) fn write_initial_count(&mut self, value: u32, now: Now) -> Action {
        if mode(self.get(reg::LVTT)) == Mode::TscDeadline {
            return Action::None;
        }
        self.set(reg::TMICT, value);
        self.timer.period_ns = self.period(value);
        self.timer.target_ns = (value != 0)
            .then(|| now.ns.checked_add(self.timer.period_ns))
            .flatten();
        Action::Timer
    }

    /// Handles a write of LVTT: a change to or from TSC-deadline mode disarms the timer.
    pub(super) fn write_lvtt(&mut self, value: u32) -> Action {
        let old = mode(self.get(reg::LVTT));
        self.set(reg::LVTT, value);
        let new = mode(value);
        if (old == Mode::TscDeadline) != (new == Mode::TscDeadline) {
            self.timer = Timer::default();
            self.set(reg::TMICT, 0);
            return Action::Timer;
        }
        if old == new {
            return Action::None;
        }
        self.timer.period_ns = self.period(self.get(reg::TMICT));
        Action::Timer
    }

    /// Handles a write of the divider: the remaining count runs at the new rate.
    pub(super) fn write_divide(&mut self, value: u32, now: Now) -> Action {
        let left = self.current_count(now);
        let old = self.ns_per_count();
        self.set(reg::TDCR, value & spec::TDCR_WRITABLE);
        if self.timer.target_ns.is_none() || old == self.ns_per_count() {
            return Action::None;
        }
        self.timer.period_ns = self.period(self.get(reg::TMICT));
        self.timer.target_ns = now
            .ns
            .checked_add(u64::from(left).saturating_mul(self.ns_per_count()));
        Action::Timer
    }

    /// Restarts the timer after a restore, from the current count that was saved.
    pub(super) fn restore_timer(&mut self, current: u32, now: Now) {
        self.timer = Timer::default();
        let initial = self.get(reg::TMICT);
        if initial == 0 || mode(self.get(reg::LVTT)) == Mode::TscDeadline {
            return;
        }
        self.timer.period_ns = self.period(initial);
        // QEMU saves no current count. KVM then begins a new period, and fires a one-shot timer at once, which a guest
        // that waits for it needs.
        let left = match (current, mode(self.get(reg::LVTT))) {
            (0, Mode::Periodic) => self.timer.period_ns,
            _ => u64::from(current).saturating_mul(self.ns_per_count()),
        };
        // The current count cannot exceed the initial one; a state with a larger one was not saved from a LAPIC.
        let left = left.min(self.timer.period_ns);
        self.timer.target_ns = now.ns.checked_add(left);
    }

    fn period(&self, count: u32) -> u64 {
        let ns = u64::from(count).saturating_mul(self.ns_per_count());
        if mode(self.get(reg::LVTT)) == Mode::Periodic && ns != 0 {
            ns.max(spec::MIN_PERIOD_NS)
        } else {
            ns
        }
    }

    /// Returns nanoseconds per count (SDM vol. 3, figure 11-10: values 0 to 6 divide by 2 to 128, 7 by 1).
    fn ns_per_count(&self) -> u64 {
        let v = self.get(reg::TDCR);
        let shift = ((v & 3 | (v & 8) >> 1) + 1) & 7;
        // KVM_ENABLE_CAP limits the tick, so that a count of 32 bits does not overflow.
        self.config.ns_per_tick << shift
    }
}
