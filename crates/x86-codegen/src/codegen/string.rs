//! MOVS, STOS, LODS, SCAS and CMPS with addresses of the mode's size. They are executed on the host, by host addresses,
//! if no operand leaves its page; otherwise by the interpreter.
//!
//! A page of the guest is a page of the host, so operands that overlap do so on the host in the same way.

use super::{
    Flags, Translator,
    memory::{host_page, select_entry, tag},
};
use crate::{
    asm::*,
    codegen::countdown::{
        self,
        exact::{self, Layout},
    },
    codegen::flags::restore_flags,
    frame::requests::site,
    frame::words::*,
    ir::decoded::Decoded,
    ir::string::{OPS, Op, operation},
};

/// Code of a string instruction by operation, log2 of the element's size, and repeat prefix.
pub(crate) type Strings = [[[usize; 3]; 4]; 5];

impl Translator {
    pub(super) fn string(&mut self, d: &Decoded) {
        let Some((op, size)) = operation(&d.i) else {
            return;
        };
        let repeat = match (d.i.has_repne_prefix(), d.i.has_rep_prefix()) {
            // The last of the prefixes F2 and F3 counts, and the decoder keeps only that.
            (true, _) if op.compares() => 2,
            (false, false) => 0,
            _ => 1,
        };
        self.spill_flags(d);
        let narrow = |a: &mut Asm| {
            a.mov32(RSI, RSI);
            a.mov32(RDI, RDI);
        };
        if !self.input.long {
            narrow(&mut self.asm);
            self.asm.mov32(RCX, RCX);
        }
        self.asm.mov_imm(S1, d.offset.into());
        self.asm
            .call_to(self.trampolines.strings[op as usize][size][repeat]);
        self.place_refund();
        if !self.input.long {
            narrow(&mut self.asm);
        }
        if op.compares() {
            self.state.flags = Flags::Register;
        }
    }
}

/// Emits the code of all forms. It is called with the instruction's offset in r13d, and flags saved. What it cannot do
/// it leaves to `bail`, which does not return to the block. `refill` is the trampoline for pages that the TLB does not
/// have. `counts`: the code is for blocks that count what is retired.
pub(crate) fn emit(a: &mut Asm, bail: usize, refill: usize, counts: Option<Layout>) -> Strings {
    let mut strings = Strings::default();
    for op in OPS {
        for (size, forms) in strings[op as usize].iter_mut().enumerate() {
            let forms = &mut forms[..if op.compares() { 3 } else { 2 }];
            for (repeat, form) in forms.iter_mut().enumerate() {
                *form = a.here();
                one(a, [bail, refill], op, (size, repeat), counts);
            }
        }
    }
    strings
}

/// Charges the countdown for as many elements as RCX says.
fn charge(a: &mut Asm, op: Op, counts: Option<Layout>) {
    match (op.writes(), counts) {
        (true, None) => countdown::charge(a, countdown::BLOCK_OPERATION),
        (true, Some(layout)) => exact::charge(a, layout, countdown::BLOCK_OPERATION),
        (false, None) => countdown::charge_repetitions(a, RCX),
        (false, Some(layout)) => exact::charge_repetitions(a, layout, RCX),
    }
}

/// Tests DF: "not equal" in the flags if it is set.
pub(super) fn test_direction(a: &mut Asm) {
    // test byte [rflags + 1], DF
    a.rm(false, &[0xf6], 0, gs(RFLAGS + 1));
    a.bytes(&[4]);
}

/// Emits the code of one form, for both directions.
fn one(a: &mut Asm, ways_out: [usize; 2], op: Op, form: (usize, usize), counts: Option<Layout>) {
    a.store32(gs(SPILL), S1);
    test_direction(a);
    let is_down = a.jcc(cc::NE);
    in_direction(a, ways_out, op, form, (false, counts));
    let here = a.here();
    a.patch(is_down, here);
    in_direction(a, ways_out, op, form, (true, counts));
}

/// Emits the code of one form for one direction: `down` if DF is set.
fn in_direction(
    a: &mut Asm,
    [bail, refill]: [usize; 2],
    op: Op,
    (size, repeat): (usize, usize),
    (down, counts): (bool, Option<Layout>),
) {
    let (mut slow, mut misses) = (Vec::new(), Vec::new());
    let mut none = None;
    if repeat != 0 {
        a.alu_imm(true, Alu::Cmp, RCX, 4096 >> size);
        slow.push(a.jcc(cc::A));
        a.rr(true, &[0x85], RCX, RCX); // test
        none = Some(a.jcc(cc::E));
        // The instruction is charged for by its length, so that polls stay near each other in time.
        charge(a, op, counts);
    }
    let (rdi, rsi) = (op.uses_rdi(), op.uses_rsi());
    // The accesses have the interpreter's order: if the first operand faults, the page of the second is not touched.
    let both: &[Reg] = match op {
        Op::Movs => &[RSI, RDI],
        Op::Cmps => &[RDI, RSI],
        _ if rdi => &[RDI],
        _ => &[RSI],
    };
    for (n, r) in both.iter().enumerate() {
        if n != 0 {
            a.store(gs(SLOT), S0);
        }
        let write = *r == RDI && op.writes();
        let retry = a.here();
        let run = (repeat != 0).then_some(down);
        let miss = distance(a, *r, write, size, run, &mut slow);
        misses.push((miss, retry, *r, write));
    }
    // The distances from guest to host addresses that RDI and RSI are moved by.
    let (by_rdi, by_rsi) = match op {
        Op::Movs => (S0, S1),
        Op::Cmps => (S1, S0),
        _ => (S0, S0),
    };
    if rdi && rsi {
        a.load(S1, gs(SLOT));
    }
    if rdi {
        a.alu_rr(true, Alu::Sub, RDI, by_rdi);
    }
    if rsi {
        a.alu_rr(true, Alu::Sub, RSI, by_rsi);
    }
    // One element is the same in both directions, and STD and CLD are slow.
    let turns = down && repeat != 0;
    let back = if down && !turns { -(2 << size) } else { 0 };
    if turns {
        a.bytes(&[0xfd]); // std
    }
    match repeat {
        0 => {}
        1 => a.bytes(&[0xf3]),
        _ => a.bytes(&[0xf2]),
    }
    match size {
        1 => a.bytes(&[0x66]),
        3 => a.bytes(&[0x48]),
        _ => {}
    }
    a.bytes(&[op.opcode() + u8::from(size != 0)]);
    if turns {
        a.bytes(&[0xfc]); // cld
    }
    // LEA leaves the flags alone, which are the guest's.
    if rdi {
        a.lea(RDI, at(RDI, back).plus(by_rdi, 0));
    }
    if rsi {
        a.lea(RSI, at(RSI, back).plus(by_rsi, 0));
    }
    a.ret();
    if let Some(from) = none {
        let here = a.here();
        a.patch(from, here);
        if op.compares() {
            restore_flags(a, S1);
        }
        a.ret();
    }
    for miss in misses {
        slow.push(refill_and_retry(a, miss, size, refill));
    }
    let here = a.here();
    for from in slow {
        a.patch(from, here);
    }
    give_up(a, bail, counts);
}

/// Emits what serves the miss of an operand's page. `miss` is the branch that is taken on the miss, `retry` is where to
/// go then, `r` has the operand's address, and `write` says that the operand is written. Returns the branch to take if
/// there is no such page.
fn refill_and_retry(
    a: &mut Asm,
    (miss, retry, r, write): (usize, usize, Reg, bool),
    size: usize,
    refill: usize,
) -> usize {
    let here = a.here();
    a.patch(miss, here);
    a.load32(S1, gs(SPILL));
    a.alu_imm(false, Alu::Or, S1, site(0, 1 << size, write) as i32);
    a.mov(S0, r);
    // The stack is aligned as it is when a block calls.
    a.lea(RSP, at(RSP, -8));
    a.call_to(refill);
    a.lea(RSP, at(RSP, 8));
    a.rr(true, &[0x85], S0, S0); // test
    let fails = a.jcc(cc::E);
    a.jmp_to(retry);
    fails
}

/// Emits the way to `bail`.
fn give_up(a: &mut Asm, bail: usize, counts: Option<Layout>) {
    pop(a, S0);
    if let Some(layout) = counts {
        exact::refund_placed(a, layout);
    }
    a.load32(S1, gs(SPILL));
    a.jmp_to(bail);
}

/// Makes r14 the distance of the guest's address in `r` from its host address, if all elements are in one page that the
/// TLB has. `run`: whether repeated elements go down. Returns the branch to take if the TLB does not have the page.
fn distance(
    a: &mut Asm,
    r: Reg,
    write: bool,
    size: usize,
    run: Option<bool>,
    slow: &mut Vec<usize>,
) -> usize {
    select_entry(a, S1, r);
    a.mov(S0, r);
    a.alu(true, Alu::Sub, S0, tag(write));
    a.alu_imm(true, Alu::Cmp, S0, 4096 - (1 << size));
    let miss = a.jcc(cc::A);
    match run {
        None => {}
        Some(false) => {
            a.lea(S0, at(S0, 0).plus(RCX, size as u8));
            a.alu_imm(true, Alu::Cmp, S0, 4096);
            slow.push(a.jcc(cc::A));
        }
        Some(true) => {
            a.rr(true, &[0xf7], 3, RCX); // neg
            a.lea(S0, at(S0, 1 << size).plus(RCX, size as u8));
            a.rr(true, &[0xf7], 3, RCX); // neg
            a.rr(true, &[0x85], S0, S0); // test
            slow.push(a.jcc(cc::S));
        }
    }
    a.load(S0, tag(write));
    a.alu(true, Alu::Sub, S0, host_page());
    miss
}
