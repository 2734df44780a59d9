//! MOV to CR3 in generated code: see [`crate::frame::switches`].

use crate::{
    asm::*,
    frame::switches::{self, BITS, HASH},
    frame::words::*,
    ir::mode::Mode,
};

/// Emits a load of CR3 with r14 that goes on with the tables that the same load led to before, if nothing has changed
/// that the entry depends on. Otherwise jumps to `bail`, where the interpreter executes the instruction at the offset
/// r13d. `move_to_tables` emits what goes on with the tables at r14, and may change r13.
pub(super) fn change_root(a: &mut Asm, bail: usize, move_to_tables: fn(&mut Asm)) -> usize {
    let place = a.here();
    a.rr(true, &[0x85], S0, S0); // test
    let flushes = a.jcc(cc::NS);
    a.store(gs(WANTED_ROOT), S0);
    push(a, RAX);
    push(a, RCX);
    a.imul(false, RAX, S0, HASH.cast_signed());
    a.shift(false, 5, RAX, (u32::BITS - BITS) as u8);
    a.shift(false, 4, RAX, switches::SHIFT);
    a.alu(true, Alu::Add, RAX, gs(SWITCHES));
    let mut unknown = Vec::new();
    a.alu(true, Alu::Cmp, S0, at(RAX, switches::VALUE));
    unknown.push(a.jcc(cc::NE));
    a.load(RCX, gs(SWITCHES_EPOCH));
    a.load(RCX, at(RCX, 0));
    a.alu(true, Alu::Cmp, RCX, at(RAX, switches::EPOCH));
    unknown.push(a.jcc(cc::NE));
    a.load(RCX, at(TLB, mmu::l1::VIEW));
    a.alu(true, Alu::Cmp, RCX, at(RAX, switches::VIEW));
    unknown.push(a.jcc(cc::NE));
    // The mode is in the key's low bits.
    a.load32(RCX, gs(KEY));
    a.alu(false, Alu::Xor, RCX, at(RAX, switches::KEY));
    a.shift(false, 4, RCX, (u32::BITS - Mode::WIDTH) as u8);
    unknown.push(a.jcc(cc::NE));
    a.load(RCX, at(RAX, switches::KEPT));
    a.alu_mem_imm8(false, Alu::Cmp, at(RCX, 0), 1);
    unknown.push(a.jcc(cc::NE));

    // Without bit 63.
    a.shift(true, 4, S0, 1);
    a.shift(true, 5, S0, 1);
    a.store(gs(CR3), S0);
    a.store_imm(gs(WANTED_ROOT), 0);
    a.load(S0, at(RAX, switches::TABLES));
    move_to_tables(a);
    a.load(S0, at(RAX, switches::KEY));
    a.store(gs(KEY), S0);
    become_key(
        a,
        S0,
        [switches::SALT, switches::NUMBER].map(|n| at(RAX, n)),
    );
    // The views known there are those of the address space that was left.
    for view in VIEWS {
        a.store_imm(gs(view), 0);
    }
    pop(a, RCX);
    pop(a, RAX);
    a.ret();

    let here = a.here();
    unknown.into_iter().for_each(|from| a.patch(from, here));
    pop(a, RCX);
    pop(a, RAX);
    let here = a.here();
    a.patch(flushes, here);
    a.lea(RSP, at(RSP, 8));
    a.jmp_to(bail);
    place
}

/// Loads the salt and the number of a key that generated code goes on with from two words of a table. Changes `by`.
pub(super) fn become_key(a: &mut Asm, by: Reg, [salt, number]: [Mem; 2]) {
    a.load(by, salt);
    a.store(gs(SALT), by);
    a.store(SHORT_SALT, by);
    a.load(by, number);
    a.store(gs(NUMBER), by);
    a.store32(SHORT_NUMBER, by);
}
