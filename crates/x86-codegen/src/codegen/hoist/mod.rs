//! Hoisted probes: a hot loop finds its pages once, and then makes iterations without probes.
//!
//! A group that stays where it is is found once between two polls. A group that moves by a constant stride has an
//! *induction*: the loop is executed in passes of *fast iterations*, as many as all groups stay in their pages for.
//!
//! ```text
//! again:  …                            one or several iterations, with probes
//!         jcc find, or holds where no group moves
//! holds:  sub r12, n; jl poll          later iterations: groups that stay by the kept pointer, others with probes
//!         …
//!         jcc find, or holds; after a poll: jmp again
//! find:   if the last pass was short, for some times: jmp holds, or again
//!         for each group at a constant distance from registers, of which an iteration changes at most one, by a
//!             constant: look for it as for the next iteration, ANCHOR = host address - that register; not in the TLB:
//!             jmp again
//!         iterations = those that all groups stay in their pages for, or in the pages behind these that are neighbours
//!             in the host's memory, too; few: jmp again
//!         r12 += CREDIT, once between two polls; r12 = iterations * n, OWED = what that is less than before
//!         registers that the loop does not use = anchors
//! fast:   sub r12, n; jl done          groups: at anchor + register
//!         …
//!         jcc fast
//! done:   those registers as before; r12 += OWED + n; jmp find, or again if a poll is near
//! ```
//!
//! TLB entries that an iteration uses stay until the next poll, as they do within a block. Whatever leaves the fast
//! iterations gives the registers back first. A way out by a link adds OWED to the countdown; the other ways out do
//! not, so that the next poll comes early.

mod anchors;
mod probe;

use core::ops::Range;

use anchors::{Anchor, anchors, short_induction, single_turns};
use probe::{Scratch, divide, in_host};

use super::{Translator, flags::Flags, stub::Stub};
use crate::{
    asm::*,
    codegen::countdown::{
        self,
        exact::{self, Cost, Layout},
    },
    frame::words::*,
    ir::branch::is_loop,
    ir::decoded::Decoded,
    ir::lowering::Forms,
    ir::member::{Induction, Member, Moves},
};

/// Fewest fast iterations that are worth a pass.
const LEAST: i32 = 4;
/// Number of fast iterations that certainly were worth a pass. For each instruction less than these, the loop goes back
/// once before it looks for its groups again.
const WORTH: i32 = 6;
/// How often the loop goes back after a failure before it looks for its groups again.
const FAILED: i32 = 2;
/// Returns the frame's word for an anchor.
const fn anchor(slot: usize) -> Mem {
    gs(ANCHORS + 8 * slot)
}

/// The fast iterations of a loop.
#[derive(Clone, Debug)]
pub(super) struct HoistedLoop {
    /// Offsets in the buffer of the first one and of the search for groups, and the loop's offset in the page.
    start: usize,
    retry: usize,
    offset: i64,
    /// Instructions of the block that is repeated, the last of which is the branch back.
    len: i32,
    /// What the block counts for, and in which layout, in code that counts what is retired.
    cost: Option<(Layout, Cost)>,
    /// The word that says how often the loop goes back before it looks for its groups again.
    reluctance: Mem,
    anchors: Vec<Anchor>,
    /// Instructions of one iteration, if the block holds several, and where each after the first begins: the first pass
    /// may begin with any of them.
    turn: usize,
    turns: Vec<usize>,
}

/// Makes r13 the number of instructions that are executed: in blocks of `turns` iterations and `len` instructions,
/// while `scratch.turns` iterations are left. [`REST`] becomes the iterations that do not fill a block. Where what is
/// retired counts, r13 has theirs, too.
fn count_instructions(a: &mut Asm, scratch: Scratch, (turns, len): (u32, i32), counts: bool) {
    a.mov(S0, scratch.turns);
    if turns > 1 {
        divide(a, turns);
        a.imul(true, S1, S0, turns as i32);
        a.alu_rr(true, Alu::Sub, scratch.turns, S1);
        a.store32(gs(REST), scratch.turns);
    }
    a.imul(true, S1, S0, len);
    if counts && turns > 1 {
        a.imul(true, scratch.turns, scratch.turns, len / turns as i32);
        a.alu_rr(true, Alu::Add, S1, scratch.turns);
    }
}

impl Translator {
    /// Translates again, for later iterations, a hot block that is a loop, if some of its groups stay where the first
    /// iteration has found them: these need no probes until the next poll. `again`: the first translation. Returns
    /// where the new one begins.
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

    /// Emits the iterations of a loop that come after another.
    fn turns(&mut self, insns: &[Decoded], forms: &Forms) {
        (self.state.current, self.state.cached) = (None, None);
        self.state.flags = Flags::Memory;
        self.state.holds = true;
        self.body(insns, forms);
        self.state.holds = false;
    }

    /// Translates the fast iterations of a hot loop, no flags of which are live where it begins. Returns where the
    /// block goes on in place of `next`, and the fast iterations with the range of their stubs; `None` if the block is
    /// no such loop. `again` is where an iteration goes that cannot rely on one before.
    pub(super) fn hoist_probes(
        &mut self,
        insns: &[Decoded],
        forms: &Forms,
        (again, next): (usize, usize),
    ) -> Option<(usize, HoistedLoop, Range<usize>)> {
        self.input.hot.as_ref().filter(|_| self.input.long)?;
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
        // The iterations in the block, and the groups that are to be looked for.
        let (turns, inductions) = single_turns(insns, &anchors).unwrap_or((1, inductions));
        let a = &mut self.asm;
        let fails = a.here();
        scratch.restore(a);
        a.jmp_to(again);
        let start = a.here();
        let reluctance = gs(RELUCTANCES + 4 * self.next.hoist);
        self.next.hoist = (self.next.hoist + 1) % RELUCTANCES_LEN;
        let layout = self.state.tally.layout();
        let cost = self.state.tally.entry();
        let unit = layout.map_or(1, |layout| layout.executed(1));
        a.alu_mem_imm(false, Alu::Sub, reluctance, unit);
        let from = a.jcc(cc::NS);
        a.patch(from, next);
        a.store32_imm(reluctance, FAILED * unit);
        let retry = a.here();
        scratch.save(a);
        let len = insns.len() as i32;
        self.find_groups(&inductions, scratch, fails);
        let a = &mut self.asm;
        a.alu_imm(true, Alu::Add, scratch.turns, 1);
        a.alu_imm(true, Alu::Cmp, scratch.turns, LEAST * turns as i32);
        let few = a.jcc(cc::L);
        a.patch(few, fails);
        count_instructions(a, scratch, (turns, len), cost.is_some());
        scratch.restore(a);
        match cost {
            Some((layout, _)) => exact::begin_fast_turns(a, layout),
            None => countdown::begin_fast_turns(a),
        }
        let mut hoisted = HoistedLoop {
            len,
            cost,
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
        let rests: Vec<usize> = (1..turns as usize)
            .map(|rest| self.branch_to_rest(rest, insns.len() - rest * hoisted.turn, layout))
            .collect();
        let a = &mut self.asm;
        a.align();
        hoisted.start = a.here();
        let from = match cost {
            Some((layout, cost)) => exact::enter(a, layout, cost),
            None => [countdown::fast_turn(a, len); _],
        };
        let stubs = self.stubs.len();
        self.stubs.push(Stub::TurnsDone { from, again });
        self.state.hoisted = Some(hoisted);
        self.turns(insns, forms);
        let hoisted = self.state.hoisted.take()?;
        // A rest of one iteration is the last of the block.
        for (from, turn) in rests.into_iter().zip(hoisted.turns.iter().rev()) {
            self.asm.patch(from, *turn);
        }
        Some((start, hoisted, stubs..self.stubs.len()))
    }

    /// Branches to the last `rest` iterations of the block, which begin with instruction `n`, if the first pass has
    /// only these. Returns the branch.
    fn branch_to_rest(&mut self, rest: usize, n: usize, layout: Option<Layout>) -> usize {
        let a = &mut self.asm;
        a.alu_mem_imm8(false, Alu::Cmp, gs(REST), rest as i8);
        let Some(layout) = layout else {
            return a.jcc(cc::E);
        };
        let is_other = a.jcc(cc::NE);
        let cost = self.state.tally.from(n);
        let is_over = exact::enter(a, layout, cost);
        let from = a.jmp();
        let here = a.here();
        is_over.into_iter().for_each(|from| a.patch(from, here));
        exact::refund_entry(a, layout, cost, S1);
        let here = a.here();
        a.patch(is_other, here);
        from
    }

    /// Notes where an iteration within the block begins, as the first pass may begin there.
    pub(super) fn begin_turn(&mut self) {
        let Some(w) = &self.state.hoisted else {
            return;
        };
        if self.state.position == 0 || !self.state.position.is_multiple_of(w.turn) {
            return;
        }
        self.settle_stack();
        (self.state.current, self.state.cached) = (None, None);
        self.state.flags = Flags::Memory;
        let here = self.asm.here();
        if let Some(w) = &mut self.state.hoisted {
            w.turns.push(here);
        }
    }

    /// Makes the branch at `from`, to an offset from the page, go on with the next fast iteration if it is the branch
    /// back. Returns true then.
    pub(super) fn goes_on_hoisted(&mut self, from: usize, target: i64) -> bool {
        let Some(start) = self.next_fast_turn(target) else {
            return false;
        };
        self.asm.patch(from, start);
        true
    }

    /// Returns where the next fast iteration begins, if a branch to `target` is the branch back.
    pub(super) fn next_fast_turn(&self, target: i64) -> Option<usize> {
        let w = self.state.hoisted.as_ref()?;
        let is_back = self.state.position + 1 == w.len as usize && target == w.offset;
        is_back.then_some(w.start)
    }

    /// Gives borrowed registers back to the guest, if there are any.
    pub(super) fn give_registers_back(&mut self) {
        if let Some(w) = &self.state.hoisted {
            w.give_registers_back(&mut self.asm);
        }
    }

    /// Returns true if the host register holds an anchor.
    pub(super) fn is_borrowed(&self, host: Reg) -> bool {
        let hoisted = self.state.hoisted.as_ref();
        hoisted.is_some_and(|w| w.borrowed().any(|(_, r, _)| r == host))
    }

    /// Returns the host address of a member of a group whose anchor is in a register.
    pub(super) fn anchored(&mut self, d: &Decoded) -> Option<Mem> {
        let m = d.member?;
        let (_, anchor) = self.state.hoisted.as_ref()?.of(m.group)?;
        let register = host_reg(anchor.borrowed?)?;
        let place = self.at_anchor(d, m, anchor.induction, register, S0);
        if !d.high {
            return Some(place);
        }
        self.asm.lea(S0, place);
        self.state.current = None;
        Some(at(S0, 0))
    }

    /// Makes r14 the address of the first byte of the group that the instruction would probe for. Returns false if the
    /// group has no anchor.
    pub(super) fn access_hoisted(&mut self, d: &Decoded) -> bool {
        let hoisted = self.state.hoisted.as_ref();
        let Some((m, (slot, of_group))) = d
            .member
            .filter(|m| m.first)
            .and_then(|m| Some((m, hoisted?.of(m.group)?)))
        else {
            return false;
        };
        self.asm.load(S0, anchor(slot));
        self.state.cached = None;
        let place = self.at_anchor(d, m, of_group.induction, S0, S1);
        let disp = place.disp.wrapping_sub(m.offset);
        self.asm.lea(S0, Mem { disp, ..place });
        if let Some(slot) = m.slot {
            self.asm.store(kept(slot), S0);
        }
        self.state.current = Some(m.group);
        true
    }

    /// Returns the access's address from an anchor in a register. A register that lives in memory is loaded to
    /// `scratch`.
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
            self.state.current = None;
        }
        match (induction.moves, induction.index) {
            (Moves::Index, Some((_, scale))) => at(anchor, disp).plus(moving, scale),
            // RSP's register can be an index, too.
            _ => at(moving, disp).plus(anchor, 0),
        }
    }
}

impl HoistedLoop {
    /// Returns the guest registers whose host registers hold anchors, with the host registers and the anchors' slots.
    fn borrowed(&self) -> impl Iterator<Item = (u8, Reg, usize)> {
        let all = self.anchors.iter().enumerate();
        all.filter_map(|(slot, anchor)| Some((anchor.borrowed?, host_reg(anchor.borrowed?)?, slot)))
    }

    /// Returns true if the group's anchor is in a register.
    pub(super) fn borrows_for(&self, group: u16) -> bool {
        let anchor = self.of(group);
        anchor.is_some_and(|(_, a)| a.borrowed.is_some())
    }

    fn of(&self, group: u16) -> Option<(usize, Anchor)> {
        let slot = self.anchors.iter().position(|a| a.group == group)?;
        Some((slot, self.anchors[slot]))
    }

    /// Loads the guest's registers where anchors were. Changes no flags.
    pub(super) fn give_registers_back(&self, a: &mut Asm) {
        for (n, host, _) in self.borrowed() {
            a.load(host, state_register(n));
        }
    }

    /// Ends a pass, whose iterations have all been made: goes on with the search for groups, or at `again` if a poll is
    /// near. The countdown becomes what it would be without the pass.
    pub(super) fn ends(&self, a: &mut Asm, again: usize) {
        a.store32_imm(self.reluctance, 0);
        // With less than this left, each pass would be interrupted at once, and the loop would never come to a poll.
        let least = LEAST * self.len;
        match self.cost {
            Some(cost) => exact::end_fast_turns(a, cost, (least, again)),
            None => {
                let is_near = countdown::end_fast_turns(a, self.len, least);
                a.patch(is_near, again);
            }
        }
        a.jmp_to(self.retry);
    }

    /// Ends a pass where the loop is left. Changes r13, and no flags.
    pub(super) fn is_left(&self, a: &mut Asm) {
        let worth = WORTH * self.len;
        let keep = |a: &mut Asm| a.store32(self.reluctance, S1);
        match self.cost {
            Some((layout, _)) => exact::leave_fast_turns(a, layout, worth, keep),
            None => countdown::leave_fast_turns(a, worth, keep),
        }
    }

    /// Loads anchors to the registers that they borrow. Changes no flags.
    pub(super) fn borrow_registers(&self, a: &mut Asm) {
        for (_, host, slot) in self.borrowed() {
            a.load(host, anchor(slot));
        }
    }
}
