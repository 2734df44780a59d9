//! Code that all blocks share: the ways in and out, and the calls into Rust.
//!
//! A guest's call is a call of the host's: so the processor predicts where the
//! guest's return goes. It pushes the guest's return address first, with which
//! the return compares what it finds on the guest's stack; if that is something
//! else, it goes by the table of targets. What is on the host's stack is dropped
//! when mapping or mode have become others, or code was dropped; and at a poll if
//! there is much of it, which bounds its depth.

use mmu::l1::{INLINE_CACHES_USED, inline_cache};

use crate::{
    asm::*,
    codegen::branch::{select_tag, select_target},
    codegen::countdown::{self, exact},
    codegen::flags::save_flags,
    codegen::fp_state::{keep_vectors, load_fp, save_fp},
    codegen::misses::{compare_end, known_device, site_entry_miss, stack_miss, straddling},
    codegen::string::{self, Strings},
    codegen::switches,
    codegen::view_changes::{
        change_access, change_key_rights, change_write_protection, move_to_tables,
    },
    frame::exit::Reason,
    frame::requests::{ACCESS, FIRST, RAISES},
    frame::words::*,
};

/// Offsets of the shared pieces in the code buffer.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Trampolines {
    /// `extern "C" fn()`: loads the registers and jumps to [`ENTRY`].
    pub(crate) enter: usize,
    /// The interpreter executes the instruction whose offset in its page is r13d.
    pub(crate) bail: usize,
    /// The same, for instructions that have nothing to do with FP state.
    pub(crate) bail_integer: usize,
    /// The page's code has changed; r13d as above.
    pub(crate) stale: usize,
    /// The same of the other pages of the trace at r13d, or they are elsewhere.
    pub(crate) moved: usize,
    /// Called when the budget is used up; r13d as above.
    pub(crate) poll: usize,
    /// A direct branch that is not linked yet; r13d is the site, flags are saved.
    pub(crate) link: usize,
    /// The same with flags in RFLAGS.
    pub(crate) link_live: usize,
    /// A branch to r14 that the target table does not have; r13d is `branch`.
    pub(crate) branch: usize,
    /// Called when an inline cache has not what r14 has the tag of: it has then, and the answer is "equal", if the table has it.
    /// r13 has the cache's number in its upper half, whose lower half is kept.
    pub(crate) fill_inline_cache: usize,
    /// The same for a jump, which goes by the table; r13d is `branch`.
    pub(crate) inline_cache: usize,
    /// A return to r14 by the table; r13d is `branch`.
    pub(crate) ret: usize,
    /// The same of 32-bit code.
    pub(crate) ret32: usize,
    /// A direct branch to another page by the table: r14 is the target relative
    /// to the page, r13d the number of the [`crate::codegen::CrossPageSite`], flags are saved.
    pub(crate) cross_page: usize,
    /// The same for a call.
    pub(crate) cross_page_call: usize,
    /// The same for one of 32-bit code.
    pub(crate) cross_page_call32: usize,
    /// [`Self::ret32`] for a stack that is addressed by SP.
    pub(crate) ret16: usize,
    /// A direct call of another page in code with segments.
    pub(crate) cross_page_segmented: usize,
    /// Called for what changes the view: r13d is its bit (`SET_AC` and so on), and the offset. Does not
    /// return if the result is 0.
    pub(crate) switch: usize,
    /// Called by CLAC, and by STAC, as [`Self::switch`].
    pub(crate) access: [usize; 2],
    /// Called by MOV to CR0, as [`Self::switch`]; r14 is the value.
    pub(crate) write_protection: usize,
    /// Called by WRPKRU, as [`Self::switch`]; r14 is the value.
    pub(crate) key_rights: usize,
    /// Called by MOV to CR3: r14 is the value, r13d the offset. Returns if the tables that it leads to
    /// are known.
    pub(crate) root: usize,
    /// Called after a TLB miss; r14 is the gva, r13d is `site`. Returns the host address in r14, and
    /// "above" in the flags; or something else, for [`Self::refused`].
    pub(crate) miss: usize,
    /// The same for a group of accesses. If it returns "below" each has to be made for itself.
    pub(crate) miss_group: usize,
    /// The same for a group whose first access is none that may be refilled.
    pub(crate) split: usize,
    /// The interpreter makes the access, with the flags and r13d as they come from a miss. (A call that is
    /// not returned from would have the processor predict all the next returns wrongly.)
    pub(crate) refused: usize,
    /// The same three when the stack's entry is another page's.
    pub(crate) stack: usize,
    pub(crate) stack_group: usize,
    pub(crate) stack_split: usize,
    /// The same three when a per-site entry has another page.
    pub(crate) site_entry: usize,
    pub(crate) site_entry_group: usize,
    pub(crate) site_entry_split: usize,
    /// Called by a block that uses FP when the state is not loaded.
    pub(crate) load_fp: usize,
    /// Called for string instructions.
    pub(crate) strings: Strings,
    /// Of code that counts: goes on with such code, and with other code, at [`COUNTED_ENTRY`].
    pub(crate) go_on_counting: usize,
    pub(crate) go_on_plainly: usize,
    /// Where a return to address 0 goes that finds no call.
    last_frame: usize,
}

/// Bytes of the host's stack above which a poll drops them: twice as many are in use at most.
const MAX_DEPTH: i32 = 16 << 10;

const SAVED: [Reg; 6] = [3, RBP, 12, 13, 14, 15];
const CALLER_SAVED: [Reg; 9] = [RAX, RCX, RDX, RSI, RDI, 8, 9, 10, 11];

/// Calls the Rust function at `refill`: the return address and nine registers are
/// on the stack, which is aligned for it.
fn call_serve(a: &mut Asm, serve: u64, counts: bool) {
    CALLER_SAVED.iter().for_each(|r| push(a, *r));
    keep_vectors(a, true);
    a.load(RDI, gs(CONTEXT));
    a.mov(RSI, S0);
    a.mov32(RDX, S1);
    a.mov_imm(RAX, serve);
    a.bytes(&[0xff, 0xd0]); // call rax
    a.mov(S0, RAX);
    match counts {
        true => exact::hasten_if_requested(a),
        false => countdown::hasten_if_requested(a),
    }
    keep_vectors(a, false);
    CALLER_SAVED.iter().rev().for_each(|r| pop(a, *r));
}

/// Guest registers, and what else generated code has close to it, from and to their places in
/// the vCPU's state.
fn load_registers(a: &mut Asm) {
    load_short_words(a);
    for n in 0..16 {
        if let Some(r) = host_reg(n) {
            a.load(r, state_register(n));
        }
    }
}

fn store_registers(a: &mut Asm) {
    for n in 0..16 {
        if let Some(r) = host_reg(n) {
            a.store(state_register(n), r);
        }
    }
    store_short_words(a);
}

/// To the tables of the view that is live now. Changes rax.
fn load_short_words(a: &mut Asm) {
    a.load(TLB, gs(TABLES));
    for (word, near) in short_words().chain(short_constants()) {
        a.load(RAX, word);
        a.store(near, RAX);
    }
    a.load32(RAX, gs(NUMBER));
    a.store32(SHORT_NUMBER, RAX);
}

/// Changes rax.
fn store_short_words(a: &mut Asm) {
    for (word, near) in short_words() {
        a.load(RAX, near);
        a.store(word, RAX);
    }
}

/// Word `n` of an inline cache; `thrice` is three times its number.
fn cached(thrice: Reg, n: i32) -> Mem {
    at(TLB, inline_cache(0) + 8 * n).plus(thrice, 3)
}

/// Emits what a poll calls; `exit`: where translated code is left.
fn emit_poll(a: &mut Asm, exit: usize, counts: bool) -> usize {
    let place = a.here();
    let go_on = |a: &mut Asm| {
        a.load(S0, gs(STACK));
        a.alu_rr(true, Alu::Sub, S0, RSP);
        a.alu_imm(true, Alu::Cmp, S0, MAX_DEPTH);
        let is_deep = a.jcc(cc::A);
        // Without it the processor would predict all the returns of the guest's that are to come wrongly.
        a.ret();
        let here = a.here();
        a.patch(is_deep, here);
        pop(a, S1);
        a.load(RSP, gs(STACK));
        a.bytes(&[0x41, 0xff, 0xe5]); // jmp r13
    };
    let poll = match counts {
        true => exact::poll(a, go_on),
        false => countdown::poll(a, go_on),
    };
    let here = a.here();
    for from in poll.leaves {
        a.patch(from, here);
    }
    if counts {
        exact::keep(a);
    }
    a.alu(true, Alu::Add, S1, SHORT_PAGE);
    a.store(gs(RIP), S1);
    a.store_imm(gs(REASON), Reason::Poll as i32);
    a.jmp_to(exit);
    place
}

/// Emits everything at the start of the buffer. `refill` and `handle` are the
/// addresses of the Rust functions behind [`Trampolines::miss`] and the trampolines that
/// have a [`Reason`]. `counts`: for code that counts what is retired, behind those of other code, which are `plain`.
pub(crate) fn emit(
    a: &mut Asm,
    serve: u64,
    handle: u64,
    plain: Option<&Trampolines>,
) -> Trampolines {
    let counts = plain.is_some();
    let mut t = Trampolines {
        enter: a.here(),
        ..Trampolines::default()
    };
    SAVED.iter().for_each(|r| push(a, *r));
    a.lea(RSP, at(RSP, -8));
    // The last frame: a return to address 0 finds it.
    a.bytes(&[0x6a, 0]); // push 0
    a.bytes(&[0x4c, 0x8d, 0x2d, 0, 0, 0, 0]); // lea r13, [rip + …]
    let last = a.here() - 4;
    push(a, S1);
    a.store(gs(STACK), RSP);
    load_registers(a);
    countdown::load(a);
    a.jmp_mem(gs(ENTRY));

    let exit = a.here();
    store_registers(a);
    let exit_stored = a.here();
    save_fp(a);
    a.load(RSP, gs(STACK));
    a.lea(RSP, at(RSP, 24));
    SAVED.iter().rev().for_each(|r| pop(a, *r));
    a.ret();

    // Registers are in memory, and vectors if they are to be kept. Goes on where `handle` says, or leaves.
    let call_handle = a.here();
    a.store(gs(HOST_RSP), RSP);
    a.alu_imm(true, Alu::And, RSP, -16);
    a.load(RDI, gs(CONTEXT));
    a.mov_imm(RAX, handle);
    a.bytes(&[0xff, 0xd0]); // call rax
    a.load(RSP, gs(HOST_RSP));
    a.mov(S0, RAX);
    keep_vectors(a, false);
    a.rr(true, &[0x85], S0, S0); // test
    let leaves = a.jcc(cc::E);
    a.patch(leaves, exit_stored);
    countdown::charge_handled(a);
    load_registers(a);
    a.bytes(&[0x41, 0xff, 0xe6]); // jmp r14

    let with_reason = |a: &mut Asm, reason: Reason, fp: bool| {
        a.store_imm(gs(REASON), reason as i32);
        if counts {
            exact::keep(a);
        }
        store_registers(a);
        if fp {
            save_fp(a);
        } else {
            keep_vectors(a, true);
        }
        a.jmp_to(call_handle);
    };
    let at_offset = |a: &mut Asm, reason: Reason, fp: bool| {
        a.alu(true, Alu::Add, S1, SHORT_PAGE);
        a.store(gs(RIP), S1);
        with_reason(a, reason, fp);
    };
    t.bail = a.here();
    at_offset(a, Reason::Interpret, true);
    t.bail_integer = a.here();
    at_offset(a, Reason::Interpret, false);
    t.moved = a.here();
    a.store_imm(gs(ARGUMENT), 1);
    t.stale = a.here();
    at_offset(a, Reason::Stale, false);

    let last_frame = a.here();
    a.patch(last, last_frame);
    a.load(RSP, gs(STACK));
    a.store(gs(RIP), S0);
    with_reason(a, Reason::Stale, false);

    t.branch = a.here();
    a.store(gs(SPILL), S0);
    a.mov32(S0, S1);
    a.shift(false, 5, S0, 12);
    a.store(gs(ARGUMENT), S0);
    a.alu_imm(false, Alu::And, S1, 0xfff);
    at_offset(a, Reason::Branch, false);

    t.fill_inline_cache = a.here();
    a.store(gs(SPILL), S1);
    push(a, RAX);
    a.load32(RAX, gs(SPILL + 4));
    // bts [used], rax
    a.rm(true, &[0x0f, 0xab], RAX, at(TLB, INLINE_CACHES_USED));
    a.lea(RAX, at(RAX, 0).plus(RAX, 1));
    a.lea(RAX, cached(RAX, 0));
    let absent = select_tag(a);
    a.store(at(RAX, 0), S0);
    for (from, to) in [(24, 8), (16, 16)] {
        a.load(S0, at(S1, from));
        a.store(at(RAX, to), S0);
    }
    let here = a.here();
    a.patch(absent, here);
    pop(a, RAX);
    a.load32(S1, gs(SPILL));
    a.ret();

    t.inline_cache = a.here();
    a.call_to(t.fill_inline_cache);
    let absent = a.jcc(cc::NE);
    a.load32(S1, gs(SPILL + 4));
    a.lea(S1, at(S1, 0).plus(S1, 1));
    a.load(S0, cached(S1, 1));
    a.store(SHORT_PAGE, S0);
    a.jmp_mem(cached(S1, 2));
    let here = a.here();
    a.patch(absent, here);
    a.alu(true, Alu::Xor, S0, SHORT_SALT);
    a.jmp_to(t.branch);

    for (trampoline, long) in [(&mut t.ret, true), (&mut t.ret32, false)] {
        *trampoline = a.here();
        a.store(gs(SPILL), S1);
        let absent = select_target(a);
        a.load(S0, at(S1, 24));
        a.store(SHORT_PAGE, S0);
        a.load(S0, gs(SPILL));
        a.shift(false, 5, S0, 12);
        a.rm(long, &[0x8d], GUEST_RSP, at(GUEST_RSP, -8).plus(S0, 0)); // lea
        a.jmp_mem(at(S1, 16));
        let here = a.here();
        a.patch(absent, here);
        a.alu(true, Alu::Xor, S0, SHORT_SALT);
        a.load(S1, gs(SPILL));
        a.jmp_to(t.branch);
    }

    let missed = a.here();
    with_reason(a, Reason::CrossPage, false);
    for (trampoline, pushed) in [
        (&mut t.cross_page, 0),
        (&mut t.cross_page_call, 8),
        (&mut t.cross_page_call32, 4),
    ] {
        *trampoline = a.here();
        a.alu(true, Alu::Add, S0, SHORT_PAGE);
        a.store(gs(SPILL), S0);
        a.store(gs(SPILL + 8), S1);
        a.alu_mem_imm8(true, Alu::Sub, gs(CROSS_PAGE_LEFT), 1);
        let misses = [a.jcc(cc::S), select_target(a)];
        a.load(S0, at(S1, 24));
        a.store(SHORT_PAGE, S0);
        if pushed != 0 {
            a.rm(pushed == 8, &[0x8d], GUEST_RSP, at(GUEST_RSP, -pushed)); // lea
        }
        a.jmp_mem(at(S1, 16));
        misses.into_iter().for_each(|from| a.patch(from, missed));
    }

    t.poll = emit_poll(a, exit, counts);

    t.link_live = a.here();
    a.store(gs(ARGUMENT), S1);
    save_flags(a);
    let saved = a.jmp();
    t.link = a.here();
    a.store(gs(ARGUMENT), S1);
    let here = a.here();
    a.patch(saved, here);
    with_reason(a, Reason::Link, false);

    t.switch = a.here();
    push(a, RAX);
    store_short_words(a);
    pop(a, RAX);
    call_serve(a, serve, counts);
    push(a, RAX);
    load_short_words(a);
    pop(a, RAX);
    a.rr(true, &[0x85], S0, S0); // test
    let failed = a.jcc(cc::E);
    a.ret();
    let here = a.here();
    a.patch(failed, here);
    a.alu_imm(false, Alu::And, S1, 0xfff);
    a.lea(RSP, at(RSP, 8));
    if counts {
        exact::refund_noted(a);
    }
    a.jmp_to(t.bail);

    t.access = [false, true].map(|set| change_access(a, set, t.switch));
    t.write_protection = change_write_protection(a, t.switch);
    t.key_rights = change_key_rights(a, t.switch);

    t.miss = a.here();
    straddling(a, true, true);
    let known = known_device(a, RAISES);
    let called = a.here();
    call_serve(a, serve, counts);
    let answered = a.here();
    a.alu_imm(true, Alu::Cmp, S0, ACCESS as i32);
    a.ret();
    t.miss_group = a.here();
    straddling(a, false, true);
    let within = a.here();
    let first_known = known_device(a, FIRST);
    // What straddles two pages needs no call.
    push(a, RAX);
    push(a, RCX);
    compare_end(a);
    pop(a, RCX);
    pop(a, RAX);
    let from = a.jcc(cc::BE);
    a.patch(from, called);
    let fails = a.here();
    a.alu_rr(false, Alu::Xor, S0, S0);
    a.jmp_to(answered);
    t.split = a.here();
    straddling(a, false, false);
    a.jmp_to(fails);
    let here = a.here();
    a.patch(known, here);
    a.patch(first_known, here);
    a.store(gs(SPILL), S0);
    a.mov_imm(S0, ACCESS);
    a.jmp_to(answered);
    t.refused = a.here();
    let is_access = a.jcc(cc::E);
    a.alu_imm(false, Alu::And, S1, 0xfff);
    a.jmp_to(t.bail);
    let here = a.here();
    a.patch(is_access, here);
    a.alu_imm(false, Alu::And, S1, 0xfff);
    at_offset(a, Reason::Access, true);

    t.stack = a.here();
    stack_miss(a, t.miss);
    t.stack_group = a.here();
    stack_miss(a, t.miss_group);
    t.stack_split = a.here();
    stack_miss(a, t.split);
    for (trampoline, otherwise) in [
        (&mut t.site_entry, t.miss),
        (&mut t.site_entry_group, t.miss_group),
        (&mut t.site_entry_split, t.split),
    ] {
        *trampoline = a.here();
        site_entry_miss(a, otherwise);
    }
    t.load_fp = a.here();
    push(a, RAX);
    push(a, RDX);
    load_fp(a);
    pop(a, RDX);
    pop(a, RAX);
    a.ret();

    t.strings = string::emit(a, t.bail_integer, within, counts);
    t.root = switches::change_root(a, t.bail_integer, |a| move_to_tables(a, IS_OTHER_ROOT));
    if let Some(plain) = plain {
        t.go_on_counting = exact::go_on(a, last_frame, true);
        t.go_on_plainly = exact::go_on(a, plain.last_frame, false);
    }
    t.last_frame = last_frame;
    emit_for_segments(a, &mut t, missed);
    t
}

/// The same for code with segments. `missed`: a direct branch that leads to another page goes by Rust.
fn emit_for_segments(a: &mut Asm, t: &mut Trampolines, missed: usize) {
    t.ret16 = a.here();
    a.store(gs(SPILL), S1);
    let absent = select_target(a);
    a.load(S0, at(S1, 24));
    a.store(SHORT_PAGE, S0);
    a.load(S0, gs(SPILL));
    a.shift(false, 5, S0, 12);
    a.bytes(&[0x66]);
    a.rm(false, &[0x8d], GUEST_RSP, at(GUEST_RSP, -8).plus(S0, 0)); // lea
    a.jmp_mem(at(S1, 16));
    let here = a.here();
    a.patch(absent, here);
    a.alu(true, Alu::Xor, S0, SHORT_SALT);
    a.load(S1, gs(SPILL));
    a.jmp_to(t.branch);

    t.cross_page_segmented = a.here();
    a.alu(true, Alu::Add, S0, SHORT_PAGE);
    a.store(gs(SPILL), S0);
    a.store(gs(SPILL + 8), S1);
    a.jmp_to(missed);
}
