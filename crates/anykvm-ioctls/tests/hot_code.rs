//! Code that is executed much, which is translated again: it does what it did before, also when what it
//! has remembered of its pages is no longer so.

#![allow(clippy::unwrap_used, reason = "a test that cannot be set up fails")]

mod long_mode;
mod stats_fd;

use anykvm_ioctls::{VcpuExit, VcpuFd};
use iced_x86::code_asm::*;
use long_mode::{Assemble, Machine, PML4};

const CODE: u64 = 0x1000;
/// A page table for 2 MiB from [`WINDOW`] on.
const TABLE: u64 = 0xa000;
const WINDOW: u64 = 0x20_0000;
const ROUNDS: u64 = 4;
/// Enough for some milliseconds: what is executed much shows in them.
const TURNS: u64 = 1_500_000;

/// Executes to HLT; RBX, and a counter of the translator.
fn run(m: &Machine, code: Assemble, counter: &str) -> (u64, u64) {
    m.load(CODE, code);
    let mut vcpu: VcpuFd = m.vcpu(0, CODE);
    match vcpu.run().unwrap() {
        VcpuExit::Hlt => {}
        other => panic!("{other:?}"),
    }
    let value = stats_fd::counter(&vcpu, counter);
    (vcpu.get_regs().unwrap().rbx, value)
}

/// The interpreter has nothing to translate.
fn is_translated() -> bool {
    std::env::var("ANYKVM_ENGINE").as_deref() != Ok("interp")
}

/// The first page of the window is mapped to one of two pages, with 1 and 1000.
fn with_two_pages() -> Machine {
    let m = Machine::new();
    for (at, entry) in [
        (PML4 + 0x2008, TABLE + 3),
        (TABLE, 0x6003),
        (0x6000, 1),
        (0x7000, 1000),
    ] {
        m.write(at, &entry.to_le_bytes());
    }
    m
}

/// A loop finds what stays where it is once, and again when it may be elsewhere.
#[test]
fn a_page_that_is_mapped_elsewhere_by_the_loop() {
    const EVERY: u32 = 1 << 19;
    let m = with_two_pages();
    let (sum, _) = run(
        &m,
        |a| {
            let (mut turn, mut changes, mut goes_on) =
                (a.create_label(), a.create_label(), a.create_label());
            a.mov(rdi, WINDOW)?;
            a.mov(ecx, 6 * EVERY)?;
            a.set_label(&mut turn)?;
            a.add(rbx, qword_ptr(rdi))?;
            // A hash, so that a turn is long and not unrolled.
            for n in 0..10 {
                a.lea(rax, qword_ptr(rax + rcx * 2 + n))?;
                a.rol(rax, 7)?;
            }
            a.inc(qword_ptr(rdi + 0x800))?;
            a.test(ecx, EVERY - 1)?;
            a.je(changes)?;
            a.set_label(&mut goes_on)?;
            a.dec(ecx)?;
            a.jne(turn)?;
            a.hlt()?;
            a.set_label(&mut changes)?;
            a.xor(qword_ptr(TABLE), 0x1000)?;
            a.invlpg(byte_ptr(rdi))?;
            a.jmp(goes_on)
        },
        "jit_hot",
    );
    // The first page for one turn, and the second last: for one less than the others.
    let each = 3 * u64::from(EVERY);
    assert_eq!(sum, each * 1001);
    for page in [0x6800, 0x7800] {
        assert_eq!(u64::from_le_bytes(m.read(page)), each);
    }
}

#[test]
fn a_page_that_is_mapped_elsewhere() {
    let m = with_two_pages();
    let (sum, site_entries) = run(
        &m,
        |a| {
            let (mut round, mut turn) = (a.create_label(), a.create_label());
            a.mov(rdi, WINDOW)?;
            a.mov(r12d, ROUNDS as u32)?;
            a.set_label(&mut round)?;
            a.mov(ecx, TURNS as u32)?;
            a.set_label(&mut turn)?;
            a.add(rbx, qword_ptr(rdi))?;
            a.inc(qword_ptr(rdi + 0x800))?;
            a.dec(ecx)?;
            a.jne(turn)?;
            a.xor(qword_ptr(TABLE), 0x1000)?;
            a.invlpg(byte_ptr(rdi))?;
            a.dec(r12d)?;
            a.jne(round)?;
            a.hlt()
        },
        "jit_site_entries",
    );
    assert_eq!(sum, ROUNDS / 2 * TURNS * 1001);
    for page in [0x6800, 0x7800] {
        assert_eq!(u64::from_le_bytes(m.read(page)), ROUNDS / 2 * TURNS);
    }
    assert!(!is_translated() || site_entries > 0);
}

#[test]
fn ever_other_pages() {
    let m = Machine::new();
    const PAGES: u64 = 64;
    const FIRST: u64 = 0x1_0000;
    for n in 0..PAGES {
        m.write(FIRST + n * 0x1000, &n.to_le_bytes());
    }
    let (sum, dropped) = run(
        &m,
        |a| {
            let mut turn = a.create_label();
            a.mov(ecx, (TURNS * PAGES / 16) as u32)?;
            a.set_label(&mut turn)?;
            a.add(rbx, qword_ptr(rdi + FIRST))?;
            a.add(edi, 0x1000)?;
            a.and(edi, (PAGES * 0x1000 - 1) as u32)?;
            a.dec(ecx)?;
            a.jne(turn)?;
            a.hlt()
        },
        "jit_site_entries_dropped",
    );
    assert_eq!(sum, TURNS / 16 * PAGES * (PAGES - 1) / 2);
    assert!(!is_translated() || dropped > 0);
}

/// A loop within a block that has always made as many turns is translated for so many, until it makes others.
#[test]
fn loops_within_loops() {
    const WORDS: u64 = 0x8000;
    /// Turns of the inner loop, and how often.
    const PHASES: [(u64, u64); 6] = [
        (3, 2_000_000),
        (5, 3),
        (1, 100_000),
        (2, 7),
        (16, 50_000),
        (3, 1000),
    ];
    let m = Machine::new();
    for n in 0..16 {
        m.write(WORDS + 8 * n, &(1_u64 << n).to_le_bytes());
    }
    for (n, (turns, times)) in (0..).zip(PHASES) {
        m.write(0x500 + 16 * n, &turns.to_le_bytes());
        m.write(0x508 + 16 * n, &times.to_le_bytes());
    }
    let (sum, known) = run(
        &m,
        |a| {
            let mut phase = a.create_label();
            let (mut outer, mut inner, mut other) =
                (a.create_label(), a.create_label(), a.create_label());
            a.mov(edi, WORDS as u32)?;
            a.mov(esi, 0x500)?;
            a.set_label(&mut phase)?;
            a.mov(rdx, qword_ptr(rsi))?;
            a.mov(rcx, qword_ptr(rsi + 8))?;
            a.set_label(&mut outer)?;
            a.xor(eax, eax)?;
            a.set_label(&mut inner)?;
            a.add(rbx, qword_ptr(rdi + rax * 8))?;
            a.inc(rax)?;
            a.cmp(rax, rdx)?;
            a.jne(inner)?;
            // Behind it, what makes two turns always.
            a.mov(r8d, 2)?;
            a.set_label(&mut other)?;
            a.add(qword_ptr(rdi + 0x100), rax)?;
            a.dec(r8d)?;
            a.jne(other)?;
            a.dec(rcx)?;
            a.jne(outer)?;
            a.add(esi, 16)?;
            a.cmp(esi, 0x500 + 16 * PHASES.len() as u32)?;
            a.jne(phase)?;
            a.hlt()
        },
        "jit_loops_known",
    );
    let sum_of = |f: fn(u64) -> u64| {
        let sums = PHASES.iter().map(|(turns, times)| f(*turns) * times);
        sums.sum::<u64>()
    };
    assert_eq!(sum, sum_of(|turns| (1 << turns) - 1));
    assert_eq!(
        u64::from_le_bytes(m.read(WORDS + 0x100)),
        sum_of(|turns| 2 * turns)
    );
    assert!(!is_translated() || known > 0);
}

/// A function that has become another one is called by pointer as before: a program's compiler drops its code.
#[test]
fn changed_functions_are_called_as_fast() {
    const CALLS: u64 = 1000;
    const OTHER: u64 = 0x8000;
    let m = Machine::new();
    // mov eax, imm32; ret
    m.write(OTHER, &[0xb8, 1, 0, 0, 0, 0xc3]);
    m.write(0x500, &OTHER.to_le_bytes());
    m.load(CODE, |a| {
        let (mut change, mut call) = (a.create_label(), a.create_label());
        a.mov(edi, OTHER as u32)?;
        a.mov(r8d, 3)?;
        a.set_label(&mut change)?;
        a.mov(ecx, CALLS as u32)?;
        a.set_label(&mut call)?;
        a.call(rdi)?;
        a.add(rbx, rax)?;
        a.call(qword_ptr(0x500))?;
        a.add(rbx, rax)?;
        a.dec(ecx)?;
        a.jne(call)?;
        a.shl(dword_ptr(rdi + 1), 4)?;
        a.dec(r8d)?;
        a.jne(change)?;
        a.hlt()
    });
    let mut vcpu = m.vcpu(0, CODE);
    // IOPL 3: not a kernel's, whose calls go another way.
    let mut regs = vcpu.get_regs().unwrap();
    regs.rflags = 0x3002;
    vcpu.set_regs(&regs).unwrap();
    assert!(matches!(vcpu.run().unwrap(), VcpuExit::Hlt));
    assert_eq!(vcpu.get_regs().unwrap().rbx, 2 * CALLS * (1 + 16 + 256));
    let stale = stats_fd::counter(&vcpu, "jit_stale");
    assert!(stale < CALLS / 10, "{stale}");
}
