//! Guest registers between host registers and the frame.

use crate::{asm::*, frame::words::*};

/// Guest registers, and what else generated code has close to it, from and to their places in
/// the vCPU's state.
pub(super) fn load_registers(a: &mut Asm) {
    load_short_words(a);
    for n in 0..16 {
        if let Some(r) = host_reg(n) {
            a.load(r, state_register(n));
        }
    }
}

pub(super) fn store_registers(a: &mut Asm) {
    for n in 0..16 {
        if let Some(r) = host_reg(n) {
            a.store(state_register(n), r);
        }
    }
    store_short_words(a);
}

/// To the tables of the view that is live now. Changes rax.
pub(super) fn load_short_words(a: &mut Asm) {
    a.load(TLB, gs(TABLES));
    for (word, near) in short_words().chain(short_constants()) {
        a.load(RAX, word);
        a.store(near, RAX);
    }
    a.load32(RAX, gs(NUMBER));
    a.store32(SHORT_NUMBER, RAX);
}

/// Changes rax.
pub(super) fn store_short_words(a: &mut Asm) {
    for (word, near) in short_words() {
        a.load(RAX, near);
        a.store(word, RAX);
    }
}
