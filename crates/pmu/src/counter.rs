//! One counter: its value, and from which tally on it counts which events.

use x86_defs::retired::STREAMS;

use crate::MASK;

/// Index of cycles, behind the streams of retired events.
pub const CYCLES: usize = STREAMS;
/// Number of streams of retired events, and cycles.
pub const SLOTS: usize = STREAMS + 1;
const _: () = assert!(SLOTS <= u16::BITS as usize);

/// What has been counted since the vCPU began, at CPL 0 and at other levels.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally(pub [[u64; SLOTS]; 2]);

/// Privilege levels, a bit each.
pub(crate) mod levels {
    pub(crate) const OS: u8 = 1;
    pub(crate) const USR: u8 = 2;
    pub(crate) const ALL: u8 = OS | USR;
}

impl Tally {
    /// Returns the sum of what is tallied at these levels in these slots, a bit each.
    pub(crate) fn sum(&self, slots: u16, levels: u8) -> u64 {
        let mut sum = 0_u64;
        for (level, tally) in self.0.iter().enumerate() {
            let mut rest = if levels >> level & 1 != 0 { slots } else { 0 };
            while rest != 0 {
                let slot = rest.trailing_zeros() as usize;
                sum = sum.wrapping_add(tally.get(slot).copied().unwrap_or(0));
                rest &= rest - 1;
            }
        }
        sum
    }
}

/// A counter of 48 bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counter {
    /// The counter's value when the tally was `since`.
    value: u64,
    since: u64,
    /// The slots of the tally whose sum is counted, a bit each.
    slots: u16,
    levels: u8,
}

impl Counter {
    /// Returns the number of events since the value was stored.
    fn counted(&self, now: &Tally) -> u64 {
        let sum = now.sum(self.slots, self.levels);
        sum.wrapping_sub(self.since)
    }
    /// Returns the counter's value now.
    pub(crate) fn value(&self, now: &Tally) -> u64 {
        self.value.wrapping_add(self.counted(now)) & MASK
    }
    /// Sets the counter's value.
    pub(crate) fn set(&mut self, value: u64, now: &Tally) {
        self.value = value & MASK;
        self.since = now.sum(self.slots, self.levels);
    }
    /// Adds what has been counted to the value. Returns true if the counter has overflowed.
    pub(crate) fn settle(&mut self, now: &Tally) -> bool {
        if self.slots == 0 {
            return false;
        }
        let sum = self.value.saturating_add(self.counted(now));
        self.set(sum & MASK, now);
        sum > MASK
    }
    /// Makes the counter, which has been settled, count something else or nothing.
    pub(crate) fn program(&mut self, slots: u16, levels: u8, now: &Tally) {
        let value = self.value;
        self.slots = if levels == 0 { 0 } else { slots };
        self.levels = levels;
        self.set(value, now);
    }
    /// Returns the slots of the tally whose sum is counted, a bit each.
    pub(crate) const fn slots(&self) -> u16 {
        self.slots
    }
    /// Returns the levels at which events are counted.
    pub(crate) const fn levels(&self) -> u8 {
        self.levels
    }
    /// Returns how many events are left until the counter overflows.
    pub(crate) fn left(&self, now: &Tally) -> u64 {
        MASK + 1 - self.value(now)
    }
}
