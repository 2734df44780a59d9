//! The countdown of code that counts what is retired, exactly.
//!
//! The register holds several sums: instructions from bit [`Layout::shift`] on, and below the events of other streams,
//! which begin at [`Layout::events`] and never come to zero within a budget. One subtraction where a block is entered
//! counts all, as if the block were executed to its end without a branch that is taken. Whatever leaves it
//! elsewhere gives back the difference first ([`refund`]), in a stub of its own. So there is one invariant wherever
//! generated code may be left:
//!
//! > retired = what polls have taken off ([`COUNTED`]) + [`COUNTED_FROM`] − the countdown
//!
//! What changes the countdown otherwise changes [`COUNTED_FROM`] by as much. Budgets end where a counter may
//! overflow at the earliest, and a block is entered only if all of it is within the budget: what is left is the interpreter's.
//!
//! Where several streams are counted ([`Layout::Several`]), there are sums of rarer events in memory, too ([`COUNTED_BESIDE`]). They
//! grow, and blocks without such events leave them alone.

mod cost;
mod sums;

pub(crate) use cost::{Cost, Layout};
pub(crate) use sums::*;

use super::{BUDGET, CREDIT, Poll, SOON, run_limit_ends, vary_budget};
use crate::{
    asm::*,
    frame::words::*,
    ir::streams::{IN_COUNTDOWN, IN_MEMORY},
};

/// Instructions up to a counter's overflow that translated code is entered for.
pub(crate) const LEAST: u64 = 64;
/// Those that there have to be for fast turns of loops to get [`CREDIT`]: more than a budget and that.
const LEAST_FOR_CREDIT: u64 = 2 * BUDGET as u64 + CREDIT as u64;

/// A block that counts for so much is entered. Returns the branch to a poll, where only the countdown has counted.
pub(in crate::codegen) fn enter(a: &mut Asm, cost: Cost) -> usize {
    match i32::try_from(cost.countdown) {
        Ok(n) => a.alu_imm(true, Alu::Sub, COUNTER, n),
        Err(_) => a.alu_literal(Alu::Sub, COUNTER, cost.countdown.cast_unsigned()),
    }
    let polls = a.jcc(cc::L);
    for (n, events) in cost.beside.into_iter().enumerate() {
        if events != 0 {
            a.alu_mem_imm(false, Alu::Add, beside(n), events);
        }
    }
    polls
}

/// It has not been entered after all. Changes no flags, but may change a register.
pub(in crate::codegen) fn refund_entry(a: &mut Asm, cost: Cost, scratch: Reg) {
    let beside = [0; 2];
    refund(a, Cost { beside, ..cost }, scratch);
}

/// So much of it has not been executed. Changes no flags, but may change a register.
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

/// Adds to the countdown alone. Changes no flags, but may change a register.
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

/// Two of the sums in memory.
const fn beside(n: usize) -> Mem {
    gs(COUNTED_BESIDE + 4 * n)
}

/// A trampoline is called that may leave the instruction to the interpreter: so much will not have been executed then. Changes
/// no flags.
pub(in crate::codegen) fn note_refund(a: &mut Asm, layout: Layout, cost: Cost) {
    match i32::try_from(cost.countdown) {
        Ok(n) => a.store_imm(gs(REFUND), n),
        Err(_) => {
            a.store32_imm(gs(REFUND), cost.countdown as i32);
            a.store32_imm(gs(REFUND + 4), (cost.countdown >> 32) as i32);
        }
    }
    if layout == Layout::Several {
        for (n, events) in cost.beside.into_iter().enumerate() {
            a.store32_imm(gs(REFUND_BESIDE + 4 * n), events);
        }
    }
}

/// The trampoline does. Changes r14 and flags.
pub(in crate::codegen) fn refund_noted(a: &mut Asm, layout: Layout) {
    a.alu(true, Alu::Add, COUNTER, gs(REFUND));
    if layout == Layout::Several {
        for n in 0..2 {
            a.load32(S0, gs(REFUND_BESIDE + 4 * n));
            a.rm(false, &[0x29], S0, beside(n)); // sub
        }
    }
}

/// Rust code is called, or returned to.
pub(in crate::codegen) fn keep(a: &mut Asm) {
    a.store(gs(COUNTED_TO), COUNTER);
}

/// Something takes as long as so many instructions, and is none. Changes r13, and no flags.
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

/// Lengthens the budget by what is in r13. Changes no flags.
fn lengthen(a: &mut Asm, spill: usize) {
    a.lea(COUNTER, at(COUNTER, 0).plus(S1, 0));
    a.store(gs(spill), COUNTER);
    a.load(COUNTER, gs(COUNTED_FROM));
    a.lea(COUNTER, at(COUNTER, 0).plus(S1, 0));
    a.store(gs(COUNTED_FROM), COUNTER);
    a.load(COUNTER, gs(spill));
}

/// The same for as many as are in a register. Changes r13 and flags.
pub(in crate::codegen) fn charge_repetitions(a: &mut Asm, layout: Layout, n: Reg) {
    a.mov(S1, n);
    a.shift(true, 4, S1, layout.shift());
    shorten(a, S1);
}

/// Shortens the budget by what is in a register, which is changed, as are flags.
fn shorten(a: &mut Asm, by: Reg) {
    a.alu_rr(true, Alu::Sub, COUNTER, by);
    a.rr(true, &[0xf7], 3, by); // neg
    a.alu(true, Alu::Add, by, gs(COUNTED_FROM));
    a.store(gs(COUNTED_FROM), by);
}

/// Leaves instructions in a register, and none of the other events. Changes flags.
fn mask_events(a: &mut Asm, layout: Layout, r: Reg) {
    match layout {
        Layout::One => a.alu_imm(true, Alu::And, r, -(1 << layout.shift())),
        Layout::Several => {
            a.shift(true, 7, r, layout.shift()); // sar
            a.shift(true, 4, r, layout.shift());
        }
    }
}

/// As [`super::hasten_if_requested`]. Changes rax and flags.
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

/// As [`super::poll`]; the run loop has to be returned to also where a counter may overflow soon.
pub(in crate::codegen) fn poll(a: &mut Asm, layout: Layout, go_on: impl FnOnce(&mut Asm)) -> Poll {
    a.load(S0, gs(REQUESTS));
    a.alu_mem_imm8(false, Alu::Cmp, at(S0, 0), 0);
    let requested = a.jcc(cc::NE);
    a.alu_mem_imm8(true, Alu::Sub, gs(POLLS_LEFT), 1);
    let used_up = a.jcc(cc::S);
    let goes_on = a.here();
    take_off(a, layout);
    vary_budget(a);
    a.load(S0, gs(EVENTS_LEFT));
    a.alu_rr(true, Alu::Cmp, COUNTER, S0);
    // cmova
    a.rr(true, &[0x0f, 0x47], COUNTER, S0);
    match layout {
        Layout::One => {
            a.shift(true, 4, COUNTER, layout.shift());
            a.alu_imm(true, Alu::Or, COUNTER, layout.events() as i32);
        }
        Layout::Several => {
            a.lea(COUNTER, at(COUNTER, 1));
            a.shift(true, 4, COUNTER, layout.shift());
            a.lea(COUNTER, at(COUNTER, -1));
        }
    }
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
        Layout::Several => take_off_several(a),
    }
    a.load(S0, gs(EVENTS_LEFT));
    a.alu_rr(true, Alu::Sub, S0, COUNTER);
    a.store(gs(EVENTS_LEFT), S0);
    a.alu(true, Alu::Add, COUNTER, instructions);
    a.store(instructions, COUNTER);
}

/// The sums beside instructions', of what has been counted, which is in the countdown and in r14: instructions are left in the countdown.
fn take_off_several(a: &mut Asm) {
    let bits = Layout::Several.bits();
    for n in 0..IN_COUNTDOWN {
        a.alu_imm(false, Alu::And, S0, (1 << bits) - 1);
        a.rm(true, &[0x01], S0, gs(COUNTED_EVENTS + 8 * n)); // add
        a.shift(true, 5, COUNTER, bits);
        if n + 1 < IN_COUNTDOWN {
            a.mov(S0, COUNTER);
        }
    }
    for n in 0..IN_MEMORY {
        a.rm(false, &[0x0f, 0xb7], S0, gs(COUNTED_BESIDE + 2 * n)); // movzx
        a.rm(
            true,
            &[0x01],
            S0,
            gs(COUNTED_EVENTS + 8 * (IN_COUNTDOWN + n)),
        );
    }
    a.store_imm(gs(COUNTED_BESIDE), 0);
}

/// Branches if nothing has been counted since the budget began: whoever does not fit into that would not after a poll. Changes flags.
pub(in crate::codegen) fn branch_if_new(a: &mut Asm) -> usize {
    a.alu(true, Alu::Cmp, COUNTER, gs(COUNTED_FROM));
    a.jcc(cc::E)
}

/// As [`super::begin_fast_turns`]: what the countdown becomes less, its beginning does, too.
pub(in crate::codegen) fn begin_fast_turns(a: &mut Asm, layout: Layout) {
    a.load(S0, gs(CREDIT_LEFT));
    a.store_imm(gs(CREDIT_LEFT), 0);
    a.store_imm(gs(OWED), 0);
    a.shift(true, 4, S0, layout.shift());
    a.alu_rr(true, Alu::Add, COUNTER, S0);
    a.alu(true, Alu::Add, S0, gs(COUNTED_FROM));
    a.store(gs(COUNTED_FROM), S0);
    // Instructions that are left beyond those in r13, and none of the other events.
    a.shift(true, 4, S1, layout.shift());
    a.mov(S0, COUNTER);
    a.alu_rr(true, Alu::Sub, S0, S1);
    mask_events(a, layout, S0);
    if layout == Layout::Several {
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

/// A fast turn that counts for so much begins, or the rest of one. Returns the branch to take if the budget is too short.
pub(in crate::codegen) fn fast_turn(a: &mut Asm, cost: Cost) -> usize {
    enter(a, cost)
}

/// As [`super::end_fast_turns`]; the last turn has counted for so much.
pub(in crate::codegen) fn end_fast_turns(
    a: &mut Asm,
    layout: Layout,
    cost: Cost,
    least: i32,
) -> usize {
    refund_entry(a, cost, S1);
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
    a.jcc(cc::L)
}

/// As [`super::leave_fast_turns`]; `executed` has [`Layout::executed`] of it in r13, in 32 bits.
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
            // All of what it is worth is in the upper half.
            a.load(S1, gs(BEGAN));
            a.lea(S1, at(S1, 0).plus(COUNTER, 0));
            EXECUTED_FROM_SEVERAL
        }
    };
    a.store(gs(SPILL), S1);
    a.load32(S1, gs(SPILL + usize::from(from / 8)));
    if layout == Layout::Several {
        a.lea(S1, at(S1, (worth >> EXECUTED_FROM_SEVERAL) as i32));
    }
    executed(a);
    // Without flags.
    a.load(S1, gs(OWED));
    lengthen(a, SPILL);
}

/// Bit from which on [`leave_fast_turns`] computes with what has been executed.
const EXECUTED_FROM_ONE: u8 = 16;
const EXECUTED_FROM_SEVERAL: u8 = 32;

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
