//! The state of a [`super::Translator`], by phase.

use super::{flags::Flags, hoist::HoistedLoop, inline::Turn, tally::Tally};
use crate::{
    ir::decoded::{Decoded, TracePlace},
    ir::hot::Hot,
    ir::mode::Mode,
    ir::source::{Source, TracePage},
};

/// Numbers that the next block's code takes from what all blocks share.
pub(super) struct Allocation {
    /// Per-site entries for reads, and for writes.
    pub(super) site_entry: [u16; 2],
    pub(super) inline_cache: usize,
    pub(super) hoist: usize,
}

impl Allocation {
    pub(super) const fn new() -> Self {
        Self {
            site_entry: [0, 1],
            inline_cache: 0,
            hoist: 0,
        }
    }
}

/// What a block is made of.
pub(crate) struct Input {
    /// Number of the interpreter's instruction at the end, 0 if there is none.
    pub(super) interpreted: u32,
    /// The page.
    pub(super) source: Source,
    /// 64-bit code.
    pub(super) long: bool,
    pub(super) mode: Mode,
    /// Bytes of a word of the instruction's on the stack.
    pub(super) word: i32,
    /// The gva of the page, if the block is executed nowhere else.
    pub(super) bound: Option<i32>,
    /// As [`super::How::by_guard`].
    pub(super) by_guard: bool,
    /// The block is executed much.
    pub(crate) hot: Option<Hot>,
    /// The pages that the block has code of, its own first.
    pub(crate) pages: Vec<TracePage>,
}

impl Input {
    pub(super) fn new() -> Self {
        Self {
            interpreted: 0,
            source: Source::default(),
            long: true,
            mode: Mode::NONE,
            word: 8,
            bound: None,
            by_guard: false,
            hot: None,
            pages: Vec::new(),
        }
    }
}

/// What holds at the instruction that is translated next.
pub(super) struct Emission {
    /// The group whose pointer is in r14.
    pub(super) current: Option<u16>,
    /// Where arithmetic flags are.
    pub(super) flags: Flags,
    /// The guest register that lives in memory and that r13 has, too.
    pub(super) cached: Option<u8>,
    /// What is still to be added to RSP.
    pub(super) rsp_moves: i32,
    /// Number of the instruction in its block.
    pub(super) position: usize,
    pub(super) tally: Tally,
    /// Several turns of a loop are translated whose groups need no probes.
    pub(super) hoisted: Option<HoistedLoop>,
    /// A turn of a loop is translated whose groups that stay have been found by the one before.
    pub(super) holds: bool,
    /// The page that is translated, of [`Input::pages`].
    pub(super) page: u8,
    /// From which stub on it was which one.
    pub(super) turns_of_pages: Vec<Turn>,
    /// How far it is from the page in [`crate::frame::words::SHORT_PAGE`].
    pub(super) beyond: i32,
    /// Where calls return to whose targets are in the block.
    pub(super) frames: Vec<TracePlace>,
    /// Branches to what comes next in the block, and their numbers, for [`super::Stub::Unexpected`].
    pub(super) branches: Vec<(Decoded, usize)>,
}

impl Emission {
    pub(super) fn new() -> Self {
        Self {
            current: None,
            flags: Flags::Memory,
            cached: None,
            rsp_moves: 0,
            position: 0,
            tally: Tally::default(),
            hoisted: None,
            holds: false,
            page: 0,
            turns_of_pages: Vec::new(),
            beyond: 0,
            frames: Vec::new(),
            branches: Vec::new(),
        }
    }
}
