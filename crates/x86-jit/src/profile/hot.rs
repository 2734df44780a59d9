//! Profiles of hot blocks, which are translated again with *per-site entries*.
//!
//! A per-site entry is an entry of the software TLB that belongs to one probe and is compared without computing an
//! index, which takes half as long. It costs far more where the probe's accesses go to ever other pages. So its misses
//! are counted, and a probe with too many of them loses its entry. Samples find hot blocks: each is the place where
//! translated code is when it comes back to the run loop.

use core::ops::Range;
use std::collections::HashMap;

use mmu::{hash::ByIdentity, l1::SITE_ENTRIES};

use x86_codegen::{
    ir::hot::Hot,
    ir::mode::{BlockKey, Mode},
    ir::source::TracePage,
};

/// A block becomes hot when this many of the last [`SAMPLES`] samples, about, have found it.
const HOT: u8 = 9;
const SAMPLES: u32 = 1024;
/// Samples of a hot block after which the iteration counts of its loops count as known.
const LEARNS: u64 = 3;
/// What a sample counts for if it finds the same block as the sample before: all that is executed may be one loop.
const SAME: u8 = 4;
/// Limit on how often a trace is revalidated: within this many TSC ticks of each other, this many times.
pub(crate) const REVALIDATED: (u64, u32) = (1 << 18, 16);
/// Instructions between two samples, about: a sample is taken every 100 us.
const INTERVAL: u64 = 100_000;
/// A per-site entry that misses more often than once in this many executions costs more than it saves.
const WORTH: u64 = 48;
/// Upper bound of a block's length when its executions are estimated: long blocks are often left early.
pub(crate) const EXECUTED: usize = 48;
/// Number of sample counters for blocks that are not hot yet. A hash of the block's key selects the counter.
const COUNTS: usize = 1 << 12;

/// What is known of a hot or watched block.
#[derive(Debug, Default)]
pub(crate) struct Profile {
    /// Length in instructions, at least 1 and at most [`EXECUTED`].
    pub(crate) len: u64,
    /// Samples that have found the block since it was translated.
    pub(crate) samples: u64,
    pub(crate) hot: Hot,
    /// Misses of each of the block's per-site entries.
    pub(crate) missed: Vec<u64>,
    /// The block's link sites in the translator, and the generation of the code that it was translated from.
    pub(crate) links: Range<usize>,
    pub(crate) generation: u32,
    /// The block is to be translated again when it is executed next.
    pub(crate) is_due: bool,
    /// The block was translated again only to get a poll, so that samples find it; it is not known to be hot yet.
    pub(crate) is_watched: bool,
    /// Branches of the page are linked to the block.
    pub(crate) is_linked: bool,
    /// Entries of the block's earlier translations, which are redirected to the newest one.
    pub(crate) before: Vec<usize>,
    /// The part that is common to the paths recorded from the block on since it became hot. Empty if the path calls
    /// nothing.
    pub(crate) path: Vec<i32>,
    /// Pages that the trace has code of; empty if the block is no trace.
    pub(crate) pages: Vec<TracePage>,
    /// TSC of the last revalidation, and how many have followed each other in quick succession.
    pub(crate) revalidated: (u64, u32),
}

/// What a sample has found.
pub(crate) enum Found {
    Nothing,
    /// A block that has just become hot and is to be translated again.
    Hot,
    /// A hot block that was translated recently; further samples are to tell more about it.
    New,
    /// A hot block that has been sampled often enough since its translation.
    Settled,
}

/// Sample counters, and the profiles of hot blocks.
#[derive(Debug)]
pub(crate) struct Profiles {
    counts: Box<[u8; COUNTS]>,
    /// The block that the last sample has found.
    last: Option<BlockKey>,
    /// Samples until all counters are halved.
    left: u32,
    pub(crate) hot: HashMap<BlockKey, Profile, ByIdentity>,
    /// The block that each per-site entry belongs to.
    pub(crate) owners: Box<[Option<BlockKey>]>,
    /// Tests only: every other block is translated as if it were hot.
    pub(crate) mixes_tiers: bool,
}

impl Profiles {
    pub(crate) fn new() -> Self {
        Self {
            counts: Box::new([0; COUNTS]),
            last: None,
            left: SAMPLES,
            hot: HashMap::default(),
            owners: vec![None; SITE_ENTRIES].into(),
            mixes_tiers: false,
        }
    }

    pub(crate) fn clear(&mut self) {
        self.counts.fill(0);
        self.hot.clear();
        self.owners.fill(None);
    }

    /// Forgets the blocks of the page of `id`, whose code has changed.
    pub(crate) fn forget(&mut self, id: u64) {
        self.hot.retain(|key, _| key.at >> 12 != id >> 12);
    }

    /// Returns what the next translation of the block is made with, and whether the block is linked to if that is
    /// known. `None`: the block is translated as any cold one is.
    pub(crate) fn begin(&mut self, key: BlockKey) -> Option<(Option<Hot>, Option<bool>)> {
        if key.mode.has(Mode::SPLIT) {
            return None;
        }
        if let Some(p) = self.hot.get(&key) {
            if p.is_due {
                let hot = (!p.is_watched).then(|| Hot {
                    site_entries: Vec::new(),
                    ..p.hot.clone()
                });
                return Some((hot, Some(p.is_linked)));
            }
            // The hot block was made from code that has changed since.
            self.hot.remove(&key);
            self.counts[place(key)] = 0;
        }
        (self.mixes_tiers && key.at & 1 != 0).then(|| (Some(Hot::default()), None))
    }

    /// Counts a sample that has found the block.
    pub(crate) fn note(&mut self, key: BlockKey) -> Found {
        self.left -= 1;
        if self.left == 0 {
            self.left = SAMPLES;
            self.counts.iter_mut().for_each(|c| *c /= 2);
        }
        let is_same = self.last.replace(key) == Some(key);
        let mut known = self.hot.get_mut(&key);
        if let Some(p) = known.as_mut().filter(|p| !p.is_watched) {
            p.samples += 1;
            return match p.samples {
                ..LEARNS => Found::New,
                LEARNS => Found::Settled,
                _ => Found::Nothing,
            };
        }
        let count = &mut self.counts[place(key)];
        *count += if is_same { SAME } else { 1 };
        let is_hot = *count >= HOT;
        if is_hot {
            *count = 0;
        }
        if let Some(p) = known {
            p.is_watched = !is_hot;
        }
        if is_hot { Found::Hot } else { Found::Nothing }
    }

    /// Hands the recorded path of the block to its next translation. Returns false if there is none.
    pub(crate) fn take_path(&mut self, key: BlockKey) -> bool {
        let Some(p) = self.hot.get_mut(&key).filter(|p| !p.path.is_empty()) else {
            return false;
        };
        p.hot.path = core::mem::take(&mut p.path);
        // In a trace, instructions have other numbers than those that `without` refers to.
        p.hot.without = 0;
        true
    }

    /// Drops the path of the block, which can no longer be followed.
    pub(crate) fn forget_path(&mut self, key: BlockKey) {
        if let Some(p) = self.hot.get_mut(&key) {
            p.hot.path.clear();
        }
    }

    /// Charges `missed` misses to a per-site entry. Returns its block if the entry costs more than it saves, so that
    /// the block is to be translated again without it.
    pub(crate) fn judge(&mut self, site_entry: usize, missed: u64) -> Option<BlockKey> {
        let key = self.owners[site_entry]?;
        let p = self.hot.get_mut(&key)?;
        let at = p
            .hot
            .site_entries
            .iter()
            .position(|l| usize::from(l.0) == site_entry)?;
        p.missed[at] += missed;
        let executed = (p.samples + 1) * INTERVAL / p.len;
        if p.missed[at] * WORTH <= executed {
            return None;
        }
        p.hot.without |= 1 << p.hot.site_entries[at].1;
        Some(key)
    }
}

fn place(key: BlockKey) -> usize {
    (key.at ^ key.at >> 12) as usize % COUNTS
}
