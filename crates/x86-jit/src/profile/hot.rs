//! What is executed much is translated again, with what pays only there: *per-site entries*.
//!
//! A per-site entry is an entry of the software TLB that belongs to one place in the code and is compared
//! without computing an index, which takes half as long. Where the place's accesses go to ever
//! other pages it costs far more, so that misses are counted, and what has too many of them goes
//! without. What is executed much shows in where translated code is when it comes back to the run loop.

use core::ops::Range;
use std::collections::HashMap;

use mmu::{hash::ByIdentity, l1::SITE_ENTRIES};

use crate::{
    ir::hot::Hot,
    ir::mode::{BlockKey, Mode},
    ir::source::TracePage,
};

/// Looks that have to find a block for it to be translated again, of so many.
const HOT: u8 = 9;
const SAMPLES: u32 = 1024;
/// Looks that find it afterwards until it is known by which turns its loops are left.
const LEARNS: u64 = 3;
/// What a look counts for that finds the same block as the last one: a loop that is all that is executed.
const SAME: u8 = 4;
/// Ticks within which a trace is not revalidated more often than so many times.
pub(crate) const REVALIDATED: (u64, u32) = (1 << 18, 16);
/// Instructions between two looks, about: they come every 100 us.
const INTERVAL: u64 = 100_000;
/// A per-site entry misses less often than once in so many executions, or costs more than it saves.
const WORTH: u64 = 48;
/// Instructions of a block that are executed, at most, for that: long blocks are often left early.
pub(crate) const EXECUTED: usize = 48;
/// Counts of looks at blocks that are not hot yet, by a hash.
const COUNTS: usize = 1 << 12;

/// A block that is executed much.
#[derive(Debug, Default)]
pub(crate) struct Profile {
    /// Instructions.
    pub(crate) len: u64,
    /// Looks that have found it since it was translated.
    pub(crate) samples: u64,
    pub(crate) hot: Hot,
    /// Misses of each of its per-site entries.
    pub(crate) missed: Vec<u64>,
    /// Its branches within the page, of code of this generation.
    pub(crate) links: Range<usize>,
    pub(crate) generation: u32,
    /// It is to be translated when it is executed next.
    pub(crate) is_due: bool,
    /// It has a poll, so that looks find it, but is not known to be executed much yet.
    pub(crate) is_watched: bool,
    /// It is linked to.
    pub(crate) is_linked: bool,
    /// Where the translations before are entered.
    pub(crate) before: Vec<usize>,
    /// The way that was executed from it on in all looks since it is known to be executed much, if it goes through calls.
    pub(crate) path: Vec<i32>,
    /// Pages that it has code of, if they are several: it is a trace.
    pub(crate) pages: Vec<TracePage>,
    /// When it was last revalidated, by the TSC, and how often in quick succession.
    pub(crate) revalidated: (u64, u32),
}

/// What a look has found.
pub(crate) enum Found {
    Nothing,
    /// A block that is to be translated again, as it is executed much.
    Hot,
    /// One that has been, of which more is to be known.
    New,
    /// One that was executed for a while since.
    Settled,
}

/// What is known of such blocks.
#[derive(Debug)]
pub(crate) struct Profiles {
    counts: Box<[u8; COUNTS]>,
    /// What the last look has found.
    last: Option<BlockKey>,
    /// Looks until they begin anew.
    left: u32,
    pub(crate) hot: HashMap<BlockKey, Profile, ByIdentity>,
    /// Whose each per-site entry is.
    pub(crate) owners: Box<[Option<BlockKey>; SITE_ENTRIES]>,
    /// Every other block is as if it were executed much: for tests.
    pub(crate) mixes_tiers: bool,
}

impl Profiles {
    pub(crate) fn new() -> Self {
        Self {
            counts: Box::new([0; COUNTS]),
            last: None,
            left: SAMPLES,
            hot: HashMap::default(),
            owners: Box::new([None; SITE_ENTRIES]),
            mixes_tiers: false,
        }
    }

    pub(crate) fn clear(&mut self) {
        self.counts.fill(0);
        self.hot.clear();
        self.owners.fill(None);
    }

    /// The blocks of the page with this one are other ones from now on.
    pub(crate) fn forget(&mut self, id: u64) {
        self.hot.retain(|key, _| key.at >> 12 != id >> 12);
    }

    /// What is to be different in the translation of a block, and whether it is linked to, if that is known.
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
            // Other code, by now.
            self.hot.remove(&key);
            self.counts[place(key)] = 0;
        }
        (self.mixes_tiers && key.at & 1 != 0).then(|| (Some(Hot::default()), None))
    }

    /// A look has found the block.
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

    /// What is known of the block's way is for its next translation; true if there is anything.
    pub(crate) fn take_path(&mut self, key: BlockKey) -> bool {
        let Some(p) = self.hot.get_mut(&key).filter(|p| !p.path.is_empty()) else {
            return false;
        };
        p.hot.path = core::mem::take(&mut p.path);
        // Other instructions have these numbers.
        p.hot.without = 0;
        true
    }

    /// The block cannot be translated along its way.
    pub(crate) fn forget_path(&mut self, key: BlockKey) {
        if let Some(p) = self.hot.get_mut(&key) {
            p.hot.path.clear();
        }
    }

    /// A per-site entry has missed so often; the block, if it is to be translated again.
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
