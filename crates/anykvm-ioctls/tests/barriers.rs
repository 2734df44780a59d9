//! Serialising instructions are memory barriers (SDM vol. 3, 9.3): of two processors that store, execute one and load what
//! the other has stored, one sees the other's store. Kernels rely on it at loads of CR3.

#![allow(clippy::unwrap_used, reason = "tests")]

mod engines;
mod long_mode;

use std::thread;

use anykvm_ioctls::VcpuExit;
use iced_x86::code_asm::*;
use long_mode::{Machine, start};

const CODE: u64 = 0x1000;
const ROUNDS: u64 = 5_000;
/// For each vCPU, a flag for the round that it has come to.
const ARRIVED: u64 = 0x8000;
/// For each vCPU, the words that it stores, and those of the other's that it loads: 16 bytes a round.
const STORED: u64 = 0x2_0000;
const SEEN: u64 = 0xa_0000;
const OF_SECOND: i32 = 8;
const STACKS: u64 = 0x4000;

type Instruction = fn(&mut CodeAssembler) -> Result<(), IcedError>;

/// rsi: 0 or 8, by the vCPU; rdi: the other of them.
fn program(instruction: Instruction) -> Vec<u8> {
    let mut a = CodeAssembler::new(64).unwrap();
    let assemble = |a: &mut CodeAssembler| {
        let (mut round, mut wait) = (a.create_label(), a.create_label());
        a.xor(r8, r8)?;
        a.set_label(&mut round)?;
        a.lea(r9, qword_ptr(r8 + 1))?;
        a.mov(qword_ptr(rsi + ARRIVED as i32), r9)?;
        a.set_label(&mut wait)?;
        a.pause()?;
        a.cmp(qword_ptr(rdi + ARRIVED as i32), r9)?;
        a.jb(wait)?;
        a.mov(r10, r8)?;
        a.shl(r10, 4)?;
        a.lea(r11, qword_ptr(r10 + rsi))?;
        a.lea(r10, qword_ptr(r10 + rdi))?;
        a.mov(qword_ptr(r11 + STORED as i32), r9)?;
        instruction(a)?;
        a.mov(rax, qword_ptr(r10 + STORED as i32))?;
        a.mov(qword_ptr(r11 + SEEN as i32), rax)?;
        a.mov(r8, r9)?;
        a.cmp(r8, ROUNDS as i32)?;
        a.jb(round)?;
        a.out(0x80, al)
    };
    assemble(&mut a).unwrap();
    a.assemble(CODE).unwrap()
}

/// Returns the number of rounds in which neither has seen the other's store.
fn unseen(instruction: Instruction) -> usize {
    let m = Machine::new();
    m.write(CODE, &program(instruction));
    let mut vcpus = [m.vcpu(0, CODE), m.vcpu(1, CODE)];
    thread::scope(|s| {
        for (n, vcpu) in vcpus.iter_mut().enumerate() {
            m.handle_page_faults(vcpu, [0x2000, 0x3000], CODE);
            start(vcpu, CODE);
            let mut regs = vcpu.get_regs().unwrap();
            let own = n as u64 * OF_SECOND as u64;
            (regs.rsi, regs.rdi) = (own, OF_SECOND as u64 - own);
            regs.rsp = STACKS + 0x1000 * n as u64;
            vcpu.set_regs(&regs).unwrap();
            s.spawn(move || assert!(matches!(vcpu.run().unwrap(), VcpuExit::IoOut(0x80, _))));
        }
    });
    let saw = |n: u64| u64::from_le_bytes(m.read(SEEN + 8 * n)) != 0;
    (0..ROUNDS)
        .filter(|n| !saw(2 * n) && !saw(2 * n + 1))
        .count()
}

#[test]
fn one_of_two_sees_the_others_store() {
    let instructions: [(&str, Instruction); 10] = [
        ("mov cr3", |a| {
            a.mov(rax, cr3)?;
            a.mov(cr3, rax)
        }),
        ("invlpg", |a| a.invlpg(ptr(r11 + STORED as i32))),
        ("cpuid", |a| {
            a.xor(eax, eax)?;
            a.cpuid()
        }),
        ("iretq", |a| {
            let mut next = a.create_label();
            a.mov(rax, rsp)?;
            a.push(0x10)?;
            a.push(rax)?;
            a.pushfq()?;
            a.push(8)?;
            a.lea(rax, ptr(next))?;
            a.push(rax)?;
            a.iretq()?;
            a.set_label(&mut next)?;
            a.zero_bytes()
        }),
        ("wrmsr", |a| {
            // EFER, as it is.
            a.mov(ecx, 0xc000_0080u32)?;
            a.mov(eax, 0x500)?;
            a.xor(edx, edx)?;
            a.wrmsr()
        }),
        ("mov cr0", |a| {
            a.mov(rax, cr0)?;
            a.mov(cr0, rax)
        }),
        ("mov cr4", |a| {
            a.mov(rax, cr4)?;
            a.mov(cr4, rax)
        }),
        ("mov dr6", |a| {
            a.mov(rax, dr6)?;
            a.mov(dr6, rax)
        }),
        ("lidt", |a| {
            a.sidt(ptr(rsp - 16))?;
            a.lidt(ptr(rsp - 16))
        }),
        ("mfence", |a| a.mfence()),
    ];
    for (name, instruction) in instructions {
        assert_eq!(unseen(instruction), 0, "{name}");
    }
    // Not beside this: vCPUs that wait for each other need processors.
    engines::again_on("interp");
}
