//! Loops: what stays where it is is found once between two polls, and those that walk through memory make so many turns as their groups
//! stay in their pages, without probes.
//!
//! ```text
//! again:  …                            a turn, or several, with probes
//!         jcc walk, or holds where there is no walk
//! holds:  sub r12, n; jl poll          a turn after another. Groups that stay: at the pointer that was kept, others with probes
//!         …
//!         jcc walk, or holds; after a poll: jmp again
//! walk:   if the last one was short, for some times: jmp holds, or again
//!         for each group that is at a constant distance from registers of which a turn changes one at most, by a constant:
//!             look for it as for the next turn, ANCHOR = host address - that register; not in the TLB: jmp again
//!         turns = those that all of them stay in their pages for, and in those after these that are their neighbours
//!             in the host's memory, too; few: jmp again
//!         r12 += CREDIT, once between two polls; r12 = turns * n, OWED = what that is less than before
//!         registers that the loop does not use = anchors
//! fast:   sub r12, n; jl walked        groups: at anchor + register
//!         …
//!         jcc fast
//! walked: those registers as before; r12 += OWED + n; jmp to where groups are looked for, or again if a poll is near
//! ```
//!
//! Translations that a turn uses stay in the TLB until the next poll, as they do within a block. Whatever leaves the fast turns
//! gives the registers back first. Who leaves them by a link adds OWED to the countdown; who leaves them by other ways comes to a
//! poll earlier than need be.

use core::ops::Range;

use iced_x86::InstructionInfoFactory;

use super::{
    Translator,
    flags::Flags,
    memory::{host_page, select_entry, selected, tag},
    stub::Stub,
};
use crate::{
    asm::*,
    codegen::countdown,
    frame::words::*,
    ir::branch::is_loop,
    ir::decoded::Decoded,
    ir::lowering::{Forms, Lowering},
    ir::member::{Base, Induction, Member, Moves},
};

/// Bytes that a turn goes on at most: fewer than eight turns of a page are not worth it.
const MAX_STRIDE: u32 = 512;
/// Turns without probes that it is worth it for.
const LEAST: i32 = 4;
/// Turns that have been worth it: for each instruction less, the loop goes back once before it tries again.
const WORTH: i32 = 6;
/// How often it goes back before that when it could not.
const FAILED: i32 = 2;
/// Bytes that a walk looks ahead, about.
const AHEAD: i32 = 16 << 12;
/// Guest registers whose host registers may have anchors: not that of RAX, by which flags are saved, nor of R12, which is left for
/// instructions that need more registers to work with.
const TO_BORROW: [u8; 8] = [3, 5, 6, 7, 2, 1, 8, 9];

/// A group whose place is known for some turns.
#[derive(Clone, Copy, Debug)]
struct Anchor {
    group: u16,
    induction: Induction,
    /// The guest's register whose host register has the anchor.
    borrowed: Option<u8>,
}

/// The fast turns.
#[derive(Clone, Debug)]
pub(super) struct HoistedLoop {
    /// Where they begin, where groups are looked for once more, and at which offset of the page the loop is.
    start: usize,
    retry: usize,
    offset: i64,
    /// Instructions of a pass, the last one of which is the branch back.
    len: i32,
    /// How often the loop is to go back before it walks again.
    reluctance: Mem,
    anchors: Vec<Anchor>,
    /// Instructions of a turn of a pass, and where the turns after the first begin: a walk may begin with any of them.
    turn: usize,
    turns: Vec<usize>,
}

/// Host registers to look for groups with, which are none of what their addresses are made of.
#[derive(Clone, Copy, Debug)]
struct Scratch {
    page: Reg,
    entry: Reg,
    turns: Reg,
}

impl Scratch {
    fn besides(inductions: &[(Member, Induction)]) -> Option<Self> {
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

    fn save(self, a: &mut Asm) {
        self.all().into_iter().for_each(|r| push(a, r));
    }

    fn restore(self, a: &mut Asm) {
        self.all().into_iter().rev().for_each(|r| pop(a, r));
    }
}

/// The host register of a guest register: `scratch`, where it is loaded to, if it lives in memory.
fn in_host(a: &mut Asm, n: u8, scratch: Reg) -> Reg {
    host_reg(n).unwrap_or_else(|| {
        a.load(scratch, gpr_slot(n));
        scratch
    })
}

/// The same of a group's base.
fn in_host_base(a: &mut Asm, base: Base, scratch: Reg) -> Option<Reg> {
    match base {
        Base::None => None,
        Base::Register(n) => Some(in_host(a, n, scratch)),
        Base::Page => {
            a.load(scratch, SHORT_PAGE);
            Some(scratch)
        }
    }
}

/// Divides r14, which is no more than [`AHEAD`] and a page, and rounds down; less than zero stays so.
fn divide(a: &mut Asm, by: u32) {
    if by.is_power_of_two() {
        a.shift(true, 7, S0, by.trailing_zeros() as u8); // sar
    } else {
        a.imul(true, S0, S0, (u32::MAX / by + 1) as i32);
        a.shift(true, 7, S0, 32);
    }
}

const fn anchor(slot: usize) -> Mem {
    gs(ANCHORS + 8 * slot)
}

/// Where a group begins, if its alignment is that of all turns.
fn short_induction(m: &Member) -> Option<Induction> {
    let induction = m.induction?;
    let is_short = induction.stride.unsigned_abs() <= MAX_STRIDE;
    (is_short && induction.stride % i32::from(m.align.to) == 0).then_some(induction)
}

/// Guest registers that the instructions do not use, of [`TO_BORROW`]; none if there is one that may be left by other ways than stubs.
fn unused(insns: &[Decoded]) -> impl Iterator<Item = u8> {
    use Lowering as K;
    let mut factory = InstructionInfoFactory::new();
    let mut used = 0_u16;
    for d in insns {
        let is_plain = matches!(
            d.kind,
            K::Nop
                | K::Copy
                | K::CopyAligned
                | K::CopyFp
                | K::CopyFpAligned
                | K::Lea
                | K::Push
                | K::Pop
                | K::Jcc
                | K::Jmp
                | K::Followed
        );
        if !is_plain {
            used = !0;
        }
        for r in factory.info(&d.i).used_registers() {
            let r = r.register();
            if r.is_gpr() {
                used |= 1 << (r.full_register().number() & 15);
            }
        }
    }
    TO_BORROW.into_iter().filter(move |n| used >> n & 1 == 0)
}

/// The first members of groups, and where these are to be found.
fn anchors(insns: &[Decoded], inductions: &[(Member, Induction)]) -> Vec<(Member, Anchor)> {
    let mut free = unused(insns);
    let anchors = inductions.iter().map(|(m, induction)| {
        let is_member = |d: &Decoded| d.member.is_some_and(|other| other.group == m.group);
        let by_operand = !insns
            .iter()
            .any(|d| is_member(d) && d.kind.stack_base().is_some());
        let anchor = Anchor {
            group: m.group,
            induction: *induction,
            borrowed: by_operand.then(|| free.next()).flatten(),
        };
        (*m, anchor)
    });
    anchors.collect()
}

/// Of how many turns of a loop a pass of the block is, if they are several that all access the same of each group, by an anchor in a register:
/// then a walk may begin with any of them. Returns the groups as they are for one turn, too.
fn single_turns(
    insns: &[Decoded],
    anchors: &[(Member, Anchor)],
) -> Option<(u32, Vec<(Member, Induction)>)> {
    let first = insns.first()?.offset;
    let turns = insns.iter().filter(|d| d.offset == first).count();
    if turns < 2 || !insns.len().is_multiple_of(turns) {
        return None;
    }
    let stride = |a: &Anchor| a.induction.stride / turns as i32;
    let (turn, others) = insns.split_at(insns.len() / turns);
    let are_alike = others.chunks(turn.len()).zip(1..).all(|(other, n)| {
        turn.iter().zip(other).all(|(one, other)| {
            let Some(m) = one.member else {
                return other.member.is_none();
            };
            let mut anchors = anchors.iter().map(|(_, a)| a);
            let anchor = anchors.find(|a| a.group == m.group && a.borrowed.is_some());
            anchor.is_some_and(|a| {
                let offset = m.offset + n * stride(a);
                one.offset == other.offset
                    && other
                        .member
                        .is_some_and(|m| (m.group, m.offset) == (a.group, offset))
            })
        })
    });
    let inductions = anchors.iter().map(|(m, a)| {
        let stride = stride(a);
        let more = stride.abs() * (turns as i32 - 1);
        let is_whole =
            a.induction.stride % turns as i32 == 0 && stride % i32::from(m.align.to) == 0;
        let from = if stride < 0 { more } else { 0 };
        let induction = Induction {
            stride,
            from: a.induction.from.checked_add(from)?,
            ..a.induction
        };
        let span = m.span.checked_sub(more as u32)?;
        is_whole.then_some((Member { span, ..*m }, induction))
    });
    let inductions = inductions.collect::<Option<_>>()?;
    are_alike.then_some((turns as u32, inductions))
}

impl Translator {
    /// Translates the turns after the first one of a block that has been, if it is a loop that is executed much, and some of its
    /// groups stay where that has found them: until the next poll, they need no probes. Returns where these turns begin.
    pub(super) fn hold(&mut self, insns: &[Decoded], forms: &Forms, again: usize) -> Option<usize> {
        let first = insns.first()?;
        let mut members = insns.iter().filter_map(|d| d.member);
        if !members.any(|m| m.first && m.stays) {
            return None;
        }
        self.asm.align();
        let start = self.asm.here();
        self.poll(insns.len(), first.offset, Some(again));
        self.turns(insns, forms);
        Some(start)
    }

    /// Turns of a loop that come after another.
    fn turns(&mut self, insns: &[Decoded], forms: &Forms) {
        (self.current, self.cached) = (None, None);
        self.flags = Flags::Memory;
        self.holds = true;
        self.body(insns, forms);
        self.holds = false;
    }

    /// Translates the fast turns of a block that has been, whose flags are not live where it begins. Returns where
    /// the block goes on in place of `next`, and the fast turns with their stubs, if it is such a loop and executed much. `again` is
    /// where a turn goes that cannot rely on one before.
    pub(super) fn hoist_probes(
        &mut self,
        insns: &[Decoded],
        forms: &Forms,
        (again, next): (usize, usize),
    ) -> Option<(usize, HoistedLoop, Range<usize>)> {
        self.hot.as_ref().filter(|_| self.long)?;
        let first = insns.first().filter(|_| is_loop(insns))?;
        let members = insns.iter().filter_map(|d| d.member.filter(|m| m.first));
        let is_known = |m: &Member| {
            let mut all = insns.iter().filter_map(|d| d.member);
            all.all(|other| other.group != m.group || other.induction.is_some())
        };
        let members = members.filter(|m| !m.alone && is_known(m));
        let inductions = members.filter_map(|m| Some((m, short_induction(&m)?)));
        let inductions: Vec<(Member, Induction)> = inductions.take(ANCHORS_LEN).collect();
        if inductions
            .iter()
            .all(|(_, induction)| induction.stride == 0)
        {
            return None;
        }
        let scratch = Scratch::besides(&inductions)?;
        let anchors = anchors(insns, &inductions);
        // The turns of a pass, and what is to be looked for.
        let (turns, inductions) = single_turns(insns, &anchors).unwrap_or((1, inductions));
        let a = &mut self.asm;
        let fails = a.here();
        scratch.restore(a);
        a.jmp_to(again);
        let start = a.here();
        let reluctance = gs(RELUCTANCES + 4 * self.next_hoist);
        self.next_hoist = (self.next_hoist + 1) % RELUCTANCES_LEN;
        a.alu_mem_imm8(false, Alu::Sub, reluctance, 1);
        let from = a.jcc(cc::NS);
        a.patch(from, next);
        a.store32_imm(reluctance, FAILED);
        let retry = a.here();
        scratch.save(a);
        let len = insns.len() as i32;
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
        let a = &mut self.asm;
        a.alu_imm(true, Alu::Add, scratch.turns, 1);
        a.alu_imm(true, Alu::Cmp, scratch.turns, LEAST * turns as i32);
        let few = a.jcc(cc::L);
        a.patch(few, fails);
        a.mov(S0, scratch.turns);
        if turns > 1 {
            divide(a, turns);
            a.imul(true, S1, S0, turns as i32);
            a.alu_rr(true, Alu::Sub, scratch.turns, S1);
            a.store32(gs(REST), scratch.turns);
        }
        a.imul(true, S1, S0, len);
        scratch.restore(a);
        countdown::begin_fast_turns(a);
        let mut hoisted = HoistedLoop {
            len,
            reluctance,
            start: 0,
            retry,
            offset: first.offset.into(),
            anchors: anchors.into_iter().map(|(_, anchor)| anchor).collect(),
            turn: insns.len() / turns as usize,
            turns: Vec::new(),
        };
        for (n, host, _) in hoisted.borrowed() {
            self.asm.store(state_register(n), host);
        }
        hoisted.borrow_registers(&mut self.asm);
        let a = &mut self.asm;
        let rests: Vec<usize> = (1..turns)
            .map(|rest| {
                a.alu_mem_imm8(false, Alu::Cmp, gs(REST), rest as i8);
                a.jcc(cc::E)
            })
            .collect();
        a.align();
        hoisted.start = a.here();
        let from = countdown::fast_turn(a, len);
        let stubs = self.stubs.len();
        self.stubs.push(Stub::TurnsDone { from, again });
        self.hoisted = Some(hoisted);
        self.turns(insns, forms);
        let hoisted = self.hoisted.take()?;
        // A rest of one turn is the last of a pass.
        for (from, turn) in rests.into_iter().zip(hoisted.turns.iter().rev()) {
            self.asm.patch(from, *turn);
        }
        Some((start, hoisted, stubs..self.stubs.len()))
    }

    /// A turn of a fast pass begins, of which the first one may be the first that is made.
    pub(super) fn begin_turn(&mut self) {
        let Some(w) = &self.hoisted else {
            return;
        };
        if self.position == 0 || !self.position.is_multiple_of(w.turn) {
            return;
        }
        self.settle_stack();
        (self.current, self.cached) = (None, None);
        self.flags = Flags::Memory;
        let here = self.asm.here();
        if let Some(w) = &mut self.hoisted {
            w.turns.push(here);
        }
    }

    /// Looks for a group as it is in the next turn: in r13 is how far the host's addresses are from its then, and in r14 how many
    /// bytes it may go on, which are less than zero if it straddles two pages.
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
        // So far as the next pages are its neighbours in the host's memory, too.
        let again = a.here();
        // There is no way from one end of addresses to the other.
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

    /// Makes the anchor of the distance in r13: what does not move of the address is added.
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

    /// The branch at `from`, whose target is at an offset from the page, goes to the next fast turn, if it is the one that does.
    pub(super) fn goes_on_hoisted(&mut self, from: usize, target: i64) -> bool {
        let Some(w) = &self.hoisted else {
            return false;
        };
        let is_back = self.position + 1 == w.len as usize && target == w.offset;
        if is_back {
            self.asm.patch(from, w.start);
        }
        is_back
    }

    /// Registers are the guest's again, if they are not.
    pub(super) fn give_registers_back(&mut self) {
        if let Some(w) = &self.hoisted {
            w.give_registers_back(&mut self.asm);
        }
    }

    /// A fast turn has an anchor in the host register.
    pub(super) fn is_borrowed(&self, host: Reg) -> bool {
        let hoisted = self.hoisted.as_ref();
        hoisted.is_some_and(|w| w.borrowed().any(|(_, r, _)| r == host))
    }

    /// The host address of a member of a group whose anchor is in a register.
    pub(super) fn anchored(&mut self, d: &Decoded) -> Option<Mem> {
        let m = d.member?;
        let (_, anchor) = self.hoisted.as_ref()?.of(m.group)?;
        let register = host_reg(anchor.borrowed?)?;
        let place = self.at_anchor(d, m, anchor.induction, register, S0);
        if !d.high {
            return Some(place);
        }
        self.asm.lea(S0, place);
        self.current = None;
        Some(at(S0, 0))
    }

    /// Makes r14 the address of the first byte of a group that the instruction would probe for; false: it has no anchor.
    pub(super) fn access_hoisted(&mut self, d: &Decoded) -> bool {
        let hoisted = self.hoisted.as_ref();
        let Some((m, (slot, of_group))) = d
            .member
            .filter(|m| m.first)
            .and_then(|m| Some((m, hoisted?.of(m.group)?)))
        else {
            return false;
        };
        self.asm.load(S0, anchor(slot));
        self.cached = None;
        let place = self.at_anchor(d, m, of_group.induction, S0, S1);
        let disp = place.disp.wrapping_sub(m.offset);
        self.asm.lea(S0, Mem { disp, ..place });
        if let Some(slot) = m.slot {
            self.asm.store(kept(slot), S0);
        }
        self.current = Some(m.group);
        true
    }

    /// From an anchor in a register to the access; a register that lives in memory is loaded to `scratch`.
    fn at_anchor(
        &mut self,
        d: &Decoded,
        m: Member,
        induction: Induction,
        anchor: Reg,
        scratch: Reg,
    ) -> Mem {
        let disp = m.from_anchor;
        let moving = match induction.moves {
            Moves::Nothing => return at(anchor, disp),
            Moves::Base => d.kind.stack_base().unwrap_or(d.i.memory_base()),
            Moves::Index => d.i.memory_index(),
        };
        let moving = in_host(&mut self.asm, moving.number() as u8, scratch);
        if moving == S0 {
            self.current = None;
        }
        match (induction.moves, induction.index) {
            (Moves::Index, Some((_, scale))) => at(anchor, disp).plus(moving, scale),
            // RSP's register can be an index, too.
            _ => at(moving, disp).plus(anchor, 0),
        }
    }
}

impl HoistedLoop {
    /// Guest registers whose host registers have anchors, with these and the anchors' slots.
    fn borrowed(&self) -> impl Iterator<Item = (u8, Reg, usize)> {
        let all = self.anchors.iter().enumerate();
        all.filter_map(|(slot, anchor)| Some((anchor.borrowed?, host_reg(anchor.borrowed?)?, slot)))
    }

    /// The group's anchor is in a register.
    pub(super) fn borrows_for(&self, group: u16) -> bool {
        let anchor = self.of(group);
        anchor.is_some_and(|(_, a)| a.borrowed.is_some())
    }

    fn of(&self, group: u16) -> Option<(usize, Anchor)> {
        let slot = self.anchors.iter().position(|a| a.group == group)?;
        Some((slot, self.anchors[slot]))
    }

    /// Changes no flags.
    pub(super) fn give_registers_back(&self, a: &mut Asm) {
        for (n, host, _) in self.borrowed() {
            a.load(host, state_register(n));
        }
    }

    /// All turns have been made that there were: on to the next ones, or `again`. The countdown is what it would be without the walk.
    pub(super) fn ends(&self, a: &mut Asm, again: usize) {
        a.store32_imm(self.reluctance, 0);
        // A walk that is interrupted at once would never come to a poll.
        let from = countdown::end_fast_turns(a, self.len, LEAST * self.len);
        a.patch(from, again);
        a.jmp_to(self.retry);
    }

    /// The same where the loop is left. Changes r13, and no flags.
    pub(super) fn is_left(&self, a: &mut Asm) {
        countdown::leave_fast_turns(a, WORTH * self.len, |a| a.store32(self.reluctance, S1));
    }

    /// Changes no flags.
    pub(super) fn borrow_registers(&self, a: &mut Asm) {
        for (_, host, slot) in self.borrowed() {
            a.load(host, anchor(slot));
        }
    }
}
