//! Branches: links within a page, remembered targets for direct ones to other
//! pages, the target table for everything else.

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
    ir::branch::{popped, target},
    ir::decoded::Decoded,
    ir::lowering::Lowering,
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
        if (0..0x1000).contains(&t) {
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

    /// A jump to a known place; `offset` is where to leave if the target is in
    /// another page that is not known yet.
    pub(super) fn direct(&mut self, offset: u32, t: i64) {
        if (0..0x1000).contains(&t) {
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

    /// On to the instruction at `offset`, which may be in the next page.
    pub(super) fn fall_through(&mut self, offset: u32) {
        if offset < 0x1000 {
            self.direct(offset - 1, offset.into());
        } else {
            self.flags_in_memory();
            self.give_registers_back();
            self.cross_page(offset - 1, offset as i32);
        }
    }

    /// Jumps to an address relative to the page; flags are saved.
    pub(super) fn cross_page(&mut self, offset: u32, t: i32) {
        let number = self.cross_page_begins(offset, t, 0, None);
        let from = self.asm.jmp();
        self.cross_page_ends(number, from);
    }

    /// Goes on if the condition of a branch to another page is met: PAGE is the target's then. `base`: r13 has the address at
    /// that offset. Returns the site's number.
    fn cross_page_begins(&mut self, offset: u32, target: i32, pop: i32, base: Option<i32>) -> u32 {
        let number = self.cross_page_sites.len() as u32;
        let page = target & !0xfff;
        let next = self.constant(page.into());
        // To an instruction of the same page goes what straddles two.
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
                    a.rm(self.input.long, &[0x8d], S1, at(S1, page)); // lea
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

    /// The rel32 at `jump` leads to the remembered target.
    fn cross_page_ends(&mut self, number: u32, jump: usize) {
        if let Some(site) = self.cross_page_sites.get_mut(number as usize) {
            site.jump = jump;
        }
    }

    /// A branch to an offset in the page. `split`: see [`LinkSite::split`].
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

    /// Jumps to the gva in r14 through the target table. Flags are saved.
    pub(super) fn jump(&mut self, offset: u32) {
        let a = &mut self.asm;
        let from = select_target(a);
        a.load(S0, at(S1, 24));
        a.store(SHORT_PAGE, S0);
        a.jmp_mem(at(S1, 16));
        self.stubs.push(Stub::Branch { from, offset });
    }

    /// Makes the gva in r14 a tag, and goes on if the next inline cache has that. Returns the cache's number, where page and code
    /// are in it, and the branch to take otherwise. There are fewer caches than branches.
    fn compare_inline_cache(&mut self) -> (usize, [Mem; 2], usize) {
        let cache = self.next.inline_cache;
        self.next.inline_cache = (cache + 1) % INLINE_CACHES;
        let word = |n: i32| at(TLB, inline_cache(cache) + 8 * n);
        self.asm.alu(true, Alu::Xor, S0, SHORT_SALT);
        self.asm.alu(true, Alu::Cmp, S0, word(0));
        (cache, [word(1), word(2)], self.asm.jcc(cc::NE))
    }

    /// The same as [`Self::jump`], where an inline cache has the target, if it does.
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

    /// Where the host's return goes, with the guest's return address on its stack. If the code
    /// has changed, the host's stack was dropped when this vCPU came to know of it, which
    /// serialising instructions see to.
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

    /// The gva after the instruction, if it is known.
    fn next(&self, d: &Decoded) -> Option<i32> {
        self.constant(d.end().into())
    }

    /// What [`Self::push_return`] has written, for the host's stack.
    fn push_for_host(&mut self, d: &Decoded) {
        match self.next(d) {
            Some(next) => self.asm.push_imm(next),
            None => self.asm.bytes(&[0x41, 0x55]), // push r13
        }
    }

    /// Writes the return address, which is in r13 then if it is not known; RSP is not changed yet.
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

    /// Offset of the instruction after a call, if it is in the same page.
    fn back(d: &Decoded) -> Option<u32> {
        Some(d.end()).filter(|back| *back < 0x1000)
    }

    pub(super) fn call(&mut self, d: &Decoded) -> Emit {
        let t = target(&d.i);
        let far = i32::try_from(t).map_err(|_| Unsupported)?;
        let is_near = (0..0x1000).contains(&t);
        // Without a probe nothing changes flags on the way.
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
            // Where it returns to, if that has been computed.
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

    /// Where an indirect branch leads, in r14.
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

    /// An indirect branch to the gva in r14.
    pub(super) fn indirect_to(&mut self, d: &Decoded) {
        if d.kind != Lowering::CallIndirect {
            // What goes by a table of imported functions goes where it went before, most of all.
            if self.input.by_guard && d.i.memory_base() == Register::RIP {
                self.jump_as_before(d.offset);
            } else {
                self.jump(d.offset);
            }
            return;
        }
        // The place of the return address may be where the target was read from: it is
        // written when it is certain that the call succeeds.
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

    /// Where page and code of what is called are, whose gva is in r14; relative to r13, which is in memory then, if they are in the
    /// table. (All address spaces share a kernel's table; inline caches would be filled anew in each.)
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

/// Goes on if [`Condition::BlockNumber`] is met. Returns where the number and the page are,
/// each with the branch if it is another one; `is_known`: in place of the second, where the target's page is, which
/// what is executed has then.
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

/// Goes on if [`Condition::PageGuard`] is met, where r13 has a gva if the target's page is not known. Returns where the displacement
/// is, the branch if it is not, where the tagged number is, and where the target's page is, or the tag is taken off.
pub(super) fn by_guard(isa: Isa, is_known: bool) -> Template<4> {
    let page_guard = at(TLB, page_guard(0));
    Template::new(isa, |a| {
        if is_known {
            let tagged = a.cmp_mem_imm32(true, page_guard);
            let from = a.jcc(cc::NE);
            a.store_imm(SHORT_PAGE, 0);
            return [tagged - 4, from, tagged, a.here() - 4];
        }
        // More than a byte can hold.
        a.lea(S1, at(S1, 0x1000));
        let tagged = a.here() - 4;
        a.alu(true, Alu::Cmp, S1, page_guard);
        let place = a.here() - 4;
        let from = a.jcc(cc::NE);
        // What a byte can.
        a.lea(S1, at(S1, -1));
        let untag = a.here() - 1;
        a.store(SHORT_PAGE, S1);
        [place, from, tagged, untag]
    })
}

/// Has r13 address the entry of the target table for the gva in r14, as `cache::place`
/// has it, and r14 its tag. Returns the branch to take if it is of another target or key.
pub(crate) fn select_target(a: &mut Asm) -> usize {
    a.alu(true, Alu::Xor, S0, SHORT_SALT);
    select_tag(a)
}

/// The same where r14 has the tag.
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

fn condition_bits(c: iced_x86::ConditionCode) -> Option<u8> {
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
