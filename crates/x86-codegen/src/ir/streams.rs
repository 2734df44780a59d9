//! The streams of events that code that counts counts besides instructions.

use x86_cpu::Retired;
use x86_defs::retired::*;

use crate::frame::words::COUNTED_SUMS;

/// What is counted besides instructions: one stream or several, as a number of [`Streams::BITS`] bits, which is part of
/// a block's mode.
///
/// Several streams are always the same ones, whichever of them are wanted. What is wanted changes often, as a profiler
/// takes turns, and each set would have translations of its own. There are four sets: with and without what costs
/// something where a branch is taken, and with and without accesses to memory, which most blocks have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Streams(u8);

/// Numbers of several streams, which no single stream has. Three bits can be added: streams are counted that depend on
/// whether a branch is taken; code has to be left after a certain number of a stream's events, as a counter may
/// overflow; and accesses to memory are counted.
pub(crate) const SEVERAL: u8 = 12;
const AND_TAKEN: u8 = 1;
const BOUNDED: u8 = 2;
pub(crate) const AND_MEMORY: u8 = 16;
const _: () = {
    let all = SEVERAL | AND_TAKEN | BOUNDED | AND_MEMORY;
    assert!(ALONE <= SEVERAL as usize && all.trailing_ones() == Streams::BITS);
};

/// Streams below this one may be the only one besides instructions.
const ALONE: usize = FAR + 1;
/// Streams of accesses to memory.
const OF_MEMORY: u16 = bit(LOADS) | bit(STORES) | bit(UPDATES) | bit(MEMORY);
/// In place of a stream: instructions that belong to [`LOADS`] and to [`STORES`]. They are rare, and the stream
/// [`MEMORY`] follows from them.
const LOADS_AND_STORES: usize = STREAMS;

/// The most sums besides that of instructions in the countdown, from the lowest bits up, and in memory.
pub(crate) const IN_COUNTDOWN: usize = 3;
pub(crate) const IN_MEMORY: usize = 8;
/// All sums besides that of instructions.
pub(crate) const SUMS: usize = IN_COUNTDOWN + IN_MEMORY;
const _: () = assert!(SUMS == COUNTED_SUMS);

/// The stream of each sum. Calls and returns are rarer than branches, and indirect and far ones much rarer, so these
/// are in memory, which a block without them leaves alone. (Each word there has two: calls, and what may be a call; not
/// calls and returns, as one addition would wait for another.)
const SUMS_OF_SEVERAL: [usize; SUMS - 5] = [
    NEAR_CALLS,
    CONDITIONAL,
    BRANCHES,
    NEAR_RETURNS,
    NEAR_INDIRECT,
    FAR,
];
/// The same with the stream of taken branches. That one is first, so that the difference where a branch is taken is in
/// the lowest bits, for which the shortest instruction suffices. (It may not be in memory: a block looks at bounds there
/// only where it counts, and this difference is counted by the block before.)
const SUMS_WITH_TAKEN: [usize; SUMS - 4] = [
    CONDITIONAL_TAKEN,
    CONDITIONAL_NOT_TAKEN,
    BRANCHES,
    NEAR_CALLS,
    NEAR_INDIRECT,
    NEAR_RETURNS,
    FAR,
];
/// The same two with accesses to memory.
const SUMS_WITH_MEMORY: [usize; SUMS - 2] = [
    LOADS,
    STORES,
    BRANCHES,
    UPDATES,
    LOADS_AND_STORES,
    NEAR_CALLS,
    NEAR_INDIRECT,
    NEAR_RETURNS,
    FAR,
];
const SUMS_WITH_BOTH: [usize; SUMS] = [
    CONDITIONAL_TAKEN,
    LOADS,
    STORES,
    BRANCHES,
    CONDITIONAL_NOT_TAKEN,
    UPDATES,
    LOADS_AND_STORES,
    NEAR_CALLS,
    NEAR_INDIRECT,
    NEAR_RETURNS,
    FAR,
];
/// Streams that depend on whether a conditional branch is taken.
const OF_TAKEN: u16 =
    bit(CONDITIONAL_TAKEN) | bit(CONDITIONAL_NOT_TAKEN) | bit(NEAR_TAKEN) | bit(TAKEN);
const SINGLE: [[usize; 1]; ALONE] = {
    let mut single = [[0]; ALONE];
    let mut n = 0;
    while n < ALONE {
        single[n] = [n];
        n += 1;
    }
    single
};

impl Streams {
    /// Number of bits of [`Self::number`].
    pub(crate) const BITS: u32 = 5;

    /// Returns what has to be counted for a mask of streams that somebody counts. `bounded`: those of which only so many
    /// events may be counted until the run loop is returned to. Only several streams have such bounds. (If only
    /// instructions are counted, `bounded` is 0.)
    pub const fn of(mask: u16, bounded: u16) -> Self {
        let others = mask & !bit(INSTRUCTIONS);
        match others.count_ones() {
            0 => Self(BRANCHES as u8),
            _ if bounded != 0 => Self(Self::several(others).0 | BOUNDED),
            1 if others & OF_MEMORY == 0 => Self(others.trailing_zeros() as u8),
            _ => Self::several(others),
        }
    }
    const fn several(mask: u16) -> Self {
        let (memory, taken) = match mask & OF_MEMORY {
            0 => (0, OF_TAKEN),
            _ => (AND_MEMORY, OF_TAKEN | bit(CONDITIONAL)),
        };
        let taken = if mask & taken == 0 { 0 } else { AND_TAKEN };
        Self(SEVERAL | memory | taken)
    }
    /// Returns true if the number of events is bounded, too.
    pub const fn are_bounded(self) -> bool {
        self.are_several() && self.0 & BOUNDED != 0
    }
    const fn has_taken(self) -> bool {
        self.are_several() && self.0 & AND_TAKEN != 0
    }
    /// Returns true if accesses to memory are counted.
    pub(crate) const fn has_memory(self) -> bool {
        self.are_several() && self.0 & AND_MEMORY != 0
    }
    /// Returns the number that names them.
    pub const fn number(self) -> u8 {
        self.0
    }
    /// Returns the streams of the number in the lowest bits.
    pub(crate) const fn of_number(number: u64) -> Self {
        Self((number & ((1 << Self::BITS) - 1)) as u8)
    }
    /// Returns true if there are several sums.
    pub const fn are_several(self) -> bool {
        self.0 & SEVERAL == SEVERAL
    }
    /// Returns the stream of each sum.
    pub const fn sums(self) -> &'static [usize] {
        match (self.are_several(), self.has_memory(), self.has_taken()) {
            (true, false, false) => &SUMS_OF_SEVERAL,
            (true, false, true) => &SUMS_WITH_TAKEN,
            (true, true, false) => &SUMS_WITH_MEMORY,
            (true, true, true) => &SUMS_WITH_BOTH,
            (false, ..) => &SINGLE[self.0 as usize % ALONE],
        }
    }
    /// Returns which sums one event of each of these streams belongs to, in their order.
    pub(crate) fn split(self, events: u16) -> impl Iterator<Item = bool> {
        let both = bit(LOADS) | bit(STORES);
        self.sums().iter().map(move |sum| match *sum {
            LOADS_AND_STORES => events & both == both,
            stream => events >> stream & 1 != 0,
        })
    }
    /// Returns for each sum after how many of its events a counter may overflow. A bounded stream that has no sum bounds
    /// those that its events belong to.
    pub fn bounds(self, retired: &Retired) -> [i64; SUMS] {
        let mut bounds = [i64::MAX; SUMS];
        if !self.are_bounded() {
            return bounds;
        }
        let sums = self.sums();
        for stream in (0..STREAMS).filter(|stream| retired.bounded >> stream & 1 != 0) {
            let within: &[usize] = match stream {
                _ if sums.contains(&stream) => &[stream],
                CONDITIONAL => &[CONDITIONAL_TAKEN, CONDITIONAL_NOT_TAKEN],
                MEMORY => &[LOADS, STORES, UPDATES],
                _ => &[BRANCHES],
            };
            let left = i64::try_from(retired.events_left[stream]).unwrap_or(i64::MAX);
            // If none of several sums has come so far, their total is less than what is left.
            let left = (left / within.len() as i64).max(1);
            for (bound, sum) in bounds.iter_mut().zip(sums) {
                if within.contains(sum) {
                    *bound = left.min(*bound);
                }
            }
        }
        bounds
    }
    /// Returns all streams that follow from the sums.
    pub fn covered(self) -> u16 {
        let streams = self.sums().iter().filter(|sum| **sum != LOADS_AND_STORES);
        let mut covered = streams.fold(0, |all, stream| all | bit(*stream));
        if self.has_taken() {
            covered |= OF_TAKEN | bit(CONDITIONAL);
        }
        if self.has_memory() {
            covered |= OF_MEMORY;
        }
        covered
    }
    /// Returns the events of each stream that follows from the sums. (`x86_cpu::retired::outcome` says which streams an
    /// instruction belongs to.)
    pub fn events(self, sums: &[u64; SUMS]) -> [u64; STREAMS] {
        let mut events = [0_u64; STREAMS];
        let mut both = 0;
        for (sum, n) in self.sums().iter().zip(sums) {
            match events.get_mut(*sum) {
                Some(events) => *events = *n,
                None => both = *n,
            }
        }
        if self.has_memory() {
            let each = [LOADS, STORES, UPDATES].map(|stream| events[stream]);
            let total = each.into_iter().fold(0, u64::wrapping_add);
            events[MEMORY] = total.wrapping_sub(both);
        }
        if self.has_taken() {
            let not_taken = events[CONDITIONAL_NOT_TAKEN];
            events[CONDITIONAL] = events[CONDITIONAL_TAKEN].wrapping_add(not_taken);
            events[TAKEN] = events[BRANCHES].wrapping_sub(not_taken);
            events[NEAR_TAKEN] = events[TAKEN].wrapping_sub(events[FAR]);
        }
        events
    }
}

#[cfg(test)]
mod tests {
    use x86_cpu::retired::outcome;

    use super::*;

    /// Streams of all kinds of instructions, with all kinds of accesses to memory.
    fn forms() -> impl Iterator<Item = u16> + Clone {
        let branches = bit(BRANCHES);
        let kinds = [
            0,
            branches,
            branches | bit(CONDITIONAL),
            branches | bit(NEAR_CALLS),
            branches | bit(NEAR_CALLS) | bit(NEAR_INDIRECT),
            branches | bit(NEAR_INDIRECT),
            branches | bit(NEAR_RETURNS),
            branches | bit(FAR),
        ];
        let memory = bit(MEMORY);
        let accesses = [
            0,
            memory | bit(LOADS),
            memory | bit(STORES),
            memory | bit(UPDATES),
            memory | bit(LOADS) | bit(STORES),
        ];
        let forms = kinds
            .into_iter()
            .flat_map(move |kind| accesses.map(|accesses| bit(INSTRUCTIONS) | kind | accesses));
        forms.flat_map(|form| [outcome(form, false), outcome(form, true)])
    }

    /// Before so many events of a bounded stream have come, a sum has come to its bound.
    #[test]
    fn each_bounded_stream_bounds_sums_that_contain_it() {
        const LEFT: u64 = 7;
        for stream in BRANCHES..STREAMS {
            let mut left = [u64::MAX; STREAMS];
            left[stream] = LEFT;
            let mut retired = Retired::default();
            retired.bound(&left);
            for others in [
                bit(BRANCHES),
                bit(TAKEN),
                bit(LOADS),
                bit(LOADS) | bit(TAKEN),
            ] {
                let streams = Streams::of(bit(stream) | others, retired.bounded);
                let taken = |sum: &usize| *sum == CONDITIONAL_TAKEN;
                assert!(streams.sums().iter().position(taken) < Some(IN_COUNTDOWN));
                let bounds = streams.bounds(&retired);
                let mut sums = [0; SUMS];
                let mut events = 0;
                let all = forms().filter(|form| form >> stream & 1 != 0);
                for form in all.cycle() {
                    for (n, belongs) in streams.split(form).enumerate() {
                        sums[n] += i64::from(belongs);
                    }
                    events += 1;
                    if sums.iter().zip(&bounds).any(|(sum, bound)| sum >= bound) {
                        break;
                    }
                    assert!(events < LEFT, "{stream} of {streams:?}");
                }
            }
        }
    }

    /// Every stream that is wanted follows from the sums, for every kind of instruction.
    #[test]
    fn all_streams_that_are_wanted_follow_from_the_sums() {
        let all =
            (0..1 << STREAMS).flat_map(|w| [Streams::of(w, 0), Streams::of(w, w)].map(|s| (w, s)));
        for (wanted, streams) in all {
            assert_eq!(wanted & !bit(INSTRUCTIONS) & !streams.covered(), 0);
            assert_eq!(Streams::of_number(streams.number().into()), streams);
            for form in forms() {
                let mut sums = [0; SUMS];
                for (sum, belongs) in sums.iter_mut().zip(streams.split(form)) {
                    *sum = u64::from(belongs);
                }
                let counted = (0..).zip(streams.events(&sums));
                let events = counted.fold(0, |all, (stream, events)| all | events << stream);
                let covered = u64::from(streams.covered());
                assert_eq!(events & covered, u64::from(form) & covered, "{streams:?}");
            }
        }
    }
}
