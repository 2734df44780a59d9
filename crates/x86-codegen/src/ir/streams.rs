//! The streams of events that code that counts counts besides instructions.

use x86_cpu::Retired;
use x86_defs::retired::*;

use crate::frame::words::COUNTED_SUMS;

/// What is counted besides instructions: one stream or several, as a number of four bits, which is part of a block's
/// mode.
///
/// Several streams are always the same ones, whichever of them are wanted. What is wanted changes often, as a profiler
/// takes turns, and each set would have translations of its own. There are two sets, because counting whether a branch
/// is taken costs something where it is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Streams(u8);

/// Numbers of several streams, which no single stream has. Two bits can be added: streams are counted that depend on
/// whether a branch is taken; and code has to be left after a certain number of a stream's events, as a counter may
/// overflow.
const SEVERAL: u8 = 12;
const AND_TAKEN: u8 = 1;
const BOUNDED: u8 = 2;
const _: () = assert!(TRANSLATED <= SEVERAL as usize && SEVERAL | AND_TAKEN | BOUNDED == 15);

/// The most sums besides that of instructions in the countdown, from the lowest bits up, and in memory.
pub(crate) const IN_COUNTDOWN: usize = 3;
pub(crate) const IN_MEMORY: usize = 4;
/// All sums besides that of instructions.
pub(crate) const SUMS: usize = IN_COUNTDOWN + IN_MEMORY;
const _: () = assert!(SUMS == COUNTED_SUMS);

/// The stream of each sum. Calls and returns are rarer than branches, and indirect and far ones much rarer, so these
/// are in memory, which a block without them leaves alone.
const SUMS_OF_SEVERAL: [usize; SUMS - 1] = [
    NEAR_CALLS,
    CONDITIONAL,
    BRANCHES,
    NEAR_RETURNS,
    NEAR_INDIRECT,
    FAR,
];
/// The same with the stream of taken branches. That one is first, so that the difference where a branch is taken is in
/// the lowest bits, for which the shortest instruction suffices.
const SUMS_WITH_TAKEN: [usize; SUMS] = [
    CONDITIONAL_TAKEN,
    CONDITIONAL,
    BRANCHES,
    NEAR_CALLS,
    NEAR_RETURNS,
    NEAR_INDIRECT,
    FAR,
];
/// Streams that depend on whether a conditional branch is taken.
const OF_TAKEN: u16 =
    bit(CONDITIONAL_TAKEN) | bit(CONDITIONAL_NOT_TAKEN) | bit(NEAR_TAKEN) | bit(TAKEN);
const SINGLE: [[usize; 1]; TRANSLATED] = {
    let mut single = [[0]; TRANSLATED];
    let mut n = 0;
    while n < TRANSLATED {
        single[n] = [n];
        n += 1;
    }
    single
};

impl Streams {
    /// Returns true if translated code can count all streams of the mask.
    pub const fn are_countable(mask: u16) -> bool {
        mask >> TRANSLATED == 0
    }
    /// Returns what has to be counted for a mask of streams that somebody counts, all of which are countable. `bounded`:
    /// those of which only so many events may be counted until the run loop is returned to. Only several streams have
    /// such bounds. (If only instructions are counted, `bounded` is 0.)
    pub const fn of(mask: u16, bounded: u16) -> Self {
        let others = mask & !bit(INSTRUCTIONS);
        match others.count_ones() {
            0 => Self(BRANCHES as u8),
            _ if bounded != 0 => Self(Self::several(others).0 | BOUNDED),
            1 => Self(others.trailing_zeros() as u8),
            _ => Self::several(others),
        }
    }
    const fn several(mask: u16) -> Self {
        if mask & OF_TAKEN == 0 {
            Self(SEVERAL)
        } else {
            Self(SEVERAL | AND_TAKEN)
        }
    }
    /// Returns true if the number of events is bounded, too.
    pub(crate) const fn are_bounded(self) -> bool {
        self.are_several() && self.0 & BOUNDED != 0
    }
    const fn has_taken(self) -> bool {
        self.are_several() && self.0 & AND_TAKEN != 0
    }
    pub(crate) const fn number(self) -> u8 {
        self.0
    }
    /// Returns the streams of the number in the lowest four bits.
    pub(crate) const fn of_number(number: u64) -> Self {
        Self((number & 0xf) as u8)
    }
    /// Returns true if there are several sums.
    pub const fn are_several(self) -> bool {
        self.0 >= SEVERAL
    }
    /// Returns the stream of each sum.
    pub const fn sums(self) -> &'static [usize] {
        match (self.are_several(), self.has_taken()) {
            (true, false) => &SUMS_OF_SEVERAL,
            (true, true) => &SUMS_WITH_TAKEN,
            _ => &SINGLE[self.0 as usize % TRANSLATED],
        }
    }
    /// Returns for each sum after how many of its events a counter may overflow. A bounded stream that has no sum bounds
    /// one that each of its events belongs to.
    pub fn bounds(self, retired: &Retired) -> [i64; SUMS] {
        let mut bounds = [i64::MAX; SUMS];
        if !self.are_bounded() {
            return bounds;
        }
        let sums = self.sums();
        for stream in (0..STREAMS).filter(|stream| retired.bounded >> stream & 1 != 0) {
            let superset = if stream == CONDITIONAL_NOT_TAKEN {
                CONDITIONAL
            } else {
                BRANCHES
            };
            let at = |of: usize| sums.iter().position(|sum| *sum == of);
            if let Some(n) = at(stream).or_else(|| at(superset)) {
                let left = i64::try_from(retired.events_left[stream]).unwrap_or(i64::MAX);
                bounds[n] = bounds[n].min(left);
            }
        }
        bounds
    }
    /// Returns all streams that follow from the sums.
    pub fn covered(self) -> u16 {
        let of = |all: u16, stream: &usize| all | bit(*stream);
        let sums = self.sums().iter().fold(0, of);
        sums | if self.has_taken() { OF_TAKEN } else { 0 }
    }
    /// Returns the events of each stream that follows from the sums. (`x86_cpu::retired::outcome` says which streams an
    /// instruction belongs to.)
    pub fn events(self, sums: &[u64; SUMS]) -> [u64; STREAMS] {
        let mut events = [0; STREAMS];
        for (stream, n) in self.sums().iter().zip(sums) {
            events[*stream] = *n;
        }
        if self.has_taken() {
            let not_taken = events[CONDITIONAL].wrapping_sub(events[CONDITIONAL_TAKEN]);
            events[CONDITIONAL_NOT_TAKEN] = not_taken;
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

    /// A bound of one stream bounds a sum that has each of its events.
    #[test]
    fn each_bounded_stream_bounds_a_sum_that_contains_it() {
        for stream in BRANCHES..TRANSLATED {
            let mut left = [u64::MAX; STREAMS];
            left[stream] = 7;
            let mut retired = Retired::default();
            retired.bound(&left);
            let streams = Streams::of(bit(stream), retired.bounded);
            let bounds = streams.bounds(&retired);
            let n = bounds.iter().position(|left| *left == 7);
            let sum = streams.sums()[n.expect("a bound")];
            let branches = bit(BRANCHES);
            let forms = [
                branches | bit(CONDITIONAL),
                branches | bit(NEAR_CALLS) | bit(NEAR_INDIRECT),
                branches | bit(NEAR_RETURNS),
                branches | bit(FAR),
            ];
            for of in forms
                .into_iter()
                .flat_map(|f| [outcome(f, false), outcome(f, true)])
            {
                assert!(of >> stream & 1 <= of >> sum & 1, "{stream}");
            }
        }
    }

    /// Every stream that is wanted follows from the sums, for every kind of instruction.
    #[test]
    fn all_streams_that_are_wanted_follow_from_the_sums() {
        let branches = bit(INSTRUCTIONS) | bit(BRANCHES);
        let forms = [
            bit(INSTRUCTIONS),
            branches,
            branches | bit(CONDITIONAL),
            branches | bit(NEAR_CALLS),
            branches | bit(NEAR_CALLS) | bit(NEAR_INDIRECT),
            branches | bit(NEAR_INDIRECT),
            branches | bit(NEAR_RETURNS),
            branches | bit(FAR),
        ];
        let all = (0..1 << TRANSLATED)
            .flat_map(|w| [Streams::of(w, 0), Streams::of(w, w)].map(|s| (w, s)));
        for (wanted, streams) in all {
            assert_eq!(wanted & !bit(INSTRUCTIONS) & !streams.covered(), 0);
            assert_eq!(Streams::of_number(streams.number().into()), streams);
            for form in forms {
                for has_branched in [false, true] {
                    let of = outcome(form, has_branched);
                    let mut sums = [0; SUMS];
                    for (n, stream) in streams.sums().iter().enumerate() {
                        sums[n] = u64::from(of >> *stream & 1);
                    }
                    let events = streams.events(&sums);
                    for (stream, events) in events.into_iter().enumerate() {
                        if streams.covered() >> stream & 1 != 0 {
                            assert_eq!(
                                events,
                                u64::from(of >> stream & 1),
                                "{stream} of {form:#x}"
                            );
                        }
                    }
                }
            }
        }
    }
}
