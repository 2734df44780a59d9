//! STAC, CLAC, MOV to CR0, CLTS and WRPKRU in generated code: goes on with the tables of another view, which Rust has
//! changed to before, or with the keys of another mode.

use x86_defs::{control::cr0, rflags, xsave};

use crate::{
    asm::*,
    codegen::switches::{become_key, serialize},
    frame::keys,
    frame::requests::{OTHER_MODE, SAME_KEY},
    frame::state::{MXCSR_FREE, X87_MASKED, X87_PENDING},
    frame::words::*,
    ir::mode::Mode,
};

/// Emits what goes on with the tables of the supervisor's other view, and the RFLAGS.AC that belongs to it, if the
/// tables are known.
pub(super) fn change_access(a: &mut Asm, set: bool, otherwise: usize) -> usize {
    let place = a.here();
    let [from, to] = [!set, set].map(|ac| [false, true].map(|wp| view_of(wp, ac)));
    let unknown = select_view(a, S0, from, to);
    for site in unknown {
        a.patch(site, otherwise);
    }
    a.load32(S1, gs(RFLAGS));
    if set {
        a.alu_imm(false, Alu::Or, S1, rflags::AC as i32);
    } else {
        a.alu_imm(false, Alu::And, S1, !(rflags::AC as i32));
    }
    a.store32(gs(RFLAGS), S1);
    go_on_with_view(a);
    place
}

/// Emits what goes on with CR0 = r14 and the tables of the view that belongs to it, if nothing but WP changes and the
/// tables are known; or with the keys of the mode that belongs to it, if nothing but TS, EM and MP changes, and the
/// code does not count what is retired.
pub(super) fn change_cr0(a: &mut Asm, otherwise: usize, counts: bool) -> usize {
    let place = a.here();
    serialize(a);
    push(a, RAX);
    // The bit is 1 whatever is written.
    a.alu_imm(true, Alu::Or, S0, cr0::ET as i32);
    a.mov(RAX, S0);
    a.alu(true, Alu::Xor, RAX, gs(CR0));
    let changes = a.jcc(cc::NE);
    pop(a, RAX);
    a.mov_imm(S0, SAME_KEY);
    a.ret();
    let here = a.here();
    a.patch(changes, here);
    let other_bits = if counts {
        a.alu_imm(true, Alu::And, RAX, !(cr0::WP as i32));
        vec![a.jcc(cc::NE)]
    } else {
        change_mode(a)
    };
    a.rr(false, &[0xf7], 0, S0); // test r14d, …
    a.bytes(&(cr0::WP as u32).to_le_bytes());
    let sets = a.jcc(cc::NE);
    let [clear, set] = [false, true].map(|wp| [false, true].map(|ac| view_of(wp, ac)));
    let not_cleared = select_view(a, RAX, set, clear);
    let selected = a.jmp();
    let here = a.here();
    a.patch(sets, here);
    let not_set = select_view(a, RAX, clear, set);
    let here = a.here();
    a.patch(selected, here);
    a.store(gs(CR0), S0);
    a.mov(S0, RAX);
    pop(a, RAX);
    go_on_with_view(a);
    let here = a.here();
    for site in other_bits.into_iter().chain(not_cleared).chain(not_set) {
        a.patch(site, here);
    }
    pop(a, RAX);
    a.jmp_to(otherwise);
    place
}

/// Bits of CR0 that no translation of addresses depends on, and code only through [`Mode::FP`].
const FP_BITS: i32 = (cr0::TS | cr0::EM | cr0::MP) as i32;

/// Emits what goes on with CR0 = r14 and the keys of the mode that belongs to it, if only bits of [`FP_BITS`] change
/// and the keys are known. rax has the bits that change, and the guest's rax is on the stack. The code behind is
/// reached if WP may be all that changes. Returns the branches that are taken if the change is another one.
fn change_mode(a: &mut Asm) -> Vec<usize> {
    a.rr(true, &[0xf7], 0, RAX); // test rax, …
    a.bytes(&(!FP_BITS).to_le_bytes());
    let others = a.jcc(cc::NE);
    push(a, RCX);
    a.load(RAX, gs(KEY));
    a.alu_imm(true, Alu::And, RAX, !(Mode::FP.number() as i32));
    a.rr(false, &[0xf7], 0, S0); // test r14d, …
    a.bytes(&((cr0::TS | cr0::EM) as u32).to_le_bytes());
    let mut without_fp = vec![a.jcc(cc::NE)];
    // The conditions are those of `runtime::state::has_plain_fp`.
    a.alu_mem_imm8(false, Alu::Cmp, gs(FP_LIVE), 0);
    let is_live = a.jcc(cc::NE);
    let saved = |at: usize| gs(FP_AREA + at);
    a.load32(RCX, saved(xsave::MXCSR));
    a.alu_imm(false, Alu::And, RCX, !MXCSR_FREE as i32);
    a.alu_imm(false, Alu::Cmp, RCX, xsave::MXCSR_DEFAULT as i32);
    without_fp.push(a.jcc(cc::NE));
    a.rm(false, &[0x0f, 0xb7], RCX, saved(xsave::FCW)); // movzx
    a.alu_imm(false, Alu::And, RCX, X87_MASKED.into());
    a.alu_imm(false, Alu::Cmp, RCX, X87_MASKED.into());
    without_fp.push(a.jcc(cc::NE));
    a.rm(false, &[0x0f, 0xb7], RCX, saved(xsave::FSW)); // movzx
    a.alu_imm(false, Alu::And, RCX, X87_PENDING.into());
    without_fp.push(a.jcc(cc::NE));
    let here = a.here();
    a.patch(is_live, here);
    a.alu_imm(true, Alu::Or, RAX, Mode::FP.number() as i32);
    let here = a.here();
    without_fp.into_iter().for_each(|from| a.patch(from, here));

    a.imul(false, RCX, RAX, keys::HASH.cast_signed());
    a.shift(false, 5, RCX, (u32::BITS - keys::BITS) as u8);
    a.shift(false, 4, RCX, keys::SHIFT);
    a.alu(true, Alu::Add, RCX, gs(KEYS));
    a.alu(true, Alu::Cmp, RAX, at(RCX, keys::KEY));
    let unknown = a.jcc(cc::NE);
    a.store(gs(CR0), S0);
    a.store(gs(KEY), RAX);
    become_key(a, RAX, [keys::SALT, keys::NUMBER].map(|n| at(RCX, n)));
    pop(a, RCX);
    pop(a, RAX);
    a.mov_imm(S0, OTHER_MODE);
    a.ret();

    let here = a.here();
    a.patch(unknown, here);
    pop(a, RCX);
    let unknown = a.jmp();
    let here = a.here();
    a.patch(others, here);
    a.alu_imm(true, Alu::And, RAX, !(cr0::WP as i32));
    vec![unknown, a.jcc(cc::NE)]
}

/// Loads `to` with the tables of the view of `views` that is the counterpart of the live one in `from`. Returns the
/// branches that are taken if the live view is not in `from`, or its counterpart is not known.
fn select_view(a: &mut Asm, to: Reg, from: [usize; 2], views: [usize; 2]) -> [usize; 2] {
    a.load(to, gs(VIEWS[views[0]]));
    a.alu(true, Alu::Cmp, TLB, gs(VIEWS[from[0]]));
    let is_first = a.jcc(cc::E);
    a.load(to, gs(VIEWS[views[1]]));
    a.alu(true, Alu::Cmp, TLB, gs(VIEWS[from[1]]));
    let is_other = a.jcc(cc::NE);
    let here = a.here();
    a.patch(is_first, here);
    a.rr(true, &[0x85], to, to); // test
    [is_other, a.jcc(cc::E)]
}

/// Emits what goes on with PKRU = r14 and the tables of the view that belongs to it, if they are known.
pub(super) fn change_key_rights(a: &mut Asm, otherwise: usize) -> usize {
    let place = a.here();
    let known = |word: usize| gs(KEY_VIEWS + 8 * word).plus(RAX, 3);
    push(a, RAX);
    a.imul(false, RAX, S0, KEY_VIEW_HASH.cast_signed());
    a.shift(false, 5, RAX, 29);
    // An entry has six words.
    a.lea(RAX, at(RAX, 0).plus(RAX, 1));
    a.alu_rr(false, Alu::Add, RAX, RAX);
    a.alu(true, Alu::Cmp, TLB, known(0));
    let is_other_view = a.jcc(cc::NE);
    a.alu(true, Alu::Cmp, S0, known(1));
    let is_other_value = a.jcc(cc::NE);
    a.store32(gs(PKRU), S0);
    a.load(S0, known(2));
    move_to_view(a);
    a.load(S0, known(3));
    a.store(gs(KEY), S0);
    a.load(S0, known(4));
    a.store(gs(SALT), S0);
    a.store(SHORT_SALT, S0);
    a.load(S0, known(5));
    a.store(gs(NUMBER), S0);
    a.store32(SHORT_NUMBER, S0);
    // The views known there are those of another PKRU.
    for view in VIEWS {
        a.store_imm(gs(view), 0);
    }
    pop(a, RAX);
    a.mov_imm(S0, SAME_KEY);
    a.ret();
    let here = a.here();
    a.patch(is_other_view, here);
    a.patch(is_other_value, here);
    pop(a, RAX);
    a.jmp_to(otherwise);
    place
}

/// Goes on with the tables at r14, and returns.
fn go_on_with_view(a: &mut Asm) {
    move_to_view(a);
    a.mov_imm(S0, SAME_KEY);
    a.ret();
}

/// Makes the tables at r14 those of the live view. Changes r13.
fn move_to_view(a: &mut Asm) {
    move_to_tables(a, IS_OTHER_VIEW);
}

/// Makes the tables at r14 those to go on with, which the frame's word `told` says to Rust. Changes r13 and flags.
pub(super) fn move_to_tables(a: &mut Asm, told: usize) {
    a.store(gs(TABLES), S0);
    a.store_imm(gs(told), 1);
    a.alu_rr(true, Alu::Cmp, S0, TLB);
    let is_same = a.jcc(cc::E);
    for (_, near) in short_words().chain(short_constants()) {
        a.load(S1, near);
        a.store(
            Mem {
                base: Some(S0),
                ..near
            },
            S1,
        );
    }
    a.mov(TLB, S0);
    let here = a.here();
    a.patch(is_same, here);
}
