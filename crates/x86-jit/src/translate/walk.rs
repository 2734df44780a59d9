//! Loops that walk through memory: so many turns as their groups stay in their pages, without probes.
//!
//! ```text
//! again:  …                            a turn, or several, with probes
//!         jcc walk
//! walk:   for each group that is at a constant distance from a register that a turn adds a constant to:
//!             probe as for the next turn, DELTA = host address - guest's; not in the TLB: jmp again
//!         turns = those that the least number of them stays in its page for; few: jmp again
//!         r12 = turns * n, OWED = what that is less than before
//! fast:   sub r12, n; jl walked        groups: at DELTA + address
//!         …
//!         jcc fast
//! walked: r12 += OWED + n; jmp again
//! ```
//!
//! Translations that a turn uses stay in the TLB until the next poll, as they do within a block. Who leaves the fast turns
//! by a link adds OWED to the countdown; who leaves them by other ways comes to a poll earlier than need be.

use super::{Translator, flags::Flags, memory::Probe, stubs::Stub};
use crate::{
    area::*,
    asm::*,
    decoded::Decoded,
    groups::{Member, Walk},
    kind::{Forms, Kind},
    translate::branch::target,
};

/// Groups at most.
const MAX_GROUPS: usize = 4;
/// Bytes that a turn goes on at most: fewer than eight turns of a page are not worth it.
const MAX_STRIDE: u32 = 512;
/// Turns without probes that it is worth it for.
const LEAST: i32 = 4;

/// The fast turns.
#[derive(Clone, Copy, Debug)]
pub(super) struct Walking {
    /// Where they begin, and at which offset of the page.
    start: usize,
    offset: i64,
    /// Number of the last instruction, which is the branch back.
    last: usize,
    groups: [Option<u16>; MAX_GROUPS],
}

/// The countdown is what it would be without the walk, plus so much. Changes r13, and no flags.
pub(super) fn pay_back(a: &mut Asm, plus: i32) {
    a.load(S1, gs(OWED));
    a.lea(COUNTER, at(COUNTER, plus).plus(S1, 0));
}

/// `imul r13d, r13d, by`
fn imul(a: &mut Asm, by: i32) {
    a.rr(false, &[0x69], S1, S1);
    a.imm32(by);
}

const fn delta(slot: usize) -> Mem {
    gs(DELTAS + 8 * slot)
}

/// Where a group begins, if its alignment is that of all turns.
fn walk_of(m: &Member) -> Option<Walk> {
    let walk = m.walk?;
    let is_short = walk.stride.unsigned_abs() <= MAX_STRIDE;
    (is_short && walk.stride % i32::from(m.align.to) == 0).then_some(walk)
}

impl Translator {
    /// Translates the fast turns of a block that has been, whose flags are not live where it begins. Returns where
    /// the block goes on in place of `again`, if it is such a loop and executed much.
    pub(super) fn walk(&mut self, insns: &[Decoded], forms: &Forms, again: usize) -> Option<usize> {
        self.hot.as_ref().filter(|_| self.long)?;
        let (first, last) = (insns.first()?, insns.last()?);
        let goes_back = matches!(last.kind, Kind::Jcc | Kind::Jmp)
            && target(&last.i) == i64::from(first.offset);
        if !goes_back {
            return None;
        }
        let mut walking = Walking {
            start: 0,
            offset: first.offset.into(),
            last: insns.len() - 1,
            groups: [None; MAX_GROUPS],
        };
        let members = insns.iter().filter_map(|d| d.member.filter(|m| m.first));
        let walks = members.filter_map(|m| Some((m, walk_of(&m)?)));
        let walks: Vec<(Member, Walk)> = walks.take(MAX_GROUPS).collect();
        if walks.iter().all(|(_, walk)| walk.stride == 0) {
            return None;
        }
        let start = self.asm.here();
        let len = insns.len() as i32;
        let mut is_first = true;
        for (slot, (m, walk)) in walks.iter().enumerate() {
            walking.groups[slot] = Some(m.group);
            self.probe_walk(slot, m, *walk, again);
            let room = 4096 - m.span as i32;
            let a = &mut self.asm;
            if walk.stride == 0 {
                continue;
            }
            // Turns that are left in the page: a few less, at most, by the rounding of the factor.
            a.alu_imm(false, Alu::And, S0, 0xfff);
            if walk.stride > 0 {
                a.mov_imm(S1, room as u64);
                a.alu_rr(false, Alu::Sub, S1, S0);
            } else {
                a.mov32(S1, S0);
            }
            imul(a, (1 << 16) / walk.stride.abs());
            a.shift(false, 5, S1, 16);
            if !is_first {
                a.load32(S0, gs(TURNS));
                a.alu_rr(false, Alu::Cmp, S1, S0);
                // cmova r13d, r14d
                a.rr(false, &[0x0f, 0x47], S1, S0);
            }
            a.store32(gs(TURNS), S1);
            is_first = false;
        }
        let a = &mut self.asm;
        a.load32(S1, gs(TURNS));
        a.alu_imm(false, Alu::Cmp, S1, LEAST);
        let few = a.jcc(cc::B);
        a.patch(few, again);
        imul(a, len);
        a.store_imm(gs(OWED), 0);
        a.mov(S0, COUNTER);
        a.alu_rr(true, Alu::Sub, S0, S1);
        let is_less = a.jcc(cc::L);
        a.store(gs(OWED), S0);
        a.mov(COUNTER, S1);
        let here = a.here();
        a.patch(is_less, here);
        walking.start = here;
        a.alu_imm(true, Alu::Sub, COUNTER, len);
        let from = a.jcc(cc::L);
        self.stubs.push(Stub::Walked { from, again, len });
        self.current = None;
        self.cached = None;
        self.flags = Flags::Memory;
        self.walking = Some(walking);
        self.body(insns, forms);
        self.walking = None;
        Some(start)
    }

    /// Probes for a group as it is in the next turn; its first host address is in r14 then.
    fn probe_walk(&mut self, slot: usize, m: &Member, walk: Walk, again: usize) {
        let base = host_reg(walk.register).unwrap_or(S1);
        if base == S1 {
            self.asm.load(S1, home(walk.register));
        }
        self.asm.lea(S0, at(base, walk.from));
        if let Some(from) = self.branch_if_misaligned(m.align) {
            self.asm.patch(from, again);
        }
        let a = &mut self.asm;
        let [limit, from] = Probe::from(m.write).emit(a);
        a.patch32(limit, 4096 - m.span as i32);
        a.patch(from, again);
        a.lea(S1, at(S0, walk.from.wrapping_neg()));
        match host_reg(walk.register) {
            Some(base) => a.alu_rr(true, Alu::Sub, S1, base),
            None => a.alu(true, Alu::Sub, S1, home(walk.register)),
        }
        a.store(delta(slot), S1);
    }

    /// The branch at `from`, whose target is at an offset from the page, goes to the next fast turn, if it is the one that does.
    pub(super) fn walks_on(&mut self, from: usize, target: i64) -> bool {
        let Some(w) = &self.walking else {
            return false;
        };
        let is_back = self.position == w.last && target == w.offset;
        if is_back {
            self.asm.patch(from, w.start);
        }
        is_back
    }

    /// The slot of the group that the instruction would probe for.
    pub(super) fn walked(&self, d: &Decoded) -> Option<(usize, Member)> {
        let m = d.member.filter(|m| m.first)?;
        let groups = self.walking?.groups;
        Some((groups.iter().position(|g| *g == Some(m.group))?, m))
    }

    /// Makes r14 the address of the group's first byte, which is at `base + disp` in the guest.
    pub(super) fn walk_to(&mut self, (slot, m): (usize, Member), base: Reg, disp: i32) {
        self.asm.load(S0, delta(slot));
        self.asm.lea(S0, at(S0, disp).plus(base, 0));
        if let Some(slot) = m.slot {
            self.asm.store(kept(slot), S0);
        }
        self.current = Some(m.group);
    }
}
