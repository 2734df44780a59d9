//! Entry into translated code, and the ways out of it.

use super::{
    Emitter,
    registers::{load_registers, store_registers},
};
use crate::{
    asm::*,
    codegen::countdown::{self, exact},
    codegen::flags::save_flags,
    codegen::fp_state::{keep_vectors, save_fp},
    frame::exit::Reason,
    frame::words::*,
};

/// Depth of the host's stack in bytes above which a poll drops it. Until the next poll it grows to twice that at most.
const MAX_DEPTH: i32 = 16 << 10;

const SAVED: [Reg; 6] = [3, RBP, 12, 13, 14, 15];

/// The most calls left open at an exit for which [`unwind_predictor`] returns.
const MAX_OPEN: i32 = 8;

/// Emits returns for the guest's calls that are open on the host's stack. The processor predicts returns by a stack of
/// its own, which has these calls on top. With them there, every later return of the hypervisor's and the VMM's would be
/// mispredicted. The returns that are emitted are mispredicted, too, so a deep stack is left as it is.
fn unwind_predictor(a: &mut Asm) {
    /// Bytes that a call takes on the host's stack.
    const FRAME: i32 = 16;
    a.load(RCX, gs(STACK));
    a.alu_rr(true, Alu::Sub, RCX, RSP);
    a.alu_imm(true, Alu::Cmp, RCX, MAX_OPEN * FRAME);
    let are_many = a.jcc(cc::A);
    a.alu_imm(true, Alu::Sub, RCX, 1);
    let is_none = a.jcc(cc::B);
    let after = a.lea_code(RAX);
    let again = a.here();
    push(a, RAX);
    a.ret();
    let here = a.here();
    a.patch(after, here);
    a.alu_imm(true, Alu::Sub, RCX, FRAME);
    let more = a.jcc(cc::AE);
    a.patch(more, again);
    let here = a.here();
    a.patch(are_many, here);
    a.patch(is_none, here);
}

impl Emitter<'_> {
    /// Emits the entry into translated code. Returns the place of the displacement of the last frame's return address.
    pub(super) fn enter(&mut self) -> usize {
        let a = &mut *self.a;
        SAVED.iter().for_each(|r| push(a, *r));
        a.lea(RSP, at(RSP, -8));
        // A return to address 0 finds the last frame.
        a.bytes(&[0x6a, 0]); // push 0
        let last = a.lea_code(S1);
        push(a, S1);
        a.store(gs(STACK), RSP);
        load_registers(a);
        countdown::load(a);
        a.jmp_mem(gs(ENTRY));
        last
    }

    /// Emits the exit from translated code.
    pub(super) fn leave(&mut self) {
        let a = &mut *self.a;
        self.exit = a.here();
        store_registers(a);
        self.exit_stored = a.here();
        save_fp(a);
        unwind_predictor(a);
        a.load(RSP, gs(STACK));
        a.lea(RSP, at(RSP, 24));
        SAVED.iter().rev().for_each(|r| pop(a, *r));
        a.ret();
    }

    /// Emits the call of `handle`: goes on where it says, or leaves. Registers are in memory, and so are vector
    /// registers that have to be kept.
    pub(super) fn call_handle(&mut self) {
        let a = &mut *self.a;
        self.call_handle = a.here();
        a.store(gs(HOST_RSP), RSP);
        a.alu_imm(true, Alu::And, RSP, -16);
        a.load(RDI, gs(CONTEXT));
        a.mov_imm(RAX, self.handle);
        a.bytes(&[0xff, 0xd0]); // call rax
        a.load(RSP, gs(HOST_RSP));
        a.mov(S0, RAX);
        keep_vectors(a, false);
        a.rr(true, &[0x85], S0, S0); // test
        let leaves = a.jcc(cc::E);
        a.patch(leaves, self.exit_stored);
        countdown::charge_handled(a);
        load_registers(a);
        a.bytes(&[0x41, 0xff, 0xe6]); // jmp r14
    }

    /// Stores the countdown for Rust code, which is called or returned to next.
    pub(super) fn keep_countdown(&mut self) {
        match self.counts {
            Some(_) => exact::keep(self.a),
            None => countdown::keep(self.a),
        }
    }

    /// Emits a call of `handle` for a reason. `fp`: it may change FP state.
    pub(super) fn with_reason(&mut self, reason: Reason, fp: bool) {
        self.keep_countdown();
        let a = &mut *self.a;
        a.store_imm(gs(REASON), reason as i32);
        store_registers(a);
        if fp {
            save_fp(a);
        } else {
            keep_vectors(a, true);
        }
        a.jmp_to(self.call_handle);
    }

    /// Does the same for the instruction whose offset in its page is r13d.
    pub(super) fn at_offset(&mut self, reason: Reason, fp: bool) {
        self.a.alu(true, Alu::Add, S1, SHORT_PAGE);
        self.a.store(gs(RIP), S1);
        self.with_reason(reason, fp);
    }

    /// Emits the trampolines for instructions that the interpreter executes, and for code that has changed.
    pub(super) fn bails(&mut self) {
        self.t.bail = self.a.here();
        self.at_offset(Reason::Interpret, true);
        self.t.bail_integer = self.a.here();
        self.at_offset(Reason::Interpret, false);
        self.t.moved = self.a.here();
        self.a.store_imm(gs(ARGUMENT), 1);
        self.t.stale = self.a.here();
        self.at_offset(Reason::Stale, false);
        if self.counts.is_some() {
            self.t.too_long = self.a.here();
            self.at_offset(Reason::TooLong, true);
        }
    }

    /// Emits the code that a return to address 0 leads to when the host's stack has no call left. `last`: what
    /// [`Self::enter`] has returned.
    pub(super) fn last_frame(&mut self, last: usize) {
        self.t.last_frame = self.a.here();
        self.a.patch(last, self.t.last_frame);
        self.a.load(RSP, gs(STACK));
        self.a.store(gs(RIP), S0);
        self.with_reason(Reason::Stale, false);
    }

    /// Emits the function that a poll calls.
    pub(super) fn poll(&mut self) {
        let a = &mut *self.a;
        self.t.poll = a.here();
        let go_on = |a: &mut Asm| {
            a.load(S0, gs(STACK));
            a.alu_rr(true, Alu::Sub, S0, RSP);
            a.alu_imm(true, Alu::Cmp, S0, MAX_DEPTH);
            let is_deep = a.jcc(cc::A);
            // The call has to return: otherwise the processor would mispredict all the guest's returns that come next.
            a.ret();
            let here = a.here();
            a.patch(is_deep, here);
            pop(a, S1);
            a.load(RSP, gs(STACK));
            a.bytes(&[0x41, 0xff, 0xe5]); // jmp r13
        };
        let poll = match self.counts {
            Some(layout) => exact::poll(a, layout, go_on),
            None => countdown::poll(a, go_on),
        };
        let here = a.here();
        for from in poll.leaves {
            a.patch(from, here);
        }
        self.keep_countdown();
        let a = &mut *self.a;
        a.alu(true, Alu::Add, S1, SHORT_PAGE);
        a.store(gs(RIP), S1);
        a.store_imm(gs(REASON), Reason::Poll as i32);
        a.jmp_to(self.exit);
    }

    /// Emits the trampolines for direct branches that are not linked yet.
    pub(super) fn links(&mut self) {
        self.t.link_live = self.a.here();
        self.a.store(gs(ARGUMENT), S1);
        save_flags(self.a);
        let saved = self.a.jmp();
        self.t.link = self.a.here();
        self.a.store(gs(ARGUMENT), S1);
        let here = self.a.here();
        self.a.patch(saved, here);
        self.with_reason(Reason::Link, false);
    }
}
