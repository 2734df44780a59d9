//! The state of a [`super::Translator`], by phase.

use super::{flags::Flags, hoist::HoistedLoop, inline::Turn, tally::Tally};
use crate::{
    ir::decoded::{Decoded, TracePlace},
    ir::hot::Hot,
    ir::mode::Mode,
    ir::source::{Source, TracePage},
};

/// Numbers that the next block takes from what all blocks share.
pub(super) struct Allocation {
    /// Next per-site entries for reads, and for writes.
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

/// What a block is translated from.
#[derive(Debug)]
pub struct Input {
    /// Number of the instruction at the block's end that the interpreter executes, 0 if there is none.
    pub(super) interpreted: u32,
    /// The page of the block's code.
    pub(super) source: Source,
    /// The code is 64-bit code.
    pub(super) long: bool,
    pub(super) mode: Mode,
    /// Length of a word on the stack for the current instruction, in bytes.
    pub(super) word: i32,
    /// The gva of the page, if the block is executed at no other address.
    pub(super) bound: Option<i32>,
    /// As [`super::How::by_guard`].
    pub(super) by_guard: bool,
    /// What is known of the block, if it is hot.
    pub hot: Option<Hot>,
    /// The pages that the block has code of, its first page first.
    pub pages: Vec<TracePage>,
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
    /// The group whose host pointer is in r14.
    pub(super) current: Option<u16>,
    /// Where arithmetic flags are.
    pub(super) flags: Flags,
    /// The guest register that lives in memory and has a copy in r13.
    pub(super) cached: Option<u8>,
    /// What has still to be added to RSP.
    pub(super) rsp_moves: i32,
    /// Number of the current instruction in its block.
    pub(super) position: usize,
    pub(super) tally: Tally,
    /// The fast iterations of a loop are being translated, whose groups need no probes.
    pub(super) hoisted: Option<HoistedLoop>,
    /// An iteration of a loop is being translated that follows another, which has found the groups that stay.
    pub(super) holds: bool,
    /// Index of the page that is being translated, in [`Input::pages`].
    pub(super) page: u8,
    /// For each change of page, the stub from which on it holds.
    pub(super) turns_of_pages: Vec<Turn>,
    /// Distance of that page from the page in [`crate::frame::words::SHORT_PAGE`].
    pub(super) beyond: i32,
    /// Return addresses of the calls whose targets the block has followed, and which have not returned in it.
    pub(super) frames: Vec<TracePlace>,
    /// Branches to what comes next in the block, and the numbers of their instructions, for
    /// [`super::Stub::Unexpected`].
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
