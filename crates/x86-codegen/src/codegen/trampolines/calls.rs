//! Calls of the Rust function `serve`, which answers translated code and returns to it.

use super::{
    Emitter,
    registers::{load_short_words, store_short_words},
};
use crate::{
    asm::*,
    codegen::countdown::{self, exact},
    codegen::fp_state::keep_vectors,
    frame::words::*,
};

const CALLER_SAVED: [Reg; 9] = [RAX, RCX, RDX, RSI, RDI, 8, 9, 10, 11];

impl Emitter<'_> {
    /// Emits the call of `serve`. The return address and nine registers are on the stack then, which aligns it as the
    /// call needs.
    pub(super) fn call_serve(&mut self) {
        let a = &mut *self.a;
        CALLER_SAVED.iter().for_each(|r| push(a, *r));
        keep_vectors(a, true);
        a.load(RDI, gs(CONTEXT));
        a.mov(RSI, S0);
        a.mov32(RDX, S1);
        a.mov_imm(RAX, self.serve);
        a.bytes(&[0xff, 0xd0]); // call rax
        a.mov(S0, RAX);
        match self.counts {
            Some(layout) => exact::hasten_if_requested(a, layout),
            None => countdown::hasten_if_requested(a),
        }
        keep_vectors(a, false);
        CALLER_SAVED.iter().rev().for_each(|r| pop(a, *r));
    }

    /// Emits the trampoline for instructions that change the view by Rust.
    pub(super) fn switch(&mut self) {
        self.t.switch = self.a.here();
        self.keep_countdown();
        push(self.a, RAX);
        store_short_words(self.a);
        pop(self.a, RAX);
        self.call_serve();
        push(self.a, RAX);
        load_short_words(self.a);
        pop(self.a, RAX);
        self.a.rr(true, &[0x85], S0, S0); // test
        let failed = self.a.jcc(cc::E);
        self.a.ret();
        let here = self.a.here();
        self.a.patch(failed, here);
        self.a.alu_imm(false, Alu::And, S1, 0xfff);
        self.a.lea(RSP, at(RSP, 8));
        if let Some(layout) = self.counts {
            exact::refund_noted(self.a, layout);
        }
        self.a.jmp_to(self.t.bail);
    }

    /// Emits the trampoline for instructions that change no view.
    pub(super) fn call(&mut self) {
        self.t.call = self.a.here();
        self.call_serve();
        self.a.ret();
    }
}
