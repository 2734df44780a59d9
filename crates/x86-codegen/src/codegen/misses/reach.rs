//! TLB misses that the MMU's second level answers, without a call: see [`mmu::reach`].
//!
//! A program that accesses memory at random is bound by how many of its cache misses the processor has in flight, and
//! so by how many instructions lie between them. So reads and writes, and global and other pages, have code of their
//! own, and a program's large pages do not enter the first level at once: that writes three lines of its tables, and a
//! page that is accessed at random is not in them any more when it is accessed again.

use core::mem::offset_of;

use mmu::{
    l1::{self, L2Key, Reach, SEEN_PAGES, empty_tag},
    reach::{
        ALL, ENTRY_SHIFT, LARGE_ENTRIES, LARGE_MAPS, MAPS_SCALE, PIECE_SHIFT, ROUND_SHIFT,
        TOKEN_BITS,
    },
};

use super::branch_if_write;
use crate::{
    asm::*,
    codegen::memory::{host_page, select_entry, selected, tag},
    frame::words::*,
};

/// A field of the view's [`Reach`].
const fn of_view(offset: usize) -> Mem {
    at(TLB, l1::REACH + offset as i32)
}

/// A field of one of the view's keys: that of the address space (0), or that of global pages (1).
const fn key(n: usize, offset: usize) -> Mem {
    of_view(offset_of!(Reach, keys) + n * size_of::<L2Key>() + offset)
}

pub(super) const SHR: u8 = 5;
pub(super) const SHL: u8 = 4;

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

/// `to = from >> n`, with what rotates in above if the host has RORX.
fn shifted(a: &mut Asm, to: Reg, from: Reg, n: u32) {
    if a.isa().bmi2 {
        a.rorx(to, from, n as u8);
    } else {
        a.mov(to, from);
        a.shift(true, SHR, to, n as u8);
    }
}

/// Answers a miss (r14 and r13 as for `Trampolines::miss`) whose bytes are in one page: returns from the trampoline
/// with the host address in r14, and "above" in the flags. Goes on behind it, with all registers but rax and rcx as they
/// were, if the second level does not have the page, or not for this access. The stack has rcx, and then rax.
pub(crate) fn answer(a: &mut Asm) {
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
}

/// Does the same by one of the keys. Returns the branch that is taken if the table has no such entry, and those that
/// are taken if the entry is not for this access. The code behind is not reached.
fn probe(a: &mut Asm, n: usize) -> (usize, Vec<usize>) {
    a.mov(RAX, S0);
    a.alu_imm(true, Alu::And, RAX, -(1 << TOKEN_BITS));
    a.alu(true, Alu::Or, RAX, key(n, offset_of!(L2Key, token)));
    locate_large(a, n);
    a.alu(true, Alu::Cmp, RAX, at(RCX, 0));
    let is_large = a.jcc(cc::E);
    // The page of 4 KiB.
    shifted(a, RCX, S0, 12 - ENTRY_SHIFT);
    a.alu(true, Alu::Xor, RCX, key(n, offset_of!(L2Key, small)));
    a.alu(true, Alu::And, RCX, of_view(offset_of!(Reach, small_mask)));
    a.alu(true, Alu::Add, RCX, of_view(offset_of!(Reach, small)));
    a.alu(true, Alu::Cmp, RAX, at(RCX, 0));
    let absent = a.jcc(cc::NE);

    // If the page may be written, both halves are filled, whatever the access is.
    let mut fails = Vec::new();
    a.load(RAX, at(RCX, 8));
    let is_write = branch_if_write(a);
    fails.push(branch_unless(a, false));
    push(a, RDX);
    let only_read = [branch_unless(a, true), branch_if_old(a)];
    let writable = a.here();
    enter(a, n == 1, true);
    patch_all(a, only_read);
    let readable = a.here();
    enter(a, n == 1, false);
    patch_all(a, [is_write]);
    fails.push(branch_unless(a, true));
    fails.push(branch_if_old(a));
    push(a, RDX);
    a.jmp_to(writable);

    patch_all(a, [is_large]);
    a.load(RAX, at(RCX, 8));
    let is_write = branch_if_write(a);
    fails.push(branch_unless_in(a, 0));
    fails.push(branch_unless(a, false));
    leave_if_new(a, n);
    push(a, RDX);
    locate_large(a, n);
    let only_read = [
        branch_unless_in(a, 1),
        branch_unless(a, true),
        branch_if_old(a),
    ];
    add_offset(a);
    a.jmp_to(writable);
    patch_all(a, only_read);
    add_offset(a);
    a.jmp_to(readable);
    patch_all(a, [is_write]);
    fails.push(branch_unless_in(a, 1));
    fails.push(branch_unless(a, true));
    fails.push(branch_if_old(a));
    leave_if_new(a, n);
    push(a, RDX);
    add_offset(a);
    a.jmp_to(writable);
    (absent, fails)
}

/// Loads rcx with the address of the entry of 2 MiB that the gva in r14 selects.
fn locate_large(a: &mut Asm, n: usize) {
    const MASK: usize = (LARGE_ENTRIES - 1) << ENTRY_SHIFT;
    shifted(a, RCX, S0, PIECE_SHIFT - ENTRY_SHIFT);
    a.alu(true, Alu::Xor, RCX, key(n, offset_of!(L2Key, large)));
    a.alu_imm(false, Alu::And, RCX, MASK as i32);
    a.alu(true, Alu::Add, RCX, of_view(offset_of!(Reach, large)));
}

/// Branches if the view may not read, or write, the page whose data is in rax. Changes rcx, as the next functions do.
fn branch_unless(a: &mut Asm, writes: bool) -> usize {
    a.load(
        RCX,
        of_view(offset_of!(Reach, rights) + 8 * usize::from(writes)),
    );
    bt(a, RCX, RAX);
    a.jcc(cc::AE)
}

/// Branches if the data in rax is not of the current round.
fn branch_if_old(a: &mut Asm) -> usize {
    a.load(RCX, of_view(offset_of!(Reach, round)));
    a.alu_rr(true, Alu::Xor, RCX, RAX);
    a.shift(true, SHR, RCX, ROUND_SHIFT as u8);
    a.jcc(cc::NE)
}

/// Branches if the page's bit is clear in this map of the large entry at rcx, whose data is in rax.
fn branch_unless_in(a: &mut Asm, map: usize) -> usize {
    a.rr(false, &[0xf7], 0, RAX); // test eax, …
    a.bytes(&(ALL[map] as u32).to_le_bytes());
    let has_all = a.jcc(cc::NE);
    a.alu(true, Alu::Sub, RCX, of_view(offset_of!(Reach, large)));
    a.shift(false, SHL, RCX, MAPS_SCALE as u8);
    a.alu(true, Alu::Add, RCX, of_view(offset_of!(Reach, large)));
    push(a, RDX);
    a.mov(RDX, S0);
    a.shift(true, SHR, RDX, 15);
    a.alu_imm(false, Alu::And, RDX, 0x38);
    a.load(RDX, at(RCX, LARGE_MAPS[map] as i32).plus(RDX, 0));
    a.mov(RCX, S0);
    a.shift(true, SHR, RCX, 12);
    bt(a, RDX, RCX);
    pop(a, RDX);
    let is_clear = a.jcc(cc::AE);
    patch_all(a, [has_all]);
    is_clear
}

/// Returns from the trampoline with the host address in the piece whose data is in rax, without an entry in the first
/// level, if the page is not global and was not looked for lately. Changes rcx and r13.
fn leave_if_new(a: &mut Asm, n: usize) {
    if n == 1 {
        return;
    }
    let seen = at(TLB, l1::REACH + offset_of!(Reach, seen_pages) as i32).plus(RCX, 0);
    let look = |a: &mut Asm| {
        shifted(a, RCX, S0, 12);
        shifted(a, S1, S0, 12 + SEEN_PAGES.trailing_zeros());
        a.alu_imm(false, Alu::And, RCX, SEEN_PAGES as i32 - 1);
    };
    look(a);
    a.rm(false, &[0x3a], S1, seen); // cmp r13b, …
    let is_seen = a.jcc(cc::E);
    a.rm(false, &[0x88], S1, seen); // mov …, r13b
    a.alu(true, Alu::And, RAX, of_view(offset_of!(Reach, page_mask)));
    a.alu_imm(false, Alu::And, S0, (1 << PIECE_SHIFT) - 1);
    leave(a);
    patch_all(a, [is_seen]);
    // Who goes on to the next page has it entered at once.
    a.alu_imm(true, Alu::Add, S0, 4096);
    look(a);
    a.rm(false, &[0x88], S1, seen);
    a.alu_imm(true, Alu::Sub, S0, 4096);
}

/// Returns from the trampoline with the sum of rax and r14, a host address. The stack has rcx, and then rax.
fn leave(a: &mut Asm) {
    a.alu_mem_imm8(true, Alu::Add, of_view(offset_of!(Reach, hits)), 1);
    pop(a, RCX);
    // No address is 0: the flags say "above".
    a.alu_rr(true, Alu::Add, S0, RAX);
    pop(a, RAX);
    a.ret();
}

/// Turns the data of a piece, in rax, into that of its page. Changes rdx.
fn add_offset(a: &mut Asm) {
    a.mov32(RDX, S0);
    a.alu_imm(false, Alu::And, RDX, (1 << PIECE_SHIFT) - 4096);
    a.alu_rr(true, Alu::Add, RAX, RDX);
}

/// Enters the page whose data is in rax in the first level, as [`mmu::l1::L1::insert`] does, makes r14 the host
/// address, and returns from the trampoline. The stack has rdx, rcx and rax.
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
    pop(a, RDX);
    leave(a);
}

const RBX: Reg = 3;
