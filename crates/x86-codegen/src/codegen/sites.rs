//! Entries of blocks, and the branches that lead to them.

use crate::ir::{mode::Mode, streams::Streams};

/// A direct branch within a page, which is linked when its target has been translated.
#[derive(Clone, Copy, Debug)]
pub struct LinkSite {
    /// Offset of the rel32 in the buffer; 0 if the target's block has taken the place of the jump.
    pub patch: usize,
    /// Offset of the target in the page.
    pub target: u32,
    /// True if flags are in memory there, not in RFLAGS.
    pub saved: bool,
    /// True if the branch leads to the split translation, in which every access probes for itself.
    pub split: bool,
    /// True if the branch goes back: its target begins a loop.
    pub is_back: bool,
    /// True for an unconditional jump.
    pub is_jump: bool,
    /// True if code can be executed without end by this branch: it leads to the target's poll.
    pub polls: bool,
    /// As in [`crate::ir::decoded::Decoded::turn`].
    pub turn: u8,
    /// True once the branch has been followed.
    pub is_taken: bool,
    /// True if the branch is in another page than the one that its block begins in.
    pub is_away: bool,
}

impl LinkSite {
    /// Notes the offset of the branch in the page.
    pub(crate) fn comes_from(&mut self, offset: u32) {
        self.is_back = self.target <= offset;
        self.polls = self.is_back;
    }

    /// Returns true if the branch must not be linked before it has been followed once: in which iteration a loop is
    /// left is still to be learned.
    pub fn is_of_interest(&self) -> bool {
        self.turn != 0 && !self.is_taken
    }
}

/// A direct branch to another page, and the block that it led to. The block's outer entry checks that its code has not
/// changed.
#[derive(Clone, Copy, Debug)]
pub struct CrossPageSite {
    /// When the branch goes on with that block.
    pub condition: Condition,
    /// Offset of the rel32 in the buffer.
    pub jump: usize,
    /// Where the host's return from a call leads, as an offset in the buffer.
    pub(super) returns: Option<usize>,
    /// Offset of the branch in its page.
    pub offset: u32,
    /// The target, relative to that page.
    pub target: i32,
    /// What the branch adds to RSP.
    pub pop: i32,
    /// The outer entry that the branch is linked to; 0 if none is remembered.
    pub to: usize,
}

/// When a direct branch to another page goes on with the block that it led to before. Numbers without another
/// explanation are offsets in the buffer of 4 bytes that the branch compares.
#[derive(Clone, Copy, Debug)]
pub enum Condition {
    /// The key must have this number; and, unless the block is executed at one address only, the block's own page must
    /// have the gva in the 8 bytes at `page`. The target is then as certain as by an entry of the target table. Kernels
    /// use this, as all address spaces share their code, but have page guards of their own.
    BlockNumber {
        /// Where the key's number is.
        number: usize,
        /// Where the block's page is, in 8 bytes, if the block is executed at more than one address.
        page: Option<usize>,
    },
    /// The live view must have the target's page where its [`PageGuard`](crate::frame::page_guard::PageGuard) says; the
    /// displacement at `page_guard` selects the guard's word. The number at `tagged` is compared, or added to a gva
    /// first; `untagged` in its place is equal to no guard that is set. The byte at `untag` takes the tag off.
    PageGuard {
        /// Where the displacement of the guard's word is.
        page_guard: usize,
        /// Where the number is that the guard is compared by.
        tagged: usize,
        /// That number for a guard that says nothing.
        untagged: i32,
        /// Where the byte is that takes the tag off, if the number is added to a gva.
        untag: Option<usize>,
    },
}

impl Condition {
    /// Returns the operand, and the value for it, with which the condition is never met.
    pub fn never(self) -> (usize, i32) {
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
pub struct Entries {
    /// From other pages, and for whoever does not know whether the code has changed. 0: not emitted yet.
    pub outer: u32,
    /// With flags in memory, and a poll. 0: not emitted yet.
    pub polled: u32,
    /// With flags in memory.
    pub saved: u32,
    /// With flags in RFLAGS.
    pub inner: u32,
}

impl Entries {
    /// Returns the entry that a branch goes to; 0 if it has not been emitted yet.
    pub fn of(&self, site: &LinkSite) -> usize {
        let entry = match (site.saved, site.polls) {
            (true, false) => self.saved,
            (true, true) => self.polled,
            // The block needs no flags.
            (false, true) if self.inner == self.saved => self.polled,
            (false, _) => self.inner,
        };
        entry as usize
    }
}

/// How a block is translated.
#[derive(Clone, Copy, Debug)]
pub struct How {
    /// The mode that it is translated for.
    pub mode: Mode,
    /// True if a branch of its page leads to the block.
    pub is_linked: bool,
    /// True if code can be executed without end by a branch to the block.
    pub polls: bool,
    /// True if every access probes for itself.
    pub is_split: bool,
    /// True if the block begins with the entry for flags in RFLAGS.
    pub falls: bool,
    /// The gva of the page, if the block is executed at no other address.
    pub bound: Option<i32>,
    /// True if branches to other pages have a [`Condition::PageGuard`].
    pub by_guard: bool,
    /// The streams that the block counts besides instructions, if it counts what is retired.
    pub counts: Option<Streams>,
}
