//! Moves guest registers between host registers and the vCPU's state.

use crate::{asm::*, frame::words::*};

/// Loads guest registers, and the other words that generated code keeps close to the TLB's base, from the vCPU's state.
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

/// Copies words of the vCPU's state close to the base of the live view's tables. Changes rax.
pub(super) fn load_short_words(a: &mut Asm) {
    a.load(TLB, gs(TABLES));
    for (word, near) in short_words().chain(short_constants()) {
        a.load(RAX, word);
        a.store(near, RAX);
    }
    a.load32(RAX, gs(NUMBER));
    a.store32(SHORT_NUMBER, RAX);
}

/// Copies them back. Changes rax.
pub(super) fn store_short_words(a: &mut Asm) {
    for (word, near) in short_words() {
        a.load(RAX, near);
        a.store(word, RAX);
    }
}
