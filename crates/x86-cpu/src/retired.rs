//! [`Retired`]: how many events of each stream have been retired while somebody counted them.
//!
//! An engine adds an instruction when it has completed, at the privilege level that it began at, if
//! [`Retired::counts_at`] returned true for that level before. An instruction that has faulted, or is to be executed
//! again after the VMM's answer, has not completed. The counts only grow: counters are differences of them.

use x86_defs::retired::{
    BRANCHES, CONDITIONAL, CONDITIONAL_NOT_TAKEN, CONDITIONAL_TAKEN, FAR, INSTRUCTIONS, NEAR_TAKEN,
    STREAMS, TAKEN, bit,
};

/// The counts of one vCPU. `repr(C)`, because generated code adds to them.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retired {
    /// Events at CPL 0, and at other levels.
    pub counts: [[u64; STREAMS]; 2],
    /// Number of instructions, counted or not, after which a counter may overflow at the earliest. The run loop has to
    /// be returned to when none are left, or no events of a bounded stream.
    pub left: u64,
    /// For each stream of [`Self::bounded`], the number of events after which a counter may overflow.
    pub events_left: [u64; STREAMS],
    /// Levels at which events are counted: bit 0 is CPL 0, bit 1 the other levels.
    pub levels: u8,
    /// Streams that somebody counts at one of these levels, a bit each. An engine need not count the others.
    pub streams: u16,
    /// Streams other than instructions that [`Self::events_left`] has a bound for, a bit each. They are counted.
    pub bounded: u16,
}

impl Default for Retired {
    fn default() -> Self {
        Self {
            counts: [[0; STREAMS]; 2],
            left: u64::MAX,
            events_left: [u64::MAX; STREAMS],
            levels: 0,
            streams: 0,
            bounded: 0,
        }
    }
}

impl Retired {
    /// So many events are far away.
    const FAR: u64 = 1 << 32;

    /// Returns the index in [`Self::counts`] of a privilege level.
    #[inline(always)]
    pub const fn level(cpl: u8) -> usize {
        (cpl != 0) as usize
    }
    /// Returns true if events are counted at this level.
    #[inline(always)]
    pub const fn counts_at(&self, cpl: u8) -> bool {
        self.levels >> Self::level(cpl) & 1 != 0
    }
    /// Returns true if [`Self::left`] is used up.
    #[inline(always)]
    pub const fn is_due(&self) -> bool {
        self.left == 0
    }
    /// Sets for each stream after how many events a counter may overflow; `u64::MAX`: never.
    ///
    /// A number that is far away bounds instructions instead, of which there are more. An operating system has every
    /// counter interrupt, because it counts beyond the counter's width; an engine that heeded those bounds for each
    /// event would do so all the time.
    pub fn bound(&mut self, left: &[u64; STREAMS]) {
        self.left = u64::MAX;
        self.events_left = [u64::MAX; STREAMS];
        self.bounded = 0;
        for (stream, left) in left.iter().enumerate() {
            if stream == INSTRUCTIONS || *left >= Self::FAR {
                self.left = self.left.min(*left);
            } else {
                self.events_left[stream] = *left;
                self.bounded |= bit(stream);
            }
        }
    }
    /// Takes events off what bounded streams have left. The run loop has to be returned to if nothing is left of one.
    #[inline]
    pub fn approach(&mut self, events: impl Fn(usize) -> u64) {
        let mut rest = self.bounded;
        while rest != 0 {
            let stream = rest.trailing_zeros() as usize % STREAMS;
            rest &= rest - 1;
            let left = self.events_left[stream].saturating_sub(events(stream));
            self.events_left[stream] = left;
            if left == 0 {
                self.left = 0;
            }
        }
    }
    /// Returns the events of a stream at all levels.
    pub fn total(&self, stream: usize) -> u64 {
        let [kernel, user] = &self.counts;
        kernel[stream % STREAMS].wrapping_add(user[stream % STREAMS])
    }
    /// Adds what an engine has counted by itself: instructions, and events of the other streams. The engine also
    /// maintains [`Self::left`] then.
    pub fn add_counted(&mut self, level: usize, instructions: u64, events: &[u64; STREAMS]) {
        let counts = &mut self.counts[level & 1];
        for (count, events) in counts.iter_mut().zip(events) {
            *count = count.wrapping_add(*events);
        }
        counts[INSTRUCTIONS] = counts[INSTRUCTIONS].wrapping_add(instructions);
    }
    /// Adds the same where the engine has counted one stream besides instructions.
    pub fn add_single(&mut self, level: usize, instructions: u64, stream: usize, events: u64) {
        let counts = &mut self.counts[level & 1];
        counts[INSTRUCTIONS] = counts[INSTRUCTIONS].wrapping_add(instructions);
        let other = &mut counts[stream % STREAMS];
        *other = other.wrapping_add(events);
    }
    /// Takes back an instruction that an engine has counted by itself but that has not completed: one event of each of
    /// these streams.
    pub fn take_back(&mut self, level: usize, events: u16) {
        let counts = &mut self.counts[level & 1];
        for (stream, count) in counts.iter_mut().enumerate() {
            let event = u64::from((events | bit(INSTRUCTIONS)) >> stream & 1);
            *count = count.wrapping_sub(event);
            if self.bounded >> stream & 1 != 0 {
                self.events_left[stream] = self.events_left[stream].saturating_add(event);
            }
        }
        self.left = self.left.saturating_add(1);
    }
    /// Adds one completed instruction that began at `level`. `events` are the streams of its form, to which [`outcome`]
    /// has added those that its execution decides.
    #[inline]
    pub fn add(&mut self, level: usize, events: u16) {
        let counts = &mut self.counts[level & 1];
        counts[INSTRUCTIONS] += 1;
        self.left = self.left.saturating_sub(1);
        let mut rest = events & !bit(INSTRUCTIONS);
        while rest != 0 {
            counts[rest.trailing_zeros() as usize % STREAMS] += 1;
            rest &= rest - 1;
        }
        if events & self.bounded != 0 {
            self.approach(|stream| u64::from(events >> stream & 1));
        }
    }
}

/// Returns the streams of a completed instruction: those of its form, and those that follow from whether it has
/// branched.
#[inline]
pub const fn outcome(form: u16, has_branched: bool) -> u16 {
    if form & bit(BRANCHES) == 0 {
        form
    } else if form & bit(FAR) != 0 {
        form | bit(TAKEN)
    } else if form & bit(CONDITIONAL) == 0 {
        form | bit(NEAR_TAKEN) | bit(TAKEN)
    } else if has_branched {
        form | bit(CONDITIONAL_TAKEN) | bit(NEAR_TAKEN) | bit(TAKEN)
    } else {
        form | bit(CONDITIONAL_NOT_TAKEN)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn far_events_bound_instructions() {
        let mut left = [u64::MAX; STREAMS];
        left[BRANCHES] = 1 << 47;
        left[CONDITIONAL] = 1 << 46;
        let mut retired = Retired::default();
        retired.bound(&left);
        assert_eq!((retired.left, retired.bounded), (1 << 46, 0));
        left[CONDITIONAL] = 1000;
        left[INSTRUCTIONS] = 1 << 20;
        retired.bound(&left);
        assert_eq!((retired.left, retired.bounded), (1 << 20, bit(CONDITIONAL)));
        assert_eq!(retired.events_left[CONDITIONAL], 1000);
        // Counted to the end, an instruction each.
        left[INSTRUCTIONS] = u64::MAX;
        left[CONDITIONAL] = u64::MAX;
        retired.bound(&left);
        for _ in 0..3 {
            retired.add(0, bit(BRANCHES));
        }
        assert_eq!(retired.left, (1 << 47) - 3);
    }
}
