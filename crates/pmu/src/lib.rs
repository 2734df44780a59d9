//! A virtual performance monitoring unit, Intel's and AMD's, as a pure state machine
//! (SDM vol. 3, chapter 20; AMD APM vol. 2, 13.2).
//!
//! Nothing is counted here. An engine keeps a [`Tally`] of retired events, which only grows, and a counter is a
//! difference of two tallies. So to enable, disable or read a counter takes a few additions, and what no counter wants
//! costs nothing. [`Pmu::wants`] tells the engine what to tally, and how far it may go until a counter overflows.
//! [`Pmu::settle`] records an overflow.
//!
//! A guest's write takes effect when the writing instruction retires: the instruction that enables a counter is not
//! counted, the one that disables it is. The caller passes the tally of that moment.

#![forbid(unsafe_code)]

mod amd;
mod config;
mod counter;
mod events;
mod filter;
mod intel;

pub use config::{Config, Vendor};
pub use counter::{CYCLES, SLOTS, Tally};
pub use filter::{Filter, InvalidFilter, MAX_EVENTS};

use std::sync::Arc;

use counter::{Counter, levels};
use x86_defs::retired::{INSTRUCTIONS, LOADS, STORES, STREAMS, bit};

/// Maximum number of general counters.
pub const MAX_GENERAL: usize = 8;
/// Maximum number of fixed counters.
pub const MAX_FIXED: usize = 3;
/// Number of a counter's bits.
pub const WIDTH: u32 = 48;
const MASK: u64 = (1 << WIDTH) - 1;
/// Bit of the first fixed counter in the global registers.
const FIXED_SHIFT: usize = 32;

/// Bits of an event select that both vendors have.
mod select {
    pub(crate) const USR: u64 = 1 << 16;
    pub(crate) const OS: u64 = 1 << 17;
    pub(crate) const EDGE: u64 = 1 << 18;
    pub(crate) const INT: u64 = 1 << 20;
    pub(crate) const EN: u64 = 1 << 22;
    pub(crate) const INV: u64 = 1 << 23;
    pub(crate) const CMASK: u64 = 0xff << 24;
}

/// What an engine has to do for the counters as they are programmed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wants {
    /// Privilege levels at which retired events are tallied: bit 0 is CPL 0, bit 1 the others.
    pub levels: u8,
    /// Streams that are counted at one of these levels, a bit each.
    pub streams: u16,
    /// For each stream, the number of its events until a counter can overflow whose overflow interrupts; `u64::MAX`:
    /// never.
    pub events_left: [u64; STREAMS],
    /// True if some counter counts cycles.
    pub has_cycles: bool,
    /// True if some counter counts cycles at some levels only, so that cycles have to be told apart by level.
    pub splits_cycles: bool,
    /// Number of cycles until a counter of cycles overflows whose overflow interrupts. It may be later, as cycles of
    /// other levels may not count.
    pub cycles_left: Option<u64>,
}

impl Default for Wants {
    /// Nothing is wanted.
    fn default() -> Self {
        Self {
            levels: 0,
            streams: 0,
            events_left: [u64::MAX; STREAMS],
            has_cycles: false,
            splits_cycles: false,
            cycles_left: None,
        }
    }
}

/// The counters of one vCPU.
#[derive(Clone, Debug, Default)]
pub struct Pmu {
    config: Config,
    general: [Counter; MAX_GENERAL],
    selects: [u64; MAX_GENERAL],
    fixed: [Counter; MAX_FIXED],
    /// The counters that count something, by their bits in the global registers.
    running: u64,
    fixed_ctrl: u64,
    global_ctrl: u64,
    global_status: u64,
    /// True if IA32_DEBUGCTL.FREEZE_WHILE_SMM is set.
    freezes_in_smm: bool,
    in_smm: bool,
    filter: Option<Arc<Filter>>,
    /// True if a counter's overflow has to interrupt, and [`Self::take_interrupt`] has not been called since.
    interrupt: bool,
}

/// The error of a refused access: it raises #GP, or ends the VMM's list of MSRs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refused;

impl Pmu {
    /// Returns what CPUID shows.
    pub const fn config(&self) -> &Config {
        &self.config
    }
    /// Makes the PMU one that CPUID shows differently. All registers are as after a reset.
    pub fn set_config(&mut self, config: Config) {
        *self = Self {
            config,
            filter: self.filter.take(),
            ..Self::default()
        };
        self.global_ctrl = general_bits(config.general);
    }
    /// Sets the filter of KVM_SET_PMU_EVENT_FILTER.
    pub fn set_filter(&mut self, filter: Option<Arc<Filter>>, now: &Tally) {
        self.change(now, |p| p.filter = filter);
    }
    /// Sets IA32_DEBUGCTL's bit that makes counters stand still in SMM.
    pub fn set_freezes_in_smm(&mut self, freezes: bool, now: &Tally) {
        if freezes != self.freezes_in_smm {
            self.change(now, |p| p.freezes_in_smm = freezes);
        }
    }
    /// Returns true if counters stand still in SMM, and `in_smm` is not what [`Self::set_in_smm`] has noted.
    pub const fn is_behind_smm(&self, in_smm: bool) -> bool {
        self.freezes_in_smm && self.in_smm != in_smm
    }
    /// Notes that the vCPU has entered or left SMM.
    pub fn set_in_smm(&mut self, in_smm: bool, now: &Tally) {
        if in_smm != self.in_smm {
            self.change(now, |p| p.in_smm = in_smm);
        }
    }

    /// Reads a register for RDMSR, or for KVM_GET_MSRS (`is_host`). `None` if this PMU does not have the register.
    pub fn read(&mut self, index: u32, is_host: bool, now: &Tally) -> Option<Result<u64, Refused>> {
        match self.config.vendor {
            Vendor::None => None,
            Vendor::Intel => self.read_intel(index, is_host, now),
            Vendor::Amd => self.read_amd(index, now),
        }
    }
    /// Writes a register for WRMSR, or for KVM_SET_MSRS (`is_host`). `None` if this PMU does not have the register.
    pub fn write(
        &mut self,
        index: u32,
        value: u64,
        is_host: bool,
        now: &Tally,
    ) -> Option<Result<(), Refused>> {
        match self.config.vendor {
            Vendor::None => None,
            Vendor::Intel => self.write_intel(index, value, is_host, now),
            Vendor::Amd => self.write_amd(index, value, is_host, now),
        }
    }
    /// Reads a counter for RDPMC, after the check of privilege.
    pub fn rdpmc(&self, index: u32, now: &Tally) -> Result<u64, Refused> {
        const FIXED: u32 = 1 << 30;
        let n = (index & !FIXED) as usize;
        let counter = match self.config.vendor {
            Vendor::Intel if index & FIXED != 0 => self.fixed[..self.config.fixed.into()].get(n),
            Vendor::Intel | Vendor::Amd => self
                .general
                .get(index as usize)
                .filter(|_| n < self.config.general.into()),
            Vendor::None => None,
        };
        counter.map(|c| c.value(now)).ok_or(Refused)
    }

    /// Records the counters that have overflowed.
    pub fn settle(&mut self, now: &Tally) {
        for at in bits(self.running) {
            let interrupts = self.interrupts(at);
            if self.counter_mut(at).settle(now) {
                self.global_status |= 1 << at;
                self.interrupt |= interrupts;
            }
        }
    }
    /// Returns true once for each interrupt that has to be sent.
    pub const fn take_interrupt(&mut self) -> bool {
        core::mem::replace(&mut self.interrupt, false)
    }

    /// Returns what has to be tallied from `now` on, and how far. The counters have been settled at `now`.
    pub fn wants(&self, now: &Tally) -> Wants {
        let mut wants = Wants::default();
        for at in bits(self.running) {
            let counter = self.counter(at);
            let slots = counter.slots();
            let left = self.interrupts(at).then(|| counter.left(now));
            if slots == bit(CYCLES) {
                wants.has_cycles = true;
                wants.splits_cycles |= counter.levels() != levels::ALL;
                wants.cycles_left = wants.cycles_left.into_iter().chain(left).min();
            } else {
                wants.levels |= counter.levels();
                wants.streams |= slots;
                let (stream, most) = bound_of(slots);
                if let Some(left) = left {
                    let bound = &mut wants.events_left[stream];
                    *bound = left.div_ceil(most).min(*bound);
                }
            }
        }
        wants
    }

    /// Returns the counter with that bit in the global registers.
    fn counter(&self, at: usize) -> &Counter {
        match at.checked_sub(FIXED_SHIFT) {
            Some(n) => &self.fixed[n % MAX_FIXED],
            None => &self.general[at % MAX_GENERAL],
        }
    }
    fn counter_mut(&mut self, at: usize) -> &mut Counter {
        match at.checked_sub(FIXED_SHIFT) {
            Some(n) => &mut self.fixed[n % MAX_FIXED],
            None => &mut self.general[at % MAX_GENERAL],
        }
    }
    /// Returns true if that counter's overflow interrupts.
    const fn interrupts(&self, at: usize) -> bool {
        match at.checked_sub(FIXED_SHIFT) {
            Some(n) => self.fixed_field(n) & 8 != 0,
            None => self.selects[at % MAX_GENERAL] & select::INT != 0,
        }
    }

    /// Changes registers by `change`. Counters that run are settled first, and go on from there.
    fn change(&mut self, now: &Tally, change: impl FnOnce(&mut Self)) {
        self.settle(now);
        change(self);
        self.reprogram(now);
    }
    fn reprogram(&mut self, now: &Tally) {
        let frozen = self.freezes_in_smm && self.in_smm;
        for n in 0..usize::from(self.config.general).min(MAX_GENERAL) {
            let select = self.selects[n];
            let enabled = select & select::EN != 0
                && !frozen
                && (!self.config.has_global || self.global_ctrl >> n & 1 != 0)
                && (self.filter.as_ref())
                    .is_none_or(|f| f.allows(self.config.vendor == Vendor::Amd, select));
            let slots = if enabled {
                events::slots(&self.config, select)
            } else {
                0
            };
            let of = |bit: u64, level: u8| if select & bit != 0 { level } else { 0 };
            let levels = of(select::OS, levels::OS) | of(select::USR, levels::USR);
            self.program(n, slots, levels, now);
        }
        for n in 0..usize::from(self.config.fixed).min(MAX_FIXED) {
            let enabled = !frozen
                && self.global_ctrl >> (FIXED_SHIFT + n) & 1 != 0
                && self.filter.as_ref().is_none_or(|f| f.allows_fixed(n));
            let levels = (self.fixed_field(n) & 3) as u8;
            let slots = if enabled { bit(events::FIXED[n]) } else { 0 };
            self.program(FIXED_SHIFT + n, slots, levels, now);
        }
    }
    /// Has a counter, which has been settled, count something else or nothing.
    fn program(&mut self, at: usize, slots: u16, levels: u8, now: &Tally) {
        let was_running = self.running >> at & 1 != 0;
        let runs = slots != 0 && levels != 0;
        if was_running || runs {
            self.counter_mut(at).program(slots, levels, now);
            self.running = self.running & !(1 << at) | u64::from(runs) << at;
        }
    }

    /// Returns the field of fixed counter `n` in IA32_FIXED_CTR_CTRL.
    const fn fixed_field(&self, n: usize) -> u64 {
        self.fixed_ctrl >> (4 * n) & 0xf
    }
    /// Returns the bits of all counters in the global registers.
    const fn global_bits(&self) -> u64 {
        general_bits(self.config.general) | general_bits(self.config.fixed) << FIXED_SHIFT
    }
    fn set_counter(&mut self, n: usize, value: u64, now: &Tally) {
        self.settle(now);
        if let Some(c) = self.general.get_mut(n) {
            c.set(value, now);
        }
    }
}

/// Returns the numbers of the bits that are set.
fn bits(mut rest: u64) -> impl Iterator<Item = usize> {
    core::iter::from_fn(move || {
        let bit = rest.trailing_zeros() as usize;
        rest &= rest.wrapping_sub(1);
        (bit < 64).then_some(bit)
    })
}

/// Returns the stream that bounds a counter of these streams, and how many events of the counter an event of that
/// stream may be.
const fn bound_of(streams: u16) -> (usize, u64) {
    if streams.is_power_of_two() {
        return (streams.trailing_zeros() as usize % STREAMS, 1);
    }
    // An instruction retires one event, or one of each.
    let has_both = streams & ONE_OR_BOTH == ONE_OR_BOTH;
    (INSTRUCTIONS, if has_both { 2 } else { 1 })
}

/// Streams of which an instruction may belong to both.
const ONE_OR_BOTH: u16 = bit(LOADS) | bit(STORES);

const fn general_bits(n: u8) -> u64 {
    (1 << n) - 1
}

#[cfg(test)]
mod tests;
