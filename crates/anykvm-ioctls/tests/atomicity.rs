//! Accesses that both vendors call atomic (SDM vol. 3, 9.1.1): of 8 and of 16 aligned bytes, and locked ones anywhere. A
//! vCPU stores zeros and ones in turn; what another one loads is all zeros or all ones.

#![allow(clippy::unwrap_used, reason = "tests")]

mod engines;
mod long_mode;

use std::thread;

use anykvm_ioctls::VcpuExit;
use iced_x86::code_asm::*;
use long_mode::{Assemble, Machine, start};

const STORING: u64 = 0x1000;
const LOADING: u64 = 0x2000;
/// Words of zeros, and 64 bytes further words of ones.
const PATTERNS: u64 = 0x5000;
/// What a load has given.
const LOADED: u64 = 0x6000;
/// Not 0 once the loads are done.
const DONE: u64 = 0x7000;
const STACKS: u64 = 0x9000;
const ROUNDS: u64 = 20_000;

/// An access of rsi's operand, and what it loads or stores at rdi.
struct Access {
    name: &'static str,
    bytes: u64,
    /// Copies from rdi to rsi.
    store: Assemble,
    /// Copies from rsi to rdi.
    load: Assemble,
}

const ACCESSES: [Access; 8] = [
    Access {
        name: "mov",
        bytes: 8,
        store: |a| {
            a.mov(rax, qword_ptr(rdi))?;
            a.mov(qword_ptr(rsi), rax)
        },
        load: |a| {
            a.mov(rax, qword_ptr(rsi))?;
            a.mov(qword_ptr(rdi), rax)
        },
    },
    Access {
        name: "push, pop",
        bytes: 8,
        store: |a| {
            a.push(qword_ptr(rdi))?;
            a.pop(qword_ptr(rsi))
        },
        load: |a| {
            a.push(qword_ptr(rsi))?;
            a.pop(qword_ptr(rdi))
        },
    },
    Access {
        name: "movs",
        bytes: 8,
        store: |a| {
            a.xchg(rsi, rdi)?;
            a.movsq()?;
            a.sub(rsi, 8)?;
            a.sub(rdi, 8)?;
            a.xchg(rsi, rdi)
        },
        load: |a| {
            a.mov(ecx, 1)?;
            a.rep().movsq()?;
            a.sub(rsi, 8)?;
            a.sub(rdi, 8)
        },
    },
    Access {
        name: "movq",
        bytes: 8,
        store: |a| {
            a.movq(xmm0, qword_ptr(rdi))?;
            a.movq(qword_ptr(rsi), xmm0)
        },
        load: |a| {
            a.movq(mm0, qword_ptr(rsi))?;
            a.movq(qword_ptr(rdi), mm0)?;
            a.emms()
        },
    },
    Access {
        name: "fild, fistp",
        bytes: 8,
        store: |a| {
            a.fild(qword_ptr(rdi))?;
            a.fistp(qword_ptr(rsi))
        },
        load: |a| {
            a.fild(qword_ptr(rsi))?;
            a.fistp(qword_ptr(rdi))
        },
    },
    Access {
        name: "xchg, cmpxchg8b",
        bytes: 8,
        store: |a| {
            a.mov(rax, qword_ptr(rdi))?;
            a.xchg(qword_ptr(rsi), rax)
        },
        load: |a| {
            a.mov(rax, 0x1234_5678_9abc_def0u64)?;
            a.mov(edx, eax)?;
            a.mov(ebx, eax)?;
            a.mov(ecx, edx)?;
            a.lock().cmpxchg8b(qword_ptr(rsi))?;
            a.mov(dword_ptr(rdi), eax)?;
            a.mov(dword_ptr(rdi + 4), edx)
        },
    },
    Access {
        name: "movdqa, movaps",
        bytes: 16,
        store: |a| {
            a.movdqa(xmm0, xmmword_ptr(rdi))?;
            a.movdqa(xmmword_ptr(rsi), xmm0)
        },
        load: |a| {
            a.movaps(xmm0, xmmword_ptr(rsi))?;
            a.movaps(xmmword_ptr(rdi), xmm0)
        },
    },
    Access {
        name: "movntdq, cmpxchg16b",
        bytes: 16,
        store: |a| {
            a.movdqa(xmm0, xmmword_ptr(rdi))?;
            a.movntdq(xmmword_ptr(rsi), xmm0)
        },
        load: |a| {
            a.mov(eax, 1)?;
            a.mov(edx, 1)?;
            a.mov(ebx, 1)?;
            a.mov(ecx, 1)?;
            a.lock().cmpxchg16b(xmmword_ptr(rsi))?;
            a.mov(qword_ptr(rdi), rax)?;
            a.mov(qword_ptr(rdi + 8), rdx)
        },
    },
];

/// Stores the two patterns in turn until the other vCPU is done.
fn storing(access: &Access) -> Vec<u8> {
    let mut a = CodeAssembler::new(64).unwrap();
    let assemble = |a: &mut CodeAssembler| {
        let mut again = a.create_label();
        a.set_label(&mut again)?;
        a.xor(rdi, 64)?;
        (access.store)(a)?;
        a.cmp(qword_ptr(DONE), 0)?;
        a.je(again)?;
        a.out(0x80, al)
    };
    assemble(&mut a).unwrap();
    a.assemble(STORING).unwrap()
}

/// r8: the number of loads that have seen a mixture.
fn loading(access: &Access) -> Vec<u8> {
    let mut a = CodeAssembler::new(64).unwrap();
    let assemble = |a: &mut CodeAssembler| {
        let [mut again, mut torn, mut next] = [(); 3].map(|()| a.create_label());
        a.xor(r8, r8)?;
        a.mov(r9, ROUNDS)?;
        a.set_label(&mut again)?;
        (access.load)(a)?;
        a.mov(rax, qword_ptr(rdi))?;
        a.lea(rcx, qword_ptr(rax + 1))?;
        a.cmp(rcx, 1)?;
        a.ja(torn)?;
        if access.bytes == 16 {
            a.cmp(rax, qword_ptr(rdi + 8))?;
            a.jne(torn)?;
        }
        a.jmp(next)?;
        a.set_label(&mut torn)?;
        a.inc(r8)?;
        a.set_label(&mut next)?;
        a.dec(r9)?;
        a.jnz(again)?;
        a.mov(qword_ptr(DONE), 1)?;
        a.out(0x80, al)
    };
    assemble(&mut a).unwrap();
    a.assemble(LOADING).unwrap()
}

/// Returns how often a mixture was seen at `at`.
fn torn(store: &Access, load: &Access, at: u64) -> u64 {
    let m = Machine::new();
    m.write(STORING, &storing(store));
    m.write(LOADING, &loading(load));
    m.write(PATTERNS + 64, &[0xff; 16]);
    let mut vcpus = [m.vcpu(0, STORING), m.vcpu(1, LOADING)];
    thread::scope(|s| {
        for (n, vcpu) in vcpus.iter_mut().enumerate() {
            let mut sregs = vcpu.get_sregs().unwrap();
            sregs.cr4 |= 1 << 9;
            vcpu.set_sregs(&sregs).unwrap();
            start(vcpu, [STORING, LOADING][n]);
            let mut regs = vcpu.get_regs().unwrap();
            (regs.rsi, regs.rdi) = (at, [PATTERNS, LOADED][n]);
            regs.rsp = STACKS + 0x1000 * n as u64;
            vcpu.set_regs(&regs).unwrap();
            s.spawn(move || assert!(matches!(vcpu.run().unwrap(), VcpuExit::IoOut(0x80, _))));
        }
    });
    vcpus[1].get_regs().unwrap().r8
}

#[test]
fn no_mixture_is_seen() {
    for access in &ACCESSES {
        let [mov8, mov16] = [&ACCESSES[0], &ACCESSES[6]];
        let plain = if access.bytes == 8 { mov8 } else { mov16 };
        let at = 0x1_0000 + access.bytes;
        assert_eq!(torn(access, plain, at), 0, "stores by {}", access.name);
        assert_eq!(torn(plain, access, at), 0, "loads by {}", access.name);
    }
    engines::again_on("interp");
}

/// An 8-byte access over two pages is two accesses; a locked one is one, for other locked ones.
#[test]
fn locked_accesses_over_two_pages_are_one() {
    let locked = ACCESSES
        .iter()
        .find(|a| a.name.starts_with("xchg"))
        .unwrap();
    for at in [0x1_003c, 0x1_0ffc] {
        assert_eq!(torn(locked, locked, at), 0, "at {at:#x}");
    }
}
