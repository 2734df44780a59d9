//! What is kept of walks never shows: paging-structure caches, and neighbours that come along.
//!
//! Random tables of each paging mode are changed at all levels, with and without the flush that the manual asks for. What was
//! not flushed may be seen as it was or as it is, what was flushed only as it is; a fault is what the tables say now. Flags of entries, the
//! dirty log and code change as the accesses alone change them.

#![allow(clippy::unwrap_used, reason = "tests")]

mod machine;

use std::collections::{BTreeMap, BTreeSet, HashMap};

use machine::Machine;
use mmu::{Miss, Mmu, Policy, Source};
use proptest::prelude::*;
use x86_cpu::{Access, CpuState, Flush, Privilege::Current};
use x86_defs::{
    control::{cr0, cr4, efer},
    paging::{A, D, G, NX, P, PS, RW, US},
};

const LOG: u32 = 1;
const ROOTS: usize = 2;
/// Each page begins with its number.
const DATA: u64 = 0x80_0000;
const NR_DATA: u64 = 1024;
/// Where writes go in a page.
const AT: u64 = 64;
const ADDRESS: u64 = 0x000f_ffff_ffff_f000;
/// Beyond the guest's physical addresses.
const RESERVED: u64 = 1 << 45;

/// Pages of one line of a table, of another line, of other tables.
const GVAS: [u64; 8] = [
    0x1000,
    0x2000,
    0x5000,
    0x3_1000,
    0x20_1000,
    0x80_1000,
    0x4000_1000,
    0xffff_8000_0000_1000,
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Bits32,
    Pae,
    Level4,
    Level5,
}

impl Mode {
    fn top(self) -> usize {
        match self {
            Self::Bits32 | Self::Pae => 2,
            Self::Level4 => 4,
            Self::Level5 => 5,
        }
    }
    fn is_long(self) -> bool {
        self.top() > 2
    }
    fn size(self) -> usize {
        if self == Self::Bits32 { 4 } else { 8 }
    }
    fn place(self, level: usize, gva: u64) -> u64 {
        if self == Self::Bits32 {
            (gva >> (12 + 10 * (level - 1)) & 1023) * 4
        } else {
            (gva >> (12 + 9 * (level - 1)) & 511) * 8
        }
    }
    fn gvas(self) -> &'static [u64] {
        &GVAS[..if self.is_long() { 8 } else { 7 }]
    }
}

#[derive(Clone, Debug)]
enum Op {
    Access {
        gva: usize,
        access: u8,
    },
    /// Changes the entry of a level on the way to `gva`.
    Edit {
        root: usize,
        gva: usize,
        level: usize,
        to: u64,
        flags: u64,
        flush: Option<u8>,
    },
    Flush {
        gva: usize,
        how: u8,
    },
    Load {
        root: usize,
        pcid: usize,
        keep: bool,
    },
    View {
        cpl3: bool,
        wp: bool,
    },
    Harvest,
    /// The page becomes code.
    Code {
        gva: usize,
    },
}

fn ops() -> impl Strategy<Value = Op> {
    prop_oneof![
        12 => (0..8usize, 0..3u8).prop_map(|(gva, access)| Op::Access { gva, access }),
        4 => (0..ROOTS, 0..8usize, 1..6usize, any::<u64>(), any::<u64>(), proptest::option::of(0..4u8))
            .prop_map(|(root, gva, level, to, flags, flush)| Op::Edit { root, gva, level, to, flags, flush }),
        2 => (0..8usize, 0..4u8).prop_map(|(gva, how)| Op::Flush { gva, how }),
        2 => (0..ROOTS, 0..ROOTS, any::<bool>()).prop_map(|(root, pcid, keep)| Op::Load { root, pcid, keep }),
        1 => (any::<bool>(), any::<bool>()).prop_map(|(cpl3, wp)| Op::View { cpl3, wp }),
        1 => Just(Op::Harvest),
        1 => (0..8usize).prop_map(|gva| Op::Code { gva }),
    ]
}

/// A way through values that the entries have, or have had.
#[derive(Clone, Debug)]
struct Way {
    page: u64,
    write: bool,
    user: bool,
    no_execute: bool,
    global: bool,
    through: Vec<u64>,
}

struct World {
    m: Machine,
    mode: Mode,
    plain: Mmu,
    plain_cpu: CpuState,
    /// Top tables, or in PAE mode the page directory that all PDPTEs name.
    roots: [u64; ROOTS],
    /// Tables by level.
    tables: [Vec<u64>; 6],
    entries: Vec<u64>,
    /// Values of each entry, without A and D, and since when.
    values: HashMap<u64, Vec<(u64, u64)>>,
    now: u64,
    root: usize,
    pcid: usize,
    has_pcids: bool,
    /// Leaves may be global. Roots have others at one address, so what is found depends on what was found before.
    has_global: bool,
    /// What each PCID was loaded with last.
    root_of: [usize; ROOTS],
    /// When something was flushed: all of a PCID, a page of it, everything global, a global page.
    flushed: [u64; ROOTS],
    flushed_page: HashMap<(usize, u64), u64>,
    flushed_all: u64,
    flushed_global: HashMap<u64, u64>,
    dirty: BTreeSet<u64>,
    /// Pages of code: identity and generation.
    code: BTreeMap<u64, (u64, u32)>,
}

impl World {
    fn new(mode: Mode, has_pcids: bool, policy: Policy, source: Source) -> Self {
        let mut m = Machine::with_flags(LOG);
        m.cpu.cr0 |= cr0::PG | cr0::WP;
        m.cpu.cr4 |= cr4::PGE | cr4::PSE;
        if mode != Mode::Bits32 {
            m.cpu.cr4 |= cr4::PAE;
            m.cpu.efer |= efer::NXE;
        }
        if mode.is_long() {
            m.cpu.efer |= efer::LME | efer::LMA;
            m.cpu.seg[x86_defs::reg::CS].attr.0 |= x86_defs::segment::Attr::L;
        }
        if mode == Mode::Level5 {
            m.cpu.cr4 |= cr4::LA57;
        }
        let has_pcids = has_pcids && mode.is_long();
        if has_pcids {
            m.cpu.cr4 |= cr4::PCIDE;
        }
        m.cpu.update_mode();
        for page in 0..NR_DATA {
            m.poke(DATA + page * 4096, 8, page);
        }
        let (plain, plain_cpu) = m.second();
        let mut w = Self {
            m,
            mode,
            plain,
            plain_cpu,
            roots: [0; ROOTS],
            tables: Default::default(),
            entries: Vec::new(),
            values: HashMap::new(),
            now: 0,
            root: 0,
            pcid: 0,
            has_pcids,
            has_global: true,
            root_of: [0, 1],
            flushed: [0; ROOTS],
            flushed_page: HashMap::new(),
            flushed_all: 0,
            flushed_global: HashMap::new(),
            dirty: BTreeSet::new(),
            code: BTreeMap::new(),
        };
        w.build();
        w.set_cr3();
        w.m.reload();
        w.m.mmu.set_policy(&w.m.cpu, policy);
        w.m.mmu.set_source(source);
        w.plain.set_source(Source::Tables);
        w.harvest();
        w.dirty.clear();
        w
    }

    /// Tables of all roots, with all pages accessed and half of them dirty.
    fn build(&mut self) {
        let mut pool = 0x10_0000;
        let mut fresh = |tables: &mut Vec<u64>| {
            pool += 0x1000;
            tables.push(pool);
            pool
        };
        let top = self.mode.top();
        for root in 0..ROOTS {
            self.roots[root] = fresh(&mut self.tables[top]);
            if self.mode == Mode::Pae {
                // The page that CR3 names, with its four PDPTEs.
                for n in 0..4 {
                    let at = 0xf_0000 + root as u64 * 0x1000 + n * 8;
                    self.m.poke(at, 8, self.roots[root] | P);
                }
            }
            for (n, gva) in self.mode.gvas().iter().enumerate() {
                let mut table = self.roots[root];
                for level in (2..=top).rev() {
                    let at = table + self.mode.place(level, *gva);
                    let mut entry = self.m.peek(at, self.mode.size());
                    if entry & P == 0 {
                        entry = fresh(&mut self.tables[level - 1]) | P | RW | US | A;
                        self.set(at, entry);
                    }
                    table = entry & ADDRESS;
                }
                let flags = P | RW | US | A | if n % 2 == 0 { D } else { 0 };
                let page = (n + 8 * root) as u64;
                self.set(
                    table + self.mode.place(1, *gva),
                    (DATA + page * 4096) | flags,
                );
            }
        }
        for level in 1..=top {
            for table in &self.tables[level] {
                let places = self.mode.gvas().iter().map(|g| self.mode.place(level, *g));
                self.entries.extend(places.map(|place| table + place));
            }
        }
        self.entries.sort_unstable();
        self.entries.dedup();
    }

    fn tick(&mut self) -> u64 {
        self.now += 1;
        self.now
    }

    fn set(&mut self, at: u64, value: u64) {
        let now = self.tick();
        self.m.poke(at, self.mode.size(), value);
        let values = self.values.entry(at).or_default();
        values.push((now, value & !(A | D)));
    }

    fn set_cr3(&mut self) {
        self.m.cpu.cr3 = match self.mode {
            Mode::Pae => 0xf_0000 + self.root as u64 * 0x1000,
            _ => self.roots[self.root],
        };
        if self.has_pcids {
            self.m.cpu.cr3 |= self.pcid as u64 + 1;
        }
    }

    /// Values that an entry has, and has had since then.
    fn values_since(&self, at: u64, since: u64) -> Vec<u64> {
        let Some(values) = self.values.get(&at) else {
            return vec![0];
        };
        let old = values.iter().rposition(|(t, _)| *t <= since);
        values[old.unwrap_or(0)..].iter().map(|v| v.1).collect()
    }

    fn ways(&self, root: usize, gva: u64, since: u64) -> Vec<Way> {
        let mut ways = Vec::new();
        let start = Way {
            page: 0,
            write: true,
            user: true,
            no_execute: false,
            global: false,
            through: Vec::new(),
        };
        let (top, table) = (self.mode.top(), self.roots[root]);
        self.follow(table, top, gva, since, &start, &mut ways);
        ways
    }

    fn follow(
        &self,
        table: u64,
        level: usize,
        gva: u64,
        since: u64,
        above: &Way,
        ways: &mut Vec<Way>,
    ) {
        let at = table + self.mode.place(level, gva);
        for value in self.values_since(at, since) {
            if value & P == 0 || self.mode != Mode::Bits32 && value & RESERVED != 0 {
                continue;
            }
            let mut way = above.clone();
            way.through.push(at);
            way.write &= value & RW != 0;
            way.user &= value & US != 0;
            way.no_execute |= self.mode != Mode::Bits32 && value & NX != 0;
            let is_large = level == 2 && value & PS != 0;
            if level > 1 && !is_large {
                self.follow(value & ADDRESS, level - 1, gva, since, &way, ways);
                continue;
            }
            let large = if self.mode == Mode::Bits32 { 1023 } else { 511 };
            let inside = if is_large { gva >> 12 & large } else { 0 };
            way.page = ((value & ADDRESS) - DATA) / 4096 + inside;
            way.global = value & G != 0;
            ways.push(way);
        }
    }

    /// What an access to `gva` may find.
    fn may_find(&self, gva: u64) -> Vec<Way> {
        let pages = self.flushed_page.get(&(self.pcid, gva));
        let private = self.flushed[self.pcid]
            .max(self.flushed_all)
            .max(pages.copied().unwrap_or(0));
        let global = self.flushed_global.get(&gva);
        let global = self.flushed_all.max(global.copied().unwrap_or(0));
        let mut ways = self.ways(self.root, gva, private);
        for root in 0..ROOTS {
            let more = self.ways(root, gva, global);
            ways.extend(more.into_iter().filter(|w| w.global));
        }
        ways
    }

    fn is_allowed(&self, way: &Way, access: Access) -> bool {
        let cpu = &self.m.cpu;
        let may_write = way.write || cpu.cpl == 0 && cpu.cr0 & cr0::WP == 0;
        (cpu.cpl == 0 || way.user)
            && match access {
                Access::Read => true,
                Access::Write => may_write,
                Access::Fetch => !way.no_execute,
            }
    }

    fn flush(&mut self, gva: u64, how: u8) {
        let now = self.tick();
        match how {
            0 => {
                self.m.mmu.flush(&self.m.cpu, Flush::Page(gva));
                self.flushed_page.insert((self.pcid, gva), now);
                self.flushed_global.insert(gva, now);
            }
            1 => {
                // What is not global of the current PCID.
                self.m.mmu.load_cr3(&mut self.m.cpu, true).unwrap();
                self.flushed[self.pcid] = now;
            }
            2 if self.has_pcids => {
                // INVPCID, of the PCID that is not current.
                let other = 1 - self.pcid;
                let pcid = other as u16 + 1;
                self.m.mmu.flush(&self.m.cpu, Flush::PcidPage(pcid, gva));
                self.flushed_page.insert((other, gva), now);
            }
            _ => {
                self.m.mmu.flush(&self.m.cpu, Flush::All);
                self.flushed_all = now;
            }
        }
    }

    fn edit(&mut self, gva: u64, root: usize, level: usize, to: u64, flags: u64) {
        let (mode, top) = (self.mode, self.mode.top());
        let level = (level - 1) % top + 1;
        let mut table = self.roots[root];
        for above in (level + 1..=top).rev() {
            let entry = self.m.peek(table + mode.place(above, gva), mode.size());
            if entry & P == 0 || entry & PS != 0 || entry & RESERVED != 0 {
                return;
            }
            table = entry & ADDRESS;
        }
        let bit = |n: u32, bit: u64| if flags >> n & 1 != 0 { bit } else { 0 };
        // Mostly present and allowed.
        let often = |n: u32, bit: u64| if flags >> n & 7 != 0 { bit } else { 0 };
        let mut value = often(0, P) | often(3, RW) | often(6, US) | often(9, A);
        if mode != Mode::Bits32 {
            value |= (NX | RESERVED) ^ (often(12, NX) | often(15, RESERVED));
        }
        let is_large = level == 2 && flags >> 20 & 7 == 0;
        value |= if is_large {
            DATA | PS | bit(23, D)
        } else if level == 1 {
            (DATA + to % NR_DATA * 4096)
                | bit(23, D)
                | if self.has_global { often(24, G) ^ G } else { 0 }
        } else {
            let below = &self.tables[level - 1];
            below[to as usize % below.len()]
        };
        self.set(table + mode.place(level, gva), value);
    }

    fn load(&mut self, root: usize, pcid: usize, keep: bool) {
        let pcid = if self.has_pcids { pcid } else { 0 };
        let keep = keep && self.has_pcids && self.root_of[pcid] == root;
        (self.root, self.pcid, self.root_of[pcid]) = (root, pcid, root);
        self.set_cr3();
        let now = self.tick();
        self.m.mmu.load_cr3(&mut self.m.cpu, !keep).unwrap();
        if !keep {
            self.flushed[pcid] = now;
        }
    }

    /// What the vCPU has dirtied of the data is what was written.
    fn harvest(&mut self) {
        let mut bits = Vec::new();
        let show = |_, words: &[u64]| {
            bits.extend_from_slice(words);
            Ok::<(), ()>(())
        };
        self.m.memory.take_dirty(0, show).unwrap().0.unwrap();
        self.m.mmu.sync();
        let first = DATA / 4096;
        let is_set = |n: &u64| bits[(n + first) as usize / 64] >> ((n + first) % 64) & 1 != 0;
        let seen: BTreeSet<u64> = (0..NR_DATA).filter(is_set).collect();
        if !self.dirty.is_empty() || self.now > 1000 {
            assert_eq!(seen, self.dirty);
        }
        self.dirty.clear();
    }

    fn flags(&self) -> Vec<u64> {
        let size = self.mode.size();
        self.entries.iter().map(|e| self.m.peek(*e, size)).collect()
    }

    /// Returns what the access has found, for comparisons.
    fn access(&mut self, gva: u64, access: Access) -> Result<u64, Miss> {
        let before = self.flags();
        let may: Vec<Way> = self.may_find(gva);
        let token = self.tick() << 16;
        let (mmu, cpu) = (&mut self.m.mmu, &mut self.m.cpu);
        let got = match access {
            Access::Read => mmu.read::<u64>(cpu, gva, Current),
            Access::Write => mmu.write(cpu, gva + AT, token, Current).map(|()| {
                let was_written = |w: &&Way| self.m.peek(DATA + w.page * 4096 + AT, 8) == token;
                may.iter().find(was_written).expect("lost").page
            }),
            Access::Fetch => {
                let page = mmu.code_page(cpu, gva);
                page.map(|p| ((p.id & ADDRESS) - DATA) / 4096)
            }
        };
        match got {
            Ok(page) => {
                let is_it = |w: &Way| w.page == page && self.is_allowed(w, access);
                assert!(
                    may.iter().any(is_it),
                    "{access:?} {gva:#x} finds {page}: {may:?}"
                );
                if access == Access::Write {
                    self.dirty.insert(page);
                    if let Some((id, generation)) = self.code.remove(&page) {
                        assert_ne!(self.m.mmu.code_generation(id), generation);
                    }
                }
            }
            Err(_) => {
                self.plain_cpu.clone_from(&self.m.cpu);
                self.plain.set_root(&self.plain_cpu);
                self.plain.flush(&self.plain_cpu, Flush::All);
                let at = if access == Access::Write {
                    gva + AT
                } else {
                    gva
                };
                let want = self
                    .plain
                    .translate(&mut self.plain_cpu, at, access, Current);
                assert_eq!(want.map(|t| t.gpa), got, "{access:?} {gva:#x}");
                assert_eq!(self.plain_cpu.fault_gva, self.m.cpu.fault_gva);
            }
        }
        for ((at, old), new) in self.entries.iter().zip(before).zip(self.flags()) {
            let is_leaf = may.iter().any(|w| w.through.last() == Some(at));
            let may_set = if !may.iter().any(|w| w.through.contains(at)) || got.is_err() {
                0
            } else if is_leaf && access == Access::Write {
                A | D
            } else {
                A
            };
            assert_eq!((old ^ new) & !may_set, 0, "{at:#x}: {old:#x} {new:#x}");
            assert_eq!(old & !new, 0);
        }
        got
    }

    fn step(&mut self, op: &Op) -> Option<Result<u64, Miss>> {
        let gvas = self.mode.gvas();
        let page = |n: usize| gvas[n % gvas.len()];
        match *op {
            Op::Access { gva, access } => {
                let all = [Access::Read, Access::Write, Access::Fetch];
                return Some(self.access(page(gva), all[usize::from(access)]));
            }
            Op::Edit {
                root,
                gva,
                level,
                to,
                flags,
                flush,
            } => {
                self.edit(page(gva), root, level, to, flags);
                if let Some(how) = flush {
                    self.flush(page(gva), how);
                }
            }
            Op::Flush { gva, how } => self.flush(page(gva), how),
            Op::Load { root, pcid, keep } => self.load(root, pcid, keep),
            Op::View { cpl3, wp } => {
                let cpu = &mut self.m.cpu;
                cpu.cpl = if cpl3 { 3 } else { 0 };
                cpu.cr0 = cpu.cr0 & !cr0::WP | if wp { cr0::WP } else { 0 };
                self.m.mmu.select_view(&self.m.cpu);
            }
            Op::Harvest => self.harvest(),
            Op::Code { gva } => {
                let (gva, mut bytes) = (page(gva) + AT, [0; 16]);
                let Ok(code) = self.m.mmu.code_page(&mut self.m.cpu, gva) else {
                    return None;
                };
                self.m
                    .mmu
                    .code_bytes(&mut self.m.cpu, gva, &mut bytes)
                    .unwrap();
                // Pages that code is first fetched from count as dirty.
                let page = ((code.id & ADDRESS) - DATA) / 4096;
                if self.code.insert(page, (code.id, code.generation)).is_none() {
                    self.dirty.insert(page);
                }
            }
        }
        None
    }
}

const MODES: [Mode; 4] = [Mode::Bits32, Mode::Pae, Mode::Level4, Mode::Level5];

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn accesses_find_what_is_or_was_there(
        has_pcids in any::<bool>(), ops in proptest::collection::vec(ops(), 1..120)
    ) {
        for mode in MODES {
            for policy in [Policy::Tdp, Policy::Shadow, Policy::Auto] {
                let mut w = World::new(mode, has_pcids, policy, Source::Kept);
                for op in &ops {
                    w.step(op);
                }
                w.harvest();
            }
        }
    }

    /// Where each change is followed by the flush that it needs, it does not matter where translations come from.
    #[test]
    fn all_sources_find_the_same(
        has_pcids in any::<bool>(), ops in proptest::collection::vec(ops(), 1..120)
    ) {
        for mode in MODES {
            for policy in [Policy::Tdp, Policy::Shadow] {
                let run = |source| {
                    let mut w = World::new(mode, has_pcids, policy, source);
                    w.has_global = false;
                    let step = |op: &Op| {
                        let found = w.step(op);
                        if let Op::Edit { .. } = op {
                            w.flush(0, 3);
                        }
                        (found, w.flags(), w.dirty.clone())
                    };
                    ops.iter().map(step).collect::<Vec<_>>()
                };
                prop_assert_eq!(run(Source::Kept), run(Source::Tables));
            }
        }
    }
}

/// A page that had code, and may be written beside it, is a neighbour of a page that is walked to. It is written after a
/// harvest.
#[test]
fn a_neighbour_with_code_is_not_written_unnoticed() {
    let access = |gva, access| Op::Access { gva, access };
    for mode in MODES {
        for policy in [Policy::Tdp, Policy::Shadow, Policy::Auto] {
            let mut w = World::new(mode, false, policy, Source::Kept);
            for op in [
                Op::Code { gva: 2 },
                access(2, 1),
                Op::Edit {
                    root: 0,
                    gva: 0,
                    level: 1,
                    to: 3,
                    flags: 0x40e5_9f7c_f8f1_c349,
                    flush: Some(1),
                },
                access(0, 0),
                access(2, 2),
                Op::Harvest,
                access(2, 1),
            ] {
                w.step(&op);
            }
            w.harvest();
        }
    }
}

/// Reads pages of a root whose tables are whole; returns how many walks that took, and how many of them were short.
fn read_all(w: &mut World, gvas: &[u64]) -> (u64, u64) {
    let before = w.m.mmu.stats();
    for gva in gvas {
        w.m.mmu.read::<u64>(&mut w.m.cpu, *gva, Current).unwrap();
    }
    let after = w.m.mmu.stats();
    (
        after.walks - before.walks,
        after.short_walks - before.short_walks,
    )
}

/// What the flushes of the manual leave of the paging-structure caches (SDM vol. 3, 4.10.4.1).
#[test]
fn flushes_drop_structures() {
    // Pages of one table each, then a page of the same table.
    let (first, others) = ([0x1000, 0x20_1000], [0x3_1000]);
    let other_pcid = |w: &mut World| w.load(1, 1, false);
    let keep = |w: &mut World| w.load(0, 0, true);
    type Do<'a> = &'a dyn Fn(&mut World);
    let table: [(&str, Do<'_>, u64); 7] = [
        ("nothing", &|_| {}, 1),
        ("INVLPG of another page", &|w| w.flush(0x80_1000, 0), 0),
        ("MOV CR3", &|w| w.flush(0, 1), 0),
        ("everything", &|w| w.flush(0, 3), 0),
        (
            "another PCID and back",
            &|w| {
                other_pcid(w);
                keep(w);
            },
            1,
        ),
        (
            "INVPCID of a page from another PCID",
            &|w| {
                other_pcid(w);
                w.flush(0x80_1000, 2);
                keep(w);
            },
            0,
        ),
        (
            "another PCID's own INVLPG",
            &|w| {
                other_pcid(w);
                w.flush(0x80_1000, 0);
                keep(w);
            },
            1,
        ),
    ];
    for (what, change, short) in table {
        let mut w = World::new(Mode::Level4, true, Policy::Tdp, Source::Kept);
        assert_eq!(read_all(&mut w, &first).0, 2);
        change(&mut w);
        assert_eq!(read_all(&mut w, &others), (1, short), "{what}");
    }
    let mut w = World::new(Mode::Level4, true, Policy::Tdp, Source::Tables);
    read_all(&mut w, &first);
    assert_eq!(read_all(&mut w, &others), (1, 0));
}

/// Which neighbours come along, and for what.
#[test]
fn neighbours_come_if_nobody_sees_it() {
    let mut w = World::new(Mode::Level4, false, Policy::Tdp, Source::Kept);
    // XD is reserved then.
    w.m.cpu.efer &= !efer::NXE;
    w.m.reload();
    let line = 0x60_0000;
    let user = P | RW | US | A;
    let entries = [
        user,
        user,
        user | D,
        P | RW | US,
        RW | US | A,
        user | NX,
        P | US | A | D,
        user | D,
    ];
    let gva = |n: usize| line + n as u64 * 4096;
    let page = |n: usize| DATA + (100 + n as u64) * 4096;
    let table = 0x50_0000;
    let mut pool = table;
    for (n, flags) in entries.iter().enumerate() {
        // The page is known to be readable.
        w.m.peek(page(n), 8);
        w.m.map(w.roots[0], gva(n), page(n) | flags, &mut pool);
    }
    // Written before, by its address.
    w.m.mmu.write(&mut w.m.cpu, gva(7), 1u64, Current).unwrap();
    w.flush(0, 1);
    let before = w.m.mmu.stats();
    let old: Vec<u64> = (0..8).map(|n| w.m.peek(table + n * 8, 8)).collect();
    assert_eq!(read_all(&mut w, &[gva(0)]).0, 1);
    // 1, 2, 6 and 7.
    assert_eq!(w.m.mmu.stats().neighbours - before.neighbours, 4);
    assert_eq!(read_all(&mut w, &[1, 2, 6, 7].map(gva)).0, 0);
    assert_eq!(w.m.mmu.stats().reach_hits - before.reach_hits, 4);
    let new: Vec<u64> = (0..8).map(|n| w.m.peek(table + n * 8, 8)).collect();
    assert_eq!(old, new);
    let walks = |w: &mut World, n: usize| {
        let before = w.m.mmu.stats().walks;
        let done = w.m.mmu.write(&mut w.m.cpu, gva(n), 1u64, Current);
        (done.is_ok(), w.m.mmu.stats().walks - before)
    };
    // Only the page that was written before is written again without being noted.
    assert_eq!(walks(&mut w, 7), (true, 0));
    assert_eq!(w.m.peek(table + 8, 8) & D, 0);
    assert_eq!(walks(&mut w, 1), (true, 1));
    assert_eq!(w.m.peek(table + 8, 8) & D, D);
    assert!(walks(&mut w, 2).0);
    assert!(!walks(&mut w, 6).0);
    // Nor is it once its entry is not dirty any more.
    w.m.poke(table + 8, 8, page(1) | user);
    w.flush(0, 1);
    read_all(&mut w, &[gva(0)]);
    assert_eq!(walks(&mut w, 1), (true, 1));
    assert_eq!(w.m.peek(table + 8, 8) & D, D);
    let dirty = [1, 2, 7].map(|n| 100 + n);
    w.dirty.extend(dirty);
    w.harvest();
    // After a harvest, and once they are code, they are not written unnoticed.
    w.flush(0, 1);
    read_all(&mut w, &[gva(0)]);
    w.m.mmu.write(&mut w.m.cpu, gva(7), 1u64, Current).unwrap();
    w.dirty.insert(107);
    w.harvest();
    let code = w.m.mmu.code_page(&mut w.m.cpu, gva(2)).unwrap();
    let mut bytes = [0; 16];
    w.m.mmu
        .code_bytes(&mut w.m.cpu, gva(2), &mut bytes)
        .unwrap();
    w.flush(0, 1);
    read_all(&mut w, &[gva(0)]);
    w.m.mmu.write(&mut w.m.cpu, gva(2), 1u64, Current).unwrap();
    assert_ne!(w.m.mmu.code_generation(code.id), code.generation);
}
