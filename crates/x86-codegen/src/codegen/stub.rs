//! [`Stub`]: what a block rarely executes, noted while it is translated and emitted behind it.

use super::{
    countdown::{Polls, exact::Cost},
    memory::{Finds, Probe},
};
use crate::ir::member::Member;

/// A stub that is to be emitted. Each is entered by the branch at `from`.
#[derive(Clone, Copy, Debug)]
pub(super) enum Stub {
    /// An access misses the TLB: goes back to `resume` with the host address, or its parts, where `finds` says.
    Refill {
        from: usize,
        resume: usize,
        site: u32,
        probe: Probe,
        finds: Finds,
        /// The guest register that r13 has to hold at `resume`.
        cached: Option<u8>,
        /// Where the instruction ends, if its code from `resume` on may be executed on a copy of its operand.
        ends: Option<usize>,
    },
    /// A group's probe misses the TLB.
    RefillGroup {
        from: usize,
        resume: usize,
        offset: u32,
        member: Member,
        probe: Probe,
        cached: Option<u8>,
    },
    /// The instruction is left to the interpreter.
    Bail {
        from: usize,
        offset: u32,
    },
    Stale {
        from: usize,
        offset: u32,
    },
    /// A page of a trace, other than its first, may have changed or moved.
    Moved {
        from: usize,
        offset: u32,
    },
    /// The target table does not have the target of a branch. r14 has the target's tag.
    Branch {
        from: usize,
        offset: u32,
    },
    /// The inline cache of a jump does not have the target, whose tag is in r14.
    InlineCache {
        from: usize,
        offset: u32,
        cache: usize,
    },
    /// A return leads to another address, which is in r14, than the one on top of the host's stack.
    Ret {
        from: usize,
        site: u32,
    },
    /// The interpreter executes an instruction that has done nothing yet, and has nothing to do with FP state: a call
    /// whose target the target table does not have, or RDPMC.
    Call {
        from: usize,
        offset: u32,
    },
    /// The inline cache of a call does not have the target, whose tag is in r14. The call has done nothing yet.
    CallCache {
        from: usize,
        resume: usize,
        offset: u32,
        cache: usize,
    },
    Poll {
        from: Polls,
        resume: usize,
        offset: u32,
        /// What the block has been counted for, in code that counts what is retired.
        cost: Cost,
    },
    LoadFp {
        from: usize,
        resume: usize,
    },
    Link {
        from: usize,
        number: u32,
        live: bool,
    },
    /// The fast iterations of a pass have all been made.
    TurnsDone {
        from: Polls,
        again: usize,
    },
    /// An indirect branch of a trace does not lead where it was expected to. `number` is its index in
    /// [`super::state::Emission::branches`].
    Unexpected {
        from: usize,
        number: usize,
    },
    /// A return within a trace does not lead where it was expected to, but to the address in the word at r14 plus
    /// `disp`.
    Elsewhere {
        from: usize,
        disp: i32,
        site: u32,
    },
    /// The condition of a cross-page branch is not met.
    CrossPageMiss {
        from: usize,
        number: u32,
    },
    /// A conditional branch to another page is taken.
    CrossPage {
        from: usize,
        offset: u32,
        target: i32,
        /// True if flags are in RFLAGS.
        live: bool,
    },
}
