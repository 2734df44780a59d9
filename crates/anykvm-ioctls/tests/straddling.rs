//! Operands that straddle two pages, which lie apart in the guest's memory.

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
/// Where its first pages are: the second one is below the first, the third is absent.
const PAGES: [u64; 2] = [0x7000, 0x6000];
/// What the second is in the end.
const OTHER: u64 = 0x8000;
const TURNS: u64 = 1000;

fn byte(page: u64, offset: u64) -> u8 {
    (page / 0x1000 * 100 + offset % 0x1000) as u8
}

/// `len` bytes from [`WINDOW`] plus `from` on.
fn value(from: u64, len: u64, second: u64) -> u64 {
    (from..from + len).rev().fold(0, |sum, at| {
        let page = if at < 0x1000 { PAGES[0] } else { second };
        sum << 8 | u64::from(byte(page, at))
    })
}

fn machine() -> Machine {
    let m = Machine::new();
    m.write(PML4 + 0x2008, &(TABLE + 3).to_le_bytes());
    for (n, page) in PAGES.into_iter().enumerate() {
        m.write(TABLE + 8 * n as u64, &(page + 3).to_le_bytes());
    }
    for page in [PAGES[0], PAGES[1], OTHER] {
        let bytes: Vec<u8> = (0..0x1000).map(|at| byte(page, at)).collect();
        m.write(page, &bytes);
    }
    m
}

/// CR4.OSFXSR.
fn enable_sse(a: &mut CodeAssembler) -> Result<(), IcedError> {
    a.mov(rax, cr4)?;
    a.or(eax, 1 << 9)?;
    a.mov(cr4, rax)
}

/// Executes it; how that ended.
fn run(m: &Machine, code: Assemble) -> (VcpuFd, &'static str) {
    m.load(CODE, code);
    let mut vcpu = m.vcpu(0, CODE);
    let end = match vcpu.run().unwrap() {
        VcpuExit::Hlt => "HLT",
        VcpuExit::Shutdown => "shutdown",
        other => panic!("{other:?}"),
    };
    (vcpu, end)
}

#[test]
fn they_are_read() {
    let m = machine();
    let (vcpu, end) = run(&m, |a| {
        let (mut turn, mut last) = (a.create_label(), a.create_label());
        enable_sse(a)?;
        a.mov(rdi, WINDOW + 0x1000)?;
        a.mov(r13d, TURNS as u32)?;
        a.set_label(&mut turn)?;
        a.add(rbx, qword_ptr(rdi - 1))?;
        a.add(rbx, qword_ptr(rdi - 7))?;
        a.mov(eax, dword_ptr(rdi - 3))?;
        a.add(rbx, rax)?;
        a.movzx(eax, word_ptr(rdi - 1))?;
        a.add(rbx, rax)?;
        a.cmp(qword_ptr(rdi - 4), 0)?;
        a.je(last)?;
        a.movdqu(xmm0, xmmword_ptr(rdi - 9))?;
        a.movq(rax, xmm0)?;
        a.add(rbx, rax)?;
        a.psrldq(xmm0, 8)?;
        a.movq(rax, xmm0)?;
        a.add(rbx, rax)?;
        a.set_label(&mut last)?;
        a.dec(r13d)?;
        a.jne(turn)?;
        // The second page is another one from now on.
        a.mov(qword_ptr(TABLE + 8), OTHER as i32 + 3)?;
        a.invlpg(byte_ptr(rdi))?;
        a.mov(rsi, qword_ptr(rdi - 5))?;
        a.hlt()
    });
    assert_eq!(end, "HLT");
    let sum = [(-1, 8), (-7, 8), (-3, 4), (-1, 2), (-9, 8), (-1, 8)]
        .into_iter()
        .map(|(at, len)| value(0x1000_u64.wrapping_add_signed(at), len, PAGES[1]))
        .fold(0_u64, u64::wrapping_add);
    let regs = vcpu.get_regs().unwrap();
    assert_eq!(regs.rbx, sum.wrapping_mul(TURNS));
    assert_eq!(regs.rsi, value(0xffb, 8, OTHER));
    if std::env::var_os("ANYKVM_ENGINE").is_none() {
        let slow = stats_fd::counter(&vcpu, "jit_interpreted_slow");
        assert!(slow < TURNS, "{slow}");
    }
}

#[test]
fn they_are_written() {
    let m = machine();
    let (_, end) = run(&m, |a| {
        let mut turn = a.create_label();
        enable_sse(a)?;
        a.mov(rdi, WINDOW + 0x1000)?;
        a.mov(ecx, 100)?;
        a.set_label(&mut turn)?;
        a.movq(xmm0, rcx)?;
        a.movdqu(xmmword_ptr(rdi - 15), xmm0)?;
        a.mov(qword_ptr(rdi - 4), rcx)?;
        a.add(qword_ptr(rdi - 4), 5)?;
        a.dec(ecx)?;
        a.jne(turn)?;
        a.hlt()
    });
    assert_eq!(end, "HLT");
    let mut written: Vec<u8> = m.read::<15>(PAGES[0] + 0xff1).into();
    written.extend(m.read::<5>(PAGES[1]));
    let last = byte(PAGES[1], 4);
    let expected = [
        1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 6, 0, 0, 0, 0, 0, 0, 0, last,
    ];
    assert_eq!(written, expected);
}

#[test]
fn the_fault_is_that_of_the_page_that_is_absent() {
    for at in [0x1ff9, 0x1fff] {
        let m = machine();
        m.write(0x100, &(WINDOW + at).to_le_bytes());
        let (vcpu, end) = run(&m, |a| {
            a.mov(rdi, qword_ptr(0x100))?;
            a.mov(rax, qword_ptr(WINDOW + 0xfff))?;
            a.mov(rbx, qword_ptr(rdi))?;
            a.hlt()
        });
        assert_eq!(end, "shutdown");
        assert_eq!(vcpu.get_sregs().unwrap().cr2, WINDOW + 0x2000);
    }
}

/// A program's pages are mapped when it touches them: an instruction that begins before such a page is
/// executed for the first time while its end is absent.
#[test]
fn an_instruction_whose_end_is_mapped_later_is_translated() {
    const GDT: u64 = 0x500;
    const IDT: u64 = 0x600;
    const HANDLER: u64 = 0x1800;
    let m = machine();
    let code = [0x48, 0xff, 0xc3, 0xc3]; // inc rbx; ret
    m.write(PAGES[0] + 0xffe, &code[..2]);
    m.write(PAGES[1], &code[2..]);
    m.write(TABLE + 8, &[0; 8]);
    m.load(HANDLER, |a| {
        a.mov(qword_ptr(TABLE + 8), PAGES[1] as i32 + 3)?;
        a.inc(rdx)?;
        a.add(rsp, 8)?;
        a.iretq()
    });
    m.load(CODE, |a| {
        let mut turn = a.create_label();
        a.mov(rsi, WINDOW + 0xffe)?;
        a.mov(ecx, TURNS as u32)?;
        a.set_label(&mut turn)?;
        a.call(rsi)?;
        a.dec(ecx)?;
        a.jne(turn)?;
        a.hlt()
    });
    let mut vcpu = m.vcpu(0, CODE);
    m.handle_page_faults(&vcpu, [GDT, IDT], HANDLER);
    assert!(matches!(vcpu.run().unwrap(), VcpuExit::Hlt));
    let regs = vcpu.get_regs().unwrap();
    assert_eq!((regs.rbx, regs.rdx), (TURNS, 1));
    if std::env::var_os("ANYKVM_ENGINE").is_none() {
        let slow = stats_fd::counter(&vcpu, "jit_interpreted_slow");
        assert!(slow < TURNS / 2, "{slow}");
    }
}
