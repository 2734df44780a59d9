//! [`Tally`]: what a block's instructions count for, in code that counts what is retired ([`exact`]).

use x86_cpu::retired::outcome;
use x86_interp::events_of;

use super::{
    Stub, Translator,
    countdown::exact::{self, Cost, Layout},
};
use crate::{
    frame::words::S0,
    ir::{branch::target, decoded::Decoded, lowering::Lowering, streams::Streams},
};

/// What a block has counted too much where it is left, by instructions and by stubs: it is given back there.
#[derive(Debug, Default)]
pub(super) struct Tally {
    /// The streams that are counted besides instructions.
    streams: Option<Streams>,
    /// By an instruction's number, what is not executed if the block is left before that instruction. The last one is
    /// 0, for the block's end.
    rest: Vec<Cost>,
    /// The first stub of each instruction, and what stubs from there on give back if they leave the block before their
    /// instruction.
    marks: Vec<(usize, Cost)>,
    /// Stubs of branches that leave the block in its middle, and what each of them gives back.
    taken: Vec<(usize, Cost)>,
    /// What is given back where the block's last branch, which is counted as taken, is not.
    falls: Cost,
}

/// Returns what an instruction counts for. `leaves`: a conditional branch leaves the block by its target. Other
/// branches are always taken.
fn cost(d: &Decoded, streams: Streams, leaves: bool) -> Cost {
    let has_branched = match d.kind {
        Lowering::Jcc => leaves != d.is_negated,
        Lowering::Counted => leaves,
        _ => true,
    };
    Cost::of(streams, outcome(events_of(&d.i), has_branched))
}

/// Returns true if the block's last instruction is a conditional branch that is counted as taken: a loop's branch back,
/// whose next turn then has nothing to give back. (Not if what gives back would add to a sum in memory, whose bound the
/// next block may not look at.)
fn is_likely(d: &Decoded, streams: Streams) -> bool {
    matches!(d.kind, Lowering::Jcc | Lowering::Counted)
        && !streams.has_memory()
        && target(&d.i) <= d.offset.into()
}

impl Tally {
    /// Begins the tally of a block. `streams`: what it counts besides instructions, if it counts.
    pub(super) fn begin(&mut self, insns: &[Decoded], streams: Option<Streams>) {
        self.streams = streams;
        self.rest.clear();
        self.marks.clear();
        self.taken.clear();
        self.falls = Cost::default();
        let Some(streams) = streams else { return };
        let mut rest = Cost::default();
        self.rest.push(rest);
        for (n, d) in insns.iter().rev().enumerate() {
            let is_taken = n == 0 && is_likely(d, streams);
            if is_taken {
                self.falls = cost(d, streams, true) - cost(d, streams, false);
            }
            // The interpreter counts the instructions that it executes itself.
            if !matches!(d.kind, Lowering::Interpret | Lowering::Unknown) {
                rest = rest + cost(d, streams, is_taken);
            }
            self.rest.push(rest);
        }
        self.rest.reverse();
    }
    pub(super) const fn counts(&self) -> bool {
        self.streams.is_some()
    }
    /// Returns how sums are laid out, if anything is counted.
    pub(super) fn layout(&self) -> Option<Layout> {
        self.streams.map(Layout::of)
    }
    /// Returns what is not executed if the block is left before instruction `n`.
    pub(super) fn from(&self, n: usize) -> Cost {
        self.rest.get(n).copied().unwrap_or_default()
    }
    /// Returns how sums are laid out, and what the whole block counts for, if anything is counted.
    pub(super) fn entry(&self) -> Option<(Layout, Cost)> {
        self.layout().map(|layout| (layout, self.from(0)))
    }
    /// Notes that the next stubs are those of instruction `n`.
    pub(super) fn mark(&mut self, stubs: usize, n: usize) {
        if self.counts() {
            self.marks.push((stubs, self.from(n)));
        }
    }
    /// Notes that the next stubs are those of instruction `n` again, but that what comes behind it has been given back
    /// already.
    pub(super) fn mark_alone(&mut self, stubs: usize, n: usize) {
        if self.counts() {
            self.marks.push((stubs, self.from(n) - self.from(n + 1)));
        }
    }
    /// Returns what the conditional branch `d`, instruction `n`, gives back when it is taken.
    pub(super) fn refund_if_taken(&self, d: &Decoded, n: usize) -> Cost {
        self.streams.map_or(Cost::default(), |streams| {
            self.from(n) - cost(d, streams, true)
        })
    }
    /// Notes that the next stub is executed when the conditional branch `d`, instruction `n`, is taken.
    pub(super) fn mark_taken(&mut self, stub: usize, d: &Decoded, n: usize) {
        if self.counts() {
            self.taken.push((stub, self.refund_if_taken(d, n)));
        }
    }
    /// Notes that the next stub leaves the block before instruction `n`: for other code, or for another translation of
    /// that instruction.
    pub(super) fn mark_left(&mut self, stub: usize, n: usize) {
        if self.counts() {
            self.taken.push((stub, self.from(n)));
        }
    }
    /// Returns what is given back where execution falls out of the block's end.
    pub(super) const fn falls(&self) -> Cost {
        self.falls
    }
    /// Forgets branches of stubs from number `stubs` on, which have been removed.
    pub(super) fn truncate(&mut self, stubs: usize) {
        self.taken.retain(|(stub, _)| *stub < stubs);
    }
    /// Returns what a stub gives back that leaves the block before its instruction.
    pub(super) fn before(&self, stub: usize) -> Cost {
        let of = self.marks.iter().rev().find(|(from, _)| *from <= stub);
        of.map_or(Cost::default(), |(_, refund)| *refund)
    }
    /// Returns what a stub gives back that leaves the block by a branch.
    pub(super) fn taken(&self, stub: usize) -> Cost {
        let of = self.taken.iter().find(|(n, _)| *n == stub);
        of.map_or(Cost::default(), |(_, refund)| *refund)
    }
}

impl Translator {
    /// Prepares for a block that counts what is retired, with these streams besides instructions, or for one that does
    /// not count.
    pub(super) fn count(&mut self, insns: &[Decoded], streams: Option<Streams>) {
        if self.state.tally.layout() != streams.map(Layout::of) {
            self.trampolines = *self.all_trampolines.of(streams);
        }
        self.state.tally.begin(insns, streams);
    }

    /// Does what [`Self::poll`] does in a block that counts. Execution goes on after the poll where nothing has been
    /// counted yet.
    pub(super) fn counted_poll(&mut self, offset: u32, after: Option<usize>) {
        let resume = after.unwrap_or(self.asm.here());
        let Some((layout, cost)) = self.state.tally.entry() else {
            return;
        };
        let from = exact::enter(&mut self.asm, layout, cost);
        self.stubs.push(Stub::Poll {
            from,
            resume,
            offset,
            cost,
        });
    }

    /// Notes what is to be given back if the trampoline that is called next leaves the instruction to the interpreter.
    pub(super) fn note_refund(&mut self) {
        if let Some(layout) = self.state.tally.layout() {
            let rest = self.state.tally.from(self.state.position);
            exact::note_refund(&mut self.asm, layout, rest);
        }
    }
    /// Does the same for the trampoline that has just been called, by constants behind the call.
    pub(super) fn place_refund(&mut self) {
        if let Some(layout) = self.state.tally.layout() {
            let rest = self.state.tally.from(self.state.position);
            exact::place_refund(&mut self.asm, layout, rest);
        }
    }
    /// Emits a branch to a trampoline that leaves before the stub's instruction, if a condition is met. At the
    /// trampoline, flags and all registers except r14 are as they are here.
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
