//! What a small guest can make the process take: hundreds of address spaces, aliases of its pages everywhere, code that it
//! makes anew all the time.

#![allow(clippy::unwrap_used, reason = "a test that cannot be set up fails")]

mod guest;

use std::{thread, time::Duration};

use anykvm_ioctls::{Kvm, VcpuExit, VcpuFd};
use guest::{Ram, add_slot};
use iced_x86::code_asm::*;
use kvm_bindings::*;

const MEMORY: usize = 4 << 20;
const CODE: u64 = 0x1000;
/// One table of each level, all of whose entries lead to the next: every address is an alias.
const TABLES: [u64; 3] = [0x2000, 0x3000, 0x4000];
/// Functions, one after the other.
const FUNCTIONS: u64 = 0x2_0000;
const FUNCTION: u64 = 128;
/// PML4 tables.
const ROOTS: u64 = 0x10_0000;
const ROOT_COUNT: u64 = 240;
const ROUNDS: u64 = 0x5000;
/// What the process may take above the guest's memory.
const BOUND: usize = 96 << 20;

/// Pages of this process that are in memory, in bytes.
fn resident() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: usize = statm.split(' ').nth(1).unwrap().parse().unwrap();
    pages * 4096
}

/// Reads, writes and adds in many places, so that much code is made of it. Its second byte begins a number.
fn function() -> Vec<u8> {
    let mut a = CodeAssembler::new(64).unwrap();
    a.mov(edx, 0x1234_5678).unwrap();
    for n in 0..9 {
        a.add(rax, qword_ptr(r8 + n * 0x1008)).unwrap();
        a.mov(dword_ptr(r9 + n * 0x2010), eax).unwrap();
    }
    a.ret().unwrap();
    a.assemble(0).unwrap()
}

/// Each address space in turn: accesses anywhere in it, and a share of the functions at an alias, each of which is made another one before.
fn program() -> Vec<u8> {
    let mut a = CodeAssembler::new(64).unwrap();
    let (mut again, mut root) = (a.create_label(), a.create_label());
    let (mut touch, mut call) = (a.create_label(), a.create_label());
    a.mov(r15, 12_345u64).unwrap();
    a.mov(r14, 6_364_136_223_846_793_005u64).unwrap();
    a.set_label(&mut again).unwrap();
    a.mov(r12d, ROOT_COUNT as u32 - 1).unwrap();
    a.set_label(&mut root).unwrap();
    // The PCID is the root's number; nothing is flushed.
    a.mov(rax, r12).unwrap();
    a.shl(rax, 12).unwrap();
    a.lea(rax, ptr(rax + r12 + ROOTS as i32)).unwrap();
    a.bts(rax, 63).unwrap();
    a.mov(cr3, rax).unwrap();
    a.mov(ecx, 200).unwrap();
    a.set_label(&mut touch).unwrap();
    a.imul_2(r15, r14).unwrap();
    a.add(r15, 1_442_695_041).unwrap();
    a.mov(rdx, r15).unwrap();
    a.shr(rdx, 26).unwrap();
    a.and(rdx, -4096).unwrap();
    a.add(rbx, qword_ptr(rdx)).unwrap();
    a.dec(ecx).unwrap();
    a.jne(touch).unwrap();
    a.mov(rsi, r12).unwrap();
    a.imul_3(rsi, rsi, 0x20_0000 + 23 * FUNCTION as i32)
        .unwrap();
    a.add(rsi, FUNCTIONS as i32).unwrap();
    a.mov(r8, 0x8000u64).unwrap();
    a.mov(r9, 0x8000u64).unwrap();
    a.mov(ebp, 23).unwrap();
    a.set_label(&mut call).unwrap();
    a.inc(r15).unwrap();
    a.mov(dword_ptr(rsi + 1), r15d).unwrap();
    a.call(rsi).unwrap();
    a.add(rsi, FUNCTION as i32).unwrap();
    a.dec(ebp).unwrap();
    a.jne(call).unwrap();
    a.dec(r12d).unwrap();
    a.jns(root).unwrap();
    a.inc(qword_ptr(ROUNDS)).unwrap();
    a.jmp(again).unwrap();
    a.assemble(CODE).unwrap()
}

fn memory() -> Ram {
    let ram = Ram::new(MEMORY);
    ram.write(CODE, &program());
    for n in 0..512u64 {
        let next = [n << 12 | 3, TABLES[0] | 3, TABLES[1] | 3];
        for (table, entry) in TABLES.iter().zip(next) {
            ram.write(table + n * 8, &entry.to_le_bytes());
        }
    }
    for root in 0..ROOT_COUNT {
        ram.write(ROOTS + (root << 12), &(TABLES[2] | 3).to_le_bytes());
    }
    let function = function();
    for n in 0..(ROOTS - FUNCTIONS) / FUNCTION {
        ram.write(FUNCTIONS + n * FUNCTION, &function);
    }
    ram
}

fn start(kvm: &Kvm, vcpu: &VcpuFd) {
    let supported = kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).unwrap();
    vcpu.set_cpuid2(&supported).unwrap();
    let mut sregs = vcpu.get_sregs().unwrap();
    sregs.cs = kvm_segment {
        limit: u32::MAX,
        selector: 8,
        type_: 11,
        present: 1,
        s: 1,
        l: 1,
        g: 1,
        ..Default::default()
    };
    // PAE and PCIDE.
    (sregs.cr0, sregs.cr3, sregs.cr4, sregs.efer) = (0x8000_0031, ROOTS, 0x2_0020, 0x500);
    vcpu.set_sregs(&sregs).unwrap();
    let regs = kvm_regs {
        rip: CODE,
        rsp: 0x7000,
        rflags: 2,
        ..Default::default()
    };
    vcpu.set_regs(&regs).unwrap();
}

#[test]
fn a_guest_of_4_mib_does_not_make_its_process_large() {
    let kvm = Kvm::new().unwrap();
    let vm = kvm.create_vm().unwrap();
    let ram = memory();
    add_slot(&vm, 0, 0, &ram, 0);
    let before = resident();
    let mut vcpu = vm.create_vcpu(0).unwrap();
    start(&kvm, &vcpu);
    let stopper = vcpu.stopper().unwrap();
    let running = thread::spawn(move || {
        let error = vcpu.run().map(|exit: VcpuExit<'_>| format!("{exit:?}"));
        (error.map_err(|e| e.errno()), vcpu)
    });
    let rounds = || u64::from_le_bytes(ram.read(ROUNDS));
    let begin = std::time::Instant::now();
    while rounds() < 40 {
        assert!(!running.is_finished(), "it has ended");
        assert!(begin.elapsed() < Duration::from_secs(60), "{}", rounds());
        thread::sleep(Duration::from_millis(10));
    }
    let taken = resident().saturating_sub(before);
    stopper.stop();
    let (end, vcpu) = running.join().unwrap();
    assert_eq!(end, Err(libc::EINTR));
    drop(vcpu);
    assert!(taken < BOUND, "{} MiB", taken >> 20);
}
