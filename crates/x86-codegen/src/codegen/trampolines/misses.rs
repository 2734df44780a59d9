//! TLB misses: of the tables, of the stack's entry, and of per-site entries.

use super::Emitter;
use crate::{
    asm::*,
    codegen::misses::{
        compare_end, known_device, site_entry_miss, stack_miss, straddling, write_back,
    },
    frame::exit::Reason,
    frame::requests::{ACCESS, FIRST, RAISES},
    frame::words::*,
};

impl Emitter<'_> {
    /// Emits the trampolines for misses of the tables. Returns the offset of the part that serves an access within one
    /// page.
    pub(super) fn misses(&mut self) -> usize {
        self.t.miss = self.a.here();
        straddling(self.a, true, true);
        let known = known_device(self.a, RAISES);
        let called = self.a.here();
        self.call_serve();
        let answered = self.a.here();
        self.a.alu_imm(true, Alu::Cmp, S0, ACCESS as i32);
        self.a.ret();
        self.t.write_back = self.a.here();
        write_back(self.a);
        self.t.miss_group = self.a.here();
        straddling(self.a, false, true);
        let within = self.a.here();
        let first_known = known_device(self.a, FIRST);
        // A group that straddles two pages fails without a call.
        push(self.a, RAX);
        push(self.a, RCX);
        compare_end(self.a);
        pop(self.a, RCX);
        pop(self.a, RAX);
        let from = self.a.jcc(cc::BE);
        self.a.patch(from, called);
        let fails = self.a.here();
        self.a.alu_rr(false, Alu::Xor, S0, S0);
        self.a.jmp_to(answered);
        self.t.split = self.a.here();
        straddling(self.a, false, false);
        self.a.jmp_to(fails);
        let here = self.a.here();
        self.a.patch(known, here);
        self.a.patch(first_known, here);
        self.a.store(gs(SPILL), S0);
        self.a.mov_imm(S0, ACCESS);
        self.a.jmp_to(answered);
        within
    }

    /// Emits the trampoline that has the interpreter make the access.
    pub(super) fn refused(&mut self) {
        self.t.refused = self.a.here();
        let is_access = self.a.jcc(cc::E);
        self.a.alu_imm(false, Alu::And, S1, 0xfff);
        self.a.jmp_to(self.t.bail);
        let here = self.a.here();
        self.a.patch(is_access, here);
        self.a.alu_imm(false, Alu::And, S1, 0xfff);
        self.at_offset(Reason::Access, true);
    }

    /// Emits the trampolines for misses of the stack's entry, and of per-site entries.
    pub(super) fn other_misses(&mut self) {
        let a = &mut *self.a;
        self.t.stack = a.here();
        stack_miss(a, self.t.miss);
        self.t.stack_group = a.here();
        stack_miss(a, self.t.miss_group);
        self.t.stack_split = a.here();
        stack_miss(a, self.t.split);
        for (trampoline, otherwise) in [
            (&mut self.t.site_entry, self.t.miss),
            (&mut self.t.site_entry_group, self.t.miss_group),
            (&mut self.t.site_entry_split, self.t.split),
        ] {
            *trampoline = a.here();
            site_entry_miss(a, otherwise);
        }
    }
}
