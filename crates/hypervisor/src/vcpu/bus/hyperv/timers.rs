//! Synthetic timers, four per processor. They expire by the reference time and then send a message or, in direct mode,
//! an interrupt (Hypervisor Top-Level Functional Specification, "Timers").

use irqchip::{Accepted, DeliveryMode, LapicIrq};

use super::{Bus, synic::Posted};
use crate::{
    system::{hv_cpuid::feature, hv_msrs::index::STIMER0_CONFIG},
    vcpu::bus::apic::NEVER,
    vm::hyperv::UNIT_NS,
};

/// HVMSG_TIMER_EXPIRED.
const EXPIRED: u32 = 0x8000_0010;

/// HV_X64_MSR_STIMERx_CONFIG.
mod config {
    pub(super) const ENABLE: u64 = 1 << 0;
    pub(super) const PERIODIC: u64 = 1 << 1;
    pub(super) const LAZY: u64 = 1 << 2;
    pub(super) const AUTO_ENABLE: u64 = 1 << 3;
    pub(super) const DIRECT: u64 = 1 << 12;

    pub(super) const fn vector(config: u64) -> u8 {
        (config >> 4) as u8
    }
    pub(super) const fn sint(config: u64) -> u8 {
        (config >> 16 & 0xf) as u8
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Timer {
    config: u64,
    /// Period, or the reference time of the expiry.
    count: u64,
    /// Reference time of the next expiry, if the timer runs.
    expires: Option<u64>,
    /// The timer has expired, and the guest could not be told yet.
    waits: bool,
}

/// The timers of a processor.
#[derive(Clone, Copy, Debug)]
pub(in crate::vcpu) struct Timers {
    list: [Timer; 4],
    /// When a timer is due next, on the monotonic clock.
    pub(in crate::vcpu) due_ns: u64,
}

impl Default for Timers {
    fn default() -> Self {
        Self {
            list: Default::default(),
            due_ns: NEVER,
        }
    }
}

impl Timer {
    const fn has(&self, bit: u64) -> bool {
        self.config & bit != 0
    }
    const fn is_running(&self) -> bool {
        self.has(config::ENABLE) && self.count != 0
    }
    /// Starts the timer if it is enabled and does not run yet.
    fn start(&mut self, time: u64) {
        if !self.is_running() {
            (self.expires, self.waits) = (None, false);
        } else if self.expires.is_none() {
            self.expires = Some(if self.has(config::PERIODIC) {
                time.saturating_add(self.count)
            } else {
                self.count
            });
        }
    }
    /// Notes that the guest has been told of an expiry.
    fn told(&mut self, time: u64) {
        self.waits = false;
        if self.has(config::PERIODIC) {
            // Periods that were missed count as one expiry.
            let late = time.saturating_sub(self.expires.unwrap_or(time));
            let left = self.count - late.checked_rem(self.count).unwrap_or(0);
            self.expires = Some(time.saturating_add(left));
        } else {
            self.config &= !config::ENABLE;
            self.expires = None;
        }
    }
    /// Handles a write of HV_X64_MSR_STIMERx_CONFIG.
    fn set_config(&mut self, value: u64) {
        let was_enabled = self.has(config::ENABLE);
        *self = Self {
            config: value,
            count: self.count,
            ..Self::default()
        };
        // Source 0 cannot be used by a timer.
        if was_enabled && !self.has(config::DIRECT) && config::sint(value) == 0 {
            self.config &= !config::ENABLE;
        }
    }
    /// Handles a write of HV_X64_MSR_STIMERx_COUNT.
    fn set_count(&mut self, value: u64, host: bool) {
        *self = Self {
            config: self.config,
            count: value,
            ..Self::default()
        };
        if host {
            // The VMM restores the value that it saved.
        } else if value == 0 {
            self.config &= !config::ENABLE;
        } else if self.has(config::AUTO_ENABLE) {
            self.config |= config::ENABLE;
        }
    }
}

impl Bus {
    pub(super) fn synthetic_timer_msr(&self, index: u32, host: bool) -> Option<u64> {
        if !self.hv.synic.is_active && !host {
            return None;
        }
        let at = (index - STIMER0_CONFIG) as usize;
        let timer = self.hv.timers.list.get(at / 2)?;
        Some(if at.is_multiple_of(2) {
            timer.config
        } else {
            timer.count
        })
    }

    pub(super) fn set_synthetic_timer_msr(&mut self, index: u32, value: u64, host: bool) -> bool {
        if !self.hv.synic.is_active && (!host || value != 0) {
            return false;
        }
        let at = (index - STIMER0_CONFIG) as usize;
        let [_, _, promised] = self.hv.features;
        let may_be_direct = host || !self.hv.enforces || promised & feature::DIRECT_TIMERS != 0;
        let Some(timer) = self.hv.timers.list.get_mut(at / 2) else {
            return false;
        };
        if !at.is_multiple_of(2) {
            timer.set_count(value, host);
        } else if value & config::DIRECT != 0 && !may_be_direct {
            return false;
        } else {
            timer.set_config(value);
        }
        self.hv.timers.due_ns = 0;
        self.recheck = true;
        true
    }

    /// Has the timers checked, because the reference time may have changed.
    pub(super) fn recheck_synthetic_timers(&mut self) {
        if self.hv.timers.due_ns != NEVER {
            self.hv.timers.due_ns = 0;
            self.recheck = true;
        }
    }

    /// Retries timers that waited for the message slots of these sources, which the guest has freed.
    pub(super) fn resume_synthetic_timers(&mut self, sints: u16) {
        let timers = &mut self.hv.timers;
        for timer in &mut timers.list {
            let is_message = timer.waits && !timer.has(config::DIRECT);
            if is_message && sints >> config::sint(timer.config) & 1 != 0 {
                timer.waits = false;
                timers.due_ns = 0;
                self.recheck = true;
            }
        }
    }

    /// Handles expired timers, if one may be due.
    #[inline]
    pub(in crate::vcpu) fn service_synthetic_timers(&mut self, now_ns: u64) {
        if self.hv.timers.due_ns <= now_ns {
            self.expire_synthetic_timers(now_ns);
        }
    }

    #[cold]
    fn expire_synthetic_timers(&mut self, now_ns: u64) {
        let time = self.reference_time();
        let mut due_ns = NEVER;
        for i in 0..self.hv.timers.list.len() {
            let mut timer = self.hv.timers.list[i];
            timer.start(time);
            if let Some(expires) = timer.expires.filter(|e| *e <= time && !timer.waits) {
                if self.tell_of_timer(i, timer.config, [expires, time]) {
                    timer.told(time);
                } else {
                    timer.waits = true;
                }
            }
            self.hv.timers.list[i] = timer;
            if let Some(expires) = timer.expires.filter(|_| !timer.waits) {
                let ns = expires.saturating_sub(time).saturating_mul(UNIT_NS);
                due_ns = due_ns.min(now_ns.saturating_add(ns));
            }
        }
        self.hv.timers.due_ns = due_ns;
    }

    /// Tells the guest of an expiry; false if the guest must take something else first.
    fn tell_of_timer(&mut self, number: usize, config: u64, times: [u64; 2]) -> bool {
        self.is_quiet = false;
        if config & config::DIRECT != 0 {
            let irq = LapicIrq::edge(self.shared.id, DeliveryMode::Fixed, config::vector(config));
            return self.shared.interrupt(&irq) != Accepted::Ignored;
        }
        let words = [number as u64, times[0], times[1]].map(u64::to_le_bytes);
        let waits = config & config::LAZY == 0;
        let posted = self.post_message(config::sint(config), EXPIRED, words.as_flattened(), waits);
        posted == Posted::Done
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn timer(config: u64, count: u64) -> Timer {
        Timer {
            config,
            count,
            ..Timer::default()
        }
    }

    #[test]
    fn a_period_begins_at_the_start_and_missed_ones_are_one() {
        let mut t = timer(config::ENABLE | config::PERIODIC, 10);
        t.start(100);
        assert_eq!(t.expires, Some(110));
        t.told(110);
        assert_eq!(t.expires, Some(120));
        t.told(153);
        assert_eq!(t.expires, Some(160));
    }

    #[test]
    fn one_shot_is_at_a_time_and_ends() {
        let mut t = timer(config::ENABLE, 110);
        t.start(100);
        assert_eq!(t.expires, Some(110));
        t.told(111);
        assert_eq!((t.expires, t.config), (None, 0));
        t.start(120);
        assert_eq!(t.expires, None);
    }

    #[test]
    fn registers_enable_and_disable() {
        let source = |n: u64| n << 16;
        let auto = config::AUTO_ENABLE | source(2);
        for (config, count, want) in [
            (auto, 5, auto | config::ENABLE),
            (auto | config::ENABLE, 0, auto),
            (source(2), 5, source(2)),
        ] {
            let mut t = timer(config, 1);
            t.set_count(count, false);
            assert_eq!((t.config, t.count), (want, count), "{config:#x}");
        }
        let mut t = timer(auto, 1);
        t.set_count(5, true);
        assert_eq!(t.config, auto);
        // An enabled timer cannot be left without a source.
        let mut t = timer(config::ENABLE | source(2), 1);
        t.set_config(config::ENABLE);
        assert_eq!(t.config, 0);
        t.set_config(config::ENABLE | config::DIRECT);
        assert_eq!(t.config, config::ENABLE | config::DIRECT);
    }
}
