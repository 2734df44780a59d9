//! [`Tally`]: what the instructions of a block count for, in code that counts what is retired ([`exact`]).

use x86_cpu::retired::outcome;
use x86_interp::events_of;

use super::{Stub, Translator, countdown::exact};
use crate::{asm::Asm, ir::decoded::Decoded, ir::lowering::Lowering};

/// What is given back where a block is left, by instructions and by stubs.
#[derive(Debug, Default)]
pub(super) struct Tally {
    /// The stream that is counted besides instructions.
    stream: Option<usize>,
    /// What is not executed if the block is left before an instruction, by its number; and 0, behind the last one.
    rest: Vec<i32>,
    /// What stubs from one on give back that leave the block before their instruction.
    marks: Vec<(usize, i32)>,
    /// Stubs of branches that leave the block in its middle, and what each gives back.
    taken: Vec<(usize, i32)>,
}

/// Its events of a stream, if a conditional branch leaves the block by its target or not; others always branch.
fn events(d: &Decoded, stream: usize, leaves: bool) -> i32 {
    let has_branched = match d.kind {
        Lowering::Jcc => leaves != d.is_negated,
        Lowering::Counted => leaves,
        _ => true,
    };
    i32::from(outcome(events_of(&d.i), has_branched) >> stream & 1)
}

impl Tally {
    /// A block is translated.
    pub(super) fn begin(&mut self, insns: &[Decoded], stream: Option<usize>) {
        self.stream = stream;
        self.rest.clear();
        self.marks.clear();
        self.taken.clear();
        let Some(stream) = stream else { return };
        let mut rest = 0;
        self.rest.push(0);
        for d in insns.iter().rev() {
            // The interpreter counts its own.
            if !matches!(d.kind, Lowering::Interpret | Lowering::Unknown) {
                rest += exact::cost(1, events(d, stream, false));
            }
            self.rest.push(rest);
        }
        self.rest.reverse();
    }
    pub(super) const fn counts(&self) -> bool {
        self.stream.is_some()
    }
    /// What is not executed if the block is left before instruction `n`.
    pub(super) fn from(&self, n: usize) -> i32 {
        self.rest.get(n).copied().unwrap_or(0)
    }
    /// The next stubs are those of instruction `n`.
    pub(super) fn mark(&mut self, stubs: usize, n: usize) {
        if self.counts() {
            self.marks.push((stubs, self.from(n)));
        }
    }
    /// The next stubs are those of instruction `n` again, when what comes behind it has been given back.
    pub(super) fn mark_alone(&mut self, stubs: usize, n: usize) {
        if self.counts() {
            self.marks.push((stubs, self.from(n) - self.from(n + 1)));
        }
    }
    /// What the conditional branch `d`, instruction `n`, gives back when it is taken.
    pub(super) fn refund_if_taken(&self, d: &Decoded, n: usize) -> i32 {
        self.stream.map_or(0, |stream| {
            self.from(n) - exact::cost(1, events(d, stream, true))
        })
    }
    /// The next stub is that of the conditional branch `d`, instruction `n`, when it is taken.
    pub(super) fn mark_taken(&mut self, stub: usize, d: &Decoded, n: usize) {
        if self.counts() {
            self.taken.push((stub, self.refund_if_taken(d, n)));
        }
    }
    /// The next stub goes on with what is not instruction `n`, or another translation of it.
    pub(super) fn mark_left(&mut self, stub: usize, n: usize) {
        if self.counts() {
            self.taken.push((stub, self.from(n)));
        }
    }
    /// There are only so many stubs.
    pub(super) fn truncate(&mut self, stubs: usize) {
        self.taken.retain(|(stub, _)| *stub < stubs);
    }
    /// What a stub gives back that leaves the block before its instruction.
    pub(super) fn before(&self, stub: usize) -> i32 {
        let of = self.marks.iter().rev().find(|(from, _)| *from <= stub);
        of.map_or(0, |(_, refund)| *refund)
    }
    /// What one gives back that leaves it by a branch.
    pub(super) fn taken(&self, stub: usize) -> i32 {
        let of = self.taken.iter().find(|(n, _)| *n == stub);
        of.map_or(0, |(_, refund)| *refund)
    }
}

impl Translator {
    /// What is translated next counts what is retired, and this stream besides instructions.
    pub(super) fn count(&mut self, insns: &[Decoded], stream: Option<usize>) {
        if self.state.tally.counts() != stream.is_some() {
            core::mem::swap(&mut self.trampolines, &mut self.other_trampolines);
        }
        self.state.tally.begin(insns, stream);
    }

    /// As [`Self::poll`], for a block that counts: it goes on where it has not counted yet.
    pub(super) fn counted_poll(&mut self, offset: u32, after: Option<usize>) {
        let resume = after.unwrap_or(self.asm.here());
        let cost = self.state.tally.from(0);
        let from = exact::enter(&mut self.asm, cost);
        self.stubs.push(Stub::Poll {
            from,
            resume,
            offset,
            cost,
        });
    }

    /// The trampoline that is called next may leave the instruction to the interpreter.
    pub(super) fn note_refund(&mut self) {
        if self.state.tally.counts() {
            let rest = self.state.tally.from(self.state.position);
            exact::note_refund(&mut self.asm, rest);
        }
    }
    /// A branch to a trampoline that leaves before the stub's instruction, if a condition is met. Flags are as they were there.
    pub(super) fn leave_if(&mut self, cc: u8, stub: usize, trampoline: usize) {
        let refund = self.state.tally.before(stub);
        let a = &mut self.asm;
        if refund == 0 {
            let from = a.jcc(cc);
            return a.patch(from, trampoline);
        }
        let goes_on = a.jcc(cc ^ 1);
        exact::refund(a, refund);
        a.jmp_to(trampoline);
        let here = a.here();
        a.patch(goes_on, here);
    }
}

/// A stub gives back so much, if that is anything.
pub(super) fn refund(a: &mut Asm, refund: i32) {
    exact::refund(a, refund);
}
