//! What instructions count for: [`Cost`], in the layout of the countdown and of the words beside it.

use core::ops::{Add, Neg, Sub};

use crate::ir::streams::{IN_COUNTDOWN, Streams};

/// Where the sums are in the countdown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Layout {
    /// Instructions from bit 20 on, one other stream below: a block's cost fits in an immediate of 32 bits.
    One,
    /// Instructions from bit 42 on, three other sums of 14 bits below, and four of 16 bits in memory.
    Several,
    /// The same, and each sum has a guard, which is set once a counter may have overflowed.
    Bounded,
}

impl Layout {
    pub(crate) const fn of(streams: Streams) -> Self {
        if streams.are_bounded() {
            Self::Bounded
        } else if streams.are_several() {
            Self::Several
        } else {
            Self::One
        }
    }
    /// Returns the lowest bit of instructions.
    pub(crate) const fn shift(self) -> u8 {
        match self {
            Self::One => 20,
            Self::Several | Self::Bounded => IN_COUNTDOWN as u8 * self.bits(),
        }
    }
    /// Returns how many bits each other sum in the countdown has: enough for the events from one poll to the next.
    pub(crate) const fn bits(self) -> u8 {
        match self {
            Self::One => 20,
            Self::Several | Self::Bounded => 14,
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
            Self::Several | Self::Bounded => n << (self.shift() - super::EXECUTED_FROM_SEVERAL),
        }
    }
}

/// What is taken off the countdown, and what is added to the words beside it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Cost {
    pub(crate) countdown: i64,
    /// Two sums of 16 bits each.
    pub(crate) beside: [i32; 2],
}

impl Cost {
    /// Returns the cost of one instruction. `events` has a bit for each stream that it belongs to.
    pub(crate) fn of(streams: Streams, events: u16) -> Self {
        let layout = Layout::of(streams);
        let mut cost = Self {
            countdown: layout.instructions(1),
            beside: [0; 2],
        };
        for (n, stream) in streams.sums().iter().enumerate() {
            let event = i32::from(events >> *stream & 1);
            match n.checked_sub(IN_COUNTDOWN) {
                None => cost.countdown += i64::from(event) << (n as u8 * layout.bits()),
                Some(n) => cost.beside[n / 2 % 2] += event << (16 * (n % 2)),
            }
        }
        cost
    }
}

impl Add for Cost {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        let [a, b] = self.beside;
        Self {
            countdown: self.countdown + other.countdown,
            beside: [a + other.beside[0], b + other.beside[1]],
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
