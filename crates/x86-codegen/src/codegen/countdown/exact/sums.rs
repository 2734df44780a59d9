//! What code that counts has counted, as Rust reads it.

use engine_frame::EngineFrame;

use super::{LEAST_FOR_CREDIT, Layout, bounds};
use crate::{
    codegen::countdown::longest,
    ir::streams::{IN_COUNTDOWN, SUMS, Streams},
};
use x86_cpu::Retired;

/// The bit of [`EngineFrame::counted_as`] that has the level.
pub(super) const LEVEL: u64 = 1 << 8;

/// Sets the countdown of code that counts, which is entered or goes on, to at most so many instructions, and to what is
/// left until a counter may overflow.
pub fn begin(
    frame: &mut EngineFrame,
    (streams, level): (Streams, usize),
    instructions: u64,
    retired: &Retired,
) {
    let instructions = instructions.min(retired.left);
    if retired.left < LEAST_FOR_CREDIT {
        frame.credit_left = 0;
    }
    let layout = Layout::of(streams);
    let events = match layout {
        Layout::Bounded | Layout::WideBounded => bounds::begin(frame, streams.bounds(retired)),
        _ => {
            frame.counted_beside = [0; 2];
            layout.events()
        }
    };
    let countdown = instructions.min(longest()) << layout.shift() | events;
    frame.counted_from = countdown;
    frame.counted_to = countdown;
    frame.counted_as = u64::from(streams.number());
    set_level(frame, level);
}

/// Sets after how many events a counter may overflow, once [`take_counted`] has taken some.
pub fn set_bounds(frame: &mut EngineFrame, retired: &Retired) {
    frame.counted_left = counts_as(frame).0.bounds(retired);
}

/// Sets the level that what is counted from now on counts at.
pub fn set_level(frame: &mut EngineFrame, level: usize) {
    let as_what = &mut frame.counted_as;
    *as_what = *as_what & !LEVEL | if level != 0 { LEVEL } else { 0 };
}

/// Returns the streams and the level that code counts, if such code runs.
pub fn counts_as(frame: &EngineFrame) -> (Streams, usize) {
    let as_what = frame.counted_as;
    (
        Streams::of_number(as_what),
        usize::from(as_what & LEVEL != 0),
    )
}

/// What code that counts has counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counted {
    /// Instructions that were retired.
    pub instructions: u64,
    /// Events, by the sums that are counted besides instructions.
    pub sums: [u64; SUMS],
    /// Instructions that polls have not taken off [`crate::frame::words::EVENTS_LEFT`] yet.
    pub left: u64,
}

impl Counted {
    /// Returns what undoes the addition of these counts.
    pub fn negative(&self) -> Self {
        Self {
            instructions: self.instructions.wrapping_neg(),
            sums: self.sums.map(u64::wrapping_neg),
            left: 0,
        }
    }
}

/// Returns what code that counts has counted when it has called `handle` or has been left, and sets the counts back to
/// 0. `None` if no such code runs. Other functions are called in the middle of a block, when more has been counted than
/// executed.
#[inline]
pub fn take_counted(frame: &mut EngineFrame) -> Option<Counted> {
    has_counted(frame).then(|| take(frame))
}

/// Returns true if code that counts runs, or has left counts behind.
#[inline]
fn has_counted(frame: &EngineFrame) -> bool {
    frame.counted_from != 0 || frame.counted_pending != 0
}

fn take(frame: &mut EngineFrame) -> Counted {
    let counted = read(frame);
    if frame.counted_from != 0 {
        frame.counted_from = frame.counted_to;
    }
    frame.counted_pending = 0;
    frame.counted = 0;
    let layout = Layout::of(counts_as(frame).0);
    if layout.is_bounded() {
        frame.counted_beside_from = frame.counted_beside;
    } else {
        frame.counted_beside = [0; 2];
    }
    frame.counted_events[..layout.sums()].fill(0);
    counted
}

/// Returns the same, and leaves the counts as they are.
#[inline]
pub fn counted(frame: &EngineFrame) -> Option<Counted> {
    has_counted(frame).then(|| read(frame))
}

fn read(frame: &EngineFrame) -> Counted {
    let counted = match frame.counted_from {
        0 => 0,
        from => from.wrapping_sub(frame.counted_to),
    };
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
        let begun = match layout.is_bounded() {
            true => frame.counted_beside_from,
            false => [0; 2],
        };
        let words = frame.counted_beside.iter().zip(begun);
        for (sums, (beside, begun)) in sums[IN_COUNTDOWN..].chunks_mut(4).zip(words) {
            let beside = beside.wrapping_sub(begun);
            for (n, sum) in sums.iter_mut().enumerate() {
                *sum = sum.wrapping_add(beside >> (16 * n) & 0xffff);
            }
        }
    }
    Counted {
        instructions: frame.counted.wrapping_add(left),
        sums,
        left,
    }
}

/// Notes that code that counts does not run any more. Returns true if such code ran.
#[inline]
pub fn end(frame: &mut EngineFrame) -> bool {
    core::mem::take(&mut frame.counted_from) != 0
}

/// Returns the number of instructions until the next poll, which may be negative. `None` if no such code runs.
pub(in crate::codegen) fn left(frame: &EngineFrame) -> Option<i64> {
    let shift = Layout::of(counts_as(frame).0).shift();
    (frame.counted_from != 0).then_some(frame.counted_to.cast_signed() >> shift)
}
