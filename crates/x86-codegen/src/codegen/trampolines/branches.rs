//! Branches through the target table, and the inline caches that copy its entries.

use mmu::l1::{INLINE_CACHES_USED, inline_cache};

use super::Emitter;
use crate::{
    asm::*,
    codegen::branch::{select_tag, select_target},
    codegen::crossing,
    frame::exit::Reason,
    frame::words::*,
};

/// Returns word `n` of an inline cache; `thrice` has three times the cache's number.
fn cached(thrice: Reg, n: i32) -> Mem {
    at(TLB, inline_cache(0) + 8 * n).plus(thrice, 3)
}

impl Emitter<'_> {
    /// Emits [`super::Trampolines::branch`], for branches whose target the target table does not have.
    pub(super) fn table_misses(&mut self) {
        self.t.branch = self.a.here();
        self.a.alu_mem_imm8(true, Alu::Cmp, gs(COUNTED_GO_ON), 0);
        let crosses = self.a.jcc(cc::NE);
        let branch = self.a.here();
        self.a.store(gs(SPILL), S0);
        self.a.mov32(S0, S1);
        self.a.shift(false, 5, S0, 12);
        self.a.store(gs(ARGUMENT), S0);
        self.a.alu_imm(false, Alu::And, S1, 0xfff);
        self.at_offset(Reason::Branch, false);
        let here = self.a.here();
        self.a.patch(crosses, here);
        crossing::cross(self.a, branch, self.counts.is_some());
    }

    /// Emits the trampolines that fill inline caches.
    pub(super) fn inline_caches(&mut self) {
        let a = &mut *self.a;
        self.t.fill_inline_cache = a.here();
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

        self.t.inline_cache = a.here();
        a.call_to(self.t.fill_inline_cache);
        let absent = a.jcc(cc::NE);
        a.load32(S1, gs(SPILL + 4));
        a.lea(S1, at(S1, 0).plus(S1, 1));
        a.load(S0, cached(S1, 1));
        a.store(SHORT_PAGE, S0);
        a.jmp_mem(cached(S1, 2));
        let here = a.here();
        a.patch(absent, here);
        a.alu(true, Alu::Xor, S0, SHORT_SALT);
        a.jmp_to(self.t.branch);
    }

    /// Emits the trampolines for returns whose target is not on top of the host's stack.
    pub(super) fn returns(&mut self) {
        self.t.ret = self.return_by_table(64);
        self.t.ret32 = self.return_by_table(32);
    }

    /// Emits the trampoline for a return whose stack pointer has so many bits.
    fn return_by_table(&mut self, bits: u32) -> usize {
        let a = &mut *self.a;
        let place = a.here();
        a.store(gs(SPILL), S1);
        let absent = select_target(a);
        a.load(S0, at(S1, 24));
        a.store(SHORT_PAGE, S0);
        a.load(S0, gs(SPILL));
        a.shift(false, 5, S0, 12);
        if bits == 16 {
            a.bytes(&[0x66]);
        }
        a.rm(
            bits == 64,
            &[0x8d],
            GUEST_RSP,
            at(GUEST_RSP, -8).plus(S0, 0),
        ); // lea
        a.jmp_mem(at(S1, 16));
        let here = a.here();
        a.patch(absent, here);
        a.alu(true, Alu::Xor, S0, SHORT_SALT);
        a.load(S1, gs(SPILL));
        a.jmp_to(self.t.branch);
        place
    }

    /// Emits the trampolines for direct branches to other pages that are not linked.
    pub(super) fn cross_page(&mut self) {
        self.missed = self.a.here();
        self.with_reason(Reason::CrossPage, false);
        let a = &mut *self.a;
        for (trampoline, pushed) in [
            (&mut self.t.cross_page, 0),
            (&mut self.t.cross_page_call, 8),
            (&mut self.t.cross_page_call32, 4),
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
            misses
                .into_iter()
                .for_each(|from| a.patch(from, self.missed));
        }
    }

    /// Emits what [`Self::returns`] emits, for a stack that is addressed by SP.
    pub(super) fn returns16(&mut self) {
        self.t.ret16 = self.return_by_table(16);
    }

    /// Emits the trampoline for a direct call of another page in code with segments. Only Rust knows what such a call
    /// pushes.
    pub(super) fn cross_page_segmented(&mut self) {
        let a = &mut *self.a;
        self.t.cross_page_segmented = a.here();
        a.alu(true, Alu::Add, S0, SHORT_PAGE);
        a.store(gs(SPILL), S0);
        a.store(gs(SPILL + 8), S1);
        a.jmp_to(self.missed);
    }
}
