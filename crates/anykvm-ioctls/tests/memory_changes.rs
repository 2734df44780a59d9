//! Memory of a guest that the VMM takes away where the guest does not name it: tables, the stack of an exception, code. KVM_RUN
//! gives EFAULT, and the guest never sees it.

#![allow(clippy::unwrap_used, reason = "a test that cannot be set up fails")]

mod engines;
mod guest;
mod long_mode;

use std::sync::atomic::{AtomicBool, Ordering};

use anykvm_ioctls::{VcpuExit, VcpuFd, begin_memory_change};
use iced_x86::code_asm::*;
use kvm_abi::numbers::KVM_INTERRUPT;
use kvm_bindings::{KVM_GUESTDBG_ENABLE, KVM_GUESTDBG_SINGLESTEP, kvm_guest_debug, kvm_interrupt};
use long_mode::{Machine, PML4};
use vm_memory::{GuestAddress, GuestMemoryBackend};

const CODE: u64 = 0x1000;
const HANDLER: u64 = 0x2000;
/// The page below the stack's top.
const STACK: u64 = 0x3000;
const GDT: u64 = 0x5000;
const IDT: u64 = 0x6000;
const DATA: u64 = 0x8000;

const NONE: libc::c_int = libc::PROT_NONE;
const READ: libc::c_int = libc::PROT_READ;
const BOTH: libc::c_int = libc::PROT_READ | libc::PROT_WRITE;

fn protect(machine: &Machine, gpa: u64, pages: usize, rights: libc::c_int) {
    let at = machine.memory.get_host_address(GuestAddress(gpa)).unwrap();
    let change = begin_memory_change(at, pages * 4096).unwrap();
    // SAFETY: guest memory, which has no references.
    let result = unsafe { libc::mprotect(at.cast(), pages * 4096, rights) };
    assert_eq!(result, 0);
    drop(change);
}

#[track_caller]
fn faults(vcpu: &mut VcpuFd, rip: u64, page: u64) {
    for _ in 0..2 {
        assert_eq!(guest::faulting_page(&vcpu.run().unwrap()), Some(page));
        assert_eq!(vcpu.get_regs().unwrap().rip, rip);
    }
}

#[test]
fn a_table_that_cannot_be_accessed_is_no_page_fault_of_the_guest() {
    let machine = Machine::new();
    machine.load(CODE, |a| {
        a.hlt()?;
        a.mov(rax, qword_ptr(DATA))?;
        a.hlt()
    });
    let mut vcpu = machine.vcpu(0, CODE);
    for table in 0..3 {
        long_mode::start(&vcpu, CODE);
        protect(&machine, PML4 + table * 4096, 1, NONE);
        faults(&mut vcpu, CODE, PML4 + table * 4096);
        protect(&machine, PML4 + table * 4096, 1, BOTH);
        assert!(matches!(vcpu.run(), Ok(VcpuExit::Hlt)));
    }
    // Accessed flags are set by now, so the tables need not be written.
    protect(&machine, PML4, 3, READ);
    assert!(matches!(vcpu.run(), Ok(VcpuExit::Hlt)));
    let entries: [u64; 3] = [0, 1, 2].map(|n| u64::from_le_bytes(machine.read(PML4 + n * 4096)));
    assert!(entries.iter().all(|entry| entry & 0x20 != 0));
    // A write has to set the dirty flag.
    assert_eq!(entries[2] & 0x40, 0);
    machine.load(CODE, |a| {
        a.mov(qword_ptr(DATA), rax)?;
        a.hlt()
    });
    long_mode::start(&vcpu, CODE);
    faults(&mut vcpu, CODE, PML4 + 0x2000);
    protect(&machine, PML4, 3, BOTH);
    assert!(matches!(vcpu.run(), Ok(VcpuExit::Hlt)));
    let leaf = u64::from_le_bytes(machine.read(PML4 + 0x2000));
    assert_eq!(leaf & 0x60, 0x60);
}

#[test]
fn an_exception_whose_frame_has_no_memory_comes_once() {
    let machine = Machine::new();
    machine.load(CODE, |a| {
        a.mov(rcx, qword_ptr(0x20_0000))?;
        a.hlt()
    });
    machine.load(HANDLER, |a| {
        a.inc(rbx)?;
        a.mov(rdx, cr2)?;
        a.hlt()
    });
    for (gone, code) in [(STACK, CODE), (IDT, CODE), (GDT, CODE), (HANDLER, HANDLER)] {
        let mut vcpu = machine.vcpu(gone >> 12, CODE);
        machine.handle_page_faults(&vcpu, [GDT, IDT], HANDLER);
        protect(&machine, gone, 1, NONE);
        faults(&mut vcpu, code, gone);
        protect(&machine, gone, 1, BOTH);
        assert!(matches!(vcpu.run(), Ok(VcpuExit::Hlt)), "{gone:#x}");
        let regs = vcpu.get_regs().unwrap();
        assert_eq!((regs.rbx, regs.rdx), (1, 0x20_0000), "{gone:#x}");
    }
}

#[test]
fn an_interrupt_whose_frame_has_no_memory_is_not_lost() {
    let machine = Machine::new();
    machine.load(CODE, |a| {
        a.inc(rcx)?;
        a.hlt()
    });
    machine.load(HANDLER, |a| {
        a.inc(rbx)?;
        a.hlt()
    });
    let mut vcpu = machine.vcpu(0, CODE);
    // The entry of vector 14 serves an interrupt as well.
    machine.handle_page_faults(&vcpu, [GDT, IDT], HANDLER);
    let mut regs = vcpu.get_regs().unwrap();
    regs.rflags |= 0x200;
    vcpu.set_regs(&regs).unwrap();
    let mut interrupt = kvm_interrupt { irq: 14 };
    guest::ioctl(&vcpu, KVM_INTERRUPT, &mut interrupt).unwrap();
    protect(&machine, STACK, 1, NONE);
    faults(&mut vcpu, CODE, STACK);
    protect(&machine, STACK, 1, BOTH);
    assert!(matches!(vcpu.run(), Ok(VcpuExit::Hlt)));
    let regs = vcpu.get_regs().unwrap();
    assert_eq!((regs.rbx, regs.rcx), (1, 0));
}

#[test]
fn a_string_stops_in_the_middle_and_goes_on() {
    let machine = Machine::new();
    machine.load(CODE, |a| {
        a.rep().movsb()?;
        a.hlt()
    });
    let mut vcpu = machine.vcpu(0, CODE);
    let bytes: [u8; 8192] = std::array::from_fn(|n| n as u8 ^ (n >> 8) as u8);
    machine.write(0x1_0000, &bytes);
    let mut regs = vcpu.get_regs().unwrap();
    (regs.rsi, regs.rdi, regs.rcx) = (0x1_0000, 0x2_0000, 8192);
    vcpu.set_regs(&regs).unwrap();
    protect(&machine, 0x2_1000, 1, READ);
    faults(&mut vcpu, CODE, 0x2_1000);
    let regs = vcpu.get_regs().unwrap();
    assert_eq!((regs.rsi, regs.rdi, regs.rcx), (0x1_1000, 0x2_1000, 4096));
    protect(&machine, 0x2_1000, 1, BOTH);
    assert!(matches!(vcpu.run(), Ok(VcpuExit::Hlt)));
    assert_eq!(machine.read::<8192>(0x2_0000), bytes);
}

#[test]
fn an_access_that_crosses_a_page_writes_all_or_nothing() {
    let machine = Machine::new();
    machine.load(CODE, |a| {
        a.mov(qword_ptr(DATA + 0xffc), rax)?;
        a.hlt()
    });
    for page in [DATA, DATA + 0x1000] {
        let mut vcpu = machine.vcpu(page >> 12, CODE);
        machine.write(DATA + 0xffc, &[7; 8]);
        protect(&machine, page, 1, READ);
        faults(&mut vcpu, CODE, page);
        assert_eq!(machine.read::<8>(DATA + 0xffc), [7; 8]);
        protect(&machine, page, 1, BOTH);
        assert!(matches!(vcpu.run(), Ok(VcpuExit::Hlt)));
        assert_eq!(machine.read::<8>(DATA + 0xffc), [0; 8]);
    }
}

#[test]
fn a_guest_that_is_stepped_goes_on_where_it_was() {
    let machine = Machine::new();
    machine.load(CODE, |a| {
        a.inc(qword_ptr(DATA))?;
        a.inc(qword_ptr(DATA))?;
        a.hlt()
    });
    let mut vcpu = machine.vcpu(0, CODE);
    let debug = kvm_guest_debug {
        control: KVM_GUESTDBG_ENABLE | KVM_GUESTDBG_SINGLESTEP,
        ..Default::default()
    };
    vcpu.set_guest_debug(&debug).unwrap();
    for done in 0..2 {
        protect(&machine, DATA, 1, READ);
        faults(&mut vcpu, CODE + done * 8, DATA);
        protect(&machine, DATA, 1, BOTH);
        assert!(matches!(vcpu.run(), Ok(VcpuExit::Debug(_))));
        assert_eq!(u64::from_le_bytes(machine.read(DATA)), done + 1);
    }
}

/// Tables whose rights change all the time, under two vCPUs that walk them all the time: without a handler, a page fault would end the guest.
#[test]
fn tables_that_change_under_running_vcpus_raise_nothing() {
    let machine = Machine::new();
    machine.load(CODE, |a| {
        let mut again = a.create_label();
        a.set_label(&mut again)?;
        a.invlpg(ptr(rsi))?;
        a.inc(rbx)?;
        a.inc(qword_ptr(rsi))?;
        a.mov(rax, cr3)?;
        a.mov(cr3, rax)?;
        a.add(rdx, qword_ptr(rsi + 8))?;
        a.jmp(again)
    });
    let is_over = AtomicBool::new(false);
    let counts: Vec<_> = (0..2).map(|n| DATA + n * 0x1000).collect();
    std::thread::scope(|scope| {
        let mut vcpus = Vec::new();
        let mut stoppers = Vec::new();
        for (id, count) in (0..).zip(&counts) {
            let mut vcpu = machine.vcpu(id, CODE);
            let mut regs = vcpu.get_regs().unwrap();
            regs.rsi = *count;
            vcpu.set_regs(&regs).unwrap();
            stoppers.push(vcpu.stopper().unwrap());
            let is_over = &is_over;
            vcpus.push(scope.spawn(move || {
                let mut faults = 0;
                while !is_over.load(Ordering::Relaxed) {
                    match vcpu.run() {
                        Ok(VcpuExit::MemoryFault { .. }) => faults += 1,
                        Err(e) if e.errno() == libc::EINTR => {}
                        other => panic!("{other:?}"),
                    }
                }
                (vcpu, faults)
            }));
        }
        for n in 0..1000 {
            let rights = if n % 2 == 0 { READ } else { NONE };
            protect(&machine, PML4, 3, rights);
            protect(&machine, PML4, 3, BOTH);
            if n % 16 == 0 {
                std::thread::sleep(std::time::Duration::from_micros(200));
            }
        }
        is_over.store(true, Ordering::Relaxed);
        for (vcpu, count) in vcpus.into_iter().zip(&counts) {
            while !vcpu.is_finished() {
                stoppers.iter().for_each(|stopper| stopper.stop());
                std::thread::yield_now();
            }
            let (vcpu, faults) = vcpu.join().unwrap();
            let regs = vcpu.get_regs().unwrap();
            let written = u64::from_le_bytes(machine.read(*count));
            assert!(written > 100 && faults > 0, "{written} {faults}");
            assert!(regs.rbx - written <= 1, "{} {written}", regs.rbx);
        }
    });
}

#[test]
fn the_interpreter_does_the_same() {
    engines::again_on("interp");
}
