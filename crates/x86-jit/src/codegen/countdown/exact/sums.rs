//! What code that counts has counted, for Rust.

use engine_frame::EngineFrame;

use super::{LEAST_FOR_CREDIT, Layout};
use crate::{
    codegen::countdown::longest,
    ir::streams::{IN_COUNTDOWN, IN_MEMORY, SUMS, Streams},
};

/// Bit of the level in [`EngineFrame::counted_as`].
const LEVEL: u64 = 1 << 8;

/// Code that counts goes on, for so many instructions at most, of which a counter may overflow after `left`.
pub(crate) fn begin(
    frame: &mut EngineFrame,
    (streams, level): (Streams, usize),
    instructions: u64,
    left: u64,
) {
    let instructions = instructions.min(left);
    if left < LEAST_FOR_CREDIT {
        frame.credit_left = 0;
    }
    let layout = Layout::of(streams);
    let countdown = instructions.min(longest()) << layout.shift() | layout.events();
    frame.counted_from = countdown;
    frame.counted_to = countdown;
    frame.counted_as = u64::from(streams.number());
    set_level(frame, level);
}

/// What is counted from now on counts at that level.
pub(crate) fn set_level(frame: &mut EngineFrame, level: usize) {
    let as_what = &mut frame.counted_as;
    *as_what = *as_what & !LEVEL | if level != 0 { LEVEL } else { 0 };
}

/// Streams and level that code counts, if such code runs.
pub(crate) fn counts_as(frame: &EngineFrame) -> (Streams, usize) {
    let as_what = frame.counted_as;
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
    /// Instructions that polls have not taken off [`crate::frame::words::EVENTS_LEFT`].
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
pub(crate) fn take_counted(frame: &mut EngineFrame) -> Option<Counted> {
    let counted = counted(frame)?;
    frame.counted_from = frame.counted_to;
    frame.counted = 0;
    frame.counted_beside = 0;
    let sums = match Layout::of(counts_as(frame).0) {
        Layout::One => 1,
        Layout::Several => SUMS,
    };
    frame.counted_events[..sums].fill(0);
    Some(counted)
}

/// The same, which may be asked again.
pub(crate) fn counted(frame: &EngineFrame) -> Option<Counted> {
    let from = frame.counted_from;
    if from == 0 {
        return None;
    }
    let counted = from.wrapping_sub(frame.counted_to);
    let (streams, _) = counts_as(frame);
    let layout = Layout::of(streams);
    let left = counted >> layout.shift();
    let mut sums = [0; SUMS];
    if layout == Layout::One {
        let events = counted & layout.events();
        sums[0] = frame.counted_events[0].wrapping_add(events);
    } else {
        sums = frame.counted_events;
        for (n, sum) in sums[..IN_COUNTDOWN].iter_mut().enumerate() {
            let events = counted >> (n as u8 * layout.bits()) & ((1 << layout.bits()) - 1);
            *sum = sum.wrapping_add(events);
        }
        let beside = frame.counted_beside;
        for (n, sum) in sums[IN_COUNTDOWN..].iter_mut().take(IN_MEMORY).enumerate() {
            *sum = sum.wrapping_add(beside >> (16 * n) & 0xffff);
        }
    }
    Some(Counted {
        instructions: frame.counted.wrapping_add(left),
        sums,
        left,
    })
}

/// It does not run any more. Returns for how many instructions it might have gone on; `None`: it did not.
pub(crate) fn end(frame: &mut EngineFrame) -> Option<u64> {
    let left = left(frame);
    (core::mem::take(&mut frame.counted_from) != 0).then_some(left)
}

/// Instructions until the next poll, while code that counts has called Rust.
pub(crate) fn left(frame: &EngineFrame) -> u64 {
    let layout = Layout::of(counts_as(frame).0);
    (frame.counted_to.cast_signed() >> layout.shift()).max(0) as u64
}

/// What `handle` has charged.
pub(crate) fn charged(frame: &EngineFrame) -> u64 {
    frame.cost
}
