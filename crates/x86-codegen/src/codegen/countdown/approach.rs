//! How translated code comes to the point in time at which a counter of cycles overflows.
//!
//! Between two looks at the time there are so many thousand instructions. Were the counter's interrupt to come at the
//! next look, a profile would show what executes many instructions instead of what takes long. So a look at the time
//! sets the distance to the next one, the *window*, and windows become shorter towards the overflow. There are two
//! estimates of how many instructions fit in the time that is left, of which the greater counts:
//!
//! - Far from the overflow, by a rate that is too slow for most code ([`EngineFrame::pace`]): what comes next may be
//!   slower than what came last. This rate falls where an overflow has passed within a window, and rises a little with
//!   each other overflow.
//! - Near to it, by half the rate of the last window. Such windows are not long ([`MOST_BY_RATE`]), so that short phases
//!   of slow code are not passed over. Shorter ones by the slow rate would take so much longer than the code in them that
//!   fast code would be found too often.

use engine_frame::EngineFrame;

use super::{BUDGET, POLLS, longest};
use crate::{asm::*, frame::words::*};

/// The pace is a number of instructions in so many ticks of the TSC.
const PACE_SHIFT: u8 = 16;
const FIRST_PACE: u64 = (1 << PACE_SHIFT) / 8;
const LEAST_PACE: u64 = (1 << PACE_SHIFT) / 64;
const MOST_PACE: u64 = 1 << PACE_SHIFT;
/// An overflow that is more ticks away is not approached yet.
const FAR: i32 = 1 << 28;
/// The shortest window of code that counts nothing, in instructions.
pub(super) const LEAST_PLAIN: u64 = 64;
/// That of code that counts: longer than any block.
pub(super) const LEAST_EXACT: u64 = 512;
/// Windows of fewer instructions are the countdown itself; longer ones are a number of polls.
const SHORT: u64 = BUDGET as u64 + 1000;
/// log2 of the instructions between two polls, at most: a budget, and the credit of fast iterations.
const POLL_SHIFT: u8 = 14;
/// log2 of those of a budget.
const BUDGET_SHIFT: u8 = 12;
/// The longest window by the rate of the last one. An overflow that has passed in a longer window makes the pace fall.
const MOST_BY_RATE: u64 = 1024;
/// An overflow that has passed more ticks ago was slept through.
const SLEPT: u64 = 1 << 22;

/// Stores the time, which is in RAX, and how long ago the last look was. Changes r14.
pub(super) fn note_time(a: &mut Asm) {
    a.mov(S0, RAX);
    a.alu(true, Alu::Sub, S0, gs(LOOKED));
    a.alu_imm(true, Alu::Or, S0, 1);
    a.store(gs(ELAPSED), S0);
    a.store(gs(LOOKED), RAX);
}

/// Emits the choice of the next window, after [`note_time`]: sets [`POLLS_LEFT`], and [`POLL_WINDOW`] where an overflow
/// is near. Goes on at `goes_on`, or behind this code where the window is shorter than a budget. Changes r14.
pub(super) fn choose_window(a: &mut Asm, goes_on: usize) {
    a.store_imm(gs(POLLS_LEFT), POLLS as i32);
    a.load(S0, gs(OVERFLOW_AT));
    a.alu(true, Alu::Sub, S0, gs(LOOKED));
    a.alu_imm(true, Alu::Cmp, S0, FAR);
    let is_far = a.jcc(cc::A);
    estimate(a);
    a.store(gs(POLL_WINDOW), S0);
    a.alu_imm(true, Alu::Cmp, S0, SHORT as i32);
    let is_short = a.jcc(cc::B);
    a.shift(true, 5, S0, POLL_SHIFT);
    a.alu(true, Alu::Cmp, S0, gs(POLLS_LEFT));
    // cmova
    a.rm(true, &[0x0f, 0x47], S0, gs(POLLS_LEFT));
    a.store(gs(POLLS_LEFT), S0);
    // About the instructions of so many polls.
    a.lea(S0, at(S0, 1));
    a.shift(true, 4, S0, BUDGET_SHIFT);
    a.store(gs(POLL_WINDOW), S0);
    a.patch(is_far, goes_on);
    a.jmp_to(goes_on);
    let here = a.here();
    a.patch(is_short, here);
    a.store_imm(gs(POLLS_LEFT), 0);
}

/// Emits the estimate of how many instructions fit in so many ticks as r14 says; r14 is that number afterwards.
fn estimate(a: &mut Asm) {
    push(a, RAX);
    push(a, RDX);
    a.mov(RAX, S0);
    a.rm(true, &[0x0f, 0xaf], S0, gs(PACE)); // imul
    a.shift(true, 5, S0, PACE_SHIFT);
    a.mov_imm(RDX, MOST_BY_RATE);
    a.alu_rr(true, Alu::Cmp, S0, RDX);
    let suffices = a.jcc(cc::AE);
    a.rm(true, &[0x0f, 0xaf], RAX, gs(POLL_WINDOW)); // imul
    a.alu_rr(false, Alu::Xor, RDX, RDX);
    a.rm(true, &[0xf7], 6, gs(ELAPSED)); // div
    a.shift(true, 5, RAX, 1);
    a.mov_imm(RDX, MOST_BY_RATE);
    a.alu_rr(true, Alu::Cmp, RAX, RDX);
    a.rr(true, &[0x0f, 0x47], RAX, RDX); // cmova
    a.alu_rr(true, Alu::Cmp, S0, RAX);
    a.rr(true, &[0x0f, 0x42], S0, RAX); // cmovb
    let here = a.here();
    a.patch(suffices, here);
    pop(a, RDX);
    pop(a, RAX);
}

/// Loads the short window to the countdown, at least `least` instructions. The fast iterations of loops get no credit.
/// Changes r14.
pub(super) fn load_window(a: &mut Asm, least: u64) {
    a.store_imm(gs(CREDIT_LEFT), 0);
    a.load(COUNTER, gs(POLL_WINDOW));
    a.mov_imm(S0, least);
    a.alu_rr(true, Alu::Cmp, COUNTER, S0);
    // cmovb
    a.rr(true, &[0x0f, 0x42], COUNTER, S0);
}

/// Sets the point in time at which a counter of cycles overflows, in ticks of the host's TSC, and the window from `now`
/// on. `None`: no counter of cycles overflows.
pub fn begin(frame: &mut EngineFrame, overflow: Option<u64>, now: impl FnOnce() -> u64) {
    let Some(overflow) = overflow else {
        frame.overflow_at = EngineFrame::NEVER;
        return;
    };
    frame.overflow_at = overflow.min(EngineFrame::NEVER);
    if frame.pace == 0 {
        frame.pace = FIRST_PACE;
    }
    let now = now();
    frame.looked = now;
    let left = overflow.saturating_sub(now);
    if left > FAR as u64 {
        return;
    }
    let window = (left * frame.pace) >> PACE_SHIFT;
    if window < SHORT {
        frame.polls_left = 0;
        frame.credit_left = 0;
        frame.count = window.clamp(LEAST_EXACT, longest());
        frame.window = frame.count;
    } else {
        frame.polls_left = (window >> POLL_SHIFT).min(POLLS);
        frame.window = (frame.polls_left + 1) << BUDGET_SHIFT;
    }
}

/// Adapts the pace, when translated code has been left at a poll.
pub fn end(frame: &mut EngineFrame, now: impl FnOnce() -> u64) {
    if frame.overflow_at == EngineFrame::NEVER {
        return;
    }
    let Some(late) = now().checked_sub(frame.overflow_at) else {
        return;
    };
    frame.overflow_at = EngineFrame::NEVER;
    let pace = if frame.window <= MOST_BY_RATE {
        frame.pace + frame.pace / 64 + 1
    } else if late <= SLEPT {
        frame.pace / 2
    } else {
        frame.pace
    };
    frame.pace = pace.clamp(LEAST_PACE, MOST_PACE);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Comes to an overflow four million ticks away, by windows by the pace alone, while an instruction takes so many
    /// ticks. Returns how many ticks late that is.
    fn come(frame: &mut EngineFrame, ticks: u64) -> u64 {
        const OVERFLOW: u64 = 1 << 40;
        let mut now = OVERFLOW - 4_000_000;
        while now < OVERFLOW {
            begin(frame, Some(OVERFLOW), || now);
            now += ticks * frame.window;
        }
        end(frame, || now);
        now - OVERFLOW
    }

    #[test]
    fn the_pace_comes_to_be_that_of_the_code() {
        for ticks in [1, 3, 10, 30] {
            let mut frame = EngineFrame::default();
            let late: Vec<u64> = (0..300).map(|_| come(&mut frame, ticks)).collect();
            let met = late.iter().filter(|late| **late <= MOST_BY_RATE * ticks);
            assert!(met.count() >= 270, "{ticks}: {late:?}");
            let pace = 1 << PACE_SHIFT;
            assert!(
                (pace / 4..=pace).contains(&(frame.pace * ticks)),
                "{ticks}: {}",
                frame.pace
            );
        }
    }

    #[test]
    fn an_overflow_that_was_slept_through_says_nothing_of_the_rate() {
        let mut frame = EngineFrame::default();
        begin(&mut frame, Some(2_000_000), || 1_000_000);
        let before = frame.pace;
        end(&mut frame, || 10_000_000);
        assert_eq!(
            (frame.pace, frame.overflow_at),
            (before, EngineFrame::NEVER)
        );
    }

    #[test]
    fn without_an_overflow_the_time_is_not_read() {
        let mut frame = EngineFrame::default();
        begin(&mut frame, None, || panic!("the time is read"));
        end(&mut frame, || panic!("the time is read"));
        assert_eq!((frame.window, frame.count), (0, 0));
    }
}
