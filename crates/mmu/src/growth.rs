//! Tables of the first level that grow.
//!
//! Small tables reach 64 MiB. A program that uses more memory finds the rest in the second level, by a miss of some sixty
//! instructions each time; an out-of-order processor then has few of the program's accesses under way at once. So
//! a program's tables that keep missing although they are filled are exchanged for large ones, which reach 2 GiB and are
//! probed inline. There are few large ones, for those that have missed last: see [`MOST`].
//!
//! A kernel's tables do not grow: its code has indices of known addresses in it, which are those of small tables. (A
//! program has few of these, and those below 64 MiB are the same. Others miss each time.)

use x86_cpu::CpuState;

use crate::{
    Mmu,
    l1::{Block, ENTRIES, L1, Size},
};

/// A sample finds that tables miss if so many misses were served since the last one, which is about 100 us ago.
const MANY_MISSES: u64 = 300;
/// Samples in a row, of one view, after which its tables are to grow.
const SAMPLES: u32 = 16;
/// Number of entries that are filled then. Tables with fewer miss because they were flushed.
const FILLED: usize = ENTRIES / 2;
/// Maximum number of large tables. A small guest has none ([`crate::budget`]), so that its process stays small.
pub(crate) const MOST: usize = 4;

/// Memory of tables, and which of them are to grow.
#[derive(Debug, Default)]
pub(crate) struct Growth {
    /// Memory of small tables that have not been made yet.
    small: Option<Block>,
    /// Tables that no view has.
    spare: Vec<L1>,
    /// Number of large tables that there are.
    pub(crate) large: usize,
    /// The tables that were live at the last sample, and how many misses had been served then.
    sampled: (usize, u64),
    /// Number of samples in a row that have found misses.
    in_a_row: u32,
    /// The tables that are to grow.
    pub(crate) due: Option<usize>,
}

impl Growth {
    /// Returns small tables. Without memory for them the process ends, as when a `Box` cannot be had.
    pub(crate) fn small_tables(&mut self) -> L1 {
        if let Some(spare) = self.take_spare(Size::Small) {
            return spare;
        }
        if let Some(pages) = self.small.as_mut().and_then(Block::tables) {
            return L1::new(pages);
        }
        let is_first = self.small.is_none();
        let Ok(mut block) = Block::new(Size::Small) else {
            return L1::default();
        };
        if is_first {
            // The vCPU is being made. Later its thread may not be allowed to ask.
            block.advise_small();
        }
        let pages = block.tables();
        self.small = Some(block);
        pages.map_or_else(L1::default, L1::new)
    }

    /// Returns large tables, or `None` if there are as many as may be.
    fn large_tables(&mut self, most: usize) -> Option<L1> {
        if let Some(spare) = self.take_spare(Size::Large) {
            return Some(spare);
        }
        if self.large >= most {
            return None;
        }
        let pages = Block::new(Size::Large).ok()?.tables()?;
        self.large += 1;
        Some(L1::new(pages))
    }

    fn take_spare(&mut self, size: Size) -> Option<L1> {
        let found = self.spare.iter().position(|t| t.size() == size)?;
        Some(self.spare.swap_remove(found))
    }
}

impl Mmu {
    /// See [`Front::sample_misses`](crate::Front::sample_misses).
    pub(crate) fn sample_misses(&mut self, cpu: &CpuState) {
        let now = (self.live, self.views[self.live].l1.reach_hits());
        let (live, before) = core::mem::replace(&mut self.growth.sampled, now);
        let is_missing = live == self.live && now.1.wrapping_sub(before) >= MANY_MISSES;
        if !is_missing || !self.may_grow(cpu) {
            self.growth.in_a_row = 0;
            return;
        }
        self.growth.in_a_row += 1;
        if self.growth.in_a_row == SAMPLES {
            self.growth.in_a_row = 0;
            let is_filled = self.views[self.live].l1.nr_filled() >= FILLED;
            self.growth.due = is_filled.then_some(self.live);
        }
    }

    /// Returns true if the live tables are small ones of a 64-bit program.
    fn may_grow(&self, cpu: &CpuState) -> bool {
        let tables = &self.views[self.live];
        tables.user && tables.l1.size() == Size::Small && cpu.is_64bit()
    }

    /// See [`Front::grow_tables`](crate::Front::grow_tables).
    pub(crate) fn grow_tables(&mut self, cpu: &CpuState) {
        if self.growth.due.take() != Some(self.live) || !self.may_grow(cpu) {
            return;
        }
        let large = self.growth.large_tables(self.budget.large);
        let large = large.or_else(|| self.take_large());
        if let Some(large) = large {
            self.stats.tables_grown += 1;
            self.exchange(self.live, large);
        }
    }

    /// Exchanges the live tables for those of another size, whatever they miss; for tests.
    pub fn exchange_tables(&mut self) {
        match self.views[self.live].l1.size() {
            Size::Large => self.shrink_tables(self.live),
            Size::Small => {
                let large = self.growth.large_tables(self.budget.large);
                if let Some(large) = large.or_else(|| self.take_large()) {
                    self.exchange(self.live, large);
                }
            }
        }
    }

    /// Takes the large tables from the view that was not selected for longest.
    fn take_large(&mut self) -> Option<L1> {
        let others =
            self.views.iter().enumerate().filter(|(n, t)| {
                t.l1.size() == Size::Large && ![self.live, self.system].contains(n)
            });
        let (n, _) = others.min_by_key(|(_, t)| t.used)?;
        self.shrink_tables(n);
        self.growth.take_spare(Size::Large)
    }

    /// Makes tables small that are another view's from now on, or whose place others need more.
    pub(crate) fn shrink_tables(&mut self, tables: usize) {
        if self.views[tables].l1.size() == Size::Large {
            let small = self.growth.small_tables();
            self.exchange(tables, small);
        }
    }

    /// Makes all tables small, and keeps no others.
    pub(crate) fn forget_large_tables(&mut self) {
        (0..self.views.len()).for_each(|tables| self.shrink_tables(tables));
        self.growth.spare.clear();
        self.growth.large = 0;
    }

    /// Gives a view another set of tables. Its own become spare ones.
    fn exchange(&mut self, tables: usize, mut l1: L1) {
        let t = &mut self.views[tables];
        l1.take_over(&mut t.l1);
        self.reach.publish(l1.reach_mut());
        self.growth.spare.push(core::mem::replace(&mut t.l1, l1));
        // The address has changed that generated code and what it has noted know the tables by.
        self.views_made += 1;
        self.forget_switches();
        self.forget_pages();
    }
}
