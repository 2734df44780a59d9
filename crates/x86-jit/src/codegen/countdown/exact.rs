//! The countdown of code that counts what is retired, exactly.
//!
//! The register holds two sums: instructions from bit [`SHIFT`] on, and below the events of one other stream,
//! which begin at [`EVENTS`] and never come to zero within a budget. One subtraction where a block is entered
//! counts both, as if the block were executed to its end without a branch that is taken. Whatever leaves it
//! elsewhere gives back the difference first ([`refund`]), in a stub of its own. So there is one invariant wherever
//! generated code may be left:
//!
//! > retired = what polls have taken off ([`COUNTED`]) + [`COUNTED_FROM`] − the countdown
//!
//! What changes the countdown otherwise changes [`COUNTED_FROM`] by as much. Budgets end where a counter may
//! overflow at the earliest, and a block is entered only if all of it is within the budget: what is left is the interpreter's.

use super::{BUDGET, CREDIT, Poll, SOON, run_limit_ends, vary_budget};
use crate::{asm::*, frame::words::*};
use engine_frame::EngineFrame;

/// Bit from which on instructions are.
const SHIFT: u8 = 20;
/// What the other events begin at.
const EVENTS: u64 = (1 << SHIFT) - 1;
/// Instructions up to a counter's overflow that translated code is entered for.
pub(crate) const LEAST: u64 = 64;
/// Those that there have to be for fast turns of loops to get [`CREDIT`]: more than a budget and that.
const LEAST_FOR_CREDIT: u64 = 2 * BUDGET as u64 + CREDIT as u64;

/// What so many instructions with so many events of the other stream count for.
pub(crate) const fn cost(instructions: i32, events: i32) -> i32 {
    (instructions << SHIFT) + events
}

/// A block that counts for so much is entered. Returns the branch to a poll.
pub(in crate::codegen) fn enter(a: &mut Asm, cost: i32) -> usize {
    a.alu_imm(true, Alu::Sub, COUNTER, cost);
    a.jcc(cc::L)
}

/// So much of it has not been executed. Changes no flags.
pub(in crate::codegen) fn refund(a: &mut Asm, cost: i32) {
    if cost != 0 {
        a.lea(COUNTER, at(COUNTER, cost));
    }
}

/// A trampoline is called that may leave the instruction to the interpreter: so much will not have been executed then. Changes
/// no flags.
pub(in crate::codegen) fn note_refund(a: &mut Asm, cost: i32) {
    a.store_imm(gs(REFUND), cost);
}

/// The trampoline does. Changes flags.
pub(in crate::codegen) fn refund_noted(a: &mut Asm) {
    a.alu(true, Alu::Add, COUNTER, gs(REFUND));
}

/// Rust code is called, or returned to.
pub(in crate::codegen) fn keep(a: &mut Asm) {
    a.store(gs(COUNTED_TO), COUNTER);
}

/// Something takes as long as so many instructions, and is none. Changes r13, and no flags.
pub(in crate::codegen) fn charge(a: &mut Asm, n: i32) {
    let n = cost(n, 0);
    a.lea(COUNTER, at(COUNTER, -n));
    a.load(S1, gs(COUNTED_FROM));
    a.lea(S1, at(S1, -n));
    a.store(gs(COUNTED_FROM), S1);
}

/// The same for as many as are in a register. Changes r13 and flags.
pub(in crate::codegen) fn charge_repetitions(a: &mut Asm, n: Reg) {
    a.mov(S1, n);
    a.shift(true, 4, S1, SHIFT);
    shorten(a, S1);
}

/// Shortens the budget by what is in a register, which is changed, as are flags.
fn shorten(a: &mut Asm, by: Reg) {
    a.alu_rr(true, Alu::Sub, COUNTER, by);
    a.rr(true, &[0xf7], 3, by); // neg
    a.alu(true, Alu::Add, by, gs(COUNTED_FROM));
    a.store(gs(COUNTED_FROM), by);
}

/// As [`super::hasten_if_requested`]. Changes rax and flags.
pub(in crate::codegen) fn hasten_if_requested(a: &mut Asm) {
    a.load(RAX, gs(REQUESTS));
    a.alu_mem_imm8(false, Alu::Cmp, at(RAX, 0), 0);
    let goes_on = a.jcc(cc::E);
    a.lea(RAX, at(COUNTER, -cost(SOON as i32, 0)));
    a.alu_imm(true, Alu::And, RAX, -(1 << SHIFT));
    a.alu_imm(true, Alu::Cmp, RAX, 0);
    let is_soon = a.jcc(cc::LE);
    shorten(a, RAX);
    let here = a.here();
    a.patch(is_soon, here);
    a.store_imm(gs(OWED), 0);
    let here = a.here();
    a.patch(goes_on, here);
}

/// As [`super::poll`]; the run loop has to be returned to also where a counter may overflow soon.
pub(in crate::codegen) fn poll(a: &mut Asm, go_on: impl FnOnce(&mut Asm)) -> Poll {
    a.load(S0, gs(REQUESTS));
    a.alu_mem_imm8(false, Alu::Cmp, at(S0, 0), 0);
    let requested = a.jcc(cc::NE);
    a.alu_mem_imm8(true, Alu::Sub, gs(POLLS_LEFT), 1);
    let used_up = a.jcc(cc::S);
    let goes_on = a.here();
    take_off(a);
    vary_budget(a);
    a.load(S0, gs(EVENTS_LEFT));
    a.alu_rr(true, Alu::Cmp, COUNTER, S0);
    // cmova
    a.rr(true, &[0x0f, 0x47], COUNTER, S0);
    a.shift(true, 4, COUNTER, SHIFT);
    a.alu_imm(true, Alu::Or, COUNTER, EVENTS as i32);
    a.store(gs(COUNTED_FROM), COUNTER);
    a.store_imm(gs(CREDIT_LEFT), CREDIT);
    a.alu_imm(true, Alu::Cmp, S0, LEAST_FOR_CREDIT as i32);
    let has_credit = a.jcc(cc::AE);
    a.store_imm(gs(CREDIT_LEFT), 0);
    let here = a.here();
    a.patch(has_credit, here);
    a.alu_imm(true, Alu::Cmp, S0, LEAST as i32);
    let may_overflow = a.jcc(cc::B);
    go_on(a);
    let here = a.here();
    a.patch(used_up, here);
    let mut leaves = run_limit_ends(a).to_vec();
    a.store_imm(gs(POLLS_LEFT), super::POLLS as i32);
    a.jmp_to(goes_on);
    leaves.extend([requested, may_overflow]);
    Poll { leaves }
}

/// Adds to [`COUNTED`] what has been counted, which is still in the countdown. Changes the countdown, r14 and flags.
fn take_off(a: &mut Asm) {
    let [instructions, events] = COUNTED.map(gs);
    a.load(S0, gs(COUNTED_FROM));
    a.alu_rr(true, Alu::Sub, S0, COUNTER);
    a.mov(COUNTER, S0);
    a.shift(true, 5, COUNTER, SHIFT);
    a.alu_imm(false, Alu::And, S0, EVENTS as i32);
    a.alu(true, Alu::Add, S0, events);
    a.store(events, S0);
    a.load(S0, gs(EVENTS_LEFT));
    a.alu_rr(true, Alu::Sub, S0, COUNTER);
    a.store(gs(EVENTS_LEFT), S0);
    a.alu(true, Alu::Add, COUNTER, instructions);
    a.store(instructions, COUNTER);
}

/// Branches if nothing has been counted since the budget began: whoever does not fit into that would not after a poll. Changes flags.
pub(in crate::codegen) fn branch_if_new(a: &mut Asm) -> usize {
    a.alu(true, Alu::Cmp, COUNTER, gs(COUNTED_FROM));
    a.jcc(cc::E)
}

/// As [`super::begin_fast_turns`]: what the countdown becomes less, its beginning does, too.
pub(in crate::codegen) fn begin_fast_turns(a: &mut Asm) {
    a.load(S0, gs(CREDIT_LEFT));
    a.store_imm(gs(CREDIT_LEFT), 0);
    a.store_imm(gs(OWED), 0);
    a.shift(true, 4, S0, SHIFT);
    a.alu_rr(true, Alu::Add, COUNTER, S0);
    a.alu(true, Alu::Add, S0, gs(COUNTED_FROM));
    a.store(gs(COUNTED_FROM), S0);
    // Instructions that are left beyond those in r13, and none of the other events.
    a.shift(true, 4, S1, SHIFT);
    a.mov(S0, COUNTER);
    a.alu_rr(true, Alu::Sub, S0, S1);
    a.alu_imm(true, Alu::And, S0, -(1 << SHIFT));
    let is_less = a.jcc(cc::LE);
    a.store(gs(OWED), S0);
    shorten(a, S0);
    let here = a.here();
    a.patch(is_less, here);
    a.mov(S1, COUNTER);
    a.rr(true, &[0xf7], 3, S1); // neg
    a.store(gs(BEGAN), S1);
}

/// A fast turn that counts for so much begins, or the rest of one. Returns the branch to take if the budget is too short.
pub(in crate::codegen) fn fast_turn(a: &mut Asm, cost: i32) -> usize {
    enter(a, cost)
}

/// As [`super::end_fast_turns`]; the last turn has counted for so much.
pub(in crate::codegen) fn end_fast_turns(a: &mut Asm, cost: i32, least: i32) -> usize {
    refund(a, cost);
    a.load(S1, gs(OWED));
    a.alu_rr(true, Alu::Add, COUNTER, S1);
    a.alu(true, Alu::Add, S1, gs(COUNTED_FROM));
    a.store(gs(COUNTED_FROM), S1);
    a.alu_imm(true, Alu::Cmp, COUNTER, self::cost(least, 0));
    a.jcc(cc::L)
}

/// As [`super::leave_fast_turns`]; `executed` has sixteen times as much in r13, in 32 bits.
pub(in crate::codegen) fn leave_fast_turns(
    a: &mut Asm,
    worth: i32,
    executed: impl FnOnce(&mut Asm),
) {
    a.load(S1, gs(BEGAN));
    a.lea(S1, at(S1, cost(worth, 0)).plus(COUNTER, 0));
    a.store(gs(SPILL), S1);
    a.load32(S1, gs(SPILL + 2));
    executed(a);
    // Without flags.
    a.load(S1, gs(OWED));
    a.lea(COUNTER, at(COUNTER, 0).plus(S1, 0));
    a.store(gs(SPILL), COUNTER);
    a.load(COUNTER, gs(COUNTED_FROM));
    a.lea(COUNTER, at(COUNTER, 0).plus(S1, 0));
    a.store(gs(COUNTED_FROM), COUNTER);
    a.load(COUNTER, gs(SPILL));
}

/// What an instruction is in what [`leave_fast_turns`] computes.
pub(in crate::codegen) const EXECUTED: i32 = 1 << (SHIFT - 16);

/// Code that counts, and has been settled, ends here.
pub(in crate::codegen) fn forget(a: &mut Asm) {
    a.store_imm(gs(COUNTED_FROM), 0);
}

/// Goes on at [`COUNTED_ENTRY`] with the countdown in [`COUNTED_TO`].
/// `last`: where the last frame of the host's stack is to lead, which may be of the other kind of code.
pub(in crate::codegen) fn go_on(a: &mut Asm, last: usize) -> usize {
    let place = a.here();
    a.bytes(&[0x4c, 0x8d, 0x2d, 0, 0, 0, 0]); // lea r13, [rip + …]
    let site = a.here() - 4;
    a.patch(site, last);
    a.load(S0, gs(STACK));
    a.store(at(S0, 0), S1);
    a.load(COUNTER, gs(COUNTED_TO));
    a.jmp_mem(gs(COUNTED_ENTRY));
    place
}

/// Code that counts goes on, for so many instructions at most, of which a counter may overflow after `left`.
pub(crate) fn begin(frame: &mut EngineFrame, instructions: u64, left: u64) {
    let instructions = instructions.min(left);
    if left < LEAST_FOR_CREDIT {
        frame.credit_left = 0;
    }
    let countdown = instructions.min(super::longest()) << SHIFT | EVENTS;
    frame.counted_from = countdown;
    frame.counted_to = countdown;
}

/// What has been counted, once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Counted {
    pub(crate) instructions: u64,
    /// Of the other stream.
    pub(crate) events: u64,
    /// Instructions that polls have not taken off [`EVENTS_LEFT`].
    pub(crate) left: u64,
}

/// Code that counts has called `handle`, or has been left: what it has counted so far. From now on it is as if it had only begun.
/// `None`: no such code runs. (In the middle of a block, where other functions are called, more has been counted than executed.)
pub(crate) fn take_counted(frame: &mut EngineFrame) -> Option<Counted> {
    let from = frame.counted_from;
    if from == 0 {
        return None;
    }
    let to = frame.counted_to;
    let counted = from.wrapping_sub(to);
    frame.counted_from = to;
    let [instructions, events] = core::mem::take(&mut frame.counted);
    Some(Counted {
        instructions: instructions.wrapping_add(counted >> SHIFT),
        events: events.wrapping_add(counted & EVENTS),
        left: counted >> SHIFT,
    })
}

/// What [`take_counted`] would say: instructions, and events of the other stream.
pub(crate) fn counted(frame: &EngineFrame) -> Option<(u64, u64)> {
    let [instructions, events] = frame.counted;
    let counted = frame.counted_from.wrapping_sub(frame.counted_to);
    (frame.counted_from != 0).then(|| {
        let instructions = instructions.wrapping_add(counted >> SHIFT);
        (instructions, events.wrapping_add(counted & EVENTS))
    })
}

/// It does not run any more. Returns for how many instructions it might have gone on; `None`: it did not.
pub(crate) fn end(frame: &mut EngineFrame) -> Option<u64> {
    let left = left(frame);
    (core::mem::take(&mut frame.counted_from) != 0).then_some(left)
}

/// Instructions until the next poll, while code that counts has called Rust.
pub(crate) fn left(frame: &EngineFrame) -> u64 {
    (frame.counted_to as i64 >> SHIFT).max(0) as u64
}

/// What `handle` has charged.
pub(crate) fn charged(frame: &EngineFrame) -> u64 {
    frame.cost
}
