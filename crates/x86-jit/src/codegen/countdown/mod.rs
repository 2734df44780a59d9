//! The countdown: how many instructions translated code may execute until it looks at requests again.
//!
//! A host register holds it. A block subtracts its length where it is entered, and polls when
//! the result is less than zero. This file and [`exact`] are the only ones that name the register and its words.
//!
//! # Policy
//!
//! The countdown is *about* right, which is all that polls need. What is not exact:
//!
//! - a long block counts for its first instructions only, as most entries leave it early ([`about`]);
//! - a block that is left by a branch in its middle has counted for all of its instructions: nothing is refunded;
//! - what takes long counts for more than one instruction ([`charge`], [`charge_repetitions`], [`charge_interpreted`]),
//!   so that polls stay near each other in time;
//! - the fast turns of a loop get a credit ([`begin_fast_turns`]), and who leaves them but by a link comes to a poll early.
//!
//! Code that counts what is retired has a policy of its own: [`exact`].

pub(crate) mod exact;

use engine_frame::EngineFrame;

use crate::{asm::*, frame::words::*};

/// Instructions between two polls, about.
const BUDGET: u32 = 4000;
/// Polls before the time and [`STOP`] are looked at, too, or before the run loop is returned to.
const POLLS: u64 = 8;
/// Instructions until the next poll, at most, once a call has found a request: at least the one that has called is
/// executed, also if that is by another block.
const SOON: u64 = 100;
/// What an instruction of the interpreter's counts for.
const INTERPRETED: u64 = 32;
/// What is added for the fast turns of loops, once between two polls: there are as many pages in reach.
const CREDIT: i32 = 8000;
/// What a PAUSE counts for: about as long as it takes.
pub(super) const PAUSE: i32 = 40;
/// What a repeated string instruction counts for that the host has an implementation of for blocks of memory.
pub(super) const BLOCK_OPERATION: i32 = 32;
/// Ticks that a [`crate::RunLimit`] has at most: a TSC that jumps ends it.
const MAX_TICKS: i32 = 1 << 20;

/// What a block of so many instructions counts for: of a long one, most entries execute the first ones only. Traces, which
/// are longer, are left less often.
const fn about(len: usize) -> i32 {
    const MOST: usize = 24;
    const LEAST_SHARE: usize = 4;
    let len = match len {
        ..MOST => len,
        _ if len / LEAST_SHARE < MOST => MOST,
        _ => len / LEAST_SHARE,
    };
    len as i32
}

/// A block of so many instructions is entered. Returns the branch to a poll.
pub(super) fn enter(a: &mut Asm, len: usize) -> usize {
    subtract(a, about(len))
}

/// Returns the branch to take if there is less. By the condition that processors fuse with a subtraction.
fn subtract(a: &mut Asm, n: i32) -> usize {
    a.alu_imm(true, Alu::Sub, COUNTER, n);
    a.jcc(cc::L)
}

/// Something counts for so many instructions more. Changes no flags.
pub(super) fn charge(a: &mut Asm, n: i32) {
    a.lea(COUNTER, at(COUNTER, -n));
}

/// The same for as many as there are repetitions in a register. Changes flags.
pub(super) fn charge_repetitions(a: &mut Asm, n: Reg) {
    a.alu_rr(true, Alu::Sub, COUNTER, n);
}

/// The same for what `handle` has said, by one of the functions below. Changes flags.
pub(super) fn charge_handled(a: &mut Asm) {
    a.alu(true, Alu::Sub, COUNTER, gs(COST));
}

/// Translated code is entered: the countdown is what [`begin`] has set.
pub(super) fn load(a: &mut Asm) {
    a.load32(COUNTER, gs(COUNT));
}

/// A call of a Rust function may have found a request: if so, a poll is soon. A full dirty ring, for one, has no
/// room for all that is written until the countdown ends. Changes rax and flags.
pub(super) fn hasten_if_requested(a: &mut Asm) {
    a.load(RAX, gs(REQUESTS));
    a.alu_mem_imm8(false, Alu::Cmp, at(RAX, 0), 0);
    let goes_on = a.jcc(cc::E);
    a.mov_imm(RAX, SOON);
    a.alu_rr(true, Alu::Cmp, COUNTER, RAX);
    // cmovg
    a.rr(true, &[0x0f, 0x4f], COUNTER, RAX);
    a.store_imm(gs(OWED), 0);
    let here = a.here();
    a.patch(goes_on, here);
}

/// The next poll is to return to the run loop, or to look at what that would.
pub(super) fn sample_at_next_poll(a: &mut Asm) {
    a.store_imm(gs(POLLS_LEFT), 0);
}

/// Where a poll goes.
pub(super) struct Poll {
    /// Branches to take if the run loop has to be returned to.
    pub(super) leaves: Vec<usize>,
}

/// What a poll does, as a function: it goes on with a new budget, and with `go_on`, or branches.
pub(super) fn poll(a: &mut Asm, go_on: impl FnOnce(&mut Asm)) -> Poll {
    a.load(S0, gs(REQUESTS));
    a.alu_mem_imm8(false, Alu::Cmp, at(S0, 0), 0);
    let requested = a.jcc(cc::NE);
    a.alu_mem_imm8(true, Alu::Sub, gs(POLLS_LEFT), 1);
    let used_up = a.jcc(cc::S);
    let goes_on = a.here();
    vary_budget(a);
    a.store_imm(gs(CREDIT_LEFT), CREDIT);
    go_on(a);
    let here = a.here();
    a.patch(used_up, here);
    let [pauses, missed, is_over, stops] = run_limit_ends(a);
    a.store_imm(gs(POLLS_LEFT), POLLS as i32);
    a.jmp_to(goes_on);
    Poll {
        leaves: vec![pauses, missed, is_over, stops, requested],
    }
}

/// Branches if the run loop has to be returned to. Changes r14.
fn run_limit_ends(a: &mut Asm) -> [usize; 4] {
    // Whether the guest only waits for another vCPU is the run loop's to judge.
    a.alu_mem_imm8(true, Alu::Cmp, gs(PAUSES), 0);
    let pauses = a.jcc(cc::NE);
    a.alu_mem_imm8(true, Alu::Cmp, gs(SITE_ENTRIES_MISSED), 0);
    let missed = a.jcc(cc::NE);
    push(a, RAX);
    push(a, RDX);
    a.bytes(&[0x0f, 0x31]); // rdtsc
    a.shift(true, 4, RDX, 32);
    a.alu_rr(true, Alu::Or, RAX, RDX);
    a.load(S0, gs(UNTIL));
    a.alu_rr(true, Alu::Sub, S0, RAX);
    pop(a, RDX);
    pop(a, RAX);
    a.alu_imm(true, Alu::Cmp, S0, MAX_TICKS);
    let is_over = a.jcc(cc::A);
    a.load(S0, gs(STOP));
    a.rm(false, &[0x80], 7, at(S0, 0)); // cmp byte [r14], 0
    a.bytes(&[0]);
    [pauses, missed, is_over, a.jcc(cc::NE)]
}

/// [`BUDGET`] instructions until the next poll, more or less: where a guest repeats itself, polls that are always as far
/// from each other come to the same few blocks, and samples see no others.
fn vary_budget(a: &mut Asm) {
    const BITS: u32 = 11;
    // A linear congruential generator, whose upper bits are the good ones.
    a.load32(COUNTER, gs(RANDOM));
    a.imul(false, COUNTER, COUNTER, 1_664_525);
    a.alu_imm(false, Alu::Add, COUNTER, 1_013_904_223);
    a.store32(gs(RANDOM), COUNTER);
    a.shift(false, 5, COUNTER, 32 - BITS as u8);
    a.lea(COUNTER, at(COUNTER, BUDGET as i32 - (1 << (BITS - 1))));
}

/// Fast turns of a loop begin, for as many instructions as are in r13: the countdown becomes that, and what is left of it
/// then is owed. Changes r13, r14 and flags.
pub(super) fn begin_fast_turns(a: &mut Asm) {
    a.alu(true, Alu::Add, COUNTER, gs(CREDIT_LEFT));
    a.store_imm(gs(CREDIT_LEFT), 0);
    a.store_imm(gs(OWED), 0);
    a.mov(S0, COUNTER);
    a.alu_rr(true, Alu::Sub, S0, S1);
    let is_less = a.jcc(cc::L);
    a.store(gs(OWED), S0);
    a.mov(COUNTER, S1);
    let here = a.here();
    a.patch(is_less, here);
    a.mov(S1, COUNTER);
    a.rr(true, &[0xf7], 3, S1); // neg
    a.store(gs(BEGAN), S1);
}

/// A fast turn of so many instructions. Returns the branch to take if it was the last one.
pub(super) fn fast_turn(a: &mut Asm, len: i32) -> usize {
    subtract(a, len)
}

/// All fast turns have been made, the last one of which has counted for one too many. Returns the branch to take if there
/// is less left than so many instructions. Changes r13 and flags.
pub(super) fn end_fast_turns(a: &mut Asm, len: i32, least: i32) -> usize {
    pay_back(a, len);
    a.alu_imm(true, Alu::Cmp, COUNTER, least);
    a.jcc(cc::L)
}

/// Fast turns are left by a link. `executed` has in r13, less `worth`, how many instructions they were. Changes r13, and no flags.
pub(super) fn leave_fast_turns(a: &mut Asm, worth: i32, executed: impl FnOnce(&mut Asm)) {
    a.load(S1, gs(BEGAN));
    a.lea(S1, at(S1, worth).plus(COUNTER, 0));
    executed(a);
    pay_back(a, 0);
}

/// Adds to the countdown what is owed, and so much. Changes r13, and no flags.
fn pay_back(a: &mut Asm, plus: i32) {
    a.load(S1, gs(OWED));
    a.lea(COUNTER, at(COUNTER, plus).plus(S1, 0));
}

/// The longest countdown.
pub(crate) const fn longest() -> u64 {
    BUDGET as u64
}

/// What translated code is entered with: so many instructions until its first poll.
pub(crate) fn begin(frame: &mut EngineFrame, instructions: u64) {
    frame.count = instructions;
}

/// As many as [`begin`] has said.
pub(crate) fn first(frame: &EngineFrame) -> u64 {
    frame.count
}

/// Polls until the run loop is returned to: as many as usual, or none.
pub(crate) fn allow_polls(frame: &mut EngineFrame, are_allowed: bool) {
    frame.polls_left = if are_allowed { POLLS } else { 0 };
}

/// `handle` has not executed anything yet.
pub(crate) fn charge_nothing(frame: &mut EngineFrame) {
    frame.cost = 0;
}

/// It has had the interpreter execute an instruction.
pub(crate) fn charge_interpreted(frame: &mut EngineFrame) {
    frame.cost = INTERPRETED;
}

/// It has done much: a poll is due.
pub(crate) fn charge_all(frame: &mut EngineFrame) {
    frame.cost = BUDGET.into();
}
