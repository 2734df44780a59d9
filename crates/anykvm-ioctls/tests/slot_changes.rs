//! vCPUs go through a slot's memory by loops, strings, the stack, locked and straddling accesses while the VMM deletes the slot and
//! unmaps its memory at once, maps it elsewhere and adds it again, has it logged, and moves it.
//!
//! An access by a stale translation ends the process: what was unmapped is not mapped again, and has guard pages.

#![allow(clippy::unwrap_used, reason = "a test that cannot be set up fails")]

mod engines;
mod long_mode;

use std::{
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

use anykvm_ioctls::{VcpuExit, VcpuFd};
use iced_x86::code_asm::*;
use kvm_bindings::{KVM_MEM_LOG_DIRTY_PAGES, kvm_userspace_memory_region};
use long_mode::{Machine, PML4};
use vm_memory::{Bytes, GuestAddress};

/// Where the slot is, also in linear addresses.
const SLOT: u64 = 0x4000_0000;
const LEN: usize = 1 << 20;
const NUMBER: u32 = 7;
/// Where nobody looks for it.
const ELSEWHERE: u64 = 0x7000_0000;
const CODE: u64 = 0x1_0000;
/// How often each vCPU has gone through all of it.
const ROUNDS: u64 = 0x8000;
const GUARD: usize = 4096;
const A_WHILE: Duration = Duration::from_secs(4);

/// Memory between guard pages.
struct Memory(*mut u8);

impl Memory {
    fn new() -> Self {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice, of which the middle is made accessible.
        unsafe {
            let all = libc::mmap(
                std::ptr::null_mut(),
                LEN + 2 * GUARD,
                libc::PROT_NONE,
                flags,
                -1,
                0,
            );
            assert_ne!(all, libc::MAP_FAILED);
            let middle = all.cast::<u8>().add(GUARD);
            assert_eq!(libc::mprotect(middle.cast(), LEN, rights), 0);
            Self(middle)
        }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the whole mapping; no slot has it any more.
        unsafe { libc::munmap(self.0.sub(GUARD).cast(), LEN + 2 * GUARD) };
    }
}

fn set_slot(machine: &Machine, gpa: u64, len: usize, memory: &Memory, logs: bool) {
    let region = kvm_userspace_memory_region {
        slot: NUMBER,
        flags: if logs { KVM_MEM_LOG_DIRTY_PAGES } else { 0 },
        guest_phys_addr: gpa,
        memory_size: len as u64,
        userspace_addr: memory.0 as u64,
    };
    // SAFETY: the memory outlives the slot, which is what is tested.
    unsafe { machine.vm.set_user_memory_region(region) }.unwrap();
}

/// Goes through all of the slot's memory in many ways, again and again.
fn assemble(vcpu: u64) -> Result<Vec<u8>, IcedError> {
    let mut a = CodeAssembler::new(64)?;
    let (mut top, mut up, mut down) = (a.create_label(), a.create_label(), a.create_label());
    let (mut push, mut pop, mut odd) = (a.create_label(), a.create_label(), a.create_label());
    a.mov(rbp, SLOT)?;
    a.set_label(&mut top)?;
    a.mov(rdi, rbp)?;
    a.mov(ecx, (LEN / 64 - 1) as u32)?;
    a.set_label(&mut up)?;
    a.mov(rax, qword_ptr(rdi))?;
    a.add(rbx, qword_ptr(rdi + 8))?;
    a.mov(qword_ptr(rdi + 16), rbx)?;
    a.mov(dword_ptr(rdi + 60), edx)?;
    a.add(rdi, 64)?;
    a.dec(ecx)?;
    a.jne(up)?;
    a.lea(rsi, ptr(rbp + (LEN as i32 - 32)))?;
    a.mov(ecx, (LEN / 24 - 3) as u32)?;
    a.set_label(&mut down)?;
    a.movdqu(xmm0, ptr(rsi))?;
    a.paddd(xmm1, xmm0)?;
    a.movdqu(ptr(rsi + 8), xmm1)?;
    a.sub(rsi, 24)?;
    a.dec(ecx)?;
    a.jne(down)?;
    a.mov(rdi, rbp)?;
    a.lea(rsi, ptr(rbp + 0x8_0000))?;
    a.mov(ecx, 0x7_0000u32 / 8)?;
    a.rep().movsq()?;
    a.mov(rdi, rbp)?;
    a.mov(ecx, 3000)?;
    a.rep().stosb()?;
    a.lea(rsp, ptr(rbp + 0x2_0000))?;
    a.mov(ecx, 4000)?;
    a.set_label(&mut push)?;
    a.push(rax)?;
    a.push(rcx)?;
    a.dec(ecx)?;
    a.jne(push)?;
    a.mov(ecx, 4000)?;
    a.set_label(&mut pop)?;
    a.pop(rdx)?;
    a.pop(rdx)?;
    a.dec(ecx)?;
    a.jne(pop)?;
    // Locked and straddling, the same place again and again.
    a.lea(rdi, ptr(rbp + 0xffd))?;
    a.mov(ecx, 2000)?;
    a.set_label(&mut odd)?;
    a.add(rax, qword_ptr(rdi))?;
    a.mov(qword_ptr(rdi), rax)?;
    a.lock().add(qword_ptr(rdi + 11), rax)?;
    a.bts(qword_ptr(rdi + 3), rcx)?;
    a.dec(ecx)?;
    a.jne(odd)?;
    a.mov(rax, ROUNDS + vcpu * 8)?;
    a.inc(qword_ptr(rax))?;
    a.jmp(top)?;
    a.assemble(CODE + vcpu * 0x1000)
}

/// Where the slot is not, its addresses are a device's.
fn run(vcpu: &mut VcpuFd, stop: &AtomicBool, devices: &AtomicU64) {
    while !stop.load(Ordering::Relaxed) {
        match vcpu.run() {
            Ok(VcpuExit::MmioRead(_, data)) => {
                data.fill(0x5a);
                devices.fetch_add(1, Ordering::Relaxed);
            }
            Ok(VcpuExit::MmioWrite(..)) => _ = devices.fetch_add(1, Ordering::Relaxed),
            Ok(exit) => panic!("{exit:?}"),
            Err(error) => assert_eq!(error.errno(), libc::EINTR),
        }
    }
}

fn change(machine: &Machine, memory: &mut Memory, random: u64) {
    let logs = random >> 33 & 1 != 0;
    match random >> 60 {
        0..=5 => {
            set_slot(machine, SLOT, 0, memory, false);
            *memory = Memory::new();
            if random >> 40 & 1 == 0 {
                thread::sleep(Duration::from_micros(random >> 50 & 127));
            }
            set_slot(machine, SLOT, LEN, memory, logs);
        }
        6..=9 => set_slot(machine, SLOT, LEN, memory, logs),
        // EINVAL unless it is logged.
        10..=13 => _ = machine.vm.get_dirty_log(NUMBER, LEN),
        _ => {
            set_slot(machine, ELSEWHERE, LEN, memory, logs);
            // SAFETY: the memory of a slot at which no vCPU looks.
            unsafe {
                libc::mprotect(memory.0.cast(), LEN, libc::PROT_NONE);
                libc::mprotect(memory.0.cast(), LEN, libc::PROT_READ | libc::PROT_WRITE);
            }
            set_slot(machine, SLOT, LEN, memory, logs);
        }
    }
}

#[test]
fn vcpus_go_through_a_slot_that_changes() {
    let machine = Machine::new();
    // The slot's first 2 MiB by the second entry of the PDPT.
    for (at, entry) in [(PML4 + 0x1008, PML4 + 0x3003), (PML4 + 0x3000, SLOT | 0x83)] {
        machine.memory.write_obj(entry, GuestAddress(at)).unwrap();
    }
    let mut memory = Memory::new();
    set_slot(&machine, SLOT, LEN, &memory, false);
    let (stop, devices) = (AtomicBool::new(false), AtomicU64::new(0));
    let rounds = || [0, 8].map(|n| u64::from_le_bytes(machine.read(ROUNDS + n)));
    thread::scope(|scope| {
        let mut stoppers = Vec::new();
        for n in 0..2 {
            machine.write(CODE + n * 0x1000, &assemble(n).unwrap());
            let mut vcpu = machine.vcpu(n, CODE + n * 0x1000);
            // SSE as well.
            let mut sregs = vcpu.get_sregs().unwrap();
            sregs.cr4 |= 0x600;
            vcpu.set_sregs(&sregs).unwrap();
            stoppers.push(vcpu.stopper().unwrap());
            let (stop, devices) = (&stop, &devices);
            scope.spawn(move || run(&mut vcpu, stop, devices));
        }
        let (start, mut random) = (Instant::now(), 12_345u64);
        while start.elapsed() < A_WHILE {
            random = random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            change(&machine, &mut memory, random);
            if random >> 20 & 3 == 0 {
                thread::sleep(Duration::from_micros(random >> 10 & 1023));
            }
        }
        // They go on where nothing changes any more.
        let before = rounds();
        while rounds()
            .iter()
            .zip(before)
            .any(|(now, before)| *now < before + 2)
        {
            assert!(start.elapsed() < A_WHILE * 10, "{before:?} {:?}", rounds());
            thread::sleep(Duration::from_millis(5));
        }
        stop.store(true, Ordering::Relaxed);
        for stopper in stoppers {
            stopper.stop();
        }
    });
    assert!(
        devices.load(Ordering::Relaxed) > 0,
        "the slot was away at times"
    );
    set_slot(&machine, SLOT, 0, &memory, false);
}

#[test]
fn the_interpreter_does_the_same() {
    engines::again_on("interp");
}
