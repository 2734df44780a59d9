//! The TLBs never show: after edits of the tables with the flush that the manual
//! asks for, every access does what a plain walk says.

#![allow(clippy::unwrap_used, reason = "tests")]

mod machine;

use machine::Machine;
use mmu::{Kept, Miss, Mmu, Policy};
use proptest::prelude::*;
use x86_cpu::{Access, CpuState, Flush, Privilege};
use x86_defs::{
    control::{cr0, cr4},
    paging::{A, D, G, NX, P, PS, RW, US},
    rflags,
};

/// PCIDs, from 1 on.
const SLOTS: usize = 3;
const ROOTS: [u64; 3] = [0x10_0000, 0x11_0000, 0x12_0000];
/// Pages that leaves point to: each holds its own number.
const DATA: u64 = 0x40_0000;
const NR_DATA: u64 = 64;
/// Few pages that collide in the L1 tables (1 024 entries) and share tables.
const GVAS: [u64; 8] = [
    0x0000_1000,
    0x0000_2000,
    0x0040_1000,
    0x0080_1000,
    0x4000_1000,
    0x0020_1000,
    0xffff_8000_0000_1000,
    0xffff_8000_0040_1000,
];

#[derive(Clone, Debug)]
enum Op {
    Access {
        gva: usize,
        offset: u64,
        access: u8,
        system: bool,
    },
    /// Edits the leaf of `gva` under a root, current or not, and flushes in one of the right ways.
    Edit {
        root: usize,
        gva: usize,
        page: u64,
        flags: u64,
        flush: u8,
    },
    /// Makes the PDE of `gva` a large page, or a table again, and flushes.
    Large {
        gva: usize,
        large: bool,
        flush: u8,
    },
    /// More rights need no flush.
    Grant {
        gva: usize,
    },
    Switch {
        root: usize,
        /// By which of the PCIDs, of which there are fewer than roots.
        slot: usize,
        keep: bool,
    },
    View {
        cpl3: bool,
        wp: bool,
        ac: bool,
    },
    /// What may be kept becomes more or less.
    Budget {
        pages: usize,
    },
}

fn ops() -> impl Strategy<Value = Op> {
    prop_oneof![
        8 => (0..8usize, 0..4096u64, 0..3u8, any::<bool>())
            .prop_map(|(gva, offset, access, system)| Op::Access { gva, offset, access, system }),
        // Only the kernel's half has global leaves (bit 5), only the user's large pages.
        3 => (0..3usize, 0..8usize, 0..NR_DATA, 0..64u64, 0..4u8).prop_map(|(root, gva, page, flags, flush)| {
            let flags = if gva < 6 { flags & 31 } else { flags };
            Op::Edit { root, gva, page, flags, flush }
        }),
        1 => (0..6usize, any::<bool>(), 0..4u8)
            .prop_map(|(gva, large, flush)| Op::Large { gva, large, flush }),
        1 => (0..8usize).prop_map(|gva| Op::Grant { gva }),
        2 => (0..3usize, 0..SLOTS, any::<bool>())
            .prop_map(|(root, slot, keep)| Op::Switch { root, slot, keep }),
        2 => (any::<bool>(), any::<bool>(), any::<bool>())
            .prop_map(|(cpl3, wp, ac)| Op::View { cpl3, wp, ac }),
        1 => (0..3000usize).prop_map(|pages| Op::Budget { pages }),
    ]
}

/// Loads in one go, as by MOV, and those in two steps, as by a task switch.
fn offers(slot: usize, root: usize) -> bool {
    slot != 2 || root != 1
}

struct World {
    m: Machine,
    plain: Mmu,
    plain_cpu: CpuState,
    root: usize,
    pcid: bool,
    /// The root that each PCID was last loaded with.
    root_of: [usize; SLOTS],
    slot: usize,
    budget: usize,
}

impl World {
    fn new(pcid: bool, policy: Policy) -> Self {
        let mut m = Machine::long_mode(ROOTS[0]);
        m.cpu.cr4 |= cr4::SMAP | cr4::SMEP;
        if pcid {
            m.cpu.cr4 |= cr4::PCIDE;
            m.cpu.cr3 |= 1;
        }
        for page in 0..NR_DATA {
            m.poke(DATA + page * 4096, 8, page);
        }
        let mut pool = 0x20_0000;
        for root in ROOTS {
            for (i, gva) in GVAS.iter().enumerate() {
                m.map(
                    root,
                    *gva,
                    (DATA + i as u64 * 4096) | P | RW | US,
                    &mut pool,
                );
            }
        }
        let (plain, plain_cpu) = m.second();
        let mut w = Self {
            m,
            plain,
            plain_cpu,
            root: 0,
            pcid,
            root_of: [0, 1, 2],
            slot: 0,
            budget: usize::MAX,
        };
        w.m.reload();
        w.m.mmu.set_policy(&w.m.cpu, policy);
        w
    }

    fn entry(&self, gva: u64, leaf_level: u32) -> u64 {
        let mut table = ROOTS[self.root];
        for level in (leaf_level + 1..=4).rev() {
            let at = table + (gva >> (12 + 9 * (level - 1)) & 511) * 8;
            table = self.m.peek(at, 8) & 0x000f_ffff_ffff_f000;
        }
        table + (gva >> (12 + 9 * (leaf_level - 1)) & 511) * 8
    }

    fn current_pcid(&self) -> u16 {
        if self.pcid { self.slot as u16 + 1 } else { 0 }
    }

    /// PCIDs that may have translations of `self.root`.
    fn pcids(&self) -> Vec<u16> {
        if !self.pcid {
            return vec![0];
        }
        let slots = (0..SLOTS).filter(|s| self.root_of[*s] == self.root);
        slots.map(|s| s as u16 + 1).collect()
    }

    fn flush(&mut self, gva: u64, how: u8, global: bool) {
        let pcids = self.pcids();
        let how = match how {
            0 => vec![Flush::Page(gva)],
            1 if !global => pcids.iter().map(|p| Flush::Pcid(*p)).collect(),
            2 if !global => vec![Flush::NonGlobal],
            3 if !global && self.pcid => vec![],
            _ => vec![Flush::Global],
        };
        let by_page = how.is_empty() || how == [Flush::Page(gva)];
        for how in how {
            self.m.mmu.flush(&self.m.cpu, how);
        }
        if by_page && self.pcid {
            for pcid in pcids {
                self.m.mmu.flush(&self.m.cpu, Flush::PcidPage(pcid, gva));
            }
        }
    }

    fn is_large(&self, gva: u64) -> bool {
        self.m.peek(self.entry(gva, 2), 8) & PS != 0
    }

    fn step(&mut self, op: &Op) {
        match *op {
            Op::Access {
                gva,
                offset,
                access,
                system,
            } => self.access(GVAS[gva] + offset, access, system),
            Op::Edit {
                root,
                gva,
                page,
                flags,
                flush,
            } => {
                let current = core::mem::replace(&mut self.root, root);
                self.edit(GVAS[gva], page, flags, flush, root == current);
                self.root = current;
            }
            Op::Large { gva, large, flush } => {
                let gva = GVAS[gva];
                let at = self.entry(gva, 2);
                let old = self.m.peek(at, 8);
                let saved = 0x30_0000 + (at & 0xf_ffff);
                if large && old & PS == 0 {
                    self.m.poke(saved, 8, old);
                    self.m.poke(at, 8, DATA | PS | P | RW | US);
                } else if !large && old & PS != 0 {
                    self.m.poke(at, 8, self.m.peek(saved, 8));
                }
                // The tables below may have global leaves.
                self.flush(gva, flush, flush != 0);
                if flush == 0 {
                    for other in GVAS {
                        self.m.mmu.flush(&self.m.cpu, Flush::Page(other));
                    }
                }
            }
            Op::Grant { gva } => {
                let gva = GVAS[gva];
                if self.is_large(gva) {
                    return;
                }
                let at = self.entry(gva, 1);
                let old = self.m.peek(at, 8);
                // (A global one would have to be granted under every root.)
                if old & P != 0 && old & G == 0 {
                    self.m.poke(at, 8, (old | RW) & !NX);
                }
            }
            Op::Switch { root, slot, keep } => {
                self.root = root;
                self.slot = slot;
                self.m.cpu.cr3 = ROOTS[root] | u64::from(self.current_pcid());
                let keep = keep && self.pcid && self.root_of[slot] == root;
                self.root_of[slot] = root;
                if offers(slot, root) {
                    self.m.mmu.load_cr3(&mut self.m.cpu, !keep).unwrap();
                } else {
                    self.m.mmu.load_root(&mut self.m.cpu).unwrap();
                    if !keep {
                        let pcid = self.current_pcid();
                        self.m.mmu.flush(&self.m.cpu, Flush::Pcid(pcid));
                    }
                }
            }
            Op::View { cpl3, wp, ac } => {
                let cpu = &mut self.m.cpu;
                cpu.cpl = if cpl3 { 3 } else { 0 };
                cpu.cr0 = cpu.cr0 & !cr0::WP | if wp { cr0::WP } else { 0 };
                cpu.rflags = cpu.rflags & !rflags::AC | if ac { rflags::AC } else { 0 };
                self.m.mmu.select_view(&self.m.cpu);
            }
            Op::Budget { pages } => {
                self.m.mmu.set_budget(&self.m.cpu, pages);
                self.budget = pages;
            }
        }
        assert!(self.m.mmu.kept().pages <= self.budget.max(Kept::LEAST_PAGES));
    }

    fn edit(&mut self, gva: u64, page: u64, flags: u64, flush: u8, is_current: bool) {
        if self.is_large(gva) {
            return;
        }
        let all = [P, RW, US, NX, A | D, G];
        let flags = (0..6)
            .filter(|i| flags >> i & 1 != 0)
            .fold(0, |f, i| f | all[i]);
        let at = self.entry(gva, 1);
        let entry = (DATA + page * 4096) | flags;
        // Global leaves lead to the same place under every root, as kernels have
        // it; otherwise the result depends on history.
        let was_global = self.m.peek(at, 8) & G != 0;
        if was_global || flags & G != 0 {
            return self.edit_everywhere(gva, entry, was_global && flush == 0);
        }
        self.m.poke(at, 8, entry);
        // INVLPG reaches the current PCID only.
        let flush = if is_current { flush } else { flush.max(1) };
        self.flush(gva, flush, false);
    }

    fn edit_everywhere(&mut self, gva: u64, entry: u64, by_page: bool) {
        let root = self.root;
        for r in 0..ROOTS.len() {
            self.root = r;
            if !self.is_large(gva) {
                self.m.poke(self.entry(gva, 1), 8, entry);
            }
        }
        self.root = root;
        // INVLPG reaches global pages of every PCID; the non-global ones of other
        // PCIDs that the entry replaced need more.
        let how = if by_page {
            Flush::Page(gva)
        } else {
            Flush::Global
        };
        self.m.mmu.flush(&self.m.cpu, how);
    }

    /// Flushes everything so often that a tracked context's global translations catch up, too.
    fn flush_often(&mut self) {
        for _ in 0..300 {
            self.m.mmu.flush(&self.m.cpu, Flush::Global);
        }
    }

    /// The same access on the TLBs and on a machine that has none.
    fn access(&mut self, gva: u64, access: u8, system: bool) {
        let who = if system {
            Privilege::System
        } else {
            Privilege::Current
        };
        let gva = gva & !7;
        self.plain_cpu.clone_from(&self.m.cpu);
        self.plain.set_root(&self.plain_cpu);
        self.plain.flush(&self.plain_cpu, Flush::All);
        let m = &mut self.m;
        match access {
            0 => {
                let got = m.mmu.read::<u64>(&mut m.cpu, gva, who);
                let want = self
                    .plain
                    .translate(&mut self.plain_cpu, gva, Access::Read, who);
                let want = want.map(|t| m.peek(t.gpa, 8));
                assert_eq!(got, want, "read {gva:x}");
            }
            1 => {
                let value = gva ^ 0x1234_5678;
                let before = {
                    // Without side effects: the leaf before anybody sets D.
                    m.mmu.translate_debug(&m.cpu, gva).map(|gpa| m.peek(gpa, 8))
                };
                let got = m.mmu.write::<u64>(&mut m.cpu, gva, value, who);
                let large = self.is_large(gva);
                let leaf = self.entry(gva, if large { 2 } else { 1 });
                // A global translation may come from another root's entry.
                if got.is_ok() && self.m.peek(leaf, 8) & G == 0 {
                    assert_eq!(self.m.peek(leaf, 8) & (A | D), A | D);
                }
                let want = self
                    .plain
                    .translate(&mut self.plain_cpu, gva, Access::Write, who);
                match want {
                    Ok(t) => {
                        assert_eq!(got, Ok(()));
                        assert_eq!(self.m.peek(t.gpa, 8), value, "write {gva:x}");
                        // The page's number is part of the data: put it back.
                        self.m.poke(t.gpa, 8, before.unwrap());
                    }
                    Err(e) => assert_eq!(got, Err(e)),
                }
            }
            _ => {
                let got = m.mmu.code_page(&mut m.cpu, gva);
                let want = self.plain.translate(
                    &mut self.plain_cpu,
                    gva,
                    Access::Fetch,
                    Privilege::Current,
                );
                match (got, want) {
                    (Ok(page), Ok(t)) => {
                        assert_eq!(page.id & 0xf_ffff_ffff_ffff, t.gpa & !0xfff);
                    }
                    (got, want) => {
                        assert_eq!(got.map(|_| ()), want.map(|_| ()), "fetch {gva:x}");
                    }
                }
            }
        }
        if self.plain_cpu.fault_gva != self.m.cpu.fault_gva {
            panic!("fault address");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn same_as_a_plain_walk(
        pcid in any::<bool>(), often in any::<bool>(), few in 1..8usize, ops in proptest::collection::vec(ops(), 1..150)
    ) {
        let all = [Policy::Tdp, Policy::Shadow, Policy::Auto].map(|policy| (policy, 192));
        // Contexts take each other's tables.
        for (policy, tables) in all.into_iter().chain([(Policy::Shadow, few), (Policy::Auto, few)]) {
            let mut w = World::new(pcid, policy);
            w.m.mmu.set_max_tables(&w.m.cpu, tables);
            if often {
                w.flush_often();
            }
            for (n, op) in ops.iter().enumerate() {
                if n % 5 == few % 5 {
                    w.m.mmu.exchange_tables();
                }
                w.step(op);
            }
        }
    }
}

/// What INVPCID, MOV to CR3 and INVLPG keep and what they drop (SDM vol. 3, 4.10.4.1).
#[test]
fn flush_semantics() {
    const KERNEL: u64 = 0xffff_8000_0000_1000;
    // Not the kernel page's place in L1.
    const USER: u64 = 0x2000;
    // (flush, while PCID 2 is current; which of PCID 1's pages are seen anew)
    let table = [
        (None, false, false),
        (Some(Flush::Pcid(2)), false, false),
        (Some(Flush::Pcid(1)), true, false),
        (Some(Flush::NonGlobal), true, false),
        (Some(Flush::Global), true, true),
        (Some(Flush::All), true, true),
        (Some(Flush::PcidPage(1, USER)), true, false),
        (Some(Flush::Page(KERNEL)), false, true),
    ];
    for (flush, user_new, kernel_new) in table {
        let mut w = World::new(true, Policy::Tdp);
        let at = [w.entry(USER, 1), w.entry(KERNEL, 1)];
        w.m.poke(at[1], 8, DATA | P | RW | G);
        w.step(&Op::Switch {
            root: 0,
            slot: 0,
            keep: true,
        });
        w.m.cpu.rflags |= rflags::AC;
        w.m.mmu.select_view(&w.m.cpu);
        let read = |w: &mut World, gva| -> u64 {
            w.m.mmu.read(&mut w.m.cpu, gva, Privilege::Current).unwrap()
        };
        assert_eq!((read(&mut w, USER), read(&mut w, KERNEL)), (1, 0));
        // Edits without a flush: the old translations are allowed to stay, and do.
        w.m.poke(at[0], 8, (DATA + 0x5000) | P | RW | US);
        w.m.poke(at[1], 8, (DATA + 0x6000) | P | RW | G);
        w.step(&Op::Switch {
            root: 1,
            slot: 1,
            keep: true,
        });
        // A global page is seen under any PCID.
        assert_eq!(read(&mut w, KERNEL), 0);
        if let Some(flush) = flush {
            w.m.mmu.flush(&w.m.cpu, flush);
        }
        w.step(&Op::Switch {
            root: 0,
            slot: 0,
            keep: true,
        });
        assert_eq!(
            read(&mut w, USER),
            if user_new { 5 } else { 1 },
            "{flush:?}"
        );
        assert_eq!(
            read(&mut w, KERNEL),
            if kernel_new { 6 } else { 0 },
            "{flush:?}"
        );
    }
}

/// Views, CR3 writes that keep a PCID, and their way back cost no walk.
#[test]
fn switching_walks_nothing() {
    let mut w = World::new(true, Policy::Tdp);
    let go = |w: &mut World| {
        for root in 0..3 {
            w.step(&Op::Switch {
                root,
                slot: root,
                keep: true,
            });
            for cpl3 in [true, false] {
                for wp in [true, false] {
                    w.step(&Op::View { cpl3, wp, ac: true });
                    for gva in GVAS {
                        let cpu = &mut w.m.cpu;
                        w.m.mmu
                            .write(cpu, gva + 64, 1u8, Privilege::Current)
                            .unwrap();
                    }
                }
            }
        }
    };
    go(&mut w);
    let before = w.m.mmu.stats();
    go(&mut w);
    let after = w.m.mmu.stats();
    assert_eq!(before.walks, after.walks);
    // L1 as well, but for the conflicts that the addresses are chosen for.
    assert!(after.l1_misses - before.l1_misses < 3 * 4 * 8 * 2);
    assert!(before.walks >= 24);
}

/// Roots that come back are not flushed, whatever PCID they come with: what was not changed costs no
/// walk, what was is seen.
#[test]
fn roots_that_come_back_catch_up() {
    for (pcid, policy) in [
        (false, Policy::Shadow),
        (false, Policy::Auto),
        (true, Policy::Shadow),
        (true, Policy::Auto),
    ] {
        let mut w = World::new(pcid, policy);
        let lap = |w: &mut World, n: usize| {
            let before = w.m.mmu.stats();
            let mut seen = Vec::new();
            for root in 0..3 {
                w.step(&Op::Switch {
                    root,
                    slot: (root + n) % SLOTS,
                    keep: false,
                });
                w.m.cpu.rflags |= rflags::AC;
                w.m.mmu.select_view(&w.m.cpu);
                for gva in GVAS {
                    let r = w.m.mmu.read::<u64>(&mut w.m.cpu, gva, Privilege::Current);
                    seen.push(r.unwrap());
                }
            }
            let after = w.m.mmu.stats();
            (seen, after.walks - before.walks, after.entries_changed)
        };
        for n in 0..6 {
            lap(&mut w, n);
        }
        let (first, _, _) = lap(&mut w, 6);
        // (L1 has conflicts, but L2 none.)
        assert_eq!(lap(&mut w, 7), (first.clone(), 0, 0), "{pcid} {policy:?}");
        // One entry of a root that is not the current one.
        w.root = 1;
        let at = w.entry(GVAS[1], 1);
        w.m.poke(at, 8, (DATA + 0x9000) | P | RW | US);
        let (second, walks, changed) = lap(&mut w, 8);
        assert_eq!((walks, changed), (1, 1), "{pcid} {policy:?}");
        let mut want = first;
        want[GVAS.len() + 1] = 9;
        assert_eq!(second, want, "{pcid} {policy:?}");
        // An accessed flag that is cleared has to be set again.
        let entry = w.m.peek(at, 8);
        w.m.poke(at, 8, entry & !A);
        lap(&mut w, 9);
        assert_eq!(w.m.peek(at, 8), entry, "{pcid} {policy:?}");
        // A table that is another's: everything that it maps is found anew, and nothing else.
        w.root = 2;
        let at = w.entry(GVAS[0], 2);
        w.m.poke(at, 8, 0x7f_f000 | P | RW | US);
        let before = w.m.mmu.stats();
        w.step(&Op::Switch {
            root: 2,
            slot: 0,
            keep: false,
        });
        for gva in &GVAS[2..] {
            w.m.mmu
                .read::<u64>(&mut w.m.cpu, *gva, Privilege::Current)
                .unwrap();
        }
        assert_eq!(w.m.mmu.stats().walks, before.walks, "{pcid} {policy:?}");
        let r =
            w.m.mmu
                .read::<u64>(&mut w.m.cpu, GVAS[0], Privilege::Current);
        assert!(matches!(r, Err(Miss::Exception(_))), "{r:?}");
    }
}

/// A guest that flushes everything again and again, as Xen does, keeps its global translations as well, as long as their
/// entries are what they were. One that only loads CR3 keeps them whatever their entries are.
#[test]
fn flushes_of_everything_catch_up() {
    const KERNEL: u64 = GVAS[6];
    let mut w = World::new(false, Policy::Auto);
    let set = |w: &mut World, page: u64| {
        for root in 0..ROOTS.len() {
            w.root = root;
            let at = w.entry(KERNEL, 1);
            w.m.poke(at, 8, (DATA + page * 4096) | P | RW | G);
        }
    };
    set(&mut w, 0);
    let lap = |w: &mut World, flushes: bool| {
        let before = w.m.mmu.stats().walks;
        let mut seen = 0;
        for root in 0..ROOTS.len() {
            w.step(&Op::Switch {
                root,
                slot: 0,
                keep: false,
            });
            if flushes {
                w.m.mmu.flush(&w.m.cpu, Flush::Global);
            }
            w.m.cpu.rflags |= rflags::AC;
            w.m.mmu.select_view(&w.m.cpu);
            for gva in [GVAS[0], KERNEL] {
                let r = w.m.mmu.read::<u64>(&mut w.m.cpu, gva, Privilege::Current);
                seen = r.unwrap();
            }
        }
        (seen, w.m.mmu.stats().walks - before)
    };
    // Without a reason to ignore G, everything is found anew.
    for _ in 0..8 {
        lap(&mut w, true);
    }
    assert_eq!(lap(&mut w, true), (0, 6));
    for _ in 0..100 {
        lap(&mut w, true);
    }
    assert_eq!(lap(&mut w, true), (0, 0));
    set(&mut w, 6);
    assert_eq!(lap(&mut w, true), (6, 3));
    for _ in 0..300 {
        lap(&mut w, false);
    }
    set(&mut w, 7);
    assert_eq!(lap(&mut w, false), (6, 0));
}

/// Loads that flush are flushes of the PCID, also where generated code has made them and only says so: what they leave
/// behind catches up even if it is selected without a flush.
#[test]
fn loads_by_generated_code_flush() {
    let mut w = World::new(false, Policy::Shadow);
    w.m.cpu.rflags |= rflags::AC;
    let read = |w: &mut World| {
        w.m.mmu.select_view(&w.m.cpu);
        let gva = GVAS[1];
        w.m.mmu
            .read::<u64>(&mut w.m.cpu, gva, Privilege::Current)
            .unwrap()
    };
    let load = |w: &mut World, root: usize, flushing: u64| {
        w.root = root;
        w.m.cpu.cr3 = ROOTS[root];
        if flushing != 0 {
            w.m.mmu.front().note_flushing_loads(&w.m.cpu, flushing);
        }
        w.m.mmu.load_root(&mut w.m.cpu).unwrap();
    };
    for root in [0, 1, 0] {
        w.m.cpu.cr3 = ROOTS[root];
        w.m.mmu.load_cr3(&mut w.m.cpu, true).unwrap();
        assert_eq!(read(&mut w), 1);
    }
    let before = w.m.mmu.stats();
    let at = w.entry(GVAS[1], 1);
    w.m.poke(at, 8, (DATA + 0x9000) | P | RW | US);
    load(&mut w, 1, 3);
    assert_eq!(read(&mut w), 1);
    let between = w.m.mmu.stats();
    assert_eq!(between.flushes - before.flushes, 3);
    // Generated code has compared that context.
    assert_eq!(between.catch_ups, before.catch_ups);
    load(&mut w, 0, 0);
    assert_eq!(read(&mut w), 9);
}

/// A context that has lost its tables is given back what is unchanged, and nothing else.
#[test]
fn contexts_without_tables_walk_for_what_has_changed() {
    let mut w = World::new(false, Policy::Shadow);
    w.m.mmu.set_max_tables(&w.m.cpu, 2);
    w.m.cpu.rflags |= rflags::AC;
    let lap = |w: &mut World| {
        let before = w.m.mmu.stats();
        let mut seen = Vec::new();
        for root in 0..3 {
            w.step(&Op::Switch {
                root,
                slot: 0,
                keep: false,
            });
            for gva in GVAS {
                let (mmu, cpu) = (&mut w.m.mmu, &mut w.m.cpu);
                mmu.write(cpu, gva + 64, 7u8, Privilege::Current).unwrap();
                seen.push(mmu.read::<u64>(cpu, gva, Privilege::Current).unwrap());
            }
        }
        let after = w.m.mmu.stats();
        (
            seen,
            after.walks - before.walks,
            after.views_made - before.views_made,
        )
    };
    for _ in 0..4 {
        lap(&mut w);
    }
    let (first, walks, views) = lap(&mut w);
    assert_eq!(walks, 0);
    assert!(views >= 3, "{views}");
    w.root = 1;
    let at = w.entry(GVAS[1], 1);
    w.m.poke(at, 8, (DATA + 0x9000) | P | RW | US);
    let (second, walks, _) = lap(&mut w);
    let mut want = first;
    want[GVAS.len() + 1] = 9;
    assert_eq!(second, want);
    // To read it, and to set D.
    assert!((1..=2).contains(&walks), "{walks}");
    // Without write permission D is noted again, and the write as well.
    let entry = w.m.peek(at, 8);
    assert_ne!(entry & D, 0);
    w.m.poke(at, 8, entry & !D);
    lap(&mut w);
    assert_eq!(w.m.peek(at, 8), entry);
}

/// INVLPG of any address in a large page drops all of it.
#[test]
fn large_pages_are_flushed_whole() {
    for (level, size) in [(2, 2u64 << 20), (3, 1 << 30)] {
        let mut w = World::new(false, Policy::Tdp);
        let gva = 0x8000_0000;
        let mut pool = 0x60_0000;
        w.m.map(ROOTS[0], gva, 0, &mut pool);
        let at = w.entry(gva, level);
        w.m.poke(at, 8, P | RW | PS);
        for offset in [0, 0x1000, size / 2, size - 0x1000] {
            let r =
                w.m.mmu
                    .write(&mut w.m.cpu, gva + offset, 1u8, Privilege::Current);
            assert!(matches!(r, Ok(()) | Err(Miss::Device { .. })));
        }
        w.m.poke(at, 8, 0);
        w.m.mmu
            .flush(&w.m.cpu, Flush::Page(gva + size / 2 + 0x3000));
        for offset in [0, 0x1000, size / 2, size - 0x1000] {
            let r =
                w.m.mmu
                    .read::<u8>(&mut w.m.cpu, gva + offset, Privilege::Current);
            assert!(matches!(r, Err(Miss::Exception(_))), "{offset:x}");
        }
    }
}
