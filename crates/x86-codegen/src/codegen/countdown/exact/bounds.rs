//! Bounds of events, in code of [`Layout::Bounded`] and [`Layout::WideBounded`].
//!
//! Each sum of events has a guard: the highest bit of its field. A sum begins so that its guard is set by the event with
//! which a counter may overflow: a sum in the countdown passes 0 then, one in memory comes to the guard from below. The
//! entry of a block tests the guards together with the sign of the countdown.

use engine_frame::EngineFrame;

use super::{Cost, Layout, Polls, beside};
use crate::{
    asm::*,
    frame::words::*,
    ir::streams::{IN_COUNTDOWN, SUMS},
};

/// The most events of each sum within a budget.
const MOST: u64 = 1 << (Layout::Bounded.bits() - 1);
/// The guard of a sum in memory.
const BESIDE_GUARD: u64 = 1 << 15;
const _: () = assert!(MOST < BESIDE_GUARD);
/// The guards of the countdown, and its sign.
const GUARDS: u64 = {
    let mut guards = 1 << 63;
    let mut n = 1;
    while n <= IN_COUNTDOWN as u8 {
        guards |= 1 << (n * Layout::Bounded.bits() - 1);
        n += 1;
    }
    guards
};
/// The guards of two sums in memory.
const BESIDE_GUARDS: u64 = BESIDE_GUARD << 16 | BESIDE_GUARD;

/// Emits a branch that is taken if the countdown is used up, or a guard in it is set. Changes flags.
pub(super) fn branch_if_used_up(a: &mut Asm) -> usize {
    a.test_literal(COUNTER, GUARDS);
    a.jcc(cc::NE)
}

/// Emits a branch that is taken if a guard of sums 2n and 2n + 1 of those in memory is set. Changes flags.
pub(super) fn branch_if_beside(a: &mut Asm, n: usize) -> usize {
    a.rm(false, &[0xf7], 0, beside(n)); // test
    a.imm32(BESIDE_GUARDS as i32);
    a.jcc(cc::NE)
}

/// Emits branches, some of which may be the same, that are taken if a block of this cost could not be entered. Changes
/// r13 and flags.
pub(super) fn branch_if_too_short(a: &mut Asm, cost: Cost) -> Polls {
    a.mov_imm(S1, (-cost.countdown).cast_unsigned());
    a.lea(S1, at(S1, 0).plus(COUNTER, 0));
    a.test_literal(S1, GUARDS);
    let used_up = a.jcc(cc::NE);
    let mut all = [used_up; _];
    for (n, events) in cost.beside.into_iter().enumerate() {
        if events != 0 {
            a.load32(S1, beside(n));
            a.alu_imm(false, Alu::Add, S1, events);
            a.rr(false, &[0xf7], 0, S1); // test
            a.imm32(BESIDE_GUARDS as i32);
            all[1 + n] = a.jcc(cc::NE);
        }
    }
    all
}

/// Returns the word that says how many events are left of sum n.
const fn left_of(n: usize) -> Mem {
    gs(COUNTED_LEFT + 8 * n)
}

/// Takes the events in r14 off what is left of sum n. Changes flags.
pub(super) fn take_off(a: &mut Asm, n: usize) {
    a.rm(true, &[0x29], S0, left_of(n)); // sub
}

/// Begins all sums of events, with instructions in the countdown and nothing below. Changes r14 and flags.
pub(super) fn begin_sums(a: &mut Asm, layout: Layout) {
    let pairs = || (0..4 * layout.words()).step_by(8);
    for at in pairs() {
        a.store_imm(gs(COUNTED_BESIDE + at), 0);
    }
    for n in 0..layout.sums() {
        a.mov_imm(S0, MOST);
        a.alu(true, Alu::Cmp, S0, left_of(n));
        a.rm(true, &[0x0f, 0x4f], S0, left_of(n)); // cmovg
        match n.checked_sub(IN_COUNTDOWN) {
            None => {
                a.lea(S0, at(S0, -1));
                a.shift(true, 4, S0, n as u8 * Layout::Bounded.bits());
                a.alu_rr(true, Alu::Or, COUNTER, S0);
            }
            Some(n) => {
                a.rr(true, &[0xf7], 3, S0); // neg
                a.lea(S0, at(S0, BESIDE_GUARD as i32));
                a.shift(true, 4, S0, 16 * (n % 4) as u8);
                a.rm(true, &[0x09], S0, gs(COUNTED_BESIDE + n / 4 * 8)); // or
            }
        }
    }
    for at in pairs() {
        a.load(S0, gs(COUNTED_BESIDE + at));
        a.store(gs(COUNTED_BESIDE_FROM + at), S0);
    }
}

/// Does what [`begin_sums`] does, and returns what the countdown has below instructions.
pub(super) fn begin(frame: &mut EngineFrame, left: [i64; SUMS]) -> u64 {
    frame.counted_left = left;
    let mut countdown = 0;
    let mut beside = [0; 2];
    for (n, left) in left.into_iter().enumerate() {
        let least = left.clamp(1, MOST.cast_signed()).cast_unsigned();
        match n.checked_sub(IN_COUNTDOWN) {
            None => countdown |= (least - 1) << (n as u8 * Layout::Bounded.bits()),
            Some(n) => beside[n / 4 % 2] |= (BESIDE_GUARD - least) << (16 * (n % 4)),
        }
    }
    frame.counted_beside = beside;
    frame.counted_beside_from = beside;
    countdown
}
