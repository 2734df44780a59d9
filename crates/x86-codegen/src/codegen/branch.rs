//! Branches: links within a page, cross-page branches that remember their target, and the target table for all others.

use iced_x86::{OpKind, Register};
use mmu::l1::{INLINE_CACHES, inline_cache, page_guard};

use super::{
    Condition, CrossPageSite, Emit, LinkSite, Stub, Translator, Unsupported,
    countdown::exact::{self, Cost},
};
use crate::{
    asm::*,
    frame::requests,
    frame::targets::TARGETS_LEN,
    frame::words::*,
    ir::branch::{is_one_way, popped, target},
    ir::decoded::Decoded,
    ir::lowering::Lowering,
    ir::mode::Mode,
};

impl Translator {
    pub(super) fn jcc(&mut self, d: &Decoded) -> Emit {
        let t = target(&d.i);
        let condition = condition_bits(d.i.condition_code()).ok_or(Unsupported)?;
        let condition = self.condition(condition);
        let refund = self.state.tally.refund_if_taken(d, self.state.position);
        let from = if refund != Cost::default() && self.next_fast_turn(t).is_some() {
            let goes_on = self.asm.jcc(condition ^ 1);
            exact::refund(&mut self.asm, refund, S1);
            let from = self.asm.jmp();
            let here = self.asm.here();
            self.asm.patch(goes_on, here);
            from
        } else {
            self.asm.jcc(condition)
        };
        let live = self.state.flags.is_register();
        if self.goes_on_hoisted(from, t) {
            return Ok(());
        }
        self.state
            .tally
            .mark_taken(self.stubs.len(), d, self.state.position);
        if self.input.mode.is_near(d.offset, t) {
            let site = self.link(from, t as u32, live, false);
            site.comes_from(d.offset);
            site.turn = d.turn;
        } else {
            self.stubs.push(Stub::CrossPage {
                from,
                offset: d.offset,
                target: i32::try_from(t).map_err(|_| Unsupported)?,
                live,
            });
        }
        Ok(())
    }

    /// Emits a jump to a known target. `offset` is the instruction at which to leave if the target is in another page
    /// that is not known yet.
    pub(super) fn direct(&mut self, offset: u32, t: i64) {
        if self.input.mode.is_near(offset, t) {
            let from = self.asm.jmp();
            if self.goes_on_hoisted(from, t) {
                return;
            }
            let live = self.state.flags.is_register();
            let site = self.link(from, t as u32, live, false);
            site.is_jump = true;
            site.comes_from(offset);
        } else {
            self.flags_in_memory();
            self.give_registers_back();
            self.cross_page(offset, t as i32);
        }
    }

    /// Emits a jump to the instruction at `offset`, which may be in the next page.
    pub(super) fn fall_through(&mut self, offset: u32) {
        if offset < 0x1000 {
            self.direct(offset - 1, offset.into());
        } else {
            self.flags_in_memory();
            self.give_registers_back();
            self.cross_page(offset - 1, offset as i32);
        }
    }

    /// Emits a jump to an address relative to the page. Flags are saved.
    pub(super) fn cross_page(&mut self, offset: u32, t: i32) {
        let number = self.cross_page_begins(offset, t, 0, None);
        let from = self.asm.jmp();
        self.cross_page_ends(number, from);
    }

    /// Emits the condition of a cross-page branch. If it is met, execution goes on behind it, and [`SHORT_PAGE`] is the
    /// target's page. `base`: r13 has the gva at that offset from the page. Returns the site's number.
    fn cross_page_begins(&mut self, offset: u32, target: i32, pop: i32, base: Option<i32>) -> u32 {
        let number = self.cross_page_sites.len() as u32;
        let page = target & !0xfff;
        let next = self.constant(page.into());
        // The block of an instruction that straddles two pages is entered by a branch to its own page, which has no
        // page guard.
        let by_guard = self.input.by_guard && page != 0;
        if by_guard && next.is_none() && base.is_none() {
            self.asm.load(S1, SHORT_PAGE);
        }
        let template =
            &self.templates.cross_page[usize::from(by_guard)][usize::from(next.is_some())];
        let a = &mut self.asm;
        let [first, from, second, third] = a.stamp(template);
        self.stubs.push(Stub::CrossPageMiss { from, number });
        let condition = if by_guard {
            let untagged = next.unwrap_or(page - base.unwrap_or(0));
            a.patch32(second, untagged);
            if let Some(next) = next {
                a.patch32(third, next);
            }
            Condition::PageGuard {
                page_guard: first,
                tagged: second,
                untagged,
                untag: next.is_none().then_some(third),
            }
        } else {
            match next {
                Some(next) => a.patch32(second, next),
                None => {
                    let from = third;
                    self.stubs.push(Stub::CrossPageMiss { from, number });
                    // The page in which CS begins starts below instruction pointer 0.
                    let is_wide = self.input.long || self.input.mode.has(Mode::SEGMENTED);
                    a.rm(is_wide, &[0x8d], S1, at(S1, page)); // lea
                    a.store(SHORT_PAGE, S1);
                }
            }
            Condition::BlockNumber {
                number: first,
                page: next.is_none().then_some(second),
            }
        };
        self.cross_page_sites.push(CrossPageSite {
            condition,
            jump: 0,
            offset,
            target,
            pop,
            returns: None,
            to: 0,
        });
        number
    }

    /// Notes that the rel32 at `jump` is the one that leads to the remembered target.
    fn cross_page_ends(&mut self, number: u32, jump: usize) {
        if let Some(site) = self.cross_page_sites.get_mut(number as usize) {
            site.jump = jump;
        }
    }

    /// Adds a link site for the rel32 at `from`, and the stub of a branch to an offset in the page. `live`: flags are
    /// in RFLAGS. `split`: see [`LinkSite::split`].
    pub(super) fn link(
        &mut self,
        from: usize,
        target: u32,
        live: bool,
        split: bool,
    ) -> &mut LinkSite {
        let number = self.links.len();
        self.links.push(LinkSite {
            patch: from,
            target,
            saved: !live,
            split,
            is_back: false,
            is_jump: false,
            polls: false,
            turn: 0,
            is_taken: false,
            is_away: self.state.page != 0,
        });
        self.stubs.push(Stub::Link {
            from,
            number: number as u32,
            live,
        });
        &mut self.links[number]
    }

    /// Translates a direct jump, whose target is translated next.
    pub(super) fn jmp(&mut self, d: &Decoded) {
        let link = self.links.len();
        self.direct(d.offset, target(&d.i));
        if self.links.len() > link && self.state.page == 0 {
            self.ahead.push(link as u32);
        }
    }

    /// Emits a jump to the gva in r14 through the target table. Flags are saved.
    pub(super) fn jump(&mut self, offset: u32) {
        let a = &mut self.asm;
        let from = select_target(a);
        a.load(S0, at(S1, 24));
        a.store(SHORT_PAGE, S0);
        a.jmp_mem(at(S1, 16));
        self.stubs.push(Stub::Branch { from, offset });
    }

    /// Emits what turns the gva in r14 into a tag and compares it with the next inline cache; execution goes on behind
    /// if they are equal. Returns the cache's number, its words of the target's page and code, and the branch that is
    /// taken otherwise. Branches share caches, as there are fewer of them.
    fn compare_inline_cache(&mut self) -> (usize, [Mem; 2], usize) {
        let cache = self.next.inline_cache;
        self.next.inline_cache = (cache + 1) % INLINE_CACHES;
        let word = |n: i32| at(TLB, inline_cache(cache) + 8 * n);
        self.asm.alu(true, Alu::Xor, S0, SHORT_SALT);
        self.asm.alu(true, Alu::Cmp, S0, word(0));
        (cache, [word(1), word(2)], self.asm.jcc(cc::NE))
    }

    /// Does what [`Self::jump`] does, by an inline cache, which most often has the target.
    fn jump_as_before(&mut self, offset: u32) {
        let (cache, [page, code], from) = self.compare_inline_cache();
        let a = &mut self.asm;
        a.load(S1, page);
        a.store(SHORT_PAGE, S1);
        a.jmp_mem(code);
        self.stubs.push(Stub::InlineCache {
            from,
            offset,
            cache,
        });
    }

    /// Emits the code that the host's return leads to; the guest's return address is on top of the host's stack. The
    /// code behind needs no check: if it has changed, the host's stack was dropped when this vCPU learned of the
    /// change, at the latest at the serialising instruction that cross-modifying code needs.
    pub(super) fn return_site(&mut self, back: u32) {
        let a = &mut self.asm;
        a.bytes(&[0x41, 0x5d]); // pop r13
        if let Some(page) = self.input.bound {
            a.store_imm(SHORT_PAGE, page);
        } else {
            a.lea(S1, at(S1, -(back as i32)));
            a.store(SHORT_PAGE, S1);
        }
        let from = self.asm.jmp();
        if self.state.page == 0 {
            self.ahead.push(self.links.len() as u32);
        }
        self.link(from, back, false, false).is_jump = true;
    }

    /// Returns the gva after the instruction, if it is known.
    fn next(&self, d: &Decoded) -> Option<i32> {
        self.constant(d.end().into())
    }

    /// Pushes on the host's stack the return address that [`Self::push_return`] has written.
    fn push_for_host(&mut self, d: &Decoded) {
        match self.next(d) {
            Some(next) => self.asm.push_imm(next),
            None => self.asm.bytes(&[0x41, 0x55]), // push r13
        }
    }

    /// Emits the write of the return address to the guest's stack. RSP does not change yet. If the address is not known
    /// at translation, r13 has it afterwards.
    pub(super) fn push_return(&mut self, d: &Decoded) {
        let disp = self.stack_slot(d, GUEST_RSP, -self.word(), true);
        if let Some(next) = self.next(d) {
            return self.asm.store_imm(at(S0, disp), next);
        }
        let end = self.state.beyond + d.end() as i32;
        self.asm.load(S1, SHORT_PAGE);
        self.lea_word(S1, at(S1, end));
        self.store_word(at(S0, disp), S1);
    }

    /// Returns the offset of the instruction after a call, if it is in the same page and the call comes back. A call
    /// that does not come back pushes nothing on the host's stack: the next return is that of the call before.
    fn back(d: &Decoded) -> Option<u32> {
        Some(d.end()).filter(|back| *back < 0x1000 && !is_one_way(d))
    }

    pub(super) fn call(&mut self, d: &Decoded) -> Emit {
        let t = target(&d.i);
        let far = i32::try_from(t).map_err(|_| Unsupported)?;
        let is_near = self.input.mode.is_near(d.offset, t);
        // Flags can stay in RFLAGS if the call probes nothing, as then nothing else changes them before the target.
        if !is_near || d.member.is_none_or(|m| m.first) {
            self.flags_in_memory();
        }
        let live = self.state.flags.is_register();
        if !is_near {
            self.compare_target(d.offset, far);
        }
        self.push_return(d);
        if is_near {
            self.move_stack(-self.word());
            let Some(back) = Self::back(d) else {
                let from = self.asm.jmp();
                self.link(from, t as u32, live, false).polls = true;
                return Ok(());
            };
            self.push_for_host(d);
            let from = self.asm.call();
            self.link(from, t as u32, live, false).polls = true;
            self.return_site(back);
        } else {
            let back = Self::back(d);
            if back.is_some() {
                self.push_for_host(d);
            }
            // Offset of the return address, which r13 has if it is not known at translation.
            let base = self.next(d).is_none().then_some(d.end() as i32);
            let number = self.cross_page_begins(d.offset, far, -self.word(), base);
            self.move_stack(-self.word());
            let Some(back) = back else {
                let from = self.asm.jmp();
                self.cross_page_ends(number, from);
                return Ok(());
            };
            let from = self.asm.call();
            self.cross_page_ends(number, from);
            let returns = self.asm.here();
            if let Some(site) = self.cross_page_sites.get_mut(number as usize) {
                site.returns = Some(returns);
            }
            self.return_site(back);
        }
        Ok(())
    }

    pub(super) fn indirect(&mut self, d: &Decoded) -> Emit {
        self.read_target(d)?;
        self.indirect_to(d);
        Ok(())
    }

    /// Loads r14 with the target of an indirect branch.
    pub(super) fn read_target(&mut self, d: &Decoded) -> Emit {
        if d.i.op0_kind() == OpKind::Memory {
            self.read_operand(d, self.word() as u32)?;
            self.load_word(S0, at(S0, 0));
        } else {
            let r = self.read_register(d.i.op0_register(), S0);
            if r != S0 {
                self.move_word(S0, r);
            }
        }
        Ok(())
    }

    /// Emits an indirect branch to the gva in r14.
    pub(super) fn indirect_to(&mut self, d: &Decoded) {
        if d.kind != Lowering::CallIndirect {
            // A jump through a table of imported functions nearly always leads where it led before.
            if self.input.by_guard && d.i.memory_base() == Register::RIP {
                self.jump_as_before(d.offset);
            } else {
                self.jump(d.offset);
            }
            return;
        }
        // The return address may be stored where the target was read from, so it is written only once it is certain
        // that the call succeeds.
        let [page, code] = self.select_callee(d.offset);
        self.push_return(d);
        let back = Self::back(d);
        if back.is_some() {
            self.push_for_host(d);
        }
        let a = &mut self.asm;
        if page.base == Some(S1) {
            a.load(S1, gs(SPILL));
        }
        a.load(S0, page);
        a.store(SHORT_PAGE, S0);
        self.move_stack(-self.word());
        let Some(back) = back else {
            return self.asm.jmp_mem(code);
        };
        self.asm.call_mem(code);
        self.return_site(back);
    }

    /// Emits the search for the callee, whose gva is in r14. Returns the words with its page and code, in an inline
    /// cache or in the target table; the latter are relative to r13, which [`SPILL`] keeps. Kernels use the table,
    /// which all address spaces share: inline caches would have to be filled again in each.
    fn select_callee(&mut self, offset: u32) -> [Mem; 2] {
        if !self.input.by_guard {
            let from = select_target(&mut self.asm);
            self.stubs.push(Stub::Call { from, offset });
            self.asm.store(gs(SPILL), S1);
            return [at(S1, 24), at(S1, 16)];
        }
        let (cache, places, from) = self.compare_inline_cache();
        self.stubs.push(Stub::CallCache {
            from,
            resume: self.asm.here(),
            offset,
            cache,
        });
        places
    }

    pub(super) fn ret(&mut self, d: &Decoded) {
        let disp = self.stack_slot(d, GUEST_RSP, 0, false);
        self.load_word(S0, at(S0, disp));
        let by = self.word() + popped(&d.i);
        self.asm.alu(true, Alu::Cmp, S0, at(RSP, 8));
        let from = self.asm.jcc(cc::NE);
        self.stubs.push(Stub::Ret {
            from,
            site: requests::branch(d.offset, by),
        });
        self.move_stack(by);
        self.asm.ret();
    }
}

/// Returns the template of [`Condition::BlockNumber`], behind which execution goes on if the condition is met, with the
/// places of the number, of the branch that is taken if it is another one, of the page, and of the branch that is taken
/// if that is another one. `is_known`: the gva of the target's page is known; then there is no second comparison, and
/// the third place is that of the gva that is stored to [`SHORT_PAGE`].
pub(super) fn by_key(isa: Isa, is_known: bool) -> Template<4> {
    Template::new(isa, |a| {
        let key = a.cmp_mem_imm32(false, SHORT_NUMBER);
        let from = a.jcc(cc::NE);
        if is_known {
            a.store_imm(SHORT_PAGE, 0);
            return [key, from, a.here() - 4, 0];
        }
        let page = a.mov_imm64(S1, 0);
        a.alu(true, Alu::Cmp, S1, SHORT_PAGE);
        [key, from, page, a.jcc(cc::NE)]
    })
}

/// Returns the template of [`Condition::PageGuard`], behind which execution goes on if the condition is met, with the
/// places of the page guard's displacement, of the branch that is taken otherwise, and of the tagged number. The fourth
/// place is that of the target's gva if `is_known`; else r13 has a gva, and it is the place of the byte that takes the
/// tag off.
pub(super) fn by_guard(isa: Isa, is_known: bool) -> Template<4> {
    let page_guard = at(TLB, page_guard(0));
    Template::new(isa, |a| {
        if is_known {
            let tagged = a.cmp_mem_imm32(true, page_guard);
            let from = a.jcc(cc::NE);
            a.store_imm(SHORT_PAGE, 0);
            return [tagged - 4, from, tagged, a.here() - 4];
        }
        // A placeholder that needs a displacement of four bytes.
        a.lea(S1, at(S1, 0x1000));
        let tagged = a.here() - 4;
        a.alu(true, Alu::Cmp, S1, page_guard);
        let place = a.here() - 4;
        let from = a.jcc(cc::NE);
        // A placeholder that fits a displacement of one byte.
        a.lea(S1, at(S1, -1));
        let untag = a.here() - 1;
        a.store(SHORT_PAGE, S1);
        [place, from, tagged, untag]
    })
}

/// Emits what makes r14 the tag of the gva in r14, and r13 the address of its entry in the target table, at the place
/// that `cache::place` computes. Returns the branch to take if the entry is that of another target or key.
pub(crate) fn select_target(a: &mut Asm) -> usize {
    a.alu(true, Alu::Xor, S0, SHORT_SALT);
    select_tag(a)
}

/// Does what [`select_target`] does, where r14 has the tag already.
pub(crate) fn select_tag(a: &mut Asm) -> usize {
    if a.isa().bmi2 {
        a.rorx(S1, S0, 64 - 5);
    } else {
        a.mov(S1, S0);
        a.shift(true, 4, S1, 5);
    }
    a.alu_rr(false, Alu::Xor, S1, S0);
    a.alu_imm(false, Alu::And, S1, (TARGETS_LEN as i32 - 1) << 5);
    a.alu(true, Alu::Add, S1, SHORT_TARGETS);
    a.alu(true, Alu::Cmp, S0, at(S1, 0));
    a.jcc(cc::NE)
}

pub(super) fn condition_bits(c: iced_x86::ConditionCode) -> Option<u8> {
    use iced_x86::ConditionCode as C;
    Some(match c {
        C::o => 0,
        C::no => 1,
        C::b => 2,
        C::ae => 3,
        C::e => 4,
        C::ne => 5,
        C::be => 6,
        C::a => 7,
        C::s => 8,
        C::ns => 9,
        C::p => 10,
        C::np => 11,
        C::l => 12,
        C::ge => 13,
        C::le => 14,
        C::g => 15,
        C::None => return None,
    })
}
