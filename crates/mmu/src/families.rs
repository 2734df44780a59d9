//! Kernel code that address spaces have in common although it is not global.
//!
//! A kernel with page-table isolation and PCIDs maps none of its code as global, so for a processor each of its roots
//! has translations of its own. They lead to the same pages nevertheless. A *family* is the list of the pages of such
//! code that some contexts have fetched from; a context is a *member* once its own walks lead to all of them. What is
//! kept by address for one member, such as targets of branches, is then right for each.
//!
//! A flush of one of the pages, or of all that is not global, ends the membership. A tracked context
//! ([`crate::shadow`]) that finds nothing changed stays a member.

use x86_cpu::{Access, CpuState, Privilege};

use crate::{Mmu, Mode, View, walk::Walk};

/// Number of families. A kernel with page-table isolation has two: its own roots, and those of programs.
const FAMILIES: usize = 8;
/// Maximum number of pages of a family.
const MAX_LEAVES: usize = 512;

/// A page, small or large, that code is fetched from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Leaf {
    gva: u64,
    gpa: u64,
    level: u8,
}

impl Leaf {
    /// Returns the page that the walk has found. `None`: code in it is not noted as common. (A page that can be written by
    /// the address by which it is executed is compared at exits, for each context.)
    fn of(gva: u64, walk: &Walk) -> Option<Self> {
        let rights = walk.rights;
        if walk.global || rights.user || rights.write || rights.no_execute {
            return None;
        }
        let mask = (1 << Self::shift(walk.level)) - 1;
        Some(Self {
            gva: gva & !mask,
            gpa: walk.gpa & !mask,
            level: walk.level,
        })
    }

    /// Returns log2 of the size of a page, in tables of 64-bit entries.
    const fn shift(level: u8) -> u32 {
        3 + 9 * level as u32
    }

    fn contains(&self, gva: u64) -> bool {
        (self.gva ^ gva) >> Self::shift(self.level) == 0
    }
}

/// Pages of code that contexts have in common.
#[derive(Debug, Default)]
struct Family {
    /// A number that no other family has had. 0: there is none.
    stamp: u64,
    world: u8,
    leaves: Vec<Leaf>,
    /// Identifies what is kept by address: see [`crate::Front::target_epoch`].
    epoch: u64,
    used: u64,
}

/// All families.
#[derive(Debug, Default)]
pub(crate) struct Families([Family; FAMILIES]);

/// A context's part in a family.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Membership {
    /// None yet.
    #[default]
    None,
    /// The first `known` pages of the family are where the context's tables lead to. The family may be another one by
    /// now, which its stamp says.
    Member {
        family: usize,
        stamp: u64,
        known: usize,
    },
    /// A supervisor has fetched from a page of the context that cannot be common.
    Barred,
}

impl Families {
    fn get(&self, family: usize, stamp: u64) -> Option<&Family> {
        self.0.get(family).filter(|f| f.stamp == stamp)
    }

    /// Ends all families.
    pub(crate) fn clear(&mut self) {
        *self = Self::default();
    }
}

impl Mmu {
    /// Notes that a supervisor fetches from a page that is not global. This comes before the fetch TLB has the page.
    pub(crate) fn note_common(&mut self, cpu: &CpuState, gva: u64, walk: &Walk) {
        let is_long = matches!(self.paging.mode, Mode::Level4 | Mode::Level5);
        let Some(leaf) = Leaf::of(gva, walk).filter(|_| is_long) else {
            self.contexts[self.current].membership = Membership::Barred;
            return;
        };
        if self.contexts[self.current].membership == Membership::Barred {
            return;
        }
        if self.common_epoch(cpu).is_none() {
            self.join(cpu);
        }
        let tick = self.next_tick();
        let membership = &mut self.contexts[self.current].membership;
        let Membership::Member { family, known, .. } = membership else {
            return;
        };
        let family = &mut self.families.0[*family];
        family.used = tick;
        if family.leaves.contains(&leaf) {
            return;
        }
        if family.leaves.len() == MAX_LEAVES {
            *membership = Membership::Barred;
            self.forget_switches_to(self.current);
        } else {
            family.leaves.push(leaf);
            *known += 1;
            // Other members do not know the page yet.
            self.forget_switches();
        }
    }

    /// Returns the epoch of the current context's family, if a supervisor executes and the context is a member.
    #[inline]
    pub(crate) fn common_epoch(&mut self, cpu: &CpuState) -> Option<u64> {
        let context = self.contexts.get(self.current)?;
        let Membership::Member {
            family,
            stamp,
            known,
        } = context.membership
        else {
            return None;
        };
        match self.families.get(family, stamp) {
            Some(f) if f.leaves.len() == known => Some(f.epoch),
            _ => self.learn(cpu, family, stamp, known),
        }
    }

    /// Looks at the pages that the family has had since the context last did.
    #[inline(never)]
    fn learn(&mut self, cpu: &CpuState, family: usize, stamp: u64, known: usize) -> Option<u64> {
        if self.families.get(family, stamp).is_some() && self.leads_to(cpu, family, known) {
            let f = &self.families.0[family];
            let (known, epoch) = (f.leaves.len(), f.epoch);
            self.contexts[self.current].membership = Membership::Member {
                family,
                stamp,
                known,
            };
            return Some(epoch);
        }
        self.leave_family();
        self.forget_private_fetches();
        None
    }

    /// Makes the current context a member of a family that fits, or of a new one. What a supervisor fetches is noted again
    /// from now on.
    fn join(&mut self, cpu: &CpuState) {
        self.forget_switches_to(self.current);
        let world = self.contexts[self.current].key.world;
        let families = &self.families.0;
        let mut known: Vec<usize> = (0..FAMILIES)
            .filter(|n| families[*n].stamp != 0 && families[*n].world == world)
            .collect();
        // The roots of programs map a part of what the kernel's own map: the other way round, these would join those.
        known.sort_by_key(|n| core::cmp::Reverse(families[*n].leaves.len()));
        let found = known.into_iter().find(|n| self.leads_to(cpu, *n, 0));
        let tick = self.next_tick();
        let family = found.unwrap_or_else(|| {
            // The oldest family ends.
            self.forget_switches();
            let oldest = (0..FAMILIES).min_by_key(|n| self.families.0[*n].used);
            let oldest = oldest.unwrap_or(0);
            self.families.0[oldest] = Family {
                stamp: tick,
                epoch: tick,
                used: tick,
                world,
                leaves: Vec::new(),
            };
            oldest
        });
        let f = &self.families.0[family];
        self.contexts[self.current].membership = Membership::Member {
            family,
            stamp: f.stamp,
            known: f.leaves.len(),
        };
        self.forget_private_fetches();
    }

    /// Returns true if the current context's tables lead to all pages of the family, beginning with number `first`.
    fn leads_to(&mut self, cpu: &CpuState, family: usize, first: usize) -> bool {
        let leaves = core::mem::take(&mut self.families.0[family].leaves);
        let is_same = leaves.iter().skip(first).all(|leaf| {
            let walk = self.walk_for_fetch(cpu, leaf.gva);
            walk.and_then(|walk| Leaf::of(leaf.gva, &walk)) == Some(*leaf)
        });
        self.families.0[family].leaves = leaves;
        is_same
    }

    /// Returns where a supervisor's fetch would come from.
    fn walk_for_fetch(&mut self, cpu: &CpuState, gva: u64) -> Option<Walk> {
        let view = View::of(cpu, Privilege::Current);
        let owner = self.owner();
        match self.l2.find(gva, owner) {
            Some(hit) => Some(hit),
            None => self.walk(gva, view, Access::Fetch, owner).ok(),
        }
    }

    /// Ends the current context's membership: its translations that are not global may be others now.
    pub(crate) fn leave_family(&mut self) {
        self.forget_switches_to(self.current);
        self.contexts[self.current].membership = Membership::None;
    }

    /// Ends the current context's membership if the page is one of its family's.
    pub(crate) fn leave_family_of(&mut self, gva: u64) {
        let Membership::Member { family, stamp, .. } = self.contexts[self.current].membership
        else {
            return;
        };
        let family = self.families.get(family, stamp);
        if family.is_none_or(|f| f.leaves.iter().any(|leaf| leaf.contains(gva))) {
            self.leave_family();
        }
    }

    /// Has what is kept by address for families forgotten: global code, or what is in a page, may be another.
    pub(crate) fn renew_families(&mut self) {
        self.forget_switches();
        for n in 0..FAMILIES {
            self.families.0[n].epoch = self.next_tick();
        }
    }
}
