//! One counter: a value, and since when it counts what.

use x86_defs::retired::STREAMS;

use crate::MASK;

/// Cycles, behind the streams of retired events.
pub const CYCLES: usize = STREAMS;
/// Streams of retired events, and cycles.
pub const SLOTS: usize = STREAMS + 1;

/// What has been counted since the beginning, at CPL 0 and at other levels.
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
    /// Its value when the tally was `since`.
    value: u64,
    since: u64,
    /// What it counts, while it does.
    slot: Option<u8>,
    levels: u8,
}

impl Counter {
    /// Events since the value was stored.
    fn counted(&self, now: &Tally) -> u64 {
        match self.slot {
            Some(slot) => now.sum(slot.into(), self.levels).wrapping_sub(self.since),
            None => 0,
        }
    }
    /// The value now.
    pub(crate) fn value(&self, now: &Tally) -> u64 {
        self.value.wrapping_add(self.counted(now)) & MASK
    }
    /// Sets it.
    pub(crate) fn set(&mut self, value: u64, now: &Tally) {
        self.value = value & MASK;
        self.since = self.slot.map_or(0, |s| now.sum(s.into(), self.levels));
    }
    /// Takes over what it has counted; true if it has overflowed.
    pub(crate) fn settle(&mut self, now: &Tally) -> bool {
        if self.slot.is_none() {
            return false;
        }
        let sum = self.value.saturating_add(self.counted(now));
        self.set(sum & MASK, now);
        sum > MASK
    }
    /// It counts something else from now on, or nothing. It is settled.
    pub(crate) fn program(&mut self, slot: Option<usize>, levels: u8, now: &Tally) {
        let value = self.value;
        self.slot = slot.filter(|_| levels != 0).map(|s| s as u8);
        self.levels = levels;
        self.set(value, now);
    }
    /// What it counts.
    pub(crate) fn slot(&self) -> Option<usize> {
        self.slot.map(usize::from)
    }
    /// At which levels.
    pub(crate) const fn levels(&self) -> u8 {
        self.levels
    }
    /// Events until it overflows.
    pub(crate) fn left(&self, now: &Tally) -> u64 {
        MASK + 1 - self.value(now)
    }
}
