//! What a TLB miss of translated code looks for before it calls Rust: other entries that have the page, and both pages
//! of bytes that straddle two.

mod mixed;
mod reach;

use mmu::{
    DevicePage,
    l1::{
        BOUNCE, BOUNCE_LEN, SITE_ENTRIES_PAGES, SITE_ENTRIES_SEEN, SITE_ENTRIES_USED,
        SITE_ENTRY_COUNTS, site_entry,
    },
};

use crate::{
    asm::*,
    codegen::countdown,
    codegen::memory::{host_page, select_entry, selected, stack_page, stack_tag, tag},
    frame::requests::{ACCESS, SITE_ENTRY_MISSES, SITE_ENTRY_SHIFT, WRITES},
    frame::words::*,
};

const LEN: i32 = BOUNCE_LEN as i32;

/// Where [`straddling_write`] says from where its copy is: the end of the first page on the host, the second page on the
/// host, the access's offset in the first page, and its size.
const FIRST_END: usize = BOUNCED;
const SECOND: usize = BOUNCED + 8;
const OFFSET: usize = BOUNCED + 16;
const SIZE: usize = BOUNCED + 24;

/// Branches if an access with this bit of a `site` is to the device page that was read or written last. (Never in
/// lock-step, where the tables are not the MMU's.)
pub(crate) fn known_device(a: &mut Asm, bit: u32) -> usize {
    push(a, RAX);
    push(a, RCX);
    // The half for writes if the site says so.
    a.mov32(RCX, S1);
    a.shift(false, 5, RCX, (20 - DevicePage::SHIFT) as u8);
    a.alu_imm(false, Alu::And, RCX, 1 << DevicePage::SHIFT);
    a.alu(true, Alu::Add, RCX, gs(DEVICES));
    a.mov(RAX, S0);
    a.alu_imm(true, Alu::And, RAX, -4096);
    a.alu(true, Alu::Xor, RAX, at(RCX, 0));
    a.load(RCX, at(RCX, 8));
    a.alu_rr(true, Alu::Xor, RCX, TLB);
    a.alu_rr(true, Alu::Or, RAX, RCX);
    // The result is 0 if it is the page, and the site has the bit.
    a.mov32(RCX, S1);
    a.alu_imm(false, Alu::And, RCX, bit as i32);
    a.alu_imm(false, Alu::Xor, RCX, bit as i32);
    a.alu_rr(true, Alu::Or, RAX, RCX);
    pop(a, RCX);
    pop(a, RAX);
    a.jcc(cc::E)
}

/// Loads rax with the size in bytes of a `site`.
fn load_size(a: &mut Asm) {
    a.mov32(RAX, S1);
    a.shift(false, 5, RAX, 12);
    a.alu_imm(false, Alu::And, RAX, 0xff);
}

/// Branches if the access of a `site` is a write.
fn branch_if_write(a: &mut Asm) -> usize {
    // test r13d, …
    a.rr(false, &[0xf7], 0, S1);
    a.bytes(&WRITES.to_le_bytes());
    a.jcc(cc::NE)
}

/// Compares where the bytes of a `site` end with the end of their page: "above" if they straddle
/// two. Changes rax and rcx.
pub(crate) fn compare_end(a: &mut Asm) {
    load_size(a);
    a.mov32(RCX, S0);
    a.alu_imm(false, Alu::And, RCX, 0xfff);
    a.alu_rr(false, Alu::Add, RAX, RCX);
    a.alu_imm(false, Alu::Cmp, RAX, 4096);
}

/// Branches if the entry that `index` selects does not belong to the page in rax, or does not allow the access of a
/// `site`.
fn branch_if_absent(a: &mut Asm, index: Reg) -> [usize; 2] {
    let [read, write] = [false, true].map(|write| selected(tag(write), index));
    let is_write = branch_if_write(a);
    a.alu(true, Alu::Cmp, RAX, read);
    let no_read = a.jcc(cc::NE);
    let is_read = a.jmp();
    let here = a.here();
    a.patch(is_write, here);
    a.alu(true, Alu::Cmp, RAX, write);
    let no_write = a.jcc(cc::NE);
    let here = a.here();
    a.patch(is_read, here);
    [no_read, no_write]
}

/// Answers an access whose bytes straddle two pages that the tables have. If the pages are neighbours in the host's
/// memory too, the bytes are accessed where they are. If not, and they are an operand that is only read (`copies`), r14
/// becomes the address of a copy. Returns then, with "above" in the flags. If they are written, r14 becomes the address
/// of a copy, too, which has to be written back, and the flags say "overflow" and "below". With `answers`, asks the
/// second level about bytes in one page, and the mixed pages. All other accesses go on behind this.
pub(crate) fn straddling(a: &mut Asm, copies: bool, answers: bool) {
    push(a, RAX);
    push(a, RCX);
    compare_end(a);
    let is_inside = if answers {
        let straddles = a.jcc(cc::A);
        reach::answer(a);
        mixed::answer(a);
        let is_inside = a.jmp();
        let here = a.here();
        a.patch(straddles, here);
        is_inside
    } else {
        a.jcc(cc::BE)
    };
    neighbours(a, copies);
    if copies {
        straddling_read(a);
    }
    let here = a.here();
    a.patch(is_inside, here);
    pop(a, RCX);
    pop(a, RAX);
}

/// Returns from the trampoline with the address that [`straddling`] has found.
fn straddles_at(a: &mut Asm) {
    pop(a, RCX);
    pop(a, RAX);
    a.alu_imm(true, Alu::Cmp, S0, ACCESS as i32);
    a.ret();
}

/// Answers if the pages are neighbours in the host's memory, or if they are written and may be copied. Changes rax and
/// rcx, as the next function does.
fn neighbours(a: &mut Asm, copies: bool) {
    push(a, RDX);
    a.mov(RAX, S0);
    a.alu_imm(true, Alu::And, RAX, -4096);
    select_entry(a, RCX, RAX);
    let first = branch_if_absent(a, RCX);
    a.load(RCX, selected(host_page(), RCX));
    a.lea(RCX, at(RCX, 4096));
    // The interpreter executes accesses around the end of addresses of 32 bits, and of 64 bits.
    a.alu_imm(true, Alu::Add, RAX, 4096);
    a.rr(false, &[0x85], RAX, RAX); // test
    let wraps = a.jcc(cc::E);
    select_entry(a, RDX, RAX);
    let second = branch_if_absent(a, RDX);
    a.alu(true, Alu::Cmp, RCX, selected(host_page(), RDX));
    let is_apart = a.jcc(cc::NE);
    a.alu_imm(true, Alu::And, S0, 0xfff);
    a.lea(S0, at(S0, -4096).plus(RCX, 0));
    pop(a, RDX);
    straddles_at(a);
    let here = a.here();
    a.patch(is_apart, here);
    let others = copies.then(|| straddling_write(a));
    let here = a.here();
    let others = others.into_iter().flatten();
    for from in others.chain([wraps]).chain(first).chain(second) {
        a.patch(from, here);
    }
    pop(a, RDX);
}

/// Copies the bytes that are written, if they are. rcx is the end of the first page on the host, and rdx selects the
/// second page's entry.
fn straddling_write(a: &mut Asm) -> [usize; 2] {
    let is_write = branch_if_write(a);
    let is_read = a.jmp();
    let here = a.here();
    a.patch(is_write, here);
    load_size(a);
    a.store(gs(SIZE), RAX);
    a.alu_imm(false, Alu::Cmp, RAX, LEN);
    let is_long = a.jcc(cc::A);
    a.load(RDX, selected(host_page(), RDX));
    a.store(gs(FIRST_END), RCX);
    a.store(gs(SECOND), RDX);
    for n in (0..LEN).step_by(8) {
        a.load(RAX, at(RCX, n - LEN));
        a.store(at(TLB, BOUNCE + n), RAX);
        a.load(RAX, at(RDX, n));
        a.store(at(TLB, BOUNCE + LEN + n), RAX);
    }
    a.alu_imm(false, Alu::And, S0, 0xfff);
    a.store(gs(OFFSET), S0);
    add_copy(a);
    // "Overflow" and "below".
    a.alu_rr(false, Alu::Xor, RAX, RAX);
    a.alu_imm(false, Alu::Cmp, RAX, i32::MIN);
    pop(a, RDX);
    pop(a, RCX);
    pop(a, RAX);
    a.ret();
    [is_read, is_long]
}

/// Writes back what [`straddling_write`] has copied: exactly the bytes of the access, as others may write those beside
/// them. Keeps all registers, and flags.
pub(crate) fn write_back(a: &mut Asm) {
    const REP_MOVSB: [u8; 2] = [0xf3, 0xa4];
    a.bytes(&[0x9c]); // pushfq
    [RCX, RSI, RDI].into_iter().for_each(|r| push(a, r));
    a.mov_imm(RCX, 4096);
    a.alu(true, Alu::Sub, RCX, gs(OFFSET));
    a.lea(RSI, at(TLB, BOUNCE + LEN));
    a.alu_rr(true, Alu::Sub, RSI, RCX);
    a.load(RDI, gs(FIRST_END));
    a.alu_rr(true, Alu::Sub, RDI, RCX);
    a.bytes(&REP_MOVSB);
    a.load(RCX, gs(SIZE));
    a.alu(true, Alu::Add, RCX, gs(OFFSET));
    a.alu_imm(true, Alu::Sub, RCX, 4096);
    a.load(RDI, gs(SECOND));
    a.bytes(&REP_MOVSB);
    [RDI, RSI, RCX].into_iter().for_each(|r| pop(a, r));
    a.bytes(&[0x9d]); // popfq
    a.ret();
}

/// Turns the offset in the first page, in r14, into the address in the copy. Changes rax.
fn add_copy(a: &mut Asm) {
    a.lea(RAX, at(TLB, BOUNCE + LEN - 4096));
    a.alu_rr(true, Alu::Add, S0, RAX);
}

fn straddling_read(a: &mut Asm) {
    let is_write = branch_if_write(a);
    load_size(a);
    a.alu_imm(false, Alu::Cmp, RAX, LEN);
    let is_long = a.jcc(cc::A);
    // The last bytes of the first page, and behind them the first bytes of the next page.
    let ends = [(0, 4096 - LEN, BOUNCE), (4096, 0, BOUNCE + LEN)];
    let is_absent = ends.map(|(ahead, from, to)| {
        a.lea(RAX, at(S0, ahead));
        a.alu_imm(true, Alu::And, RAX, -4096);
        select_entry(a, RCX, RAX);
        a.alu(true, Alu::Cmp, RAX, selected(tag(false), RCX));
        let is_absent = a.jcc(cc::NE);
        // The interpreter executes accesses around the end of addresses of 32 bits.
        a.rr(false, &[0x85], RAX, RAX); // test
        let wraps = a.jcc(cc::E);
        a.load(RCX, selected(host_page(), RCX));
        for n in (0..LEN).step_by(8) {
            a.load(RAX, at(RCX, from + n));
            a.store(at(TLB, to + n), RAX);
        }
        [is_absent, wraps]
    });
    a.alu_imm(true, Alu::And, S0, 0xfff);
    add_copy(a);
    straddles_at(a);
    let here = a.here();
    let others = is_absent.into_iter().flatten();
    for from in [is_write, is_long].into_iter().chain(others) {
        a.patch(from, here);
    }
}

/// Ends both functions below: restores rax and rcx, and goes on at `otherwise`.
fn give_up(a: &mut Asm, from: [usize; 3], otherwise: usize) {
    let here = a.here();
    from.into_iter().for_each(|from| a.patch(from, here));
    pop(a, RCX);
    pop(a, RAX);
    a.jmp_to(otherwise);
}

/// Looks in the tables for a page that the stack's entry does not have. If the page may be written, the stack's entry
/// is the page's from then on. Returns with "above" in the flags, or goes on at `otherwise` if the tables do not have
/// the page either.
pub(crate) fn stack_miss(a: &mut Asm, otherwise: usize) {
    push(a, RAX);
    push(a, RCX);
    // Bytes that straddle two pages are in no entry.
    compare_end(a);
    let straddles = a.jcc(cc::A);
    select_entry(a, RCX, S0);
    a.mov(RAX, S0);
    a.alu_imm(true, Alu::And, RAX, -4096);
    a.alu(true, Alu::Cmp, RAX, selected(tag(true), RCX));
    let is_other = a.jcc(cc::NE);
    a.store(stack_tag(), RAX);
    a.load(RAX, selected(host_page(), RCX));
    a.store(stack_page(), RAX);
    let found = a.here();
    a.alu_imm(true, Alu::And, S0, 0xfff);
    a.alu_rr(true, Alu::Add, S0, RAX);
    pop(a, RCX);
    pop(a, RAX);
    a.ret();
    let here = a.here();
    a.patch(is_other, here);
    let is_write = branch_if_write(a);
    a.alu(true, Alu::Cmp, RAX, selected(tag(false), RCX));
    let is_absent = a.jcc(cc::NE);
    a.load(RAX, selected(host_page(), RCX));
    a.jmp_to(found);
    give_up(a, [straddles, is_write, is_absent], otherwise);
}

/// Looks in the tables for a page that a per-site entry does not have, and enters it there. Returns with "above" in the
/// flags, or goes on at `otherwise` if the tables do not have the page either.
pub(crate) fn site_entry_miss(a: &mut Asm, otherwise: usize) {
    push(a, RAX);
    push(a, RCX);
    compare_end(a);
    let straddles = a.jcc(cc::A);
    a.mov(RCX, S1);
    a.shift(true, 5, RCX, SITE_ENTRY_SHIFT as u8);
    let count = at(TLB, SITE_ENTRY_COUNTS).plus(RCX, 2);
    a.alu_mem_imm8(false, Alu::Add, count, 1);
    // test dword [count], …
    a.rm(false, &[0xf7], 0, count);
    a.bytes(&(SITE_ENTRY_MISSES - 1).to_le_bytes());
    let few = a.jcc(cc::NE);
    // The next poll has to look at the counts.
    a.store_imm(gs(SITE_ENTRIES_MISSED), 1);
    countdown::sample_at_next_poll(a);
    let here = a.here();
    a.patch(few, here);
    select_entry(a, RCX, S0);
    a.mov(RAX, S0);
    a.alu_imm(true, Alu::And, RAX, -4096);
    let [no_read, no_write] = branch_if_absent(a, RCX);
    a.load(RCX, selected(host_page(), RCX));
    a.shift(true, 5, S1, SITE_ENTRY_SHIFT as u8);
    // bts [used], r13
    a.rm(true, &[0x0f, 0xab], S1, at(TLB, SITE_ENTRIES_USED));
    a.shift(true, 4, S1, 4);
    a.store(at(TLB, site_entry(0)).plus(S1, 0), RAX);
    a.store(at(TLB, site_entry(0) + 8).plus(S1, 0), RCX);
    a.shift(false, 5, RAX, 12);
    a.alu_imm(false, Alu::And, RAX, SITE_ENTRIES_PAGES as i32 - 1);
    // bts [seen], rax
    a.rm(true, &[0x0f, 0xab], RAX, at(TLB, SITE_ENTRIES_SEEN));
    a.alu_imm(true, Alu::And, S0, 0xfff);
    a.alu_rr(true, Alu::Add, S0, RCX);
    pop(a, RCX);
    pop(a, RAX);
    a.ret();
    give_up(a, [straddles, no_read, no_write], otherwise);
}
