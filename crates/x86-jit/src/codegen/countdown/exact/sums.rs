//! What code that counts has counted, for Rust.

use super::{LEAST_FOR_CREDIT, Layout};
use crate::{
    codegen::countdown::longest,
    frame::words::*,
    ir::streams::{IN_COUNTDOWN, IN_MEMORY, SUMS, Streams},
};

/// Bit of the level in [`COUNTED_AS`].
const LEVEL: u64 = 1 << 8;

/// Code that counts goes on, for so many instructions at most, of which a counter may overflow after `left`.
pub(crate) fn begin(
    words: &mut [u64],
    (streams, level): (Streams, usize),
    instructions: u64,
    left: u64,
) {
    let instructions = instructions.min(left);
    if left < LEAST_FOR_CREDIT {
        words[index(CREDIT_LEFT)] = 0;
    }
    let layout = Layout::of(streams);
    let countdown = instructions.min(longest()) << layout.shift() | layout.events();
    words[index(COUNTED_FROM)] = countdown;
    words[index(COUNTED_TO)] = countdown;
    words[index(COUNTED_AS)] = u64::from(streams.number());
    set_level(words, level);
}

/// What is counted from now on counts at that level.
pub(crate) fn set_level(words: &mut [u64], level: usize) {
    let as_what = &mut words[index(COUNTED_AS)];
    *as_what = *as_what & !LEVEL | if level != 0 { LEVEL } else { 0 };
}

/// Streams and level that code counts, if such code runs.
pub(crate) fn counts_as(words: &[u64]) -> (Streams, usize) {
    let as_what = words[index(COUNTED_AS)];
    (
        Streams::of_number(as_what),
        usize::from(as_what & LEVEL != 0),
    )
}

/// What has been counted, once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Counted {
    pub(crate) instructions: u64,
    /// Of the sums beside.
    pub(crate) sums: [u64; SUMS],
    /// Instructions that polls have not taken off [`EVENTS_LEFT`].
    pub(crate) left: u64,
}

impl Counted {
    /// What it takes to take it back.
    pub(crate) fn negative(&self) -> Self {
        Self {
            instructions: self.instructions.wrapping_neg(),
            sums: self.sums.map(u64::wrapping_neg),
            left: 0,
        }
    }
}

/// Code that counts has called `handle`, or has been left: what it has counted so far. From now on it is as if it had only begun.
/// `None`: no such code runs. (In the middle of a block, where other functions are called, more has been counted than executed.)
pub(crate) fn take_counted(words: &mut [u64]) -> Option<Counted> {
    let counted = counted(words)?;
    words[index(COUNTED_FROM)] = words[index(COUNTED_TO)];
    words[index(COUNTED)] = 0;
    words[index(COUNTED_BESIDE)] = 0;
    let sums = match Layout::of(counts_as(words).0) {
        Layout::One => 1,
        Layout::Several => SUMS,
    };
    words[index(COUNTED_EVENTS)..][..sums].fill(0);
    Some(counted)
}

/// The same, which may be asked again.
pub(crate) fn counted(words: &[u64]) -> Option<Counted> {
    let from = words[index(COUNTED_FROM)];
    if from == 0 {
        return None;
    }
    let counted = from.wrapping_sub(words[index(COUNTED_TO)]);
    let (streams, _) = counts_as(words);
    let layout = Layout::of(streams);
    let left = counted >> layout.shift();
    let mut sums = [0; SUMS];
    if layout == Layout::One {
        let events = counted & layout.events();
        sums[0] = words[index(COUNTED_EVENTS)].wrapping_add(events);
    } else {
        sums.copy_from_slice(&words[index(COUNTED_EVENTS)..][..SUMS]);
        for (n, sum) in sums[..IN_COUNTDOWN].iter_mut().enumerate() {
            let events = counted >> (n as u8 * layout.bits()) & ((1 << layout.bits()) - 1);
            *sum = sum.wrapping_add(events);
        }
        let beside = words[index(COUNTED_BESIDE)];
        for (n, sum) in sums[IN_COUNTDOWN..].iter_mut().take(IN_MEMORY).enumerate() {
            *sum = sum.wrapping_add(beside >> (16 * n) & 0xffff);
        }
    }
    Some(Counted {
        instructions: words[index(COUNTED)].wrapping_add(left),
        sums,
        left,
    })
}

/// It does not run any more. Returns for how many instructions it might have gone on; `None`: it did not.
pub(crate) fn end(words: &mut [u64]) -> Option<u64> {
    let left = left(words);
    (core::mem::take(&mut words[index(COUNTED_FROM)]) != 0).then_some(left)
}

/// Instructions until the next poll, while code that counts has called Rust.
pub(crate) fn left(words: &[u64]) -> u64 {
    let layout = Layout::of(counts_as(words).0);
    (words[index(COUNTED_TO)].cast_signed() >> layout.shift()).max(0) as u64
}

/// What `handle` has charged.
pub(crate) fn charged(words: &[u64]) -> u64 {
    words[index(COST)]
}
