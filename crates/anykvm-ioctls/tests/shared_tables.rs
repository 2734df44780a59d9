//! A kernel with SMAP whose own pages are global: its address spaces share what is kept of them. Programs and kernel read
//! and write what their root shows, whatever the order of loads of CR3, system calls and accesses with RFLAGS.AC, also
//! where a root has pages of the kernel for itself.

#![allow(clippy::unwrap_used, reason = "tests")]

mod engines;
mod long_mode;
mod random;

use anykvm_ioctls::{VcpuExit, VcpuFd};
use iced_x86::code_asm::*;
use long_mode::{Machine, become_user, counted, set_cr4};
use random::Random;
use vm_memory::{Bytes, GuestAddress};

const KERNEL_CODE: u64 = 0x1000;
const USER_CODE: u64 = 0x2000;
/// What the kernel does: words of an operation, an address and a value. What is read comes to the log.
const PROGRAM: u64 = 0x4_0000;
const LOG: u64 = 0x8_0000;
const LOG_END: u64 = 0xf_0000;
const ROOTS: u64 = 0x11_0000;
const NR_ROOTS: u64 = 24;
const DATA: u64 = 0x18_0000;
/// Where each root shows pages of its own: two of the user's, two of the kernel's, and the user's code.
const WINDOW: u64 = 0x20_0000;
const PAGES: u64 = 4;
const USERS_PAGES: u64 = 2;
const CODE_PAGE: u64 = 31;
/// The functions at [`USER_CODE`].
const USER_READS: u64 = 0x40;

const PRESENT: u64 = 3;
const USER: u64 = 4;
const GLOBAL_LARGE_PAGE: u64 = 0x183;
const KEEP: u64 = 1 << 63;
const PGE: u64 = 1 << 7;
const PCIDE: u64 = 1 << 17;
const SMAP: u64 = 1 << 21;

const END: u64 = 0;
const LOAD: u64 = 1;
/// Accesses with RFLAGS.AC.
const READ: u64 = 2;
const WRITE: u64 = 3;
/// The same without, of the kernel's pages.
const READ_OWN: u64 = 4;
const WRITE_OWN: u64 = 5;
/// The user reads the word, writes the value to the next one, and calls the kernel.
const BE_USER: u64 = 6;
/// Calls the function at [`FUNCTION`] of a page of the kernel's.
const CALL_OWN: u64 = 7;
/// Offset of code that returns what the page's first word was at first.
const FUNCTION: u64 = 0x100;

fn root(n: u64) -> u64 {
    ROOTS + n * 0x4000
}

fn data(n: u64, page: u64) -> u64 {
    DATA + (n * PAGES + page) * 0x1000
}

fn first_word(n: u64, page: u64) -> u64 {
    1000 * n + page
}

fn put(m: &Machine, at: u64, value: u64) {
    m.memory.write_obj(value, GuestAddress(at)).unwrap();
}

fn kernel(a: &mut CodeAssembler) -> Result<(), IcedError> {
    let [mut next, mut log] = [(); 2].map(|()| a.create_label());
    let mut ops: [CodeLabel; 8] = core::array::from_fn(|_| a.create_label());
    // A system call: the result of what the user has read.
    a.set_label(&mut log)?;
    a.mov(qword_ptr(rdi), rax)?;
    a.add(rdi, 8)?;
    a.set_label(&mut next)?;
    a.mov(rax, qword_ptr(rsi))?;
    a.mov(rdx, qword_ptr(rsi + 8))?;
    a.mov(rbx, qword_ptr(rsi + 16))?;
    a.add(rsi, 24)?;
    for (op, label) in ops.iter().enumerate() {
        a.cmp(eax, op as i32)?;
        a.je(*label)?;
    }
    a.ud2()?;
    a.set_label(&mut ops[END as usize])?;
    a.mov(rsi, PROGRAM)?;
    a.dec(r12)?;
    a.jnz(next)?;
    a.out(0x80, al)?;
    a.set_label(&mut ops[LOAD as usize])?;
    a.mov(cr3, rdx)?;
    a.jmp(next)?;
    a.set_label(&mut ops[READ as usize])?;
    a.stac()?;
    a.mov(rax, qword_ptr(rdx))?;
    a.clac()?;
    a.jmp(log)?;
    a.set_label(&mut ops[WRITE as usize])?;
    a.stac()?;
    a.mov(qword_ptr(rdx), rbx)?;
    a.clac()?;
    a.jmp(next)?;
    a.set_label(&mut ops[READ_OWN as usize])?;
    a.mov(rax, qword_ptr(rdx))?;
    a.jmp(log)?;
    a.set_label(&mut ops[WRITE_OWN as usize])?;
    a.mov(qword_ptr(rdx), rbx)?;
    a.jmp(next)?;
    a.set_label(&mut ops[CALL_OWN as usize])?;
    a.call(rdx)?;
    a.jmp(log)?;
    a.set_label(&mut ops[BE_USER as usize])?;
    a.mov(ecx, (WINDOW + CODE_PAGE * 0x1000 + USER_READS) as u32)?;
    a.mov(r11d, 2)?;
    a.sysretq()
}

fn user_reads(a: &mut CodeAssembler) -> Result<(), IcedError> {
    a.mov(rax, qword_ptr(rdx))?;
    a.mov(qword_ptr(rdx + 8), rbx)?;
    a.syscall()
}

fn machine() -> Machine {
    let m = Machine::new();
    m.load(KERNEL_CODE, kernel);
    m.load(USER_CODE, |a| a.syscall());
    m.load(USER_CODE + USER_READS, user_reads);
    for n in 0..NR_ROOTS {
        let at = root(n);
        put(&m, at, (at + 0x1000) | PRESENT | USER);
        put(&m, at + 0x1000, (at + 0x2000) | PRESENT | USER);
        put(&m, at + 0x2000, GLOBAL_LARGE_PAGE);
        put(&m, at + 0x2008, (at + 0x3000) | PRESENT | USER);
        for page in 0..PAGES {
            let user = if page < USERS_PAGES { USER } else { 0 };
            put(&m, at + 0x3000 + 8 * page, data(n, page) | PRESENT | user);
            put(&m, data(n, page), first_word(n, page));
            let mut function = vec![0xb8];
            function.extend((first_word(n, page) as u32).to_le_bytes());
            function.push(0xc3);
            m.write(data(n, page) + FUNCTION, &function);
        }
        put(&m, at + 0x3000 + 8 * CODE_PAGE, USER_CODE | PRESENT | USER);
    }
    m
}

/// The value that loads a root: without PCIDs it flushes, and with them it does not.
fn load(n: u64, has_pcids: bool) -> [u64; 3] {
    let pcid = if has_pcids { (n + 1) | KEEP } else { 0 };
    [LOAD, root(n) | pcid, 0]
}

fn vcpu(m: &Machine, has_pcids: bool) -> VcpuFd {
    let vcpu = m.vcpu(0, WINDOW + CODE_PAGE * 0x1000);
    become_user(&vcpu, KERNEL_CODE);
    let mut sregs = vcpu.get_sregs().unwrap();
    sregs.cr3 = root(0);
    vcpu.set_sregs(&sregs).unwrap();
    set_cr4(&vcpu, PGE | SMAP | if has_pcids { PCIDE } else { 0 });
    vcpu
}

/// Runs the program so many times.
fn run(m: &Machine, vcpu: &mut VcpuFd, program: &[[u64; 3]], rounds: u64) {
    for (n, words) in program.iter().chain([&[END; 3]]).enumerate() {
        for (i, word) in words.iter().enumerate() {
            put(m, PROGRAM + 24 * n as u64 + 8 * i as u64, *word);
        }
    }
    let mut regs = vcpu.get_regs().unwrap();
    (regs.rip, regs.rsi, regs.rdi) = (WINDOW + CODE_PAGE * 0x1000, PROGRAM, LOG);
    (regs.rax, regs.r12, regs.rflags) = (0, rounds, 2);
    vcpu.set_regs(&regs).unwrap();
    become_user(vcpu, KERNEL_CODE);
    assert!(matches!(vcpu.run().unwrap(), VcpuExit::IoOut(0x80, _)));
}

/// What guest memory says.
struct Model {
    /// The first two words of each page.
    words: Vec<[u64; 2]>,
    current: u64,
    log: Vec<u64>,
}

impl Model {
    fn new() -> Self {
        let each = |n: u64| (0..PAGES).map(move |page| [first_word(n, page), 0]);
        Self {
            words: (0..NR_ROOTS).flat_map(each).collect(),
            current: 0,
            log: vec![0],
        }
    }

    fn word(&mut self, at: u64) -> &mut u64 {
        let page = self.current * PAGES + (at - WINDOW) / 0x1000;
        &mut self.words[page as usize][(at % 0x1000 / 8) as usize]
    }

    fn step(&mut self, [op, at, value]: [u64; 3]) {
        match op {
            LOAD => self.current = ((at & 0xff_f000) - ROOTS) / 0x4000,
            CALL_OWN => {
                let page = (at - WINDOW) / 0x1000;
                self.log.push(first_word(self.current, page));
            }
            READ | READ_OWN | BE_USER => {
                let word = *self.word(at);
                self.log.push(word);
                if op == BE_USER {
                    *self.word(at + 8) = value;
                }
            }
            _ => *self.word(at) = value,
        }
    }
}

/// `owners`: of the first so many roots, the kernel uses pages that are not global. In one of `rarely` operations.
fn program(random: &mut Random, has_pcids: bool, owners: u64, rarely: u64) -> Vec<[u64; 3]> {
    let mut program = vec![load(0, has_pcids)];
    let mut current = 0;
    for _ in 0..300 {
        let page = |n: u64| WINDOW + n * 0x1000;
        let users = page(random.below(USERS_PAGES));
        let owns = page(USERS_PAGES + random.below(PAGES - USERS_PAGES));
        let value = random.next();
        program.push(match random.below(8) {
            _ if current < owners && random.one_in(rarely) => match random.below(4) {
                0 => [WRITE_OWN, owns, value],
                2 => [CALL_OWN, owns + FUNCTION, 0],
                1 => [READ, owns, 0],
                _ => [READ_OWN, owns, 0],
            },
            0..3 => {
                current = random.below(NR_ROOTS);
                load(current, has_pcids)
            }
            3 => [READ, users, 0],
            4 => [READ, users + 8, 0],
            5 => [WRITE, users, value],
            _ => [BE_USER, users, value],
        });
    }
    program
}

#[test]
fn each_root_shows_its_own_pages() {
    for seed in 0..48 {
        let mut random = Random(seed);
        let has_pcids = seed % 2 != 0;
        let owners = [0, 1, 5, NR_ROOTS][seed as usize / 2 % 4];
        let program = program(
            &mut random,
            has_pcids,
            owners,
            [3, 40][seed as usize / 8 % 2],
        );
        let is_read = |p: &&[u64; 3]| matches!(p[0], READ | READ_OWN | BE_USER | CALL_OWN);
        let reads = program.iter().filter(is_read).count() as u64;
        let rounds = ((LOG_END - LOG) / 8 / reads).min(100) - 1;
        let m = machine();
        let mut vcpu = vcpu(&m, has_pcids);
        let mut model = Model::new();
        run(&m, &mut vcpu, &program, rounds);
        (0..rounds).for_each(|_| program.iter().for_each(|op| model.step(*op)));
        let log = (0..model.log.len() as u64).map(|n| u64::from_le_bytes(m.read(LOG + 8 * n)));
        let wrong = log.zip(&model.log).position(|(is, want)| is != *want);
        assert_eq!(
            wrong, None,
            "{seed}: {rounds} rounds, {reads} reads in each"
        );
    }
}

#[test]
fn the_other_engines_agree() {
    engines::again_on("interp");
    engines::again_on("lockstep");
}

#[test]
fn switches_leave_translated_code_for_nothing() {
    if std::env::var_os("ANYKVM_ENGINE").is_some() {
        return;
    }
    let names = ["mmu_views_made", "jit_interpreted"];
    for has_pcids in [false, true] {
        let m = machine();
        let mut vcpu = vcpu(&m, has_pcids);
        let visit = |n| [load(n, has_pcids), [READ, WINDOW, 0], [BE_USER, WINDOW, 1]];
        let roots = if has_pcids { 6 } else { NR_ROOTS };
        let turns: Vec<_> = (0..roots).flat_map(visit).collect();
        run(&m, &mut vcpu, &turns, 100);
        let [views, interpreted] = counted(&mut vcpu, names, |vcpu| {
            run(&m, vcpu, &turns, 200);
        });
        assert_eq!(views, 0, "{has_pcids}");
        assert!(interpreted < 200, "{has_pcids}: {interpreted}");
    }
}

/// The first page that is not global comes while generated code knows both of the kernel's views.
#[test]
fn a_page_that_is_not_shared_is_found_again() {
    if std::env::var_os("ANYKVM_ENGINE").is_some() {
        return;
    }
    let m = machine();
    let mut vcpu = vcpu(&m, false);
    // All is translated, and both views are known, before the page is used.
    let global = [READ_OWN, PROGRAM, 0];
    let program = [load(0, false), [READ, WINDOW, 0], global, global];
    run(&m, &mut vcpu, &program, 50);
    let owns = WINDOW + USERS_PAGES * 0x1000;
    let other = WINDOW + 0x1000;
    let program = [[READ, WINDOW, 0], [READ_OWN, owns, 0], [READ, other, 0]];
    let [misses] = counted(&mut vcpu, ["tlb_l1_misses"], |vcpu| {
        run(&m, vcpu, &program, 5000);
    });
    assert!(misses < 150, "{misses}");
}

/// The same where the kernel executes code in such a page, and then misses with RFLAGS.AC.
#[test]
fn code_that_is_not_shared_is_found_again() {
    if std::env::var_os("ANYKVM_ENGINE").is_some() {
        return;
    }
    let m = machine();
    let mut vcpu = vcpu(&m, false);
    let own = WINDOW + USERS_PAGES * 0x1000;
    let function = [CALL_OWN, own + FUNCTION, 0];
    let [read, other] = [WINDOW, WINDOW + 0x1000].map(|at| [READ, at, 0]);
    let mut program = vec![load(0, false)];
    program.extend([read; 20]);
    program.extend([function, other]);
    program.extend([[READ_OWN, own, 0]; 4000]);
    let [misses] = counted(&mut vcpu, ["tlb_l1_misses"], |vcpu| {
        run(&m, vcpu, &program, 1);
    });
    assert!(misses < 150, "{misses}");
}
