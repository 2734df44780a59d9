//! Writes of data beside code, that no table of the TLB answers: see [`mmu::mixed`].

use std::mem::offset_of;

use mmu::mixed::{MIXED_PAGES, MixedPage};

use super::{
    branch_if_write, load_size,
    reach::{SHL, SHR},
};
use crate::{asm::*, frame::words::*};

/// Largest size in bytes of a write that is answered: with up to seven bits before its own, its bits are in eight bytes.
const MAX_SIZE: i32 = 32;

/// Answers a write (r14 and r13 as for `Trampolines::miss`) whose bytes are in one page: returns from the trampoline
/// with the host address in r14, and "above" in the flags. Goes on behind it, with all registers but rax and rcx as they
/// were, if the page is none that has code, or if the bytes are code. The stack has rcx, and then rax.
pub(super) fn answer(a: &mut Asm) {
    const FIELD: fn(usize) -> Mem = |offset| at(RCX, offset as i32);
    let is_write = branch_if_write(a);
    let is_read = a.jmp();
    let here = a.here();
    a.patch(is_write, here);
    a.mov32(RCX, S0);
    a.shift(false, SHR, RCX, (12 - MixedPage::SHIFT) as u8);
    let mask = (MIXED_PAGES - 1) << MixedPage::SHIFT;
    a.alu_imm(false, Alu::And, RCX, mask as i32);
    a.alu(true, Alu::Add, RCX, gs(MIXED));
    a.mov(RAX, S0);
    a.alu_imm(true, Alu::And, RAX, -4096);
    a.alu(true, Alu::Cmp, RAX, FIELD(offset_of!(MixedPage, page)));
    let is_other = a.jcc(cc::NE);
    a.alu(true, Alu::Cmp, TLB, FIELD(offset_of!(MixedPage, tables)));
    let is_others = a.jcc(cc::NE);
    load_size(a);
    a.alu_imm(false, Alu::Cmp, RAX, MAX_SIZE);
    let is_long = a.jcc(cc::A);
    push(a, RDX);
    a.mov32(RDX, S0);
    a.alu_imm(false, Alu::And, RDX, 0xfff);
    a.shift(false, SHR, RDX, 3);
    a.alu(true, Alu::Add, RDX, FIELD(offset_of!(MixedPage, code)));
    a.load(RDX, at(RDX, 0));
    push(a, RCX);
    a.mov32(RCX, S0);
    a.alu_imm(false, Alu::And, RCX, 7);
    a.rr(true, &[0xd3], SHR, RDX);
    a.mov32(RCX, RAX);
    a.rr(false, &[0xf7], 3, RCX); // neg, which is 64 less the size for a shift
    a.rr(true, &[0xd3], SHL, RDX);
    pop(a, RCX);
    pop(a, RDX);
    let is_code = a.jcc(cc::NE);
    a.load(RAX, FIELD(offset_of!(MixedPage, host)));
    a.alu_imm(true, Alu::And, S0, 0xfff);
    pop(a, RCX);
    // No address is 0: the flags say "above".
    a.alu_rr(true, Alu::Add, S0, RAX);
    pop(a, RAX);
    a.ret();
    let here = a.here();
    for from in [is_read, is_other, is_others, is_long, is_code] {
        a.patch(from, here);
    }
}
