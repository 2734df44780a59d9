//! TLB misses that the MMU's second level answers, without a call: see [`mmu::reach`].
//!
//! A program that accesses memory at random is bound by how many of its cache misses the processor has in flight, and
//! so by how many instructions lie between them. So reads and writes, and global and other pages, have code of their
//! own.

use core::mem::offset_of;

use mmu::{
    l1::{self, L2Key, Reach, empty_tag},
    reach::{LARGE_ENTRIES, LARGE_MAPS, LARGE_SHIFT, PIECE_SHIFT, ROUND_SHIFT, TOKEN_BITS},
};

use crate::{
    asm::*,
    codegen::memory::{host_page, select_entry, selected, tag},
    frame::requests::{ACCESS, WRITES},
    frame::words::*,
};

const SAVED: [Reg; 3] = [RAX, RCX, RDX];
/// log2 of a small entry's size.
const SMALL_SHIFT: u8 = 4;
/// Offset of the round in an entry, which has 16 bits.
const ROUND: i32 = 8 + ROUND_SHIFT as i32 / 8;

/// A field of the view's [`Reach`].
const fn of_view(offset: usize) -> Mem {
    at(TLB, l1::REACH + offset as i32)
}

/// A field of one of the view's keys: that of the address space (0), or that of global pages (1).
const fn key(n: usize, offset: usize) -> Mem {
    of_view(offset_of!(Reach, keys) + n * size_of::<L2Key>() + offset)
}

const SHR: u8 = 5;
const SHL: u8 = 4;

/// Copies the bit of `word` that `n` says, modulo 64, to the carry flag. [`bts`] then sets the bit, and [`btr`] clears
/// it.
fn bt(a: &mut Asm, word: Reg, n: Reg) {
    a.rr(true, &[0x0f, 0xa3], n, word);
}
fn bts(a: &mut Asm, word: Reg, n: Reg) {
    a.rr(true, &[0x0f, 0xab], n, word);
}
fn btr(a: &mut Asm, word: Reg, n: Reg) {
    a.rr(true, &[0x0f, 0xb3], n, word);
}

fn test(a: &mut Asm, wide: bool, reg: Reg) {
    a.rr(wide, &[0x85], reg, reg);
}

fn patch_all(a: &mut Asm, from: impl IntoIterator<Item = usize>) {
    let here = a.here();
    from.into_iter().for_each(|from| a.patch(from, here));
}

/// Answers a miss (r14 and r13 as for `Trampolines::miss`) whose bytes are in one page: returns from the trampoline
/// with the host address in r14, and "above" in the flags. Goes on behind it, with all registers as they were, if the
/// second level does not have the page, or not for this access.
pub(crate) fn answer(a: &mut Asm) {
    SAVED.iter().for_each(|r| push(a, *r));
    // In the upper half of addresses most pages are global.
    test(a, true, S0);
    let is_upper = a.jcc(cc::S);
    let own = a.here();
    let (absent, mut fails) = probe(a, 0);
    fails.push(absent);
    let fails_there = a.jmp();
    patch_all(a, [is_upper]);
    let (absent, other_fails) = probe(a, 1);
    a.patch(absent, own);
    fails.extend(other_fails);
    fails.push(fails_there);
    patch_all(a, fails);
    SAVED.iter().rev().for_each(|r| pop(a, *r));
}

/// Does the same by one of the keys. Returns the branch that is taken if the table has no such entry, and those that
/// are taken if the entry is not for this access. The code behind is not reached.
fn probe(a: &mut Asm, n: usize) -> (usize, Vec<usize>) {
    a.mov(RAX, S0);
    a.alu_imm(true, Alu::And, RAX, -(1 << TOKEN_BITS));
    a.alu(true, Alu::Or, RAX, key(n, offset_of!(L2Key, token)));
    // The piece of 2 MiB.
    a.mov(RCX, S0);
    a.shift(true, SHR, RCX, PIECE_SHIFT as u8);
    a.alu(true, Alu::Xor, RCX, key(n, offset_of!(L2Key, large)));
    a.alu_imm(false, Alu::And, RCX, LARGE_ENTRIES as i32 - 1);
    a.shift(false, SHL, RCX, LARGE_SHIFT as u8);
    a.alu(true, Alu::Add, RCX, of_view(offset_of!(Reach, large)));
    a.alu(true, Alu::Cmp, RAX, at(RCX, 0));
    let is_large = a.jcc(cc::E);
    // The page of 4 KiB.
    a.mov(RCX, S0);
    a.shift(true, SHR, RCX, 12);
    a.alu(true, Alu::Xor, RCX, key(n, offset_of!(L2Key, small)));
    a.shift(true, SHL, RCX, SMALL_SHIFT);
    a.alu(true, Alu::And, RCX, of_view(offset_of!(Reach, small_mask)));
    a.alu(true, Alu::Add, RCX, of_view(offset_of!(Reach, small)));
    a.alu(true, Alu::Cmp, RAX, at(RCX, 0));
    let absent = a.jcc(cc::NE);

    // If the page may be written, both halves are filled, whatever the access is.
    let mut fails = Vec::new();
    a.load(RAX, at(RCX, 8));
    let is_write = branch_if_write(a);
    fails.push(branch_unless(a, false));
    let not_allowed = branch_unless(a, true);
    let not_noted = branch_if_old(a);
    let writable = a.here();
    enter(a, n == 1, true);
    patch_all(a, [not_allowed, not_noted]);
    let readable = a.here();
    enter(a, n == 1, false);
    patch_all(a, [is_write]);
    fails.push(branch_unless(a, true));
    fails.push(branch_if_old(a));
    a.jmp_to(writable);

    patch_all(a, [is_large]);
    a.load(RAX, at(RCX, 8));
    let is_write = branch_if_write(a);
    fails.push(branch_unless(a, false));
    fails.push(branch_unless_in(a, LARGE_MAPS[0]));
    let not_allowed = [
        branch_unless(a, true),
        branch_unless_in(a, LARGE_MAPS[1]),
        branch_if_old(a),
    ];
    add_offset(a);
    a.jmp_to(writable);
    patch_all(a, not_allowed);
    add_offset(a);
    a.jmp_to(readable);
    patch_all(a, [is_write]);
    fails.push(branch_unless(a, true));
    fails.push(branch_unless_in(a, LARGE_MAPS[1]));
    fails.push(branch_if_old(a));
    add_offset(a);
    a.jmp_to(writable);
    (absent, fails)
}

/// Branches if the access of a `site` is a write.
fn branch_if_write(a: &mut Asm) -> usize {
    a.rr(false, &[0xf7], 0, S1); // test r13d, …
    a.bytes(&WRITES.to_le_bytes());
    a.jcc(cc::NE)
}

/// Branches if the view may not read, or write, the page whose data is in rax. Changes rdx.
fn branch_unless(a: &mut Asm, writes: bool) -> usize {
    a.load(
        RDX,
        of_view(offset_of!(Reach, rights) + 8 * usize::from(writes)),
    );
    bt(a, RDX, RAX);
    a.jcc(cc::AE)
}

/// Branches if the entry at rcx is not of the current round. Changes rdx.
fn branch_if_old(a: &mut Asm) -> usize {
    a.rm(false, &[0x0f, 0xb7], RDX, at(RCX, ROUND)); // movzx
    a.alu(false, Alu::Cmp, RDX, of_view(offset_of!(Reach, round)));
    a.jcc(cc::NE)
}

/// Branches if the page's bit is clear in this map of the large entry at rcx. Changes rdx.
fn branch_unless_in(a: &mut Asm, map: usize) -> usize {
    a.mov(RDX, S0);
    a.shift(true, SHR, RDX, 15);
    a.alu_imm(false, Alu::And, RDX, 0x38);
    a.load(RDX, at(RCX, map as i32).plus(RDX, 0));
    push(a, RCX);
    a.mov(RCX, S0);
    a.shift(true, SHR, RCX, 12);
    bt(a, RDX, RCX);
    pop(a, RCX);
    a.jcc(cc::AE)
}

/// Turns the data of a piece, in rax, into that of its page. Changes rdx.
fn add_offset(a: &mut Asm) {
    a.mov32(RDX, S0);
    a.alu_imm(false, Alu::And, RDX, (1 << PIECE_SHIFT) - 4096);
    a.alu_rr(true, Alu::Add, RAX, RDX);
}

/// Enters the page whose data is in rax in the first level, as [`mmu::l1::L1::insert`] does, makes r14 the host
/// address, and returns from the trampoline.
fn enter(a: &mut Asm, global: bool, writable: bool) {
    select_entry(a, RCX, S0);
    // A flush finds the entry by these bits.
    a.mov32(RDX, RCX);
    a.shift(false, SHR, RDX, 6);
    let [of_global, of_private] = [offset_of!(Reach, global), offset_of!(Reach, private)]
        .map(|offset| of_view(offset).plus(RDX, 3));
    if global {
        a.load(S1, of_private);
        btr(a, S1, RCX);
        let is_clear = a.jcc(cc::AE);
        a.store(of_private, S1);
        patch_all(a, [is_clear]);
    }
    let bits = if global { of_global } else { of_private };
    a.load(S1, bits);
    bts(a, S1, RCX);
    let is_set = a.jcc(cc::B);
    a.store(bits, S1);
    a.mov32(S1, RDX);
    a.shift(false, SHR, S1, 6);
    a.lea(S1, of_view(offset_of!(Reach, used)).plus(S1, 3));
    push(a, RBX);
    a.load(RBX, at(S1, 0));
    bts(a, RBX, RDX);
    a.store(at(S1, 0), RBX);
    pop(a, RBX);
    patch_all(a, [is_set]);

    let [read, write] = [false, true].map(|write| selected(tag(write), RCX));
    a.mov(RDX, S0);
    a.alu_imm(true, Alu::And, RDX, -4096);
    a.store(read, RDX);
    if !writable {
        const { assert!(empty_tag(0) == 1 << 12 && empty_tag(1) == 0) };
        a.alu_rr(false, Alu::Xor, RDX, RDX);
        test(a, false, RCX);
        a.rr(false, &[0x0f, 0x90 | cc::E], 0, RDX); // sete
        a.shift(false, SHL, RDX, 12);
    }
    a.store(write, RDX);
    a.alu(true, Alu::And, RAX, of_view(offset_of!(Reach, page_mask)));
    a.store(selected(host_page(), RCX), RAX);
    a.alu_imm(false, Alu::And, S0, 0xfff);
    a.alu_rr(true, Alu::Add, S0, RAX);
    a.alu_mem_imm8(true, Alu::Add, of_view(offset_of!(Reach, hits)), 1);
    SAVED.iter().rev().for_each(|r| pop(a, *r));
    a.alu_imm(true, Alu::Cmp, S0, ACCESS as i32);
    a.ret();
}

const RBX: Reg = 3;
