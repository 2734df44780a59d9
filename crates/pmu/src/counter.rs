//! One counter: its value, and from which tally on it counts which events.

use x86_defs::retired::STREAMS;

use crate::MASK;

/// Index of cycles, behind the streams of retired events.
pub const CYCLES: usize = STREAMS;
/// Number of streams of retired events, and cycles.
pub const SLOTS: usize = STREAMS + 1;

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
    pub(crate) fn sum(&self, slot: usize, levels: u8) -> u64 {
        let of = |level: usize| self.0[level].get(slot).copied().unwrap_or(0);
        let os = if levels & levels::OS != 0 { of(0) } else { 0 };
        let usr = if levels & levels::USR != 0 { of(1) } else { 0 };
        os.wrapping_add(usr)
    }
}

/// A counter of 48 bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counter {
    /// The counter's value when the tally was `since`.
    value: u64,
    since: u64,
    /// The index in the tally of what is counted, if anything is.
    slot: Option<u8>,
    levels: u8,
}

impl Counter {
    /// Returns the number of events since the value was stored.
    fn counted(&self, now: &Tally) -> u64 {
        match self.slot {
            Some(slot) => now.sum(slot.into(), self.levels).wrapping_sub(self.since),
            None => 0,
        }
    }
    /// Returns the counter's value now.
    pub(crate) fn value(&self, now: &Tally) -> u64 {
        self.value.wrapping_add(self.counted(now)) & MASK
    }
    /// Sets the counter's value.
    pub(crate) fn set(&mut self, value: u64, now: &Tally) {
        self.value = value & MASK;
        self.since = self.slot.map_or(0, |s| now.sum(s.into(), self.levels));
    }
    /// Adds what has been counted to the value. Returns true if the counter has overflowed.
    pub(crate) fn settle(&mut self, now: &Tally) -> bool {
        if self.slot.is_none() {
            return false;
        }
        let sum = self.value.saturating_add(self.counted(now));
        self.set(sum & MASK, now);
        sum > MASK
    }
    /// Makes the counter, which has been settled, count something else or nothing.
    pub(crate) fn program(&mut self, slot: Option<usize>, levels: u8, now: &Tally) {
        let value = self.value;
        self.slot = slot.filter(|_| levels != 0).map(|s| s as u8);
        self.levels = levels;
        self.set(value, now);
    }
    /// Returns the index in the tally of what is counted, if anything is.
    pub(crate) fn slot(&self) -> Option<usize> {
        self.slot.map(usize::from)
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
