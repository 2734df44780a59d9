//! [`Tally`]: what the instructions of a block count for, in code that counts what is retired ([`exact`]).

use x86_cpu::retired::outcome;
use x86_interp::events_of;

use super::{
    Stub, Translator,
    countdown::exact::{self, Cost, Layout},
};
use crate::{frame::words::S0, ir::decoded::Decoded, ir::lowering::Lowering, ir::streams::Streams};

/// What is given back where a block is left, by instructions and by stubs.
#[derive(Debug, Default)]
pub(super) struct Tally {
    /// The streams that are counted besides instructions.
    streams: Option<Streams>,
    /// What is not executed if the block is left before an instruction, by its number; and 0, behind the last one.
    rest: Vec<Cost>,
    /// What stubs from one on give back that leave the block before their instruction.
    marks: Vec<(usize, Cost)>,
    /// Stubs of branches that leave the block in its middle, and what each gives back.
    taken: Vec<(usize, Cost)>,
}

/// What an instruction counts for, if a conditional branch leaves the block by its target or not; others always branch.
fn cost(d: &Decoded, streams: Streams, leaves: bool) -> Cost {
    let has_branched = match d.kind {
        Lowering::Jcc => leaves != d.is_negated,
        Lowering::Counted => leaves,
        _ => true,
    };
    Cost::of(streams, outcome(events_of(&d.i), has_branched))
}

impl Tally {
    /// A block is translated.
    pub(super) fn begin(&mut self, insns: &[Decoded], streams: Option<Streams>) {
        self.streams = streams;
        self.rest.clear();
        self.marks.clear();
        self.taken.clear();
        let Some(streams) = streams else { return };
        let mut rest = Cost::default();
        self.rest.push(rest);
        for d in insns.iter().rev() {
            // The interpreter counts its own.
            if !matches!(d.kind, Lowering::Interpret | Lowering::Unknown) {
                rest = rest + cost(d, streams, false);
            }
            self.rest.push(rest);
        }
        self.rest.reverse();
    }
    pub(super) const fn counts(&self) -> bool {
        self.streams.is_some()
    }
    /// How, if anything is counted.
    pub(super) fn layout(&self) -> Option<Layout> {
        self.streams.map(Layout::of)
    }
    /// What is not executed if the block is left before instruction `n`.
    pub(super) fn from(&self, n: usize) -> Cost {
        self.rest.get(n).copied().unwrap_or_default()
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
    pub(super) fn refund_if_taken(&self, d: &Decoded, n: usize) -> Cost {
        self.streams.map_or(Cost::default(), |streams| {
            self.from(n) - cost(d, streams, true)
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
    pub(super) fn before(&self, stub: usize) -> Cost {
        let of = self.marks.iter().rev().find(|(from, _)| *from <= stub);
        of.map_or(Cost::default(), |(_, refund)| *refund)
    }
    /// What one gives back that leaves it by a branch.
    pub(super) fn taken(&self, stub: usize) -> Cost {
        let of = self.taken.iter().find(|(n, _)| *n == stub);
        of.map_or(Cost::default(), |(_, refund)| *refund)
    }
}

impl Translator {
    /// What is translated next counts what is retired, and these streams besides instructions.
    pub(super) fn count(&mut self, insns: &[Decoded], streams: Option<Streams>) {
        if self.state.tally.layout() != streams.map(Layout::of) {
            self.trampolines = *self.all_trampolines.of(streams);
        }
        self.state.tally.begin(insns, streams);
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
        if let Some(layout) = self.state.tally.layout() {
            let rest = self.state.tally.from(self.state.position);
            exact::note_refund(&mut self.asm, layout, rest);
        }
    }
    /// A branch to a trampoline that leaves before the stub's instruction, if a condition is met. Flags are as they were there, as are
    /// registers but r14.
    pub(super) fn leave_if(&mut self, cc: u8, stub: usize, trampoline: usize) {
        let refund = self.state.tally.before(stub);
        let a = &mut self.asm;
        if refund == Cost::default() {
            let from = a.jcc(cc);
            return a.patch(from, trampoline);
        }
        let goes_on = a.jcc(cc ^ 1);
        exact::refund(a, refund, S0);
        a.jmp_to(trampoline);
        let here = a.here();
        a.patch(goes_on, here);
    }
}
