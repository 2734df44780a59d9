//! The countdown of code that counts what is retired, exactly.
//!
//! The register holds several sums. Instructions are counted from bit [`Layout::shift`] on; below are the events of
//! other streams. The entry of a block counts all of them by one subtraction, as if the block were executed to its end
//! and no conditional branch were taken. A stub that leaves the block elsewhere first gives back the difference
//! ([`refund`]). So there is one invariant wherever generated code may be left:
//!
//! > retired = what polls have taken off ([`COUNTED`]) + [`COUNTED_FROM`] − the countdown
//!
//! What changes the countdown for another reason changes [`COUNTED_FROM`] by as much. A budget ends where a counter may
//! overflow, and a block is entered only if all of it is within the budget: the interpreter executes what is left.
//!
//! Where several streams are counted ([`Layout::Several`], [`Layout::Wide`]), the sums of rarer events are in memory
//! ([`COUNTED_BESIDE`]). These count up, and blocks without such events do not touch them. If a counter of events may
//! overflow, their number bounds a budget, too ([`bounds`]); otherwise the sums below instructions begin so high that
//! they do not come to zero within a budget.

mod bounds;
mod cost;
mod sums;

pub(crate) use cost::{Cost, Layout};
pub use sums::*;

use sums::LEVEL;

use super::{BUDGET, CREDIT, Poll, Polls, SOON, approach, run_limit_ends, vary_budget};
use crate::{
    asm::*,
    frame::words::*,
    ir::{
        mode::Mode,
        streams::{AND_MEMORY, IN_COUNTDOWN, SEVERAL, Streams},
    },
};
use x86_defs::retired::INSTRUCTIONS;

/// Fewest instructions before a counter's overflow for which translated code is entered.
pub const LEAST: u64 = 64;
/// Fewest instructions before a counter's overflow with which the fast iterations of loops get [`CREDIT`]: more than a
/// budget and the credit.
const LEAST_FOR_CREDIT: u64 = 2 * BUDGET as u64 + CREDIT as u64;

/// Emits the entry of a block of this cost. Returns the branches to a poll, some of which may be the same. If one is
/// taken, [`refund_entry`] takes the entry back.
pub(in crate::codegen) fn enter(a: &mut Asm, layout: Layout, cost: Cost) -> Polls {
    match i32::try_from(cost.countdown) {
        Ok(n) => a.alu_imm(true, Alu::Sub, COUNTER, n),
        Err(_) => a.alu_literal(Alu::Sub, COUNTER, cost.countdown.cast_unsigned()),
    }
    if !layout.is_bounded() {
        let polls = a.jcc(cc::L);
        add_beside(a, cost);
        return [polls; _];
    }
    add_beside(a, cost);
    let polls = bounds::branch_if_used_up(a);
    let mut all = [polls; _];
    for (n, events) in cost.beside.into_iter().enumerate() {
        if events != 0 {
            all[1 + n] = bounds::branch_if_beside(a, n);
        }
    }
    all
}

/// Adds a block's events to the sums in memory. Changes flags.
fn add_beside(a: &mut Asm, cost: Cost) {
    for (n, events) in cost.beside.into_iter().enumerate() {
        if events != 0 {
            a.alu_mem_imm(false, Alu::Add, beside(n), events);
        }
    }
}

/// Returns true if a block of this cost may not fit in a budget even where the budget is new.
pub(in crate::codegen) fn may_be_too_long(layout: Layout, cost: Cost) -> bool {
    layout.is_bounded() || cost.countdown > layout.instructions(LEAST as i32)
}

/// Takes back an entry whose poll is due. Changes no flags, but may change `scratch`.
pub(in crate::codegen) fn refund_entry(a: &mut Asm, layout: Layout, cost: Cost, scratch: Reg) {
    let beside = match layout.is_bounded() {
        true => cost.beside,
        // Only the countdown has counted.
        false => Cost::default().beside,
    };
    refund(a, Cost { beside, ..cost }, scratch);
}

/// Gives back what has not been executed. Changes no flags, but may change `scratch`.
pub(in crate::codegen) fn refund(a: &mut Asm, cost: Cost, scratch: Reg) {
    add(a, cost.countdown, scratch);
    for (n, events) in cost.beside.into_iter().enumerate() {
        if events != 0 {
            a.load32(scratch, beside(n));
            a.rm(false, &[0x8d], scratch, at(scratch, -events)); // lea
            a.store32(beside(n), scratch);
        }
    }
}

/// Adds `n` to the countdown alone. Changes no flags, but may change `scratch`.
fn add(a: &mut Asm, n: i64, scratch: Reg) {
    match i32::try_from(n) {
        Ok(0) => {}
        Ok(n) => a.lea(COUNTER, at(COUNTER, n)),
        Err(_) => {
            a.load_literal(scratch, n.cast_unsigned());
            a.lea(COUNTER, at(COUNTER, 0).plus(scratch, 0));
        }
    }
}

/// Returns the word with sums 2n and 2n + 1 of those in memory.
const fn beside(n: usize) -> Mem {
    gs(COUNTED_BESIDE + 4 * n)
}

/// Notes what has not been executed if the trampoline that is called next leaves the instruction to the interpreter.
/// Changes no flags.
pub(in crate::codegen) fn note_refund(a: &mut Asm, layout: Layout, cost: Cost) {
    match i32::try_from(cost.countdown) {
        Ok(n) => a.store_imm(gs(REFUND), n),
        Err(_) => {
            a.store32_imm(gs(REFUND), cost.countdown as i32);
            a.store32_imm(gs(REFUND + 4), (cost.countdown >> 32) as i32);
        }
    }
    for (n, events) in cost.beside.into_iter().enumerate().take(layout.words()) {
        a.store32_imm(gs(REFUND_BESIDE + 4 * n), events);
    }
}

/// Gives back what [`note_refund`] has noted. Changes r14 and flags.
pub(in crate::codegen) fn refund_noted(a: &mut Asm, layout: Layout) {
    a.alu(true, Alu::Add, COUNTER, gs(REFUND));
    for n in 0..layout.words() {
        a.load32(S0, gs(REFUND_BESIDE + 4 * n));
        a.rm(false, &[0x29], S0, beside(n)); // sub
    }
}

/// The opcode of a NOP with a memory operand, whose displacement may be any constant: NOP [RAX + disp32].
const NOP: [u8; 3] = [0x0f, 0x1f, 0x80];

/// Places constants behind the call of a trampoline: what has not been executed if it leaves the instruction to the
/// interpreter. They are displacements of NOPs, so that the trampoline may also return to them.
pub(in crate::codegen) fn place_refund(a: &mut Asm, layout: Layout, cost: Cost) {
    let [low, high] = [0, 32].map(|bit| (cost.countdown >> bit) as i32);
    let high = layout.has_several().then_some(high);
    let beside = cost.beside.into_iter().take(layout.words());
    for word in [low].into_iter().chain(high).chain(beside) {
        a.bytes(&NOP);
        a.imm32(word);
    }
}

/// Gives back what [`place_refund`] has placed; r14 has the address behind the call. Changes r13, r14 and flags.
pub(in crate::codegen) fn refund_placed(a: &mut Asm, layout: Layout) {
    let place = |n: usize| at(S0, (n * (NOP.len() + 4) + NOP.len()) as i32);
    match layout {
        Layout::One => {
            a.rm(true, &[0x63], S1, place(0)); // movsxd
            a.alu_rr(true, Alu::Add, COUNTER, S1);
        }
        _ => {
            a.load32(S1, place(1));
            a.shift(true, 4, S1, 32);
            a.alu_rr(true, Alu::Add, COUNTER, S1);
            a.load32(S1, place(0));
            a.alu_rr(true, Alu::Add, COUNTER, S1);
            for n in 0..layout.words() {
                a.load32(S1, place(2 + n));
                a.rm(false, &[0x29], S1, beside(n)); // sub
            }
        }
    }
}

/// Does what [`super::keep`] does.
pub(in crate::codegen) fn keep(a: &mut Asm) {
    a.store(gs(COUNTED_TO), COUNTER);
}

/// Charges `n` instructions for something that takes as long but retires none. Changes r13, and no flags.
pub(in crate::codegen) fn charge(a: &mut Asm, layout: Layout, n: i32) {
    let n = layout.instructions(n);
    let Ok(n) = i32::try_from(n) else {
        a.mov_imm(S1, (-n).cast_unsigned());
        return lengthen(a, COUNTED_SPILL);
    };
    a.lea(COUNTER, at(COUNTER, -n));
    a.load(S1, gs(COUNTED_FROM));
    a.lea(S1, at(S1, -n));
    a.store(gs(COUNTED_FROM), S1);
}

/// Lengthens the budget by what is in r13, which may be negative. Changes no flags.
fn lengthen(a: &mut Asm, spill: usize) {
    a.lea(COUNTER, at(COUNTER, 0).plus(S1, 0));
    a.store(gs(spill), COUNTER);
    a.load(COUNTER, gs(COUNTED_FROM));
    a.lea(COUNTER, at(COUNTER, 0).plus(S1, 0));
    a.store(gs(COUNTED_FROM), COUNTER);
    a.load(COUNTER, gs(spill));
}

/// Charges an instruction for each repetition in the register `n`. Changes r13 and flags.
pub(in crate::codegen) fn charge_repetitions(a: &mut Asm, layout: Layout, n: Reg) {
    a.mov(S1, n);
    a.shift(true, 4, S1, layout.shift());
    shorten(a, S1);
}

/// Shortens the budget by what is in the register `by`. Changes that register and flags.
fn shorten(a: &mut Asm, by: Reg) {
    a.alu_rr(true, Alu::Sub, COUNTER, by);
    a.rr(true, &[0xf7], 3, by); // neg
    a.alu(true, Alu::Add, by, gs(COUNTED_FROM));
    a.store(gs(COUNTED_FROM), by);
}

/// Clears the bits of events in a register, and leaves those of instructions. Changes flags.
fn mask_events(a: &mut Asm, layout: Layout, r: Reg) {
    match layout {
        Layout::One => a.alu_imm(true, Alu::And, r, -(1 << layout.shift())),
        _ => {
            a.shift(true, 7, r, layout.shift()); // sar
            a.shift(true, 4, r, layout.shift());
        }
    }
}

/// Does what [`super::hasten_if_requested`] does. Changes rax and flags.
pub(in crate::codegen) fn hasten_if_requested(a: &mut Asm, layout: Layout) {
    a.load(RAX, gs(REQUESTS));
    a.alu_mem_imm8(false, Alu::Cmp, at(RAX, 0), 0);
    let goes_on = a.jcc(cc::E);
    let soon = -layout.instructions(SOON as i32);
    match i32::try_from(soon) {
        Ok(soon) => a.lea(RAX, at(COUNTER, soon)),
        Err(_) => {
            a.mov_imm(RAX, soon.cast_unsigned());
            a.alu_rr(true, Alu::Add, RAX, COUNTER);
        }
    }
    mask_events(a, layout, RAX);
    a.alu_imm(true, Alu::Cmp, RAX, 0);
    let is_soon = a.jcc(cc::LE);
    shorten(a, RAX);
    let here = a.here();
    a.patch(is_soon, here);
    a.store_imm(gs(OWED), 0);
    let here = a.here();
    a.patch(goes_on, here);
}

/// Does what [`super::poll`] does. The run loop is returned to also where a counter may overflow soon.
pub(in crate::codegen) fn poll(a: &mut Asm, layout: Layout, go_on: impl FnOnce(&mut Asm)) -> Poll {
    a.load(S0, gs(REQUESTS));
    a.alu_mem_imm8(false, Alu::Cmp, at(S0, 0), 0);
    let requested = a.jcc(cc::NE);
    a.alu_mem_imm8(true, Alu::Sub, gs(POLLS_LEFT), 1);
    let used_up = a.jcc(cc::S);
    let goes_on = a.here();
    take_off(a, layout);
    vary_budget(a);
    set_budget(a, layout);
    a.store_imm(gs(CREDIT_LEFT), CREDIT);
    a.alu_imm(true, Alu::Cmp, S0, LEAST_FOR_CREDIT as i32);
    let has_credit = a.jcc(cc::AE);
    a.store_imm(gs(CREDIT_LEFT), 0);
    let here = a.here();
    a.patch(has_credit, here);
    let returns = a.here();
    a.alu_imm(true, Alu::Cmp, S0, LEAST as i32);
    let may_overflow = a.jcc(cc::B);
    go_on(a);
    let here = a.here();
    a.patch(used_up, here);
    let mut leaves = run_limit_ends(a).to_vec();
    approach::choose_window(a, goes_on);
    take_off(a, layout);
    approach::load_window(a, approach::LEAST_EXACT);
    set_budget(a, layout);
    a.jmp_to(returns);
    leaves.extend([requested, may_overflow]);
    Poll { leaves }
}

/// Sets the countdown to the number of instructions in it, or to as many as there are before a counter may overflow;
/// this number is in r14 afterwards. Changes flags.
fn set_budget(a: &mut Asm, layout: Layout) {
    a.load(S0, gs(EVENTS_LEFT));
    a.alu_rr(true, Alu::Cmp, COUNTER, S0);
    // cmova
    a.rr(true, &[0x0f, 0x47], COUNTER, S0);
    if layout.is_bounded() {
        a.shift(true, 4, COUNTER, layout.shift());
        bounds::begin_sums(a, layout);
        a.load(S0, gs(EVENTS_LEFT));
    } else {
        begin_unbounded(a, layout, COUNTER);
    }
    a.store(gs(COUNTED_FROM), COUNTER);
}

/// Makes a number of instructions the countdown for these, with the other sums in it at [`Layout::events`]. Changes flags.
fn begin_unbounded(a: &mut Asm, layout: Layout, r: Reg) {
    a.lea(r, at(r, 1));
    a.shift(true, 4, r, layout.shift());
    a.lea(r, at(r, -1));
}

/// Adds to [`COUNTED`] and the other sums what has been counted, which is still in the countdown. Changes the
/// countdown, r14 and flags.
fn take_off(a: &mut Asm, layout: Layout) {
    let [instructions, events] = [COUNTED, COUNTED_EVENTS].map(gs);
    a.load(S0, gs(COUNTED_FROM));
    a.alu_rr(true, Alu::Sub, S0, COUNTER);
    a.mov(COUNTER, S0);
    match layout {
        Layout::One => {
            a.shift(true, 5, COUNTER, layout.shift());
            a.alu_imm(false, Alu::And, S0, layout.events() as i32);
            a.alu(true, Alu::Add, S0, events);
            a.store(events, S0);
        }
        _ => take_off_several(a, layout),
    }
    a.load(S0, gs(EVENTS_LEFT));
    a.alu_rr(true, Alu::Sub, S0, COUNTER);
    a.store(gs(EVENTS_LEFT), S0);
    a.alu(true, Alu::Add, COUNTER, instructions);
    a.store(instructions, COUNTER);
}

/// Adds to the sums of events what has been counted; the countdown and r14 have it. Leaves instructions in the
/// countdown.
fn take_off_several(a: &mut Asm, layout: Layout) {
    let bits = layout.bits();
    let is_bounded = layout.is_bounded();
    for n in 0..IN_COUNTDOWN {
        a.alu_imm(false, Alu::And, S0, (1 << bits) - 1);
        a.rm(true, &[0x01], S0, gs(COUNTED_EVENTS + 8 * n)); // add
        if is_bounded {
            bounds::take_off(a, n);
        }
        a.shift(true, 5, COUNTER, bits);
        if n + 1 < IN_COUNTDOWN {
            a.mov(S0, COUNTER);
        }
    }
    // Four sums at a time.
    for at in (0..4 * layout.words()).step_by(8) {
        let mut sums = COUNTED_BESIDE + at;
        if is_bounded {
            a.load(S0, gs(sums));
            a.alu(true, Alu::Sub, S0, gs(COUNTED_BESIDE_FROM + at));
            sums = COUNTED_SPILL;
            a.store(gs(sums), S0);
        }
        for n in 0..4 {
            a.rm(false, &[0x0f, 0xb7], S0, gs(sums + 2 * n)); // movzx
            let sum = IN_COUNTDOWN + at / 2 + n;
            a.rm(true, &[0x01], S0, gs(COUNTED_EVENTS + 8 * sum)); // add
            if is_bounded {
                bounds::take_off(a, sum);
            }
        }
        a.store_imm(gs(COUNTED_BESIDE + at), 0);
    }
}

/// Emits a branch that is taken if nothing has been counted since the budget began: then a block that does not fit in
/// the budget would not fit after a poll either. Changes flags.
pub(in crate::codegen) fn branch_if_new(a: &mut Asm) -> usize {
    a.alu(true, Alu::Cmp, COUNTER, gs(COUNTED_FROM));
    a.jcc(cc::E)
}

/// Does what [`super::begin_fast_turns`] does. What it takes off the countdown it takes off [`COUNTED_FROM`], too.
pub(in crate::codegen) fn begin_fast_turns(a: &mut Asm, layout: Layout) {
    a.load(S0, gs(CREDIT_LEFT));
    a.store_imm(gs(CREDIT_LEFT), 0);
    a.store_imm(gs(OWED), 0);
    a.shift(true, 4, S0, layout.shift());
    a.alu_rr(true, Alu::Add, COUNTER, S0);
    a.alu(true, Alu::Add, S0, gs(COUNTED_FROM));
    a.store(gs(COUNTED_FROM), S0);
    // The instructions that are left beyond those in r13, without the events of other streams.
    a.shift(true, 4, S1, layout.shift());
    a.mov(S0, COUNTER);
    a.alu_rr(true, Alu::Sub, S0, S1);
    mask_events(a, layout, S0);
    if layout.has_several() {
        a.rr(true, &[0x85], S0, S0); // test
    }
    let is_less = a.jcc(cc::LE);
    a.store(gs(OWED), S0);
    shorten(a, S0);
    let here = a.here();
    a.patch(is_less, here);
    a.mov(S1, COUNTER);
    a.rr(true, &[0xf7], 3, S1); // neg
    a.store(gs(BEGAN), S1);
}

/// Does what [`super::end_fast_turns`] does; `cost` is that of one iteration, which has been subtracted once too often.
/// Branches to `again` also if there are not enough events left for an iteration.
pub(in crate::codegen) fn end_fast_turns(
    a: &mut Asm,
    (layout, cost): (Layout, Cost),
    (least, again): (i32, usize),
) {
    refund_entry(a, layout, cost, S1);
    a.load(S1, gs(OWED));
    a.alu_rr(true, Alu::Add, COUNTER, S1);
    a.alu(true, Alu::Add, S1, gs(COUNTED_FROM));
    a.store(gs(COUNTED_FROM), S1);
    let least = layout.instructions(least);
    match i32::try_from(least) {
        Ok(least) => a.alu_imm(true, Alu::Cmp, COUNTER, least),
        Err(_) => {
            a.mov_imm(S1, least.cast_unsigned());
            a.alu_rr(true, Alu::Cmp, COUNTER, S1);
        }
    }
    let is_near = a.jcc(cc::L);
    a.patch(is_near, again);
    if layout.is_bounded() {
        for is_short in bounds::branch_if_too_short(a, cost) {
            a.patch(is_short, again);
        }
    }
}

/// Does what [`super::leave_fast_turns`] does; `executed` is called with [`Layout::executed`] of the number in r13, in
/// 32 bits.
pub(in crate::codegen) fn leave_fast_turns(
    a: &mut Asm,
    layout: Layout,
    worth: i32,
    executed: impl FnOnce(&mut Asm),
) {
    let worth = layout.instructions(worth);
    let from = match i32::try_from(worth) {
        Ok(worth) => {
            a.load(S1, gs(BEGAN));
            a.lea(S1, at(S1, worth).plus(COUNTER, 0));
            EXECUTED_FROM_ONE
        }
        Err(_) => {
            // The upper half has all bits of instructions.
            a.load(S1, gs(BEGAN));
            a.lea(S1, at(S1, 0).plus(COUNTER, 0));
            EXECUTED_FROM_SEVERAL
        }
    };
    a.store(gs(SPILL), S1);
    a.load32(S1, gs(SPILL + usize::from(from / 8)));
    if layout.has_several() {
        a.lea(S1, at(S1, (worth >> EXECUTED_FROM_SEVERAL) as i32));
    }
    executed(a);
    // The budget is lengthened without a change of flags.
    a.load(S1, gs(OWED));
    lengthen(a, SPILL);
}

/// Emits a branch that is taken if a counter may overflow too soon for [`begin_at`]. Changes flags.
pub(in crate::codegen) fn branch_if_near(a: &mut Asm) -> usize {
    a.alu_mem_imm(true, Alu::Cmp, gs(EVENTS_LEFT), LEAST_FOR_CREDIT as i32);
    a.jcc(cc::B)
}

/// Does what [`take_off`] does in the middle of a budget, which stays. Changes rdx, r14 and flags.
fn take_off_within(a: &mut Asm, layout: Layout) {
    a.mov(RDX, COUNTER);
    take_off(a, layout);
    a.mov(COUNTER, RDX);
    a.store(gs(COUNTED_FROM), COUNTER);
}

/// Adds to [`Retired::counts`] at a level what code of [`Layout::One`] has counted, which goes on counting. Changes rdx,
/// r14 and flags.
///
/// [`Retired::counts`]: x86_cpu::Retired::counts
pub(in crate::codegen) fn settle(a: &mut Asm, level: usize) {
    take_off_within(a, Layout::One);
    a.load(S0, gs(COUNTED));
    a.store_imm(gs(COUNTED), 0);
    a.rm(true, &[0x01], S0, gs(retired(level, INSTRUCTIONS))); // add
    a.load(S0, gs(COUNTED_EVENTS));
    a.store_imm(gs(COUNTED_EVENTS), 0);
    a.load32(RDX, gs(COUNTED_AS));
    a.alu_imm(false, Alu::And, RDX, (1 << Streams::BITS) - 1);
    a.rm(true, &[0x01], S0, gs(retired(level, 0)).plus(RDX, 3)); // add
    // What comes next counts at the other level.
    a.alu_mem_imm(true, Alu::Xor, gs(COUNTED_AS), LEVEL as i32);
}

/// Sets what code that does not count goes on with. Of several streams, what was counted stays where polls leave it; what
/// was counted of one has been settled by [`settle`]. Changes rdx, r14 and flags.
pub(in crate::codegen) fn keep_plainly(a: &mut Asm, layout: Layout) {
    if layout.has_several() {
        take_off_within(a, layout);
        a.store_imm(gs(COUNTED_PENDING), 1);
    }
    a.mov(S0, COUNTER);
    a.shift(true, 7, S0, layout.shift()); // sar
    raise_to_zero(a, S0);
    a.store(gs(COUNTED_TO), S0);
}

/// Makes a negative number 0: what takes long may have charged more than was left. Changes rdx and flags.
fn raise_to_zero(a: &mut Asm, r: Reg) {
    a.mov_imm(RDX, 0);
    a.alu_rr(true, Alu::Cmp, r, RDX);
    a.rr(true, &[0x0f, 0x4c], r, RDX); // cmovl
}

/// Sets what counts from now on, by the key that has become the live one, at this CPL: it is in r14 then. Changes flags.
pub(in crate::codegen) fn note_streams(a: &mut Asm, cpl: u8) {
    a.load32(S0, gs(KEY));
    a.shift(false, 5, S0, Mode::STREAMS as u8);
    a.alu_imm(false, Alu::And, S0, (1 << Streams::BITS) - 1);
    if cpl != 0 {
        a.alu_imm(false, Alu::Or, S0, LEVEL as i32);
    }
    a.store(gs(COUNTED_AS), S0);
}

/// Emits branches that are taken if the streams in r14 are several, and if accesses to memory are among them. Changes r14
/// and flags.
pub(in crate::codegen) fn branch_by_layout(a: &mut Asm) -> [usize; 2] {
    a.rr(false, &[0xf7], 0, S0); // test
    a.imm32(AND_MEMORY.into());
    let wide = a.jcc(cc::NE);
    a.alu_imm(false, Alu::And, S0, SEVERAL.into());
    a.alu_imm(false, Alu::Cmp, S0, SEVERAL.into());
    [a.jcc(cc::E), wide]
}

/// Sets what code of this layout goes on with behind code that does not count, as [`begin`] does. Changes rdx, r14 and
/// flags.
pub(in crate::codegen) fn begin_at(a: &mut Asm, layout: Layout) {
    for at in (0..4 * layout.words()).step_by(8) {
        a.store_imm(gs(COUNTED_BESIDE + at), 0);
    }
    a.mov_imm(S0, super::longest());
    a.alu_rr(true, Alu::Cmp, S0, COUNTER);
    a.rr(true, &[0x0f, 0x4f], S0, COUNTER); // cmovg
    raise_to_zero(a, S0);
    begin_unbounded(a, layout, S0);
    a.store(gs(COUNTED_FROM), S0);
    a.store(gs(COUNTED_TO), S0);
}

/// The lowest bit of the countdown that [`leave_fast_turns`] computes with, for each layout.
const EXECUTED_FROM_ONE: u8 = 16;
const EXECUTED_FROM_SEVERAL: u8 = 32;

/// Notes that code that counts, whose counts have been settled, ends here.
pub(in crate::codegen) fn forget(a: &mut Asm) {
    a.store_imm(gs(COUNTED_FROM), 0);
}

/// Emits what goes on at [`COUNTED_ENTRY`] with the countdown in [`COUNTED_TO`]. `last`: the code that the last frame
/// of the host's stack is to lead to, which may have been set for the other kind of code.
pub(in crate::codegen) fn go_on(a: &mut Asm, last: usize) -> usize {
    let place = a.here();
    let site = a.lea_code(S1);
    a.patch(site, last);
    a.load(S0, gs(STACK));
    a.store(at(S0, 0), S1);
    a.load(COUNTER, gs(COUNTED_TO));
    a.jmp_mem(gs(COUNTED_ENTRY));
    place
}
