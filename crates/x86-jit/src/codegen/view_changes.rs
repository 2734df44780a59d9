//! STAC, CLAC, MOV to CR0 and WRPKRU in generated code: the tables of another view, which Rust has changed to before.

use x86_defs::{control::cr0, rflags};

use crate::{asm::*, frame::requests::SAME_KEY, frame::words::*};

/// Goes on with the tables of the supervisor's other view, and RFLAGS.AC as it belongs to it, if they are known.
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

/// Goes on with CR0 = r14 and the tables of the view that belongs to it, if nothing but WP changes and they are known.
pub(super) fn change_write_protection(a: &mut Asm, otherwise: usize) -> usize {
    let place = a.here();
    push(a, RAX);
    a.mov(RAX, S0);
    a.alu(true, Alu::Xor, RAX, gs(CR0));
    a.alu_imm(true, Alu::And, RAX, !(cr0::WP as i32));
    let other_bits = a.jcc(cc::NE);
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
    for site in [other_bits].into_iter().chain(not_cleared).chain(not_set) {
        a.patch(site, here);
    }
    pop(a, RAX);
    a.jmp_to(otherwise);
    place
}

/// `to` becomes the tables beside the live ones in one of two pairs of [`VIEWS`]. Returns the branches if they are in none.
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

/// Goes on with PKRU = r14 and the tables of the view that belongs to it, if they are known.
pub(super) fn change_key_rights(a: &mut Asm, otherwise: usize) -> usize {
    let place = a.here();
    let known = |word: usize| gs(KEY_VIEWS + 8 * word).plus(RAX, 3);
    push(a, RAX);
    a.imul(false, RAX, S0, KEY_VIEW_HASH.cast_signed());
    a.shift(false, 5, RAX, 29);
    // Six words each.
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
    // They are those of another PKRU.
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

/// The tables at r14 are those of the live view. Changes r13.
fn move_to_view(a: &mut Asm) {
    move_to_tables(a, IS_OTHER_VIEW);
}

/// The tables at r14 are those to go on with, which the word `told` says to Rust. Changes r13.
pub(super) fn move_to_tables(a: &mut Asm, told: usize) {
    a.store(gs(TABLES), S0);
    a.store_imm(gs(told), 1);
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
}
