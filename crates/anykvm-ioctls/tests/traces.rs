//! Calls that are executed much, which translated code follows into other functions and back: they do what they did
//! before, also when functions, pointers to them, pages or the ways back become others.

#![allow(clippy::unwrap_used, reason = "a test that cannot be set up fails")]

mod long_mode;
mod stats_fd;

use anykvm_ioctls::{VcpuExit, VcpuFd};
use iced_x86::code_asm::*;
use long_mode::{Machine, PML4};

const CODE: u64 = 0x1000;
/// Of the function that is called, and of those that it calls by a pointer.
const OUTER: u64 = 0x8000;
const INNER: [u64; 2] = [0x9000, 0xb000];
const POINTER: u64 = 0x500;
const DATA: u64 = 0x600;
/// Where the constant is in functions that add one.
const CONSTANT: u64 = 14;
/// A page table for 2 MiB from [`WINDOW`] on.
const TABLE: u64 = 0xa000;
const WINDOW: u64 = 0x20_0000;
/// No memory.
const DEVICE: u64 = 0x3000_0000;
/// Enough for some milliseconds: what is executed much shows in them.
const TURNS: u32 = 2_000_000;

/// About to execute [`CODE`] as programs do, by NT: kernels' calls are not followed.
fn begin(m: &Machine) -> VcpuFd {
    let vcpu = m.vcpu(0, CODE);
    let mut regs = vcpu.get_regs().unwrap();
    regs.rflags = 0x4002;
    vcpu.set_regs(&regs).unwrap();
    vcpu
}

/// The first page of the window is that one.
fn map_window(m: &Machine, page: u64) {
    for (at, entry) in [(PML4 + 0x2008, TABLE + 3), (TABLE, page + 3)] {
        m.write(at, &entry.to_le_bytes());
    }
}

/// RBX at HLT. Reads of the device are answered with their number.
fn run(mut vcpu: VcpuFd) -> u64 {
    let mut reads = 0_u64;
    loop {
        match vcpu.run().unwrap() {
            VcpuExit::Hlt => break,
            VcpuExit::MmioRead(DEVICE, data) => {
                reads += 1;
                data.copy_from_slice(&reads.to_le_bytes());
            }
            other => panic!("{other:?}"),
        }
    }
    // The interpreter has nothing to translate.
    let is_translated = std::env::var("ANYKVM_ENGINE").as_deref() != Ok("interp");
    assert!(!is_translated || stats_fd::counter(&vcpu, "jit_inlined") > 0);
    vcpu.get_regs().unwrap().rbx
}

/// A function that adds a constant, where it is, and what RDI points to.
fn adds(m: &Machine, at: u64, what: u32) {
    let mut code = vec![0x51]; // push rcx
    code.extend([0x48, 0x8d, 0x0d]); // lea rcx, [at]
    code.extend((-8_i32).to_le_bytes());
    code.extend([0x48, 0x01, 0xcb]); // add rbx, rcx
    code.extend([0x48, 0x81, 0xc3]); // add rbx, imm32
    assert_eq!(code.len() as u64, CONSTANT);
    code.extend(what.to_le_bytes());
    code.extend([0x48, 0x03, 0x1f]); // add rbx, [rdi]
    code.extend([0x59, 0xc3]); // pop rcx; ret
    m.write(at, &code);
}

/// It calls one by a pointer, and returns as many bytes further as RDX says.
fn calls(m: &Machine) {
    m.load(OUTER, |a| {
        a.push(rsi)?;
        a.mov(rsi, qword_ptr(POINTER))?;
        a.stc()?;
        a.call(rsi)?;
        a.pop(rsi)?;
        a.add(qword_ptr(rsp), rdx)?;
        a.ret()
    });
}

#[test]
fn functions_pointers_and_ways_back_become_others() {
    let m = Machine::new();
    m.write(DATA, &5_u64.to_le_bytes());
    m.write(POINTER, &INNER[0].to_le_bytes());
    for (n, at) in (0..).zip(INNER) {
        adds(&m, at, 1000 + n);
    }
    calls(&m);
    m.load(CODE, |a| {
        let (mut phase, mut turn) = (a.create_label(), a.create_label());
        a.mov(edi, DATA as u32)?;
        a.xor(r8d, r8d)?;
        a.set_label(&mut phase)?;
        a.mov(ecx, TURNS)?;
        a.set_label(&mut turn)?;
        // In the last phase, the way back is the second instruction from here.
        a.call(OUTER)?;
        a.add(rbx, 16)?;
        a.inc(r9)?;
        a.dec(ecx)?;
        a.jne(turn)?;
        a.inc(r8d)?;
        let mut others = [a.create_label(), a.create_label(), a.create_label()];
        for (n, other) in (1..).zip(&mut others) {
            a.cmp(r8d, n)?;
            a.je(*other)?;
        }
        a.lea(rbx, qword_ptr(rbx + r9))?;
        a.hlt()?;
        // The function adds 77.
        a.set_label(&mut others[0])?;
        a.mov(dword_ptr(INNER[0] + CONSTANT), 77)?;
        a.jmp(phase)?;
        // Another pointer.
        a.set_label(&mut others[1])?;
        a.mov(qword_ptr(POINTER), INNER[1] as i32)?;
        a.jmp(phase)?;
        // `add rbx, 16` has four bytes.
        a.set_label(&mut others[2])?;
        a.mov(edx, 4)?;
        a.jmp(phase)
    });
    let each = |at: u64, what: u64| at + what + 5;
    let wanted = each(INNER[0], 1000) + each(INNER[0], 77) + 2 * each(INNER[1], 1001);
    let turns = u64::from(TURNS);
    assert_eq!(run(begin(&m)), turns * (wanted + 3 * 16 + 4));
}

/// A function's page is mapped to another one's; a trace knows where it was.
#[test]
fn a_function_that_is_mapped_elsewhere() {
    const EVERY: u32 = 1 << 20;
    let m = Machine::new();
    map_window(&m, INNER[0]);
    // add rbx, imm8; ret
    for (at, what) in [(INNER[0], 1), (INNER[0] ^ 0x2000, 100)] {
        m.write(at, &[0x48, 0x83, 0xc3, what, 0xc3]);
    }
    m.load(CODE, |a| {
        let (mut turn, mut changes, mut goes_on) =
            (a.create_label(), a.create_label(), a.create_label());
        a.mov(ecx, 8 * EVERY)?;
        a.set_label(&mut turn)?;
        a.call(WINDOW)?;
        a.test(ecx, EVERY - 1)?;
        a.je(changes)?;
        a.set_label(&mut goes_on)?;
        a.dec(ecx)?;
        a.jne(turn)?;
        a.hlt()?;
        a.set_label(&mut changes)?;
        a.xor(qword_ptr(TABLE), 0x2000)?;
        a.invlpg(byte_ptr(WINDOW))?;
        a.jmp(goes_on)
    });
    // The first function for one turn, and the second last: for one less than the others.
    assert_eq!(run(begin(&m)), 4 * u64::from(EVERY) * 101);
}

/// Two address spaces take turns: a function is the same one in both, or another one at the same place.
#[test]
fn a_function_of_two_address_spaces() {
    const ROUNDS: u32 = 100;
    const CALLS: u32 = 40_000;
    const OTHER: u64 = PML4 + 0x1_0000;
    const OTHER_TABLE: u64 = 0xc000;
    for (page, what) in [(INNER[0], 1), (INNER[1], 100)] {
        let m = Machine::new();
        for (root, table, page) in [(PML4, TABLE, INNER[0]), (OTHER, OTHER_TABLE, page)] {
            let entries = [
                (root, root + 0x1003),
                (root + 0x1000, root + 0x2003),
                (root + 0x2000, 0x83),
                (root + 0x2008, table + 3),
                (table, page + 3),
            ];
            for (at, entry) in entries {
                m.write(at, &entry.to_le_bytes());
            }
        }
        // add rbx, imm8; ret
        for (at, what) in [(INNER[0], 1), (page, what)] {
            m.write(at, &[0x48, 0x83, 0xc3, what, 0xc3]);
        }
        m.load(CODE, |a| {
            let (mut round, mut turn) = (a.create_label(), a.create_label());
            a.mov(r8d, 2 * ROUNDS)?;
            a.mov(r9, OTHER)?;
            a.mov(r10, PML4)?;
            a.set_label(&mut round)?;
            a.xchg(r9, r10)?;
            a.mov(cr3, r9)?;
            a.mov(ecx, CALLS)?;
            a.set_label(&mut turn)?;
            a.call(WINDOW)?;
            a.dec(ecx)?;
            a.jne(turn)?;
            a.dec(r8d)?;
            a.jne(round)?;
            a.hlt()
        });
        let wanted = u64::from(ROUNDS * CALLS) * (1 + u64::from(what));
        assert_eq!(run(begin(&m)), wanted, "{what}");
    }
}

/// What leaves translated code within a function that was called comes back there.
#[test]
fn a_device_within_a_function() {
    const EVERY: u32 = 1 << 17;
    const ROUNDS: u32 = 40;
    let m = Machine::new();
    map_window(&m, DEVICE);
    m.write(DATA, &5_u64.to_le_bytes());
    m.write(POINTER, &INNER[0].to_le_bytes());
    adds(&m, INNER[0], 3);
    calls(&m);
    m.load(CODE, |a| {
        let (mut turn, mut round) = (a.create_label(), a.create_label());
        a.mov(esi, ROUNDS)?;
        a.set_label(&mut round)?;
        a.mov(edi, DATA as u32)?;
        a.mov(ecx, EVERY)?;
        a.mov(eax, WINDOW as u32)?;
        a.set_label(&mut turn)?;
        a.call(OUTER)?;
        a.cmp(ecx, 2)?;
        a.cmove(edi, eax)?;
        a.dec(ecx)?;
        a.jne(turn)?;
        a.dec(esi)?;
        a.jne(round)?;
        a.hlt()
    });
    let (every, rounds) = (u64::from(EVERY), u64::from(ROUNDS));
    let wanted = rounds * (every * (INNER[0] + 3) + (every - 1) * 5) + rounds * (rounds + 1) / 2;
    assert_eq!(run(begin(&m)), wanted);
}
