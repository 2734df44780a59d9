//! Branches whose target comes next in a trace.
//!
//! [`SHORT_PAGE`] stays the page that the trace begins in. If code stored another page there, the next branch would
//! load it again, and all of a trace would wait for one such store and load after the other. Code that leaves the trace
//! from another page sets it first.

use super::{Emit, Stub, Translator, check_generation};
use crate::{
    asm::*,
    frame::requests,
    frame::words::*,
    ir::branch::popped,
    ir::decoded::{Decoded, TracePlace},
    ir::lowering::Lowering,
};

/// From this stub on, code is of this page of the trace, which is this far beyond [`SHORT_PAGE`].
pub(super) type Turn = (usize, u8, i32);

impl Translator {
    /// Resets what is known of a trace: nothing is translated yet.
    pub(super) fn begin_trace(&mut self) {
        (self.state.page, self.state.beyond) = (0, 0);
        self.state.turns_of_pages.clear();
        self.state.frames.clear();
        self.state.branches.clear();
    }

    /// Compares the trace's other pages. Leaves for `offset`, where the trace begins, if one is not what it was, or not
    /// where it was.
    pub(super) fn compare_pages(&mut self, offset: u32) {
        if self.input.pages.len() == 1 {
            return;
        }
        if self.input.bound.is_none() {
            self.asm.load(S0, SHORT_PAGE);
        }
        for n in 1..self.input.pages.len() {
            let page = self.input.pages[n];
            let Some(page_guard) = page.page_guard else {
                continue;
            };
            let place = at(TLB, mmu::l1::page_guard(page_guard.number));
            let tag = i32::from(page_guard.tag);
            let changed = check_generation(&mut self.asm, self.code, &page.source);
            if let Some(page) = page.bound {
                let n = self.asm.cmp_mem_imm32(true, place);
                self.asm.patch32(n, page + tag);
            } else {
                self.asm.lea(S1, at(S0, page.distance + tag));
                self.asm.alu(true, Alu::Cmp, S1, place);
            }
            let moved = self.asm.jcc(cc::NE);
            for from in [changed, moved] {
                self.stubs.push(Stub::Moved { from, offset });
            }
        }
    }

    /// Translates a branch whose target comes next. If it leads elsewhere, it is made as in any other block.
    pub(super) fn inline(&mut self, d: &Decoded, onto: TracePlace) -> Emit {
        match d.kind {
            Lowering::Ret => {
                self.flags_in_memory();
                self.inline_return(d, onto);
            }
            Lowering::CallIndirect | Lowering::JmpIndirect => {
                self.flags_in_memory();
                self.expect_target(d, onto)?;
            }
            _ => {}
        }
        if matches!(d.kind, Lowering::CallIndirect | Lowering::Call) {
            self.push_return(d);
            self.state.rsp_moves -= self.word();
            self.state.frames.push(d.behind());
        }
        self.state.cached = None;
        self.set_page(onto.page);
        Ok(())
    }

    fn distance(&self, page: u8) -> i32 {
        let page = self.input.pages.get(usize::from(page));
        page.map_or(0, |p| p.distance)
    }

    fn bound(&self, page: u8) -> Option<i32> {
        self.input.pages.get(usize::from(page))?.bound
    }

    /// Returns what has to be added to [`SHORT_PAGE`] for the gva of the place.
    fn beyond_of(&self, place: TracePlace) -> i32 {
        self.state.beyond - self.distance(self.state.page)
            + self.distance(place.page)
            + i32::from(place.offset)
    }

    /// Loads r13 with the gva of a place.
    fn load_place(&mut self, place: TracePlace) {
        let beyond = self.beyond_of(place);
        self.asm.load(S1, SHORT_PAGE);
        self.asm.lea(S1, at(S1, beyond));
    }

    /// Has the code of that page of the trace translated next.
    fn set_page(&mut self, page: u8) {
        let there = TracePlace { page, offset: 0 };
        self.turn(page, self.beyond_of(there));
    }

    /// Does the same for a page that is `beyond` bytes beyond [`SHORT_PAGE`].
    fn turn(&mut self, page: u8, beyond: i32) {
        if (self.state.page, self.state.beyond) != (page, beyond) {
            (self.state.page, self.state.beyond) = (page, beyond);
            self.input.bound = self.bound(page);
            self.state
                .turns_of_pages
                .push((self.stubs.len(), page, beyond));
        }
    }

    /// Makes [`SHORT_PAGE`] the page of the code from here on, whose last instruction comes next, or has come. Changes
    /// r13.
    pub(super) fn settle_page(&mut self) {
        if self.state.beyond != 0 {
            set_short_page(&mut self.asm, self.input.bound, self.state.beyond);
            self.state.cached = None;
            self.turn(self.state.page, 0);
        }
    }

    /// Compares the target of an indirect branch with the expected one.
    fn expect_target(&mut self, d: &Decoded, onto: TracePlace) -> Emit {
        self.read_target(d)?;
        self.state.current = None;
        if let Some(page) = self.bound(onto.page) {
            self.asm
                .alu_imm(true, Alu::Cmp, S0, page + i32::from(onto.offset));
        } else {
            self.load_place(onto);
            self.asm.alu_rr(true, Alu::Cmp, S0, S1);
        }
        let from = self.asm.jcc(cc::NE);
        let number = self.state.branches.len();
        self.state.branches.push((*d, self.state.position));
        self.state
            .tally
            .mark_left(self.stubs.len(), self.state.position + 1);
        self.stubs.push(Stub::Unexpected { from, number });
        Ok(())
    }

    fn inline_return(&mut self, d: &Decoded, onto: TracePlace) {
        self.state.frames.pop();
        let disp = self.stack_slot(d, GUEST_RSP, 0, false);
        let slot = at(S0, disp);
        if let Some(page) = self.bound(onto.page) {
            let n = self.asm.cmp_mem_imm32(true, slot);
            self.asm.patch32(n, page + i32::from(onto.offset));
        } else {
            self.load_place(onto);
            self.asm.alu(true, Alu::Cmp, S1, slot);
        }
        let from = self.asm.jcc(cc::NE);
        let by = self.word() + popped(&d.i);
        self.state
            .tally
            .mark_left(self.stubs.len(), self.state.position + 1);
        self.stubs.push(Stub::Elsewhere {
            from,
            disp,
            site: requests::branch(d.offset, by),
        });
        self.state.rsp_moves += by;
    }

    /// Pushes frames of the calls that the trace ends within, so that returns from them are predicted as those from
    /// other calls.
    pub(super) fn push_frames(&mut self) {
        let (page, beyond) = (self.state.page, self.state.beyond);
        for frame in core::mem::take(&mut self.state.frames) {
            if let Some(page) = self.bound(frame.page) {
                self.asm.push_imm(page + i32::from(frame.offset));
            } else {
                self.load_place(frame);
                push(&mut self.asm, S1);
            }
            let call = self.asm.call();
            self.turn(frame.page, 0);
            self.return_site(frame.offset.into());
            self.turn(page, beyond);
            let next = self.asm.here();
            self.asm.patch(call, next);
            self.state.cached = None;
        }
    }

    /// Makes an indirect branch to the gva in r14, which is not the expected target, before the branch has done
    /// anything.
    pub(super) fn unexpected(&mut self, number: usize) {
        let Some((d, position)) = self.state.branches.get(number).copied() else {
            return;
        };
        self.state.tally.mark_alone(self.stubs.len(), position);
        (self.state.current, self.state.cached, self.state.rsp_moves) = (None, None, 0);
        self.state.flags = super::Flags::Memory;
        self.indirect_to(&Decoded { member: None, ..d });
    }

    /// Makes the page that the stub `stub` is of the one that is translated for. Returns how far that is beyond
    /// [`SHORT_PAGE`].
    pub(super) fn turn_to_page_of(&mut self, stub: usize) -> i32 {
        if self.input.pages.len() == 1 {
            return 0;
        }
        let mut before = self.state.turns_of_pages.iter().rev();
        let of = before.find(|(from, ..)| *from <= stub).copied();
        let (_, page, beyond) = of.unwrap_or_default();
        // [`SHORT_PAGE`] is set by then, so the stubs that this one adds are not beyond it.
        self.turn(page, 0);
        beyond
    }
}

/// Sets [`SHORT_PAGE`], to which `beyond` has to be added; `bound` is the result, if it is known. Changes r13, but no
/// flags.
fn set_short_page(a: &mut Asm, bound: Option<i32>, beyond: i32) {
    if let Some(page) = bound {
        return a.store_imm(SHORT_PAGE, page);
    }
    a.load(S1, SHORT_PAGE);
    a.lea(S1, at(S1, beyond));
    a.store(SHORT_PAGE, S1);
}

/// Does the same without changing a register.
pub(super) fn move_page(a: &mut Asm, bound: Option<i32>, beyond: i32) {
    if beyond != 0 {
        push(a, S1);
        set_short_page(a, bound, beyond);
        pop(a, S1);
    }
}
