//! Pages of 2 MiB that are not global, as programs have them: which of their pages enter the first level of the TLB, and
//! what a harvest of one of them leaves of the others.

#![allow(clippy::unwrap_used, reason = "a test that cannot be set up fails")]

mod long_mode;
mod stats_fd;

use anykvm_ioctls::{VcpuExit, VcpuFd};
use iced_x86::code_asm::*;
use kvm_bindings::{KVM_MEM_LOG_DIRTY_PAGES, kvm_userspace_memory_region};
use long_mode::{Assemble, Machine, PML4, start};
use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryMmap};

const CODE: u64 = 0x1000;
/// The large page, and where it is in a slot of its own.
const WINDOW: u64 = 0x40_0000;
const GPA: u64 = 0x20_0000;
const SIZE: usize = 2 << 20;
const SLOT: u32 = 5;
/// Pages that are accessed, and the distance from one to the next.
const PAGES: u64 = 100;
const APART: u64 = 3;

fn machine(flags: u32) -> (Machine, VcpuFd) {
    let m = Machine::new();
    m.write(PML4 + 0x2010, &(GPA | 0x83).to_le_bytes());
    let ranges = [(GuestAddress(GPA), SIZE)];
    let memory = Box::leak(Box::new(
        GuestMemoryMmap::<()>::from_ranges(&ranges).unwrap(),
    ));
    let region = kvm_userspace_memory_region {
        slot: SLOT,
        flags,
        guest_phys_addr: GPA,
        memory_size: SIZE as u64,
        userspace_addr: memory.get_host_address(GuestAddress(GPA)).unwrap() as u64,
    };
    // SAFETY: the memory is never unmapped.
    unsafe { m.vm.set_user_memory_region(region) }.unwrap();
    let vcpu = m.vcpu(0, CODE);
    (m, vcpu)
}

fn run(m: &Machine, vcpu: &mut VcpuFd, code: Assemble) {
    m.load(CODE, code);
    start(vcpu, CODE);
    assert!(matches!(vcpu.run().unwrap(), VcpuExit::Hlt));
}

/// Reads all pages, so that they are known to be there, and flushes.
fn touch(m: &Machine, vcpu: &mut VcpuFd) {
    run(m, vcpu, |a| {
        let mut page = a.create_label();
        a.mov(rdi, WINDOW)?;
        a.mov(ecx, SIZE as u32 >> 12)?;
        a.set_label(&mut page)?;
        a.mov(rax, qword_ptr(rdi))?;
        a.add(rdi, 0x1000)?;
        a.dec(ecx)?;
        a.jne(page)?;
        a.mov(rax, cr3)?;
        a.mov(cr3, rax)?;
        a.hlt()
    });
}

/// Misses that generated code has answered by the second level.
fn answered(vcpu: &VcpuFd) -> u64 {
    stats_fd::counter(vcpu, "tlb_reach_hits")
}

/// The pages that were written since the last harvest.
fn harvest(m: &Machine) -> Vec<usize> {
    let words = m.vm.get_dirty_log(SLOT, SIZE).unwrap();
    let is_set = |n: &usize| words[n / 64] >> (n % 64) & 1 != 0;
    (0..SIZE >> 12).filter(is_set).collect()
}

#[test]
fn a_page_enters_the_first_level_when_it_is_missed_again() {
    let (m, mut vcpu) = machine(0);
    touch(&m, &mut vcpu);
    let before = answered(&vcpu);
    run(&m, &mut vcpu, |a| {
        let (mut round, mut page) = (a.create_label(), a.create_label());
        a.mov(r8d, 8)?;
        a.set_label(&mut round)?;
        a.mov(rdi, WINDOW)?;
        a.mov(ecx, PAGES as u32)?;
        a.set_label(&mut page)?;
        a.mov(rax, qword_ptr(rdi))?;
        a.add(rdi, (APART << 12) as i32)?;
        a.dec(ecx)?;
        a.jne(page)?;
        a.dec(r8d)?;
        a.jne(round)?;
        a.hlt()
    });
    if std::env::var_os("ANYKVM_ENGINE").is_none() {
        let misses = answered(&vcpu) - before;
        let expected = 2 * PAGES;
        assert!((expected - 8..expected + 8).contains(&misses), "{misses}");
    }
}

#[test]
fn pages_that_follow_each_other_enter_it_at_once() {
    let (m, mut vcpu) = machine(0);
    touch(&m, &mut vcpu);
    let before = answered(&vcpu);
    run(&m, &mut vcpu, |a| {
        let mut place = a.create_label();
        a.mov(rdi, WINDOW)?;
        a.mov(ecx, (PAGES << 12) as u32 / 256)?;
        a.set_label(&mut place)?;
        a.mov(rax, qword_ptr(rdi))?;
        a.add(rdi, 256)?;
        a.dec(ecx)?;
        a.jne(place)?;
        a.hlt()
    });
    if std::env::var_os("ANYKVM_ENGINE").is_none() {
        let misses = answered(&vcpu) - before;
        assert!((PAGES - 8..PAGES + 8).contains(&misses), "{misses}");
    }
}

#[test]
fn a_harvest_of_all_pages_has_each_noted_again() {
    let (m, mut vcpu) = machine(KVM_MEM_LOG_DIRTY_PAGES);
    let all = |a: &mut CodeAssembler| {
        let mut page = a.create_label();
        a.mov(rdi, WINDOW)?;
        a.mov(ecx, SIZE as u32 >> 12)?;
        a.set_label(&mut page)?;
        a.inc(qword_ptr(rdi))?;
        a.add(rdi, 0x1000)?;
        a.dec(ecx)?;
        a.jne(page)?;
        a.hlt()
    };
    for _ in 0..3 {
        run(&m, &mut vcpu, all);
        assert_eq!(harvest(&m).len(), SIZE >> 12);
        run(&m, &mut vcpu, |a| {
            a.mov(rdi, WINDOW)?;
            a.inc(qword_ptr(rdi + 0x5000))?;
            a.mov(rax, qword_ptr(rdi + 0x6000))?;
            a.inc(qword_ptr(rdi + 0x7_7000))?;
            a.inc(qword_ptr(rdi + 0x7_7008))?;
            a.hlt()
        });
        assert_eq!(harvest(&m), [5, 0x77]);
        assert!(harvest(&m).is_empty());
    }
}
