//! Where blocks are entered, and the branches that lead there.

use crate::ir::{mode::Mode, streams::Streams};

/// A direct branch within a page, to be linked when its target is translated.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LinkSite {
    /// Where the rel32 is in the buffer; 0: the target has taken the place of the jump.
    pub(crate) patch: usize,
    /// Offset of the target in the page.
    pub(crate) target: u32,
    /// Flags are in memory, not in RFLAGS.
    pub(crate) saved: bool,
    /// Leads to the translation in which every access probes for itself.
    pub(crate) split: bool,
    /// From a branch back: a loop begins there.
    pub(crate) is_back: bool,
    /// JMP.
    pub(crate) is_jump: bool,
    /// Code that is executed without end goes this way: it leads to the target's poll.
    pub(crate) polls: bool,
    /// As [`crate::ir::decoded::Decoded::turn`].
    pub(crate) turn: u8,
    /// It was followed.
    pub(crate) is_taken: bool,
    /// It is in another page than its block begins in.
    pub(crate) is_away: bool,
}

impl LinkSite {
    /// It belongs to a branch at that offset of the page.
    pub(crate) fn comes_from(&mut self, offset: u32) {
        self.is_back = self.target <= offset;
        self.polls = self.is_back;
    }

    /// Nothing is to take it but what is executed: whether it does is of interest.
    pub(crate) fn is_of_interest(&self) -> bool {
        self.turn != 0 && !self.is_taken
    }
}

/// A direct branch to another page, and the block that it led to.
/// (That the code has not changed is checked at its outer entry.)
#[derive(Clone, Copy, Debug)]
pub(crate) struct CrossPageSite {
    pub(crate) condition: Condition,
    /// Where the rel32 is.
    pub(crate) jump: usize,
    /// Where a call comes back to.
    pub(super) returns: Option<usize>,
    /// Offset of the branch in its page.
    pub(crate) offset: u32,
    /// The target, relative to that page.
    pub(crate) target: i32,
    /// What is added to RSP.
    pub(crate) pop: i32,
    /// The outer entry that it leads to, 0 if nothing is remembered.
    pub(crate) to: usize,
}

/// When a direct branch to another page leads to the block that it is known to have led to: what it compares, as offsets of 4 bytes
/// in the buffer if nothing else is said.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Condition {
    /// The key has this number, and the branch is in the page whose gva is in the 8 bytes at `page`, if it may be in another one:
    /// as right as an entry of the table of targets. All address spaces share a kernel's, while each has views of its own.
    BlockNumber { number: usize, page: Option<usize> },
    /// The target is in one page, which is where the displacement at `page_guard` has the `PageGuard` say that the view has the block's. What it is compared with
    /// is computed from the number at `tagged`, which is `untagged` for a page guard that says nothing; the byte at `untag` takes the tag off.
    PageGuard {
        page_guard: usize,
        tagged: usize,
        untagged: i32,
        untag: Option<usize>,
    },
}

impl Condition {
    /// What is to be written where for it to be never met.
    pub(crate) fn never(self) -> (usize, i32) {
        match self {
            // No number is zero.
            Self::BlockNumber { number, .. } => (number, 0),
            Self::PageGuard {
                tagged, untagged, ..
            } => (tagged, untagged),
        }
    }
}

/// Entry points of a translated block, as offsets in the buffer.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Entries {
    /// From other pages, and for whoever does not know that the code is what it was. 0: none yet.
    pub(crate) outer: u32,
    /// With flags in memory and a poll. 0: none yet.
    pub(crate) polled: u32,
    /// With flags in memory.
    pub(crate) saved: u32,
    /// With flags in RFLAGS.
    pub(crate) inner: u32,
}

impl Entries {
    /// Where a branch goes; 0: there is no entry for it yet.
    pub(crate) fn of(&self, site: &LinkSite) -> usize {
        let entry = match (site.saved, site.polls) {
            (true, false) => self.saved,
            (true, true) => self.polled,
            // It needs no flags.
            (false, true) if self.inner == self.saved => self.polled,
            (false, _) => self.inner,
        };
        entry as usize
    }
}

/// How a block is to be translated.
#[derive(Clone, Copy, Debug)]
pub(crate) struct How {
    pub(crate) mode: Mode,
    /// A branch of its page leads there.
    pub(crate) is_linked: bool,
    /// What leads there may be executed without end.
    pub(crate) polls: bool,
    /// Every access probes for itself.
    pub(crate) is_split: bool,
    /// It begins with the entry for flags in RFLAGS.
    pub(crate) falls: bool,
    /// The gva of the page, if it is executed nowhere else.
    pub(crate) bound: Option<i32>,
    /// Its branches to other pages have a [`Condition::PageGuard`].
    pub(crate) by_guard: bool,
    /// It counts what is retired, and these streams besides instructions.
    pub(crate) counts: Option<Streams>,
}
