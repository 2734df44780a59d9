//! [`Stub`]: what a block rarely executes, noted while it is translated and emitted behind it.

use super::{
    countdown::exact::Cost,
    memory::{Finds, Probe},
};
use crate::ir::member::Member;

/// Code off the main path, emitted after it.
#[derive(Clone, Copy, Debug)]
pub(super) enum Stub {
    /// TLB miss: back to `resume` with the host address in r14.
    Refill {
        from: usize,
        resume: usize,
        site: u32,
        probe: Probe,
        finds: Finds,
        /// What r13 has to hold there.
        cached: Option<u8>,
    },
    /// TLB miss of a group.
    RefillGroup {
        from: usize,
        resume: usize,
        offset: u32,
        member: Member,
        probe: Probe,
        cached: Option<u8>,
    },
    /// Leave at an instruction.
    Bail {
        from: usize,
        offset: u32,
    },
    Stale {
        from: usize,
        offset: u32,
    },
    /// The same where a trace's other pages may have changed, or moved.
    Moved {
        from: usize,
        offset: u32,
    },
    /// A branch's target, of which r14 has the tag, is not in the table.
    Branch {
        from: usize,
        offset: u32,
    },
    /// The same of one that has an inline cache.
    InlineCache {
        from: usize,
        offset: u32,
        cache: usize,
    },
    /// A return to r14, which the host has not predicted.
    Ret {
        from: usize,
        site: u32,
    },
    /// That of a call, which has done nothing yet; or one that has nothing to do with FP state.
    Call {
        from: usize,
        offset: u32,
    },
    /// The same for one that has an inline cache.
    CallCache {
        from: usize,
        resume: usize,
        offset: u32,
        cache: usize,
    },
    Poll {
        from: usize,
        resume: usize,
        offset: u32,
        /// What a block has counted for that counts what is retired.
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
    /// A walk is over.
    TurnsDone {
        from: usize,
        again: usize,
    },
    /// A branch of a trace does not lead where it was expected to: its number in `Translator::branches`.
    Unexpected {
        from: usize,
        number: usize,
    },
    /// A return that does not, to what r14 plus a constant addresses.
    Elsewhere {
        from: usize,
        disp: i32,
        site: u32,
    },
    /// A branch to another page is not where it was before.
    CrossPageMiss {
        from: usize,
        number: u32,
    },
    /// A conditional branch to another page.
    CrossPage {
        from: usize,
        offset: u32,
        target: i32,
        /// Flags are in RFLAGS.
        live: bool,
    },
}
