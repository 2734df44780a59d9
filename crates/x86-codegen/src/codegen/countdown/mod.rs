//! The countdown: how many instructions translated code may execute until it looks at requests again.
//!
//! A host register holds the countdown. A block subtracts its length where it is entered, and polls when the result is
//! less than zero. Only the files of this folder name the register and the frame's words of the countdown.
//!
//! # Policy
//!
//! The countdown is *about* right, which is all that polls need. What is not exact:
//!
//! - a long block counts for its first instructions only, as most entries leave it early ([`about`]);
//! - a block that is left by a branch in its middle has counted all of its instructions: nothing is given back;
//! - what takes long counts as several instructions ([`charge`], [`charge_repetitions`], [`charge_interpreted`]), so
//!   that polls stay near each other in time;
//! - the fast iterations of a loop get a credit ([`begin_fast_turns`]), and leaving them other than by a link makes the
//!   next poll come early.
//!
//! Code that counts what is retired has a policy of its own: [`exact`]. Before a counter of cycles overflows, looks at
//! the time come ever closer together: [`approach`].

pub mod approach;
pub mod exact;

use engine_frame::EngineFrame;

use crate::{asm::*, frame::words::*};

/// Instructions between two polls, on average.
const BUDGET: u32 = 4000;
/// Polls between two looks at the time and at [`STOP`], or before the run loop is returned to.
const POLLS: u64 = 8;
/// Maximum number of instructions until the next poll once a call of Rust has found a request. At least the calling
/// instruction is executed before that poll, even if by another block.
const SOON: u64 = 100;
/// What an instruction that the interpreter executes counts as, in instructions.
const INTERPRETED: u64 = 32;
/// What is added to the countdown for the fast iterations of loops, once between two polls: about what the pages in
/// reach last for.
const CREDIT: i32 = 8000;
/// What a PAUSE counts as, in instructions: about as long as it takes.
pub(super) const PAUSE: i32 = 40;
/// What a repeated string instruction counts as, in instructions, if the host executes it a block of memory at a time.
pub(super) const BLOCK_OPERATION: i32 = 32;
/// Maximum distance of a `x86_jit::RunLimit` in ticks of the TSC. A greater distance means that the TSC has jumped, and
/// ends the run.
const MAX_TICKS: i32 = 1 << 20;

/// The branches of a block's entry to a poll, some of which may be the same.
pub(super) type Polls = [usize; 5];

/// Returns what a block of `len` instructions counts as. Of a long block, most entries execute only the first
/// instructions. Traces, which are longer still, are left early less often.
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

/// Emits the entry of a block of `len` instructions. Returns the branch to a poll.
pub(super) fn enter(a: &mut Asm, len: usize) -> usize {
    subtract(a, about(len))
}

/// Subtracts `n`. Returns the branch to take if the result is less than zero; its condition is one that processors fuse
/// with a subtraction.
fn subtract(a: &mut Asm, n: i32) -> usize {
    a.alu_imm(true, Alu::Sub, COUNTER, n);
    a.jcc(cc::L)
}

/// Charges `n` instructions for something that takes as long. Changes no flags.
pub(super) fn charge(a: &mut Asm, n: i32) {
    a.lea(COUNTER, at(COUNTER, -n));
}

/// Charges an instruction for each repetition in the register `n`. Changes flags.
pub(super) fn charge_repetitions(a: &mut Asm, n: Reg) {
    a.alu_rr(true, Alu::Sub, COUNTER, n);
}

/// Charges what `handle` has noted by one of the functions below. Changes flags.
pub(super) fn charge_handled(a: &mut Asm) {
    a.alu(true, Alu::Sub, COUNTER, gs(COST));
}

/// Stores the countdown for Rust code, which is called or returned to next.
pub(super) fn keep(a: &mut Asm) {
    a.store(gs(LEFT_TO_POLL), COUNTER);
}

/// Loads the countdown that [`begin`] has set, at the entry to translated code.
pub(super) fn load(a: &mut Asm) {
    a.load32(COUNTER, gs(COUNT));
}

/// Makes a poll come soon if a call of Rust has found a request: a full dirty ring, for one, has no room for all that
/// is written until the countdown ends. Changes rax and flags.
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

/// Has the next poll look at what the run loop may be returned to for.
pub(super) fn sample_at_next_poll(a: &mut Asm) {
    a.store_imm(gs(POLLS_LEFT), 0);
}

/// The ways out of a poll.
pub(super) struct Poll {
    /// Branches to take if the run loop has to be returned to.
    pub(super) leaves: Vec<usize>,
}

/// Emits a poll as a function: it goes on with a new budget and `go_on`, or branches.
pub(super) fn poll(a: &mut Asm, go_on: impl FnOnce(&mut Asm)) -> Poll {
    a.load(S0, gs(REQUESTS));
    a.alu_mem_imm8(false, Alu::Cmp, at(S0, 0), 0);
    let requested = a.jcc(cc::NE);
    a.alu_mem_imm8(true, Alu::Sub, gs(POLLS_LEFT), 1);
    let used_up = a.jcc(cc::S);
    let goes_on = a.here();
    vary_budget(a);
    a.store_imm(gs(CREDIT_LEFT), CREDIT);
    let returns = a.here();
    go_on(a);
    let here = a.here();
    a.patch(used_up, here);
    let [pauses, missed, is_over, stops] = run_limit_ends(a);
    approach::choose_window(a, goes_on);
    approach::load_window(a, approach::LEAST_PLAIN);
    a.jmp_to(returns);
    Poll {
        leaves: vec![pauses, missed, is_over, stops, requested],
    }
}

/// Emits branches that are taken if the run loop has to be returned to, and notes the time. Changes r14.
fn run_limit_ends(a: &mut Asm) -> [usize; 4] {
    // The run loop judges whether the guest only waits for another vCPU.
    a.alu_mem_imm8(true, Alu::Cmp, gs(PAUSES), 0);
    let pauses = a.jcc(cc::NE);
    a.alu_mem_imm8(true, Alu::Cmp, gs(SITE_ENTRIES_MISSED), 0);
    let missed = a.jcc(cc::NE);
    push(a, RAX);
    push(a, RDX);
    a.bytes(&[0x0f, 0x31]); // rdtsc
    a.shift(true, 4, RDX, 32);
    a.alu_rr(true, Alu::Or, RAX, RDX);
    approach::note_time(a);
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

/// Sets the countdown to about [`BUDGET`] instructions. If the distances between polls were all the same, a guest that
/// repeats itself would come to polls in the same few blocks, and samples would see no others.
fn vary_budget(a: &mut Asm) {
    const BITS: u32 = 11;
    // The step of a linear congruential generator; its upper bits are the good ones.
    a.load32(COUNTER, gs(RANDOM));
    a.imul(false, COUNTER, COUNTER, 1_664_525);
    a.alu_imm(false, Alu::Add, COUNTER, 1_013_904_223);
    a.store32(gs(RANDOM), COUNTER);
    a.shift(false, 5, COUNTER, 32 - BITS as u8);
    a.lea(COUNTER, at(COUNTER, BUDGET as i32 - (1 << (BITS - 1))));
}

/// Begins the fast iterations of a loop, for as many instructions as r13 says: sets the countdown to that number, and
/// [`OWED`] to what was left beyond it. Changes r13, r14 and flags.
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

/// Emits the beginning of a fast iteration of `len` instructions. Returns the branch to take if the previous one was
/// the last.
pub(super) fn fast_turn(a: &mut Asm, len: i32) -> usize {
    subtract(a, len)
}

/// Ends the fast iterations; the last subtraction was one too many. Returns the branch to take if fewer than `least`
/// instructions are left. Changes r13 and flags.
pub(super) fn end_fast_turns(a: &mut Asm, len: i32, least: i32) -> usize {
    pay_back(a, len);
    a.alu_imm(true, Alu::Cmp, COUNTER, least);
    a.jcc(cc::L)
}

/// Leaves fast iterations by a link. `executed` is called with the number of instructions that they were, less `worth`,
/// in r13. Changes r13, and no flags.
pub(super) fn leave_fast_turns(a: &mut Asm, worth: i32, executed: impl FnOnce(&mut Asm)) {
    a.load(S1, gs(BEGAN));
    a.lea(S1, at(S1, worth).plus(COUNTER, 0));
    executed(a);
    pay_back(a, 0);
}

/// Adds [`OWED`] and `plus` to the countdown. Changes r13, and no flags.
fn pay_back(a: &mut Asm, plus: i32) {
    a.load(S1, gs(OWED));
    a.lea(COUNTER, at(COUNTER, plus).plus(S1, 0));
}

/// Returns the longest countdown.
pub const fn longest() -> u64 {
    BUDGET as u64
}

/// Sets the number of instructions that translated code executes from its entry to its first poll.
pub fn begin(frame: &mut EngineFrame, instructions: u64) {
    frame.count = instructions;
}

/// Returns the number that [`begin`] has set.
pub fn first(frame: &EngineFrame) -> u64 {
    frame.count
}

/// Returns the number of instructions until the next poll, when translated code has called Rust.
pub fn left(frame: &EngineFrame) -> u64 {
    let left = exact::left(frame).unwrap_or(frame.left_to_poll.cast_signed());
    left.max(0) as u64
}

/// Returns true if the block that is gone on with `left` instructions before the next poll may poll at its entry.
/// `counts`: the block may be one that counts.
pub const fn may_poll_first(left: u64, counts: bool) -> bool {
    left < if counts { approach::LEAST_EXACT } else { SOON }
}

/// Returns what `handle` has charged.
pub fn charged(frame: &EngineFrame) -> u64 {
    frame.cost
}

/// Allows as many polls as usual before the run loop is returned to, or none.
pub fn allow_polls(frame: &mut EngineFrame, are_allowed: bool) {
    frame.polls_left = if are_allowed { POLLS } else { 0 };
}

/// Notes that `handle` has not executed anything yet.
pub fn charge_nothing(frame: &mut EngineFrame) {
    frame.cost = 0;
}

/// Notes that `handle` has had the interpreter execute an instruction.
pub fn charge_interpreted(frame: &mut EngineFrame) {
    frame.cost = INTERPRETED;
}

/// Notes that `handle` has done so much that a poll is due.
pub fn charge_all(frame: &mut EngineFrame) {
    frame.cost = BUDGET.into();
}
