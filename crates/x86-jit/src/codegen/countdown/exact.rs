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

use super::{Poll, SOON, run_limit_ends, vary_budget};
use crate::{asm::*, frame::words::*};

/// Bit from which on instructions are.
const SHIFT: u8 = 20;
/// What the other events begin at.
const EVENTS: u64 = (1 << SHIFT) - 1;
/// Instructions up to a counter's overflow that translated code is entered for.
pub(crate) const LEAST: u64 = 64;

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
    a.patch(goes_on, here);
    a.patch(is_soon, here);
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

/// Goes on at [`COUNTED_ENTRY`] with the countdown that [`begin`] has set, or with that of code that does not count.
/// `last`: where the last frame of the host's stack is to lead, which may be of the other kind of code.
pub(in crate::codegen) fn go_on(a: &mut Asm, last: usize, counts: bool) -> usize {
    let place = a.here();
    a.bytes(&[0x4c, 0x8d, 0x2d, 0, 0, 0, 0]); // lea r13, [rip + …]
    let site = a.here() - 4;
    a.patch(site, last);
    a.load(S0, gs(STACK));
    a.store(at(S0, 0), S1);
    if counts {
        a.load(COUNTER, gs(COUNTED_TO));
    } else {
        super::load(a);
    }
    a.jmp_mem(gs(COUNTED_ENTRY));
    place
}

/// Code that counts goes on, for so many instructions at most.
pub(crate) fn begin(words: &mut [u64], instructions: u64) {
    let countdown = instructions.min(super::longest()) << SHIFT | EVENTS;
    words[index(COUNTED_FROM)] = countdown;
    words[index(COUNTED_TO)] = countdown;
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
pub(crate) fn take_counted(words: &mut [u64]) -> Option<Counted> {
    let from = words[index(COUNTED_FROM)];
    if from == 0 {
        return None;
    }
    let to = words[index(COUNTED_TO)];
    let counted = from.wrapping_sub(to);
    words[index(COUNTED_FROM)] = to;
    let [instructions, events] = COUNTED.map(|w| core::mem::take(&mut words[index(w)]));
    Some(Counted {
        instructions: instructions.wrapping_add(counted >> SHIFT),
        events: events.wrapping_add(counted & EVENTS),
        left: counted >> SHIFT,
    })
}

/// It does not run any more. Returns for how many instructions it might have gone on; `None`: it did not.
pub(crate) fn end(words: &mut [u64]) -> Option<u64> {
    if core::mem::take(&mut words[index(COUNTED_FROM)]) == 0 {
        return None;
    }
    let left = words[index(COUNTED_TO)] as i64 >> SHIFT;
    Some(left.max(0) as u64)
}

/// What `handle` has charged.
pub(crate) fn charged(words: &[u64]) -> u64 {
    words[index(COST)]
}
