//! Loads of CR3 that flush: random changes of the tables between them are seen, and those that find nothing changed leave
//! translated code for nothing. With PCIDs, there are loads that flush nothing as well, and a root has now one PCID and
//! now another.

#![allow(clippy::unwrap_used, reason = "tests")]

mod engines;
mod long_mode;
mod random;

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use anykvm_ioctls::{VcpuExit, VcpuFd};
use iced_x86::code_asm::*;
use long_mode::{Machine, counted, start};
use random::Random;
use vm_memory::{Bytes, GuestAddress};

const CODE: u64 = 0x1000;
/// The program: words of an operation, an address and a value. What it reads comes to the log.
const PROGRAM: u64 = 0x4_0000;
const LOG: u64 = 0x8_0000;
const LOG_END: u64 = 0x10_0000;
/// Pages that the window shows: a word of their own, a word that is written, and at [`FUNCTION`] code that returns the
/// first word.
const DATA: u64 = 0x2_0000;
const NR_DATA: u64 = 12;
const FUNCTION: u64 = 0x100;
const ROOTS: u64 = 0x11_0000;
/// Two tables of a root show pages of data in the window.
const PAGES: u64 = 3;
const WINDOW: u64 = 0x20_0000;
const LARGE_PAGE: u64 = 0x183;
/// Bit of CR3: the load flushes nothing.
const KEEP: u64 = 1 << 63;
const PCID: u64 = 0xfff;
const PRESENT: u64 = 3;

const END: u64 = 0;
const LOAD: u64 = 1;
const STORE: u64 = 2;
const READ: u64 = 3;
const CALL: u64 = 4;
const INVALIDATE: u64 = 5;
/// Toggles EFER.NXE, which flushes nothing and leads to other translations of the same root.
const TOGGLE: u64 = 6;

fn root(n: u64) -> u64 {
    ROOTS + n * 0x5000
}

/// The entry of the lowest level for page `page` of the window, in one of the two tables of root `n`.
fn leaf(n: u64, table: u64, page: u64) -> u64 {
    root(n) + 0x3000 + table * 0x1000 + 8 * page
}

/// The entry above it.
fn upper(n: u64) -> u64 {
    root(n) + 0x2008
}

fn data(n: u64) -> u64 {
    DATA + n * 0x1000
}

fn value(n: u64) -> u64 {
    1000 + n * n
}

fn put(m: &Machine, at: u64, value: u64) {
    m.memory.write_obj(value, GuestAddress(at)).unwrap();
}

fn get(m: &Machine, at: u64) -> u64 {
    u64::from_le_bytes(m.read(at))
}

/// So many roots, which have all of memory in common, by a global page, and the window for themselves.
fn machine(roots: u64) -> Machine {
    let m = Machine::new();
    m.load(CODE, |a| {
        let (mut round, mut next, mut end) = (a.create_label(), a.create_label(), a.create_label());
        let mut others: [CodeLabel; 5] = core::array::from_fn(|_| a.create_label());
        a.set_label(&mut round)?;
        a.mov(rsi, PROGRAM)?;
        a.set_label(&mut next)?;
        a.mov(rax, qword_ptr(rsi))?;
        a.mov(rdx, qword_ptr(rsi + 8))?;
        a.mov(rbx, qword_ptr(rsi + 16))?;
        a.add(rsi, 24)?;
        a.cmp(rax, LOAD as i32)?;
        a.jb(end)?;
        a.ja(others[0])?;
        a.mov(cr3, rdx)?;
        a.jmp(next)?;
        a.set_label(&mut others[0])?;
        a.cmp(rax, READ as i32)?;
        a.jae(others[1])?;
        a.mov(qword_ptr(rdx), rbx)?;
        a.jmp(next)?;
        a.set_label(&mut others[1])?;
        a.ja(others[2])?;
        a.mov(rax, qword_ptr(rdx))?;
        a.mov(qword_ptr(rdi), rax)?;
        a.add(rdi, 8)?;
        a.jmp(next)?;
        a.set_label(&mut others[2])?;
        a.cmp(rax, CALL as i32)?;
        a.ja(others[3])?;
        a.call(rdx)?;
        a.mov(qword_ptr(rdi), rax)?;
        a.add(rdi, 8)?;
        a.jmp(next)?;
        a.set_label(&mut others[3])?;
        a.cmp(rax, INVALIDATE as i32)?;
        a.ja(others[4])?;
        a.invlpg(qword_ptr(rdx))?;
        a.jmp(next)?;
        a.set_label(&mut others[4])?;
        a.mov(rbx, rcx)?;
        a.mov(ecx, 0xc000_0080u32)?;
        a.rdmsr()?;
        a.xor(eax, 0x800)?;
        a.wrmsr()?;
        a.mov(rcx, rbx)?;
        a.jmp(next)?;
        a.set_label(&mut end)?;
        a.dec(rcx)?;
        a.jnz(round)?;
        a.out(0x80, al)
    });
    for n in 0..NR_DATA {
        put(&m, data(n), value(n));
        let mut function = vec![0xb8];
        function.extend((value(n) as u32).to_le_bytes());
        function.push(0xc3);
        m.write(data(n) + FUNCTION, &function);
    }
    for n in 0..roots {
        let at = root(n);
        put(&m, at, (at + 0x1000) | PRESENT);
        put(&m, at + 0x1000, (at + 0x2000) | PRESENT);
        put(&m, at + 0x2000, LARGE_PAGE);
        put(&m, upper(n), (at + 0x3000) | PRESENT);
        for table in 0..2 {
            for page in 0..PAGES {
                put(
                    &m,
                    leaf(n, table, page),
                    data((n + page) % NR_DATA) | PRESENT,
                );
            }
        }
    }
    m
}

/// Returns a vCPU with CR4.PGE and maybe PCIDE.
fn vcpu(m: &Machine, id: u64, has_pcids: bool) -> VcpuFd {
    let vcpu = m.vcpu(id, CODE);
    long_mode::set_cr4(&vcpu, 1 << 7 | u64::from(has_pcids) << 17);
    vcpu
}

/// Runs the program so many times.
fn run(vcpu: &mut VcpuFd, rounds: u64) {
    start(vcpu, CODE);
    let mut regs = vcpu.get_regs().unwrap();
    (regs.rcx, regs.rdi) = (rounds, LOG);
    vcpu.set_regs(&regs).unwrap();
    assert!(matches!(vcpu.run().unwrap(), VcpuExit::IoOut(0x80, _)));
}

fn store_program(m: &Machine, program: &[[u64; 3]]) {
    for (n, words) in program.iter().chain([&[END; 3]]).enumerate() {
        for (i, word) in words.iter().enumerate() {
            put(m, PROGRAM + 24 * n as u64 + 8 * i as u64, *word);
        }
    }
}

/// What guest memory says, by plain reads.
struct Model {
    roots: u64,
    /// Number of PCIDs; with 0, each load flushes.
    pcids: u64,
    /// Which table each root has.
    table: Vec<u64>,
    /// The page of data that each entry shows.
    shown: Vec<[[u64; PAGES as usize]; 2]>,
    written: [u64; NR_DATA as usize],
    /// CR3, and the roots that were loaded with each PCID since it was flushed.
    loaded: u64,
    roots_of: Vec<Vec<u64>>,
    /// What each read may find.
    log: Vec<Vec<u64>>,
}

/// Returns the number of CR3's root.
fn number(loaded: u64) -> u64 {
    ((loaded & !(KEEP | PCID)) - ROOTS) / 0x5000
}

impl Model {
    fn new(roots: u64, pcids: u64) -> Self {
        let shown = |n: u64| [core::array::from_fn(|page| (n + page as u64) % NR_DATA); 2];
        Self {
            roots,
            pcids,
            table: vec![0; roots as usize],
            shown: (0..roots).map(shown).collect(),
            written: [0; NR_DATA as usize],
            loaded: root(0),
            roots_of: vec![Vec::new(); PCID as usize + 1],
            log: Vec::new(),
        }
    }

    /// The pages of data that may be seen at an address in the window: a processor may have tables of each root that was
    /// loaded with the PCID.
    fn seen(&self, at: u64) -> Vec<usize> {
        let page = (at - WINDOW) / 0x1000;
        let of = |root: &u64| {
            let root = *root as usize;
            self.shown[root][self.table[root] as usize][page as usize] as usize
        };
        let roots = &self.roots_of[(self.loaded & PCID) as usize];
        roots.iter().map(of).collect()
    }

    fn step(&mut self, [op, at, value_]: [u64; 3]) {
        match op {
            LOAD => {
                self.loaded = at;
                let roots = &mut self.roots_of[(at & PCID) as usize];
                if at & KEEP == 0 {
                    roots.clear();
                }
                roots.push(number(at));
            }
            STORE if at >= WINDOW => {
                for seen in self.seen(at) {
                    self.written[seen] = value_;
                }
            }
            STORE => {
                let (root, inside) = ((at - ROOTS) / 0x5000, (at - ROOTS) % 0x5000);
                if inside == 0x2008 {
                    self.table[root as usize] = (value_ >> 12) - (self::root(root) >> 12) - 3;
                } else {
                    let (table, page) = (inside / 0x1000 - 3, inside % 0x1000 / 8);
                    self.shown[root as usize][table as usize][page as usize] =
                        ((value_ & !0xfff) - DATA) / 0x1000;
                }
            }
            READ | CALL => {
                let of = |seen: usize| match at % 0x1000 {
                    8 => self.written[seen],
                    _ => value(seen as u64),
                };
                self.log.push(self.seen(at).into_iter().map(of).collect());
            }
            _ => {}
        }
    }

    /// A program that reads what it has changed after the next load only.
    fn program(&self, random: &mut Random, len: u64, changes: u64) -> Vec<[u64; 3]> {
        // What a round leaves behind is flushed before the next one.
        let pcids = (0..self.pcids.max(1)).rev();
        let mut program: Vec<_> = pcids.map(|pcid| [LOAD, root(0) | pcid, 0]).collect();
        let mut is_changed = false;
        let mut kept = Kept::new(self.roots);
        program.iter().for_each(|op| kept.step(*op));
        for _ in 0..len {
            let flushing = root(random.below(self.roots)) | random.below(self.pcids.max(1));
            let keeps = self.pcids != 0 && random.below(2) == 0 && kept.are_right(flushing);
            let load = [LOAD, flushing | if keeps { KEEP } else { 0 }, 0];
            let page = WINDOW + random.below(PAGES) * 0x1000;
            let (n, table) = (random.below(self.roots), random.below(2));
            let op = match random.below(100) {
                n if n < changes => match random.below(4) {
                    0 => [
                        STORE,
                        upper(n % self.roots),
                        (root(n % self.roots) + 0x3000 + table * 0x1000) | PRESENT,
                    ],
                    _ => [
                        STORE,
                        leaf(n % self.roots, table, random.below(PAGES)),
                        data(random.below(NR_DATA)) | PRESENT,
                    ],
                },
                n if n < changes + 1 => [INVALIDATE, page, 0],
                n if n < changes + 4 => [TOGGLE, 0, 0],
                _ => match (n + random.below(8)) % 8 {
                    0..3 => load,
                    3 => [STORE, page + 8, random.below(1 << 40)],
                    4 => [READ, page + 8, 0],
                    5 => [CALL, page + FUNCTION, 0],
                    _ => [READ, page, 0],
                },
            };
            let is_change = op[0] == STORE && op[1] < WINDOW;
            let looks = !is_change && !matches!(op[0], LOAD | TOGGLE);
            let is_vague = op[0] == STORE && !is_change && !kept.is_one_root();
            if is_changed && looks || is_vague {
                program.push([LOAD, flushing, 0]);
                kept.step([LOAD, flushing, 0]);
            }
            is_changed = is_change || is_changed && op[0] == TOGGLE;
            program.push(op);
            kept.step(op);
        }
        program
    }
}

/// Which roots' translations a processor may have for each PCID.
struct Kept {
    /// Number of changes of each root's tables.
    changes: Vec<u64>,
    /// The roots that were loaded since the PCID was flushed, with that number.
    used: Vec<HashSet<(u64, u64)>>,
    /// CR3.
    loaded: u64,
}

impl Kept {
    fn new(roots: u64) -> Self {
        Self {
            changes: vec![0; roots as usize],
            used: vec![HashSet::new(); PCID as usize + 1],
            loaded: root(0),
        }
    }

    /// Returns the number of CR3's root, and of its changes.
    fn root_of(&self, loaded: u64) -> (u64, u64) {
        let n = number(loaded);
        (n, self.changes[n as usize])
    }

    /// Returns true if a load that flushes nothing finds what the tables of these roots say now.
    fn are_right(&self, wanted: u64) -> bool {
        let used = &self.used[(wanted & PCID) as usize];
        let is_now = |(n, changes): &(u64, u64)| self.changes[*n as usize] == *changes;
        used.iter().all(is_now)
    }

    /// Returns true if all translations are the current root's.
    fn is_one_root(&self) -> bool {
        let used = &self.used[(self.loaded & PCID) as usize];
        used.iter().all(|used| *used == self.root_of(self.loaded))
    }

    fn step(&mut self, [op, at, _]: [u64; 3]) {
        match op {
            LOAD => {
                self.loaded = at;
                let root = self.root_of(at);
                let used = &mut self.used[(at & PCID) as usize];
                if at & KEEP == 0 {
                    used.clear();
                }
                used.insert(root);
            }
            STORE if at < WINDOW => self.changes[((at - ROOTS) / 0x5000) as usize] += 1,
            _ => {}
        }
    }
}

/// Runs a program so many times, and compares what it reads with the model.
fn check(m: &Machine, model: &mut Model, program: &[[u64; 3]], rounds: u64, what: u64) {
    store_program(m, program);
    let mut vcpu = vcpu(m, 0, model.pcids != 0);
    run(&mut vcpu, rounds);
    for _ in 0..rounds {
        program.iter().for_each(|op| model.step(*op));
    }
    let log = (0..model.log.len() as u64).map(|n| get(m, LOG + 8 * n));
    let wrong = log
        .zip(&model.log)
        .position(|(is, want)| !want.contains(&is));
    assert_eq!(wrong, None, "{what}: {rounds} rounds of {}", program.len());
}

#[test]
fn changes_are_seen_at_the_next_load() {
    for seed in 0..56 {
        let mut random = Random(seed);
        let roots = [1, 2, 3, 8][seed as usize % 4];
        let changes = [0, 1, 4, 30][seed as usize / 4 % 4];
        let pcids = [0, 0, 1, 3, 6, 0, 2][seed as usize % 7];
        let mut model = Model::new(roots, pcids);
        let program = model.program(&mut random, 150, changes);
        let reads = program.iter().filter(|p| matches!(p[0], READ | CALL));
        let rounds = (LOG_END - LOG) / 8 / (reads.count() as u64).max(1);
        check(&machine(roots), &mut model, &program, rounds.min(400), seed);
    }
}

/// What a load flushes is also what was known of the root while EFER.NXE was another.
#[test]
fn a_load_flushes_for_other_modes_too() {
    let far = WINDOW + 2 * 0x1000;
    let turns = |page: u64| {
        let each = move |n| {
            [
                [LOAD, root(n), 0],
                [READ, if n == 0 { page } else { WINDOW }, 0],
            ]
        };
        (0..16).flat_map(move |turn| each(turn % 2))
    };
    let mut program = Vec::new();
    for n in [7, 9] {
        program.extend(turns(far));
        program.push([TOGGLE, 0, 0]);
        program.extend(turns(WINDOW));
        program.extend([
            [STORE, leaf(0, 0, 2), data(n) | PRESENT],
            [LOAD, root(0), 0],
            [READ, WINDOW, 0],
            [TOGGLE, 0, 0],
            [READ, far, 0],
        ]);
    }
    check(&machine(2), &mut Model::new(2, 0), &program, 100, 0);
}

#[test]
fn the_other_engines_agree() {
    engines::again_on("interp");
    engines::again_on("lockstep");
}

#[test]
fn an_unchanged_root_leaves_translated_code_for_nothing() {
    if std::env::var_os("ANYKVM_ENGINE").is_some() {
        return;
    }
    const ROUNDS: u64 = 10_000;
    let names = ["jit_interpreted", "page_walks", "tlb_flush"];
    for (roots, pcids) in [(1, 0), (2, 0), (8, 0), (1, 1), (2, 1), (8, 3)] {
        let m = machine(roots);
        let mut vcpu = vcpu(&m, 0, pcids != 0);
        // Each load that flushes is followed by one that does not. In each turn a root has another PCID.
        let each = |turn: u64| {
            let to = root(turn % roots) | (turn % u64::max(pcids, 1));
            let again = to | if pcids != 0 { KEEP } else { 0 };
            [
                [LOAD, to, 0],
                [READ, WINDOW, 0],
                [LOAD, again, 0],
                [CALL, WINDOW + FUNCTION, 0],
            ]
        };
        let turns = roots * u64::max(pcids, 1);
        let program: Vec<_> = (0..turns).flat_map(each).collect();
        let loads = turns * if pcids == 0 { 2 } else { 1 };
        store_program(&m, &program);
        run(&mut vcpu, 20_000 / turns);
        let [left, walks, flushes] = counted(&mut vcpu, names, |vcpu| run(vcpu, ROUNDS / turns));
        assert!(left < 300, "{roots}, {pcids}: {left}");
        // Those that are walked for again when entries that are not used any more are looked for.
        assert!(walks < 200, "{roots}, {pcids}: {walks}");
        assert_eq!(flushes, ROUNDS / turns * loads, "{roots}, {pcids}");
    }
}

/// Tables that others change while two vCPUs load them: each load leads to one of two pages.
#[test]
fn tables_that_others_change() {
    const ROUNDS: u64 = 400;
    let m = machine(2);
    let mut vcpus = [vcpu(&m, 0, false), vcpu(&m, 1, false)];
    let mut program = Vec::new();
    for n in 0..2 {
        program.extend([[LOAD, root(n), 0], [CALL, WINDOW + FUNCTION, 0]]);
    }
    store_program(&m, &program);
    let (m, is_done) = (&m, &AtomicBool::new(false));
    thread::scope(|s| {
        let runners: Vec<_> = vcpus
            .iter_mut()
            .map(|vcpu| s.spawn(move || (0..60).for_each(|_| run(vcpu, ROUNDS))))
            .collect();
        s.spawn(move || {
            for turn in 0.. {
                for table in 0..2 {
                    put(m, leaf(0, table, 0), data(turn % 2 * 5) | PRESENT);
                }
                if turn % 3 == 0 {
                    let table = root(0) + 0x3000 + turn % 2 * 0x1000;
                    put(m, upper(0), table | PRESENT);
                }
                if is_done.load(Ordering::Relaxed) {
                    break;
                }
                thread::yield_now();
            }
        });
        let results: Vec<_> = runners.into_iter().map(|r| r.join()).collect();
        is_done.store(true, Ordering::Relaxed);
        assert!(results.iter().all(|r| r.is_ok()));
    });
    for n in 0..2 * ROUNDS {
        let seen = get(m, LOG + 8 * n);
        let may_be = if n % 2 == 0 {
            [value(0), value(5)]
        } else {
            [value(1); 2]
        };
        assert!(may_be.contains(&seen), "{n}: {seen}");
    }
    // What was changed last is what is seen.
    put(m, upper(0), (root(0) + 0x3000) | PRESENT);
    put(m, leaf(0, 0, 0), data(7) | PRESENT);
    for vcpu in &mut vcpus {
        run(vcpu, 1);
        assert_eq!(get(m, LOG), value(7));
    }
}
