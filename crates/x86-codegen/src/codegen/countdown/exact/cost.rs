//! What instructions count for: [`Cost`], in the layout of the countdown and of the words beside it.

use core::ops::{Add, Neg, Sub};

use crate::ir::streams::{IN_COUNTDOWN, IN_MEMORY, Streams};

/// Where the sums are in the countdown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Layout {
    /// Instructions from bit 20 on, one other stream below: a block's cost fits in an immediate of 32 bits.
    One,
    /// Instructions from bit 42 on, three other sums of 14 bits below, and four of 16 bits in memory.
    Several,
    /// The same, and each sum has a guard, which is set once a counter may have overflowed.
    Bounded,
    /// As [`Self::Several`], with eight sums in memory.
    Wide,
    /// As [`Self::Bounded`], with eight sums in memory.
    WideBounded,
}

impl Layout {
    /// All of them, in their order.
    pub(crate) const ALL: [Self; 5] = [
        Self::One,
        Self::Several,
        Self::Bounded,
        Self::Wide,
        Self::WideBounded,
    ];

    pub(crate) const fn of(streams: Streams) -> Self {
        match (streams.has_memory(), streams.are_bounded()) {
            (false, false) if streams.are_several() => Self::Several,
            (false, false) => Self::One,
            (false, true) => Self::Bounded,
            (true, false) => Self::Wide,
            (true, true) => Self::WideBounded,
        }
    }
    /// Returns true if sums have guards.
    pub(crate) const fn is_bounded(self) -> bool {
        matches!(self, Self::Bounded | Self::WideBounded)
    }
    /// Returns the number of words in memory, of two sums each.
    pub(crate) const fn words(self) -> usize {
        match self {
            Self::One => 0,
            Self::Several | Self::Bounded => WORDS / 2,
            Self::Wide | Self::WideBounded => WORDS,
        }
    }
    /// Returns the number of sums besides that of instructions.
    pub(crate) const fn sums(self) -> usize {
        match self {
            Self::One => 1,
            _ => IN_COUNTDOWN + 2 * self.words(),
        }
    }
    /// Returns the lowest bit of instructions.
    pub(crate) const fn shift(self) -> u8 {
        match self {
            Self::One => 20,
            _ => IN_COUNTDOWN as u8 * self.bits(),
        }
    }
    /// Returns how many bits each other sum in the countdown has: enough for the events from one poll to the next.
    pub(crate) const fn bits(self) -> u8 {
        match self {
            Self::One => 20,
            _ => 14,
        }
    }
    /// Returns what the other sums in the countdown begin at where they have no bounds.
    pub(crate) const fn events(self) -> u64 {
        (1 << self.shift()) - 1
    }
    /// Returns true if there are several sums besides that of instructions.
    pub(crate) const fn has_several(self) -> bool {
        !matches!(self, Self::One)
    }
    /// Returns `n` instructions in the countdown's units.
    pub(crate) const fn instructions(self, n: i32) -> i64 {
        (n as i64) << self.shift()
    }
    /// Returns `n` instructions in the bits that `leave_fast_turns` computes with.
    pub(in crate::codegen) const fn executed(self, n: i32) -> i32 {
        match self {
            Self::One => n << (self.shift() - super::EXECUTED_FROM_ONE),
            _ => n << (self.shift() - super::EXECUTED_FROM_SEVERAL),
        }
    }
}

/// The most words in memory.
const WORDS: usize = IN_MEMORY / 2;

/// What is taken off the countdown, and what is added to the words beside it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Cost {
    pub(crate) countdown: i64,
    /// Two sums of 16 bits each.
    pub(crate) beside: [i32; WORDS],
}

impl Cost {
    /// Returns the cost of one instruction. `events` has a bit for each stream that it belongs to.
    pub(crate) fn of(streams: Streams, events: u16) -> Self {
        let layout = Layout::of(streams);
        let mut cost = Self {
            countdown: layout.instructions(1),
            beside: [0; WORDS],
        };
        for (n, belongs) in streams.split(events).enumerate() {
            let event = i32::from(belongs);
            match n.checked_sub(IN_COUNTDOWN) {
                None => cost.countdown += i64::from(event) << (n as u8 * layout.bits()),
                Some(n) => cost.beside[n / 2 % WORDS] += event << (16 * (n % 2)),
            }
        }
        cost
    }
}

impl Add for Cost {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self {
            countdown: self.countdown + other.countdown,
            beside: core::array::from_fn(|n| self.beside[n] + other.beside[n]),
        }
    }
}

impl Neg for Cost {
    type Output = Self;
    fn neg(self) -> Self {
        Self {
            countdown: -self.countdown,
            beside: self.beside.map(|n| -n),
        }
    }
}

impl Sub for Cost {
    type Output = Self;
    fn sub(self, other: Self) -> Self {
        self + -other
    }
}

const _: () = {
    // From one poll to the next there are no more events than instructions. Instructions are at most those of a budget,
    // of the credit for the fast iterations of loops, and of a block.
    let most = super::super::BUDGET as u64 * 3 / 2 + super::super::CREDIT as u64 + 1024;
    assert!(most < 1 << Layout::Several.bits() && most < 1 << 16);
};
