//! Finds where the groups of a loop are, and for how many iterations they stay in their pages.

use super::{anchor, anchors::TO_BORROW};
use crate::{
    asm::*,
    codegen::Translator,
    codegen::memory::{host_page, select_entry, selected, tag},
    frame::words::*,
    ir::member::{Base, Induction, Member, Moves},
};

/// How far ahead neighbouring pages are looked for, about, in bytes.
const AHEAD: i32 = 16 << 12;

/// Host registers to look for groups with. None belongs to the groups' addresses.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scratch {
    page: Reg,
    entry: Reg,
    pub(super) turns: Reg,
}

impl Scratch {
    pub(super) fn besides(inductions: &[(Member, Induction)]) -> Option<Self> {
        let is_used = |n: &u8| {
            let mut all = inductions.iter().map(|(_, induction)| induction);
            all.any(|w| w.base == Base::Register(*n) || w.index.is_some_and(|(i, _)| i == *n))
        };
        let mut free = TO_BORROW.into_iter().filter(|n| !is_used(n));
        let mut next = || host_reg(free.next()?);
        Some(Self {
            page: next()?,
            entry: next()?,
            turns: next()?,
        })
    }

    fn all(self) -> [Reg; 3] {
        [self.page, self.entry, self.turns]
    }

    pub(super) fn save(self, a: &mut Asm) {
        self.all().into_iter().for_each(|r| push(a, r));
    }

    pub(super) fn restore(self, a: &mut Asm) {
        self.all().into_iter().rev().for_each(|r| pop(a, r));
    }
}

/// Returns the host register of a guest register; one that lives in memory is loaded to `scratch`.
pub(super) fn in_host(a: &mut Asm, n: u8, scratch: Reg) -> Reg {
    host_reg(n).unwrap_or_else(|| {
        a.load(scratch, gpr_slot(n));
        scratch
    })
}

/// Does the same for a group's base.
pub(super) fn in_host_base(a: &mut Asm, base: Base, scratch: Reg) -> Option<Reg> {
    match base {
        Base::None => None,
        Base::Register(n) => Some(in_host(a, n, scratch)),
        Base::Page => {
            a.load(scratch, SHORT_PAGE);
            Some(scratch)
        }
    }
}

/// Divides r14 and rounds down. r14 is at most [`AHEAD`] and a page; a number below zero stays below zero.
pub(super) fn divide(a: &mut Asm, by: u32) {
    if by.is_power_of_two() {
        a.shift(true, 7, S0, by.trailing_zeros() as u8); // sar
    } else {
        a.imul(true, S0, S0, (u32::MAX / by + 1) as i32);
        a.shift(true, 7, S0, 32);
    }
}

impl Translator {
    /// Looks for all groups as they are in the next iteration; branches to `fails` if the TLB does not have one. Sets
    /// `scratch.turns` to one less than the number of iterations that all of them stay in their pages for.
    pub(super) fn find_groups(
        &mut self,
        inductions: &[(Member, Induction)],
        scratch: Scratch,
        fails: usize,
    ) {
        let mut is_first = true;
        for (slot, (m, induction)) in inductions.iter().enumerate() {
            self.probe_range(m, *induction, scratch, fails);
            let a = &mut self.asm;
            if induction.stride != 0 {
                divide(a, induction.stride.unsigned_abs());
                if is_first {
                    a.mov(scratch.turns, S0);
                } else {
                    a.alu_rr(true, Alu::Cmp, S0, scratch.turns);
                    // cmovl turns, r14
                    a.rr(true, &[0x0f, 0x4c], scratch.turns, S0);
                }
                is_first = false;
            }
            self.drop_anchor(slot, *induction);
        }
    }

    /// Looks for a group as it is in the next iteration. Sets r13 to the distance from the group's addresses to the
    /// host's, and r14 to how many bytes the group may move on, which is less than zero if it straddles two pages.
    fn probe_range(&mut self, m: &Member, induction: Induction, scratch: Scratch, fails: usize) {
        let Scratch { page, entry, .. } = scratch;
        let a = &mut self.asm;
        let base = in_host_base(a, induction.base, S1);
        let index = induction.index.map(|(n, scale)| (in_host(a, n, S0), scale));
        let address = Mem {
            base,
            index,
            disp: induction.from,
            gs: false,
        };
        a.lea(S0, address);
        if let Some(from) = self.branch_if_misaligned(m.align) {
            self.asm.patch(from, fails);
        }
        let a = &mut self.asm;
        let [tag, host] = [tag(m.write), host_page()].map(|word| selected(word, entry));
        a.mov(page, S0);
        a.alu_imm(true, Alu::And, page, -4096);
        select_entry(a, entry, page);
        a.alu(true, Alu::Cmp, page, tag);
        let is_absent = a.jcc(cc::NE);
        a.patch(is_absent, fails);
        a.load(S1, host);
        a.alu_rr(true, Alu::Sub, S1, page);
        a.alu_rr(true, Alu::Sub, S0, page);
        let down = induction.stride < 0;
        let last = 4096 - m.span as i32;
        let straddles = if down {
            a.alu_imm(true, Alu::Cmp, S0, last);
            Some(a.jcc(cc::A))
        } else {
            a.rr(true, &[0xf7], 3, S0); // neg
            a.alu_imm(true, Alu::Add, S0, last);
            (induction.stride == 0).then(|| a.jcc(cc::S))
        };
        if let Some(from) = straddles {
            a.patch(from, fails);
        }
        if induction.stride == 0 {
            return;
        }
        // The range goes on as long as the next pages are neighbours in the host's memory, too.
        let again = a.here();
        // The range does not go around the end of addresses.
        let ends = if down {
            a.alu_imm(true, Alu::Sub, page, 4096);
            a.jcc(cc::B)
        } else {
            a.alu_imm(true, Alu::Add, page, 4096);
            a.jcc(cc::E)
        };
        select_entry(a, entry, page);
        a.alu(true, Alu::Cmp, page, tag);
        let is_absent = a.jcc(cc::NE);
        a.load(entry, host);
        a.alu_rr(true, Alu::Sub, entry, page);
        a.alu_rr(true, Alu::Cmp, entry, S1);
        let is_apart = a.jcc(cc::NE);
        a.alu_imm(true, Alu::Add, S0, 4096);
        a.alu_imm(true, Alu::Cmp, S0, AHEAD);
        let from = a.jcc(cc::L);
        a.patch(from, again);
        let here = a.here();
        for from in [ends, is_absent, is_apart] {
            a.patch(from, here);
        }
    }

    /// Computes the anchor from the distance in r13, to which the part of the address is added that does not move, and
    /// stores it.
    fn drop_anchor(&mut self, slot: usize, induction: Induction) {
        let a = &mut self.asm;
        if induction.moves != Moves::Base
            && let Some(r) = in_host_base(a, induction.base, S0)
        {
            a.alu_rr(true, Alu::Add, S1, r);
        }
        if induction.moves != Moves::Index
            && let Some((n, scale)) = induction.index
        {
            let r = in_host(a, n, S0);
            a.lea(S1, at(S1, 0).plus(r, scale));
        }
        a.store(anchor(slot), S1);
    }
}
