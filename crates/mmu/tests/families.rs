//! What is kept by address under one target epoch is right in every context that has this epoch.
//!
//! Roots map kernel code, none of it global: at first all in the same way, then some pages change in one root or in all, with
//! the flushes that the manual asks for. A supervisor fetches, and each page that it gets is remembered under the epoch. Whatever
//! is remembered under the epoch of a context must then be where the context's tables lead to.
//!
//! A load of CR3 that is remembered, and vouched for, leads to what it led to before.

#![allow(clippy::unwrap_used, reason = "tests")]

mod machine;

use std::collections::HashMap;

use machine::{Machine, RAM};
use mmu::Policy;
use proptest::prelude::*;
use x86_cpu::Flush;
use x86_defs::{
    control::cr4,
    paging::{A, D, NX, P, PS, RW, US},
    rflags,
};

const ROOTS: usize = 12;
const PCIDS: u64 = 3;
const ROOT: u64 = 0x10_0000;
const TABLES: u64 = 0x20_0000;
/// Kernel code: small pages, and one that is 2 MiB.
const GVAS: [u64; 6] = [
    0xffff_8000_0000_1000,
    0xffff_8000_0000_2000,
    0xffff_8000_0040_3000,
    0xffff_8000_8000_1000,
    LARGE,
    LARGE + 0x5000,
];
const LARGE: u64 = 0xffff_8000_c000_0000;

#[derive(Clone, Copy, Debug)]
enum Op {
    /// A supervisor fetches from the page.
    Fetch {
        gva: usize,
    },
    Load {
        root: usize,
        pcid: u64,
        keeps: bool,
    },
    /// Changes the page's leaf in one root, or in all.
    Change {
        root: Option<usize>,
        gva: usize,
        to: u64,
        flags: u64,
    },
    /// Flushes the page, or more, though nothing has changed.
    Flush {
        gva: usize,
        how: u8,
    },
    /// Changes RFLAGS.AC, which the kernel's view of its data depends on.
    View,
    /// The VMM may have written code.
    Recheck,
}

fn ops() -> impl Strategy<Value = Op> {
    prop_oneof![
        12 => (0..GVAS.len()).prop_map(|gva| Op::Fetch { gva }),
        6 => (0..ROOTS, 0..PCIDS, any::<bool>()).prop_map(|(root, pcid, keeps)| Op::Load { root, pcid, keeps }),
        2 => (proptest::option::of(0..ROOTS), 0..GVAS.len(), 0..4u64, 0..16u64)
            .prop_map(|(root, gva, to, flags)| Op::Change { root, gva, to, flags }),
        1 => (0..GVAS.len(), 0..4u8).prop_map(|(gva, how)| Op::Flush { gva, how }),
        1 => Just(Op::View),
        1 => Just(Op::Recheck),
    ]
}

struct Guest {
    m: Machine,
    /// The PCID that each root was loaded with last.
    pcids: [u64; ROOTS],
    current: usize,
    /// Roots, with pages that have changed in them, that have to be flushed when they are loaded.
    stale: [bool; ROOTS],
    /// The root that has each PCID's translations.
    owners: [Option<usize>; PCIDS as usize],
    /// What was fetched under each epoch.
    known: HashMap<u64, HashMap<u64, u64>>,
    /// Where loads have led, by their value, whether they flush, and RFLAGS.AC.
    loads: HashMap<(u64, bool, u64), (Remembered, Place)>,
    /// Number of changes of tables.
    changes: u64,
    /// Number of loads that were vouched for.
    vouched: u64,
}

/// What a remembered load depends on.
#[derive(Clone, Copy, Debug)]
struct Remembered {
    epoch: u64,
    changes: u64,
}

/// Where a load leads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Place {
    context: u64,
    tables: u64,
    view: u64,
    target_epoch: u64,
}

impl Guest {
    fn new(policy: Policy) -> Self {
        let m = Machine::long_mode(ROOT);
        let mut pool = TABLES;
        for root in 0..ROOTS as u64 {
            for (n, gva) in GVAS.iter().enumerate().take(5) {
                let level = if *gva == LARGE { 2 } else { 1 };
                let place = entry(&m, ROOT + root * 4096, *gva, level, &mut pool);
                m.poke(place, 8, leaf(n, n as u64 % 4, 0));
            }
        }
        let mut guest = Self {
            m,
            pcids: [0; ROOTS],
            current: 0,
            stale: [false; ROOTS],
            owners: [None; PCIDS as usize],
            known: HashMap::new(),
            loads: HashMap::new(),
            changes: 0,
            vouched: 0,
        };
        guest.m.cpu.cr4 |= cr4::PCIDE;
        guest.m.mmu.set_policy(&guest.m.cpu, policy);
        guest.m.reload();
        guest.owners[0] = Some(0);
        guest
    }

    fn load(&mut self, root: usize, pcid: u64, keeps: bool) {
        // Without a flush only what the same root has left under the PCID may be used.
        let keeps = keeps && self.owners[pcid as usize] == Some(root) && !self.stale[root];
        // What a PCID has of a root that has changed goes with its flush alone, so others have to be flushed, too.
        if self.stale[root] {
            for (n, owner) in self.owners.iter_mut().enumerate() {
                if *owner == Some(root) && n as u64 != pcid {
                    self.m.mmu.flush(&self.m.cpu, Flush::Pcid(n as u16));
                    *owner = None;
                }
            }
            self.stale[root] = false;
        }
        self.owners[pcid as usize] = Some(root);
        (self.current, self.pcids[root]) = (root, pcid);
        let value = (ROOT + root as u64 * 4096) | pcid;
        let by = (value, keeps, self.m.cpu.rflags & rflags::AC);
        let known = self.loads.get(&by).copied().filter(|known| {
            let (front, (of, place)) = (self.m.mmu.front(), known);
            let epochs = front.switch_epochs();
            epochs.of(place.context, !keeps) == of.epoch
                && if keeps {
                    epochs.is_last(value)
                } else {
                    self.changes == of.changes
                }
        });
        self.m.cpu.cr3 = value;
        self.m.mmu.load_cr3(&mut self.m.cpu, !keeps).unwrap();
        let tables = self.m.mmu.front().live_tables().base();
        let front = &mut self.m.mmu.front();
        let now = Place {
            context: front.address_space(),
            tables,
            view: front.live_view(),
            target_epoch: front.target_epoch(&self.m.cpu),
        };
        if let Some((_, place)) = known {
            assert_eq!(place, now);
            self.vouched += 1;
        }
        if keeps || front.compared().is_some() {
            let (epoch, changes) = (front.switch_epoch(!keeps), self.changes);
            self.loads.insert(by, (Remembered { epoch, changes }, now));
        }
    }

    fn run(&mut self, op: Op) {
        match op {
            Op::Fetch { gva } => self.fetch(GVAS[gva]),
            Op::Load { root, pcid, keeps } => self.load(root, pcid, keeps),
            Op::Change {
                root,
                gva,
                to,
                flags,
            } => {
                for n in root.map_or(0..ROOTS, |n| n..n + 1) {
                    let base = gva.min(4);
                    let level = if base == 4 { 2 } else { 1 };
                    let place = entry(&self.m, ROOT + n as u64 * 4096, GVAS[base], level, &mut 0);
                    self.m.poke(place, 8, leaf(base, to, flags));
                    self.stale[n] = true;
                    self.changes += 1;
                }
                // What the current root has is flushed now, by page.
                if self.stale[self.current] {
                    let (cpu, gva) = (&self.m.cpu, GVAS[gva]);
                    self.m.mmu.flush(cpu, Flush::Page(gva));
                    for (pcid, owner) in self.owners.iter().enumerate() {
                        if *owner == Some(self.current) {
                            self.m.mmu.flush(cpu, Flush::PcidPage(pcid as u16, gva));
                        }
                    }
                    self.stale[self.current] = false;
                }
            }
            Op::Flush { gva, how } => {
                let pcid = self.pcids[self.current];
                let what = match how {
                    0 => Flush::Page(GVAS[gva]),
                    1 => Flush::Pcid(pcid as u16),
                    2 => Flush::NonGlobal,
                    _ => Flush::All,
                };
                self.m.mmu.flush(&self.m.cpu, what);
            }
            Op::View => {
                self.m.cpu.rflags ^= rflags::AC;
                self.m.mmu.select_view(&self.m.cpu);
            }
            Op::Recheck => self.m.mmu.recheck_code(),
        }
        self.check();
    }

    /// Fetches as the JIT does: what it finds is kept under the epoch that is told afterwards.
    fn fetch(&mut self, gva: u64) {
        let page = self.m.mmu.code_page(&mut self.m.cpu, gva);
        assert_eq!(
            page.ok().map(|p| p.id & ADDRESS),
            self.walk(gva),
            "{gva:#x}"
        );
        if let Ok(page) = page {
            let epoch = self.m.mmu.front().target_epoch(&self.m.cpu);
            let old = self.known.entry(epoch).or_default().insert(gva, page.id);
            assert!(old.is_none_or(|old| old == page.id), "{gva:#x}");
        }
    }

    fn check(&mut self) {
        let epoch = self.m.mmu.front().target_epoch(&self.m.cpu);
        for (gva, id) in self.known.get(&epoch).into_iter().flatten() {
            assert_eq!(Some(id & ADDRESS), self.walk(*gva), "{gva:#x}");
        }
    }

    /// Returns where the current root's tables say that code at `gva` is.
    fn walk(&self, gva: u64) -> Option<u64> {
        let mut table = ROOT + self.current as u64 * 4096;
        for level in (1..5).rev() {
            let e = self
                .m
                .peek(table + (gva >> (12 + 9 * (level - 1)) & 511) * 8, 8);
            if e & P == 0 || e & NX != 0 {
                return None;
            }
            if level == 1 || e & PS != 0 {
                let mask = (1 << (12 + 9 * (level - 1))) - 1;
                return Some((e & ADDRESS & !mask) + (gva & mask & !0xfff));
            }
            table = e & ADDRESS;
        }
        None
    }
}

const ADDRESS: u64 = 0x000f_ffff_ffff_f000;

/// Returns where the entry of a level for `gva` is, with tables from `pool`.
fn entry(m: &Machine, root: u64, gva: u64, level: u32, pool: &mut u64) -> u64 {
    let mut table = root;
    for n in (level + 1..5).rev() {
        let at = table + (gva >> (12 + 9 * (n - 1)) & 511) * 8;
        if m.peek(at, 8) & P == 0 {
            m.poke(at, 8, *pool | 7);
            *pool += 4096;
        }
        table = m.peek(at, 8) & ADDRESS;
    }
    table + (gva >> (12 + 9 * (level - 1)) & 511) * 8
}

/// A leaf for page number `n` of [`GVAS`] that leads to one of four places.
fn leaf(n: usize, to: u64, flags: u64) -> u64 {
    let mut entry = P | A | D;
    entry |= match n {
        4 => PS | (RAM / 2 + ((to % 2) << 21)),
        _ => RAM - 0x10_0000 + (to << 12),
    };
    match flags {
        0..=9 => entry,
        10 | 11 => entry | RW,
        12 => entry | US,
        13 => entry | NX,
        _ => entry & !P,
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(400) })]

    #[test]
    fn targets_are_right_in_every_context_of_an_epoch(
        policy in prop_oneof![Just(Policy::Tdp), Just(Policy::Auto), Just(Policy::Shadow)],
        max_tables in 8..32usize,
        ops in proptest::collection::vec(ops(), 1..400),
    ) {
        let mut guest = Guest::new(policy);
        guest.m.mmu.set_max_tables(&guest.m.cpu, max_tables);
        for op in ops {
            guest.run(op);
        }
    }
}

/// Roots with the same kernel code share an epoch, the roots of programs have another.
#[test]
fn roots_with_the_same_code_have_one_epoch() {
    for policy in [Policy::Tdp, Policy::Auto, Policy::Shadow] {
        let mut guest = Guest::new(policy);
        // The last root has only the page by which a kernel is entered.
        for gva in &GVAS[1..5] {
            let level = if *gva == LARGE { 2 } else { 1 };
            let last = ROOT + (ROOTS as u64 - 1) * 4096;
            let place = entry(&guest.m, last, *gva, level, &mut 0);
            guest.m.poke(place, 8, 0);
        }
        let mut epochs = [0; ROOTS];
        for round in 0..6 {
            for (root, epoch) in epochs.iter_mut().enumerate() {
                guest.load(root, root as u64 % PCIDS, false);
                let nr_pages = if root == ROOTS - 1 { 1 } else { GVAS.len() };
                for gva in &GVAS[..nr_pages] {
                    guest.fetch(*gva);
                }
                *epoch = guest.m.mmu.front().target_epoch(&guest.m.cpu);
            }
            if round > 0 {
                assert!(
                    epochs[..ROOTS - 1].iter().all(|e| *e == epochs[0]),
                    "{policy:?}"
                );
                assert_ne!(epochs[ROOTS - 1], epochs[0]);
            }
        }
        // A program's root that is entered for the first time looks at as little.
        let walks = guest.m.mmu.stats().fetch_misses;
        guest.load(0, 0, false);
        guest.check();
        assert!(guest.m.mmu.stats().fetch_misses <= walks + 1);
    }
}

/// What one root's context does leaves the loads that lead to others known.
#[test]
fn loads_stay_known_while_other_contexts_change() {
    for policy in [Policy::Auto, Policy::Shadow] {
        let mut guest = Guest::new(policy);
        let lap = |guest: &mut Guest, keeps| {
            for root in 0..3 {
                guest.load(root, root as u64, keeps);
                guest.fetch(GVAS[0]);
                guest.fetch(GVAS[1]);
            }
        };
        (0..8).for_each(|round| lap(&mut guest, round > 4));
        guest.run(Op::Change {
            root: Some(1),
            gva: 1,
            to: 1,
            flags: 10,
        });
        guest.load(1, 1, false);
        let before = guest.vouched;
        lap(&mut guest, true);
        assert_eq!(guest.vouched - before, 2);
    }
}
