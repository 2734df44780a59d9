//! Data in a page with code: written by translated code without the interpreter, while what is fetched from the page
//! changes whenever it is written.

#![allow(clippy::unwrap_used, reason = "a test that cannot be set up fails")]

mod long_mode;
mod stats_fd;

use std::{sync::mpsc::channel, thread, time::Duration};

use anykvm_ioctls::{VcpuExit, VcpuFd};
use iced_x86::code_asm::*;
use long_mode::Machine;

/// CR4.OSFXSR.
const OSFXSR: u64 = 1 << 9;
const CODE: u64 = 0x1000;
/// In the same page.
const DATA: u64 = CODE + 0xe00;

/// Runs to HLT; EBX.
fn run(vcpu: &mut VcpuFd) -> u64 {
    match vcpu.run().unwrap() {
        VcpuExit::Hlt => vcpu.get_regs().unwrap().rbx,
        other => panic!("{other:?}"),
    }
}

/// Words of all sizes, at each distance from the borders of chunks.
#[test]
fn is_written_by_translated_code() {
    const TURNS: u32 = 30_000;
    let machine = Machine::new();
    machine.load(CODE, |a| {
        let mut again = a.create_label();
        a.mov(esi, DATA as u32)?;
        a.xor(edx, edx)?;
        a.mov(ecx, TURNS)?;
        a.set_label(&mut again)?;
        a.inc(qword_ptr(rsi))?;
        a.mov(byte_ptr(rsi + rdx + 16), cl)?;
        a.add(word_ptr(rsi + 0xa0), 3)?;
        a.lock().xadd(dword_ptr(rsi + 0xa4), ecx)?;
        a.movq(xmm0, rcx)?;
        a.movups(xmmword_ptr(rsi + rdx + 0xb0), xmm0)?;
        a.push(rcx)?;
        a.pop(qword_ptr(rsi + rdx + 0x123))?;
        a.mov(ecx, TURNS)?;
        a.sub(ecx, dword_ptr(rsi))?;
        a.inc(edx)?;
        a.and(edx, 127)?;
        a.test(ecx, ecx)?;
        a.jne(again)?;
        a.hlt()
    });
    let mut vcpu = machine.vcpu(0, CODE);
    long_mode::set_cr4(&vcpu, OSFXSR);
    run(&mut vcpu);
    let slow = stats_fd::counter(&vcpu, "jit_interpreted_slow");
    assert!(slow < u64::from(TURNS) / 100, "{slow} of {TURNS}");
    let counter = u64::from_le_bytes(machine.read(DATA));
    assert_eq!(counter, u64::from(TURNS));
    let sum = u16::from_le_bytes(machine.read(DATA + 0xa0));
    assert_eq!(sum, (TURNS * 3) as u16);
}

/// A function is written anew, into the same chunk as before and into others, with data written all around it.
#[test]
fn code_in_new_places_is_executed_as_written() {
    let machine = Machine::new();
    machine.load(CODE, |a| {
        let mut again = a.create_label();
        // Functions at 50 places, 37 bytes apart: MOV EAX, ecx; RET.
        a.mov(ecx, 5000)?;
        a.set_label(&mut again)?;
        a.inc(dword_ptr(DATA))?;
        a.mov(eax, ecx)?;
        a.xor(edx, edx)?;
        a.mov(esi, 50)?;
        a.div(esi)?;
        a.imul_3(edi, edx, 37)?;
        a.add(edi, CODE as u32 + 0x200)?;
        a.mov(byte_ptr(rdi), 0xb8)?;
        a.mov(dword_ptr(rdi + 1), ecx)?;
        a.mov(byte_ptr(rdi + 5), 0xc3)?;
        // Data between this function and the next one.
        a.inc(dword_ptr(rdi + 8))?;
        a.call(rdi)?;
        a.add(rbx, rax)?;
        a.inc(dword_ptr(DATA))?;
        // The function that is called once more has not changed, or was changed by one byte.
        a.xor(byte_ptr(rdi + 1), 1)?;
        a.call(rdi)?;
        a.add(rbx, rax)?;
        a.dec(ecx)?;
        a.jne(again)?;
        a.hlt()
    });
    let mut vcpu = machine.vcpu(0, CODE);
    let want: u64 = (1..=5000_u64).map(|n| n + (n ^ 1)).sum();
    assert_eq!(run(&mut vcpu), want);
    assert_eq!(u32::from_le_bytes(machine.read(DATA)), 10_000);
}

/// Variables between a jump and its target, and behind a return, in a page whose instructions change at times, too.
#[test]
fn among_instructions_translates_nothing_anew() {
    const TURNS: u32 = 30_000;
    let machine = Machine::new();
    machine.load(CODE, |a| {
        let (mut again, mut over, mut function, mut data, mut after, mut immediate, mut same) = (
            a.create_label(),
            a.create_label(),
            a.create_label(),
            a.create_label(),
            a.create_label(),
            a.create_label(),
            a.create_label(),
        );
        a.mov(ecx, TURNS)?;
        a.set_label(&mut again)?;
        a.jmp(over)?;
        a.set_label(&mut data)?;
        a.dd(&[0])?;
        a.set_label(&mut over)?;
        a.inc(dword_ptr(data))?;
        a.call(function)?;
        // Each 10,000 turns an immediate changes.
        a.mov(eax, ecx)?;
        a.xor(edx, edx)?;
        a.mov(esi, 10_000)?;
        a.div(esi)?;
        a.test(edx, edx)?;
        a.jne(same)?;
        a.lea(rdi, qword_ptr(immediate))?;
        a.inc(dword_ptr(rdi + 2))?;
        a.set_label(&mut same)?;
        a.nop()?;
        a.set_label(&mut immediate)?;
        // ADD EBX, 0.
        a.db(&[0x81, 0xc3, 0, 0, 0, 0])?;
        a.dec(ecx)?;
        a.jne(again)?;
        a.mov(eax, dword_ptr(data))?;
        a.mov(esi, dword_ptr(after))?;
        a.hlt()?;
        a.set_label(&mut function)?;
        a.inc(dword_ptr(after))?;
        a.ret()?;
        a.set_label(&mut after)?;
        a.dd(&[0])
    });
    let mut vcpu = machine.vcpu(0, CODE);
    // In turns of 10,000: 1, then 2, then 3 are added.
    let ones = u64::from(TURNS / 10_000);
    let first = 1;
    let want: u64 = (1..=u64::from(TURNS))
        .map(|turn| {
            // ECX counts down from TURNS; the immediate changes before it is added where ECX is a multiple.
            let left = u64::from(TURNS) - turn + 1;
            ones + first - left.div_ceil(10_000)
        })
        .sum();
    assert_eq!(run(&mut vcpu), want);
    let regs = vcpu.get_regs().unwrap();
    assert_eq!((regs.rax, regs.rsi), (TURNS.into(), TURNS.into()));
    let blocks = stats_fd::counter(&vcpu, "jit_blocks");
    assert!(blocks < 1000, "{blocks}");
    let slow = stats_fd::counter(&vcpu, "jit_interpreted_slow");
    assert!(slow < u64::from(TURNS) / 100, "{slow} of {TURNS}");
}

/// Writes of each size around a function of three bytes, all of it or some of it or none.
#[test]
fn a_write_that_has_a_byte_of_code_changes_it() {
    const TURNS: u8 = 40;
    /// MOV AL, 0; RET.
    const FUNCTION: [u8; 3] = [0xb0, 0, 0xc3];
    const PLACE: usize = 20;
    /// What is written lies here, in another page; the function's number changes before each write.
    const SOURCE: u64 = 0x6000;
    const TARGET: u64 = CODE + 0xf40;
    /// Sizes, and where they begin.
    fn writes() -> impl Iterator<Item = (usize, usize)> {
        let sizes = [1, 2, 4, 8, 16].into_iter();
        sizes.flat_map(|size| (PLACE - size - 1..=PLACE + 4).map(move |at| (size, at)))
    }
    let mut memory = [0_u8; 48];
    memory[PLACE..][..3].copy_from_slice(&FUNCTION);
    let machine = Machine::new();
    machine.write(SOURCE, &memory);
    machine.load(CODE, |a| {
        let mut again = a.create_label();
        a.mov(esi, SOURCE as u32)?;
        a.mov(edi, TARGET as u32)?;
        a.lea(rdx, qword_ptr(rdi + PLACE))?;
        a.mov(ecx, u32::from(TURNS))?;
        a.movups(xmm0, xmmword_ptr(rsi + 16))?;
        a.movups(xmmword_ptr(rdi + 16), xmm0)?;
        a.set_label(&mut again)?;
        for (size, at) in writes() {
            a.inc(byte_ptr(rsi + PLACE + 1))?;
            match size {
                1 => {
                    a.mov(al, byte_ptr(rsi + at))?;
                    a.mov(byte_ptr(rdi + at), al)?;
                }
                2 => {
                    a.mov(ax, word_ptr(rsi + at))?;
                    a.mov(word_ptr(rdi + at), ax)?;
                }
                4 => {
                    a.mov(eax, dword_ptr(rsi + at))?;
                    a.mov(dword_ptr(rdi + at), eax)?;
                }
                8 => {
                    a.mov(rax, qword_ptr(rsi + at))?;
                    a.mov(qword_ptr(rdi + at), rax)?;
                }
                _ => {
                    a.movups(xmm0, xmmword_ptr(rsi + at))?;
                    a.movups(xmmword_ptr(rdi + at), xmm0)?;
                }
            }
            a.xor(eax, eax)?;
            a.call(rdx)?;
            a.imul_3(rbx, rbx, 31)?;
            a.add(rbx, rax)?;
        }
        a.dec(ecx)?;
        a.jne(again)?;
        a.hlt()
    });
    let mut want = 0_u64;
    let (mut number, mut written) = (0_u8, 0_u8);
    for _ in 0..TURNS {
        for (size, at) in writes() {
            number = number.wrapping_add(1);
            if (at..at + size).contains(&(PLACE + 1)) {
                written = number;
            }
            want = want.wrapping_mul(31).wrapping_add(written.into());
        }
    }
    let mut vcpu = machine.vcpu(0, CODE);
    long_mode::set_cr4(&vcpu, OSFXSR);
    assert_eq!(run(&mut vcpu), want);
}

/// One vCPU writes functions into a page, and data beside and among them; the other one executes each function that it is
/// told of.
#[test]
fn another_vcpu_executes_what_was_written() {
    const PAGE: u64 = 0x7000;
    const ROUNDS: u32 = 6000;
    /// Number of the last function that was written, and of the last one that was executed.
    const WRITTEN: u64 = 0x6000;
    const EXECUTED: u64 = 0x6040;
    let machine = Machine::new();
    // The function of round n is at 23 n modulo 3,000.
    fn locate(a: &mut CodeAssembler) -> Result<(), IcedError> {
        a.imul_3(eax, ecx, 23)?;
        a.xor(edx, edx)?;
        a.mov(esi, 3000)?;
        a.div(esi)?;
        a.lea(edi, dword_ptr(edx + PAGE as u32))
    }
    machine.load(CODE, |a| {
        let (mut again, mut wait) = (a.create_label(), a.create_label());
        a.mov(ecx, 1)?;
        a.set_label(&mut again)?;
        locate(a)?;
        a.mov(byte_ptr(rdi), 0xb8)?;
        a.mov(dword_ptr(rdi + 1), ecx)?;
        a.mov(byte_ptr(rdi + 5), 0xc3)?;
        a.mov(dword_ptr(WRITTEN), ecx)?;
        a.set_label(&mut wait)?;
        a.inc(dword_ptr(PAGE + 0xff0))?;
        a.inc(word_ptr(rdi + 7))?;
        a.cmp(dword_ptr(EXECUTED), ecx)?;
        a.jne(wait)?;
        a.inc(ecx)?;
        a.cmp(ecx, ROUNDS + 1)?;
        a.jne(again)?;
        a.hlt()
    });
    machine.load(0x9000, |a| {
        let (mut again, mut wait) = (a.create_label(), a.create_label());
        a.mov(ecx, 1)?;
        a.set_label(&mut again)?;
        a.nop()?;
        a.set_label(&mut wait)?;
        a.pause()?;
        a.cmp(dword_ptr(WRITTEN), ecx)?;
        a.jne(wait)?;
        // Serialises.
        a.mov(r8, rcx)?;
        a.mov(r9, rbx)?;
        a.cpuid()?;
        a.mov(rcx, r8)?;
        a.mov(rbx, r9)?;
        locate(a)?;
        a.call(rdi)?;
        // Counts what is wrong.
        a.xor(eax, ecx)?;
        a.neg(eax)?;
        a.adc(ebx, 0)?;
        a.mov(dword_ptr(EXECUTED), ecx)?;
        a.inc(ecx)?;
        a.cmp(ecx, ROUNDS + 1)?;
        a.jne(again)?;
        a.hlt()
    });
    let (done, finished) = channel();
    for (id, rip) in [(0, CODE), (1, 0x9000)] {
        let mut vcpu = machine.vcpu(id, rip);
        let done = done.clone();
        thread::spawn(move || done.send((id, run(&mut vcpu))));
    }
    for _ in 0..2 {
        let (id, wrong) = finished
            .recv_timeout(Duration::from_secs(120))
            .expect("a vCPU does not see what the other one wrote");
        assert_eq!(wrong, 0, "of vCPU {id}");
    }
}
