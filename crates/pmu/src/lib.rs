//! A virtual performance monitoring unit, Intel's and AMD's, as a pure state machine
//! (SDM vol. 3, chapter 20; AMD APM vol. 2, 13.2).
//!
//! Nothing is counted here: an engine keeps a [`Tally`] of what has been retired, which only
//! grows, and a counter is a difference of two tallies. So enabling, disabling and reading are a
//! few additions, and what no counter wants costs nothing. [`Pmu::wants`] tells the engine what to
//! tally and how far it may go until a counter overflows; [`Pmu::settle`] takes an overflow over.
//!
//! A guest's write takes effect when the writing instruction retires: the one that enables a
//! counter is not counted, the one that disables it is. The caller says so by the tally it passes.

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
use x86_defs::retired::INSTRUCTIONS;

/// General counters at most.
pub const MAX_GENERAL: usize = 8;
/// Fixed counters at most.
pub const MAX_FIXED: usize = 3;
/// Bits of a counter.
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
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Wants {
    /// Privilege levels at which retired events are tallied: bit 0 is CPL 0, bit 1 the others.
    pub levels: u8,
    /// Streams that are counted at one of them, a bit each.
    pub streams: u16,
    /// Events until the first counter overflows that interrupts then; an instruction retires no
    /// more than one for each counter.
    pub events_left: Option<u64>,
    /// Rare streams that this leaves out, a bit each: after each of their events this is to be asked again.
    pub held: u16,
    /// Some counter counts cycles.
    pub has_cycles: bool,
    /// Some counter counts cycles at some levels only: those have to be told apart.
    pub splits_cycles: bool,
    /// Cycles until the first such counter overflows that interrupts then; cycles of other levels
    /// may come on top.
    pub cycles_left: Option<u64>,
}

/// The counters of one vCPU.
#[derive(Clone, Debug, Default)]
pub struct Pmu {
    config: Config,
    general: [Counter; MAX_GENERAL],
    selects: [u64; MAX_GENERAL],
    fixed: [Counter; MAX_FIXED],
    fixed_ctrl: u64,
    global_ctrl: u64,
    global_status: u64,
    /// IA32_DEBUGCTL.FREEZE_WHILE_SMM.
    freezes_in_smm: bool,
    in_smm: bool,
    filter: Option<Arc<Filter>>,
    /// A counter has overflowed that interrupts then, and nobody has taken it yet.
    interrupt: bool,
}

/// The access is refused: #GP, or the VMM's list ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refused;

impl Pmu {
    /// What CPUID shows.
    pub const fn config(&self) -> &Config {
        &self.config
    }
    /// Another table for CPUID: all registers are as after a reset.
    pub fn set_config(&mut self, config: Config) {
        *self = Self {
            config,
            filter: self.filter.take(),
            ..Self::default()
        };
        self.global_ctrl = general_bits(config.general);
    }
    /// KVM_SET_PMU_EVENT_FILTER.
    pub fn set_filter(&mut self, filter: Option<Arc<Filter>>, now: &Tally) {
        self.change(now, |p| p.filter = filter);
    }
    /// IA32_DEBUGCTL's bit that has counters stand still in SMM.
    pub const fn freezes_in_smm(&self) -> bool {
        self.freezes_in_smm
    }
    /// Sets it.
    pub fn set_freezes_in_smm(&mut self, freezes: bool, now: &Tally) {
        if freezes != self.freezes_in_smm {
            self.change(now, |p| p.freezes_in_smm = freezes);
        }
    }
    /// The vCPU has entered or left SMM.
    pub fn set_in_smm(&mut self, in_smm: bool, now: &Tally) {
        if in_smm != self.in_smm {
            self.change(now, |p| p.in_smm = in_smm);
        }
    }

    /// RDMSR, or KVM_GET_MSRS (`is_host`); `None`: not one of this PMU's registers.
    pub fn read(&mut self, index: u32, is_host: bool, now: &Tally) -> Option<Result<u64, Refused>> {
        match self.config.vendor {
            Vendor::None => None,
            Vendor::Intel => self.read_intel(index, is_host, now),
            Vendor::Amd => self.read_amd(index, now),
        }
    }
    /// WRMSR, or KVM_SET_MSRS.
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
    /// RDPMC after the check of privilege.
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

    /// Takes over what has overflowed by now.
    pub fn settle(&mut self, now: &Tally) {
        for n in 0..MAX_GENERAL {
            if self.general[n].settle(now) {
                self.global_status |= 1 << n;
                self.interrupt |= self.selects[n] & select::INT != 0;
            }
        }
        for n in 0..MAX_FIXED {
            if self.fixed[n].settle(now) {
                self.global_status |= 1 << (FIXED_SHIFT + n);
                self.interrupt |= self.fixed_field(n) & 8 != 0;
            }
        }
    }
    /// True once for each time that the interrupt is to be sent.
    pub const fn take_interrupt(&mut self) -> bool {
        core::mem::replace(&mut self.interrupt, false)
    }

    /// What has to be tallied from `now` on, and how far; to be called when this is settled.
    pub fn wants(&self, now: &Tally) -> Wants {
        let mut wants = Wants::default();
        let general = self.general.iter().zip(self.selects);
        let general = general.map(|(c, s)| (c, s & select::INT != 0));
        let fixed = (self.fixed.iter().enumerate()).map(|(n, c)| (c, self.fixed_field(n) & 8 != 0));
        for (counter, interrupts) in general.chain(fixed) {
            let Some(slot) = counter.slot() else { continue };
            let left = interrupts.then(|| counter.left(now));
            let least = |old: Option<u64>| match (old, left) {
                (Some(a), Some(b)) => Some(a.min(b)),
                (a, b) => a.or(b),
            };
            if slot == CYCLES {
                wants.has_cycles = true;
                wants.splits_cycles |= counter.levels() != levels::ALL;
                wants.cycles_left = least(wants.cycles_left);
            } else {
                wants.levels |= counter.levels();
                wants.streams |= x86_defs::retired::bit(slot);
                if left.is_some_and(|left| is_held(slot, left, now)) {
                    wants.held |= x86_defs::retired::bit(slot);
                } else {
                    wants.events_left = least(wants.events_left);
                }
            }
        }
        wants
    }

    /// Changes registers: counters that run go on with what they have by then.
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
            let slot = events::slot(&self.config, select).filter(|_| enabled);
            let of = |bit: u64, level: u8| if select & bit != 0 { level } else { 0 };
            let levels = of(select::OS, levels::OS) | of(select::USR, levels::USR);
            self.general[n].program(slot, levels, now);
        }
        for n in 0..usize::from(self.config.fixed).min(MAX_FIXED) {
            let enabled = !frozen
                && self.global_ctrl >> (FIXED_SHIFT + n) & 1 != 0
                && self.filter.as_ref().is_none_or(|f| f.allows_fixed(n));
            let levels = (self.fixed_field(n) & 3) as u8;
            let slot = events::FIXED[n];
            self.fixed[n].program(enabled.then_some(slot), levels, now);
        }
    }

    /// Fixed counter `n`'s part of IA32_FIXED_CTR_CTRL.
    const fn fixed_field(&self, n: usize) -> u64 {
        self.fixed_ctrl >> (4 * n) & 0xf
    }
    /// The bits of all counters in the global registers.
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

/// It is less work to look after each event of the stream than after as many instructions as there are events left: an event costs about
/// as much as two looks.
fn is_held(slot: usize, left: u64, now: &Tally) -> bool {
    /// There is no translated code for fewer instructions until an overflow.
    const LEAST: u64 = 64;
    if x86_defs::retired::RARE >> slot & 1 == 0 {
        return false;
    }
    let [instructions, events] = [INSTRUCTIONS, slot].map(|s| now.sum(s, levels::ALL));
    left < LEAST.max(instructions / events.saturating_mul(2).max(1))
}

const fn general_bits(n: u8) -> u64 {
    (1 << n) - 1
}

#[cfg(test)]
mod tests;
