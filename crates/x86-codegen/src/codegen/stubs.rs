//! The code of each [`Stub`].

use core::ops::Range;

use super::{
    Entries, Translator,
    countdown::exact::{self, Cost},
    hoist::HoistedLoop,
    inline::move_page,
    memory::{Finds, Probe},
    stub::Stub,
};
use crate::{
    asm::*,
    codegen::flags::save_flags,
    frame::requests,
    frame::requests::{FIRST, site},
    frame::words::*,
};

/// A stub's place, and what holds where it is entered.
struct Context<'h> {
    here: usize,
    /// The index of the stub among the block's.
    number: usize,
    /// What has been counted too much if the block is left before the stub's instruction, and if it is left by the
    /// instruction's branch.
    before: Cost,
    taken: Cost,
    /// The distance of the instruction's page from the page in [`SHORT_PAGE`], and the gva of the page that the block
    /// begins in, if it is known.
    beyond: i32,
    begins: Option<i32>,
    hoisted: Option<&'h HoistedLoop>,
}

impl Translator {
    /// Emits the code of the block's stubs. `hoisted`: a loop's fast iterations, and the range of their stubs. `known`
    /// returns the entries of blocks that links may lead to, as for [`Translator::block`].
    pub(super) fn emit_stubs(
        &mut self,
        hoisted: Option<&(HoistedLoop, Range<usize>)>,
        known: impl Fn(u8, u32, bool) -> Option<Entries>,
    ) {
        let mut next = 0;
        // Stubs may add others, such as bails.
        while let Some(stub) = self.stubs.get(next).copied() {
            let hoisted = hoisted.filter(|w| w.1.contains(&next)).map(|w| &w.0);
            let beyond = self.turn_to_page_of(next);
            let bound = self.input.bound;
            let begins = self.input.pages.first().and_then(|p| p.bound);
            let number = next;
            let (before, taken) = (
                self.state.tally.before(number),
                self.state.tally.taken(number),
            );
            next += 1;
            let a = &mut self.asm;
            let here = a.here();
            if let Some(w) = hoisted {
                w.give_registers_back(a);
            }
            move_page(a, bound, beyond);
            let t = self.trampolines;
            let c = Context {
                here,
                number,
                before,
                taken,
                beyond,
                begins,
                hoisted,
            };
            match stub {
                Stub::Refill { .. } => self.refill(&c, stub),
                Stub::RefillGroup { .. } => self.refill_group(&c, stub, &known),
                Stub::Bail { from, offset } => self.leave_by(from, here, (before, offset), t.bail),
                Stub::Call { from, offset } => {
                    self.leave_by(from, here, (before, offset), t.bail_integer);
                }
                Stub::Stale { from, offset } => {
                    self.leave_by(from, here, (Cost::default(), offset), t.stale);
                }
                Stub::Moved { from, offset } => {
                    self.leave_by(from, here, (Cost::default(), offset), t.moved);
                }
                Stub::Poll {
                    from,
                    resume,
                    offset,
                    cost,
                } => {
                    from.into_iter().for_each(|from| a.patch(from, here));
                    let layout = self.state.tally.layout();
                    if let Some(layout) = layout {
                        exact::refund_entry(a, layout, cost, S1);
                    }
                    a.mov_imm(S1, offset.into());
                    if layout.is_some_and(|layout| exact::may_be_too_long(layout, cost)) {
                        let from = exact::branch_if_new(a);
                        a.patch(from, t.too_long);
                    }
                    a.call_to(t.poll);
                    a.jmp_to(resume);
                }
                Stub::LoadFp { from, resume } => {
                    a.patch(from, here);
                    a.call_to(t.load_fp);
                    a.jmp_to(resume);
                }
                Stub::TurnsDone { from, again } => {
                    from.into_iter().for_each(|from| a.patch(from, here));
                    if let Some(w) = hoisted {
                        w.ends(a, again);
                    }
                }
                Stub::Link { .. } => self.link_stub(&c, stub, &known),
                Stub::Branch { .. }
                | Stub::InlineCache { .. }
                | Stub::Ret { .. }
                | Stub::CallCache { .. }
                | Stub::Unexpected { .. }
                | Stub::Elsewhere { .. }
                | Stub::CrossPageMiss { .. }
                | Stub::CrossPage { .. } => self.branch_stub(&c, stub),
            }
        }
        self.asm.emit_literals();
    }

    /// Leaves by the trampoline `to` for the instruction at an offset, and gives `back` what has been counted too much.
    fn leave_by(&mut self, from: usize, here: usize, (back, offset): (Cost, u32), to: usize) {
        let a = &mut self.asm;
        a.patch(from, here);
        exact::refund(a, back, S1);
        a.mov_imm(S1, offset.into());
        a.jmp_to(to);
    }

    /// Emits the stub of a branch or return whose target is not where it was expected.
    fn branch_stub(&mut self, c: &Context<'_>, stub: Stub) {
        let t = self.trampolines;
        let a = &mut self.asm;
        match stub {
            Stub::Branch { from, offset } => {
                a.patch(from, c.here);
                a.alu(true, Alu::Xor, S0, SHORT_SALT);
                a.mov_imm(S1, requests::branch(offset, 0).into());
                a.jmp_to(t.branch);
            }
            Stub::InlineCache {
                from,
                offset,
                cache,
            } => {
                a.patch(from, c.here);
                let site = requests::branch(offset, 0);
                a.mov_imm(S1, requests::with_inline_cache(site, cache));
                a.jmp_to(t.inline_cache);
            }
            Stub::Ret { from, site } => {
                a.patch(from, c.here);
                a.mov_imm(S1, site.into());
                a.jmp_to(t.ret_in(self.input.mode));
            }
            Stub::CallCache {
                from,
                resume,
                offset,
                cache,
            } => {
                a.patch(from, c.here);
                a.mov_imm(S1, requests::with_inline_cache(offset, cache));
                a.call_to(t.fill_inline_cache);
                let from = a.jcc(cc::E);
                a.patch(from, resume);
                exact::refund(a, c.before, S0);
                a.jmp_to(t.bail_integer);
            }
            Stub::Unexpected { from, number } => {
                a.patch(from, c.here);
                exact::refund(a, c.taken, S1);
                self.unexpected(number);
            }
            Stub::Elsewhere { from, disp, site } => {
                a.patch(from, c.here);
                exact::refund(a, c.taken, S1);
                self.load_word(S0, at(S0, disp));
                let a = &mut self.asm;
                a.mov_imm(S1, site.into());
                a.jmp_to(t.ret_in(self.input.mode));
            }
            Stub::CrossPageMiss { from, number } => {
                a.patch(from, c.here);
                self.cross_page_missed(number);
            }
            Stub::CrossPage {
                from,
                offset,
                target,
                live,
            } => {
                a.patch(from, c.here);
                exact::refund(a, c.taken, S1);
                if live {
                    save_flags(a);
                }
                self.cross_page(offset, target);
            }
            _ => {}
        }
    }

    /// Emits the stub of an access that has missed the TLB, which goes on at `resume`.
    fn refill(&mut self, c: &Context<'_>, stub: Stub) {
        let Stub::Refill {
            from,
            resume,
            site,
            probe,
            finds,
            cached,
            ends,
        } = stub
        else {
            return;
        };
        let t = self.trampolines;
        let a = &mut self.asm;
        a.patch(from, c.here);
        let call = self.miss(probe, site);
        let a = &mut self.asm;
        a.patch(
            call,
            match probe {
                Probe::Stack => t.stack,
                Probe::SiteEntry(_) => t.site_entry,
                _ => t.miss,
            },
        );
        let bounces = ends.map(|ends| (self.asm.jcc(cc::O), ends));
        self.leave_if(cc::BE, c.number, t.refused);
        let finish = |a: &mut Asm| {
            if let Some(n) = cached {
                a.load(S1, gpr_slot(n));
            }
            match (finds, probe) {
                (Finds::Address, _) => {}
                (Finds::Parts, Probe::Known { gva, .. }) => {
                    a.lea(S0, at(S0, -(gva & 0xfff)));
                }
                (Finds::Parts, _) => a.mov_imm(S1, 0),
            }
            move_page(a, c.begins, -c.beyond);
            if let Some(w) = c.hoisted {
                w.borrow_registers(a);
            }
        };
        let a = &mut self.asm;
        finish(a);
        a.jmp_to(resume);
        if let Some((from, ends)) = bounces {
            let here = a.here();
            a.patch(from, here);
            finish(a);
            a.repeat(resume, ends);
            a.call_to(t.write_back);
            a.jmp_to(ends);
        }
    }

    /// Emits the stub of a group whose probe has missed the TLB: if no probe can serve the whole group, each access
    /// probes for itself.
    fn refill_group(
        &mut self,
        c: &Context<'_>,
        stub: Stub,
        known: impl Fn(u8, u32, bool) -> Option<Entries>,
    ) {
        let Stub::RefillGroup {
            from,
            resume,
            offset,
            member,
            probe,
            cached,
        } = stub
        else {
            return;
        };
        let t = self.trampolines;
        let a = &mut self.asm;
        a.patch(from, c.here);
        let first = if member.offset == 0 { FIRST } else { 0 };
        let site = site(offset, member.span, member.write) | first;
        let is_site_entry = matches!(probe, Probe::SiteEntry(_));
        // In a block that is not hot, the accesses themselves refill an entry that has another page.
        if member.refill || is_site_entry || self.input.hot.is_some() {
            let call = self.miss(probe, site);
            let a = &mut self.asm;
            a.patch(
                call,
                match probe {
                    Probe::Stack if member.refill => t.stack_group,
                    Probe::Stack => t.stack_split,
                    Probe::SiteEntry(_) if member.refill => t.site_entry_group,
                    Probe::SiteEntry(_) => t.site_entry_split,
                    _ if member.refill => t.miss_group,
                    _ => t.split,
                },
            );
            self.leave_if(cc::E, c.number, t.refused);
            let a = &mut self.asm;
            if let Some(n) = cached {
                a.load(S1, gpr_slot(n));
            }
            if let Some(w) = c.hoisted {
                let from = a.jcc(cc::BE);
                w.borrow_registers(a);
                a.jmp_to(resume);
                let here = a.here();
                a.patch(from, here);
            } else if c.beyond != 0 {
                let from = a.jcc(cc::BE);
                move_page(a, c.begins, -c.beyond);
                a.jmp_to(resume);
                let here = a.here();
                a.patch(from, here);
            } else {
                let from = a.jcc(cc::A);
                a.patch(from, resume);
            }
        }
        exact::refund(&mut self.asm, c.before, S1);
        if let Some(entries) = known(self.state.page, offset, true) {
            self.asm.jmp_to(entries.saved as usize);
            return;
        }
        let from = self.asm.jmp();
        self.link(from, offset, false, true);
    }

    /// Emits the stub of a direct branch within the page: links it if the target is known, else calls for the target.
    fn link_stub(
        &mut self,
        c: &Context<'_>,
        stub: Stub,
        known: impl Fn(u8, u32, bool) -> Option<Entries>,
    ) {
        let Stub::Link {
            mut from,
            number,
            live,
        } = stub
        else {
            return;
        };
        let t = self.trampolines;
        let a = &mut self.asm;
        if (c.hoisted.is_some() || c.beyond != 0 || c.taken != Cost::default())
            && let Some(site) = self.links.get_mut(number as usize)
        {
            a.patch(from, c.here);
            if let Some(w) = c.hoisted {
                w.is_left(a);
            }
            exact::refund(a, c.taken, S1);
            from = a.jmp();
            (site.patch, site.is_jump) = (from, false);
        }
        let here = a.here();
        let site = self.links.get(number as usize);
        let site = site.filter(|s| !s.is_of_interest());
        let entry = site.and_then(|s| Some(known(self.state.page, s.target, s.split)?.of(s)));
        if let Some(entry) = entry.filter(|e| *e != 0) {
            a.patch(from, entry);
            self.ahead.retain(|n| *n != number);
            return;
        }
        a.patch(from, here);
        let [word, jump] = a.stamp(&self.templates.link);
        a.patch32(word, number as i32);
        a.patch(jump, if live { t.link_live } else { t.link });
    }

    /// Emits the way of the direct branch `number` to another page through the target table.
    fn cross_page_missed(&mut self, number: u32) {
        let Some(site) = self.cross_page_sites.get(number as usize) else {
            return;
        };
        let (a, t) = (&mut self.asm, &self.trampolines);
        a.mov_signed(true, S0, site.target);
        a.mov_imm(S1, number.into());
        let to = t.cross_page_in(self.input.mode, site.pop);
        match site.returns {
            Some(back) => {
                a.call_to(to);
                a.jmp_to(back);
            }
            None => a.jmp_to(to),
        }
    }
}
