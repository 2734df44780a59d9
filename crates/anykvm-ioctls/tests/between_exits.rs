//! What a VMM does between two device accesses of a guest that it does not look at otherwise: the
//! guest goes on with the answer, and with everything else that has become different.

#![allow(clippy::unwrap_used, reason = "tests")]

mod long_mode;

use anykvm_ioctls::{VcpuExit, VcpuFd};
use iced_x86::code_asm::*;
use kvm_bindings::kvm_userspace_memory_region;
use long_mode::Machine;
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};

const CODE: u64 = 0x1000;
const OTHER_CODE: u64 = 0x3000;
/// A large page without a memslot.
const DEVICE: u64 = 2 << 20;
const PAGE_DIRECTORY: u64 = 0x10_2000;

/// What an exit was: port or gpa, and whether it was a read. Reads are answered with 1.
fn next(vcpu: &mut VcpuFd) -> (u64, bool) {
    match vcpu.run().unwrap() {
        VcpuExit::IoOut(port, _) => (port.into(), false),
        VcpuExit::IoIn(port, data) => {
            data.fill(1);
            (port.into(), true)
        }
        VcpuExit::MmioWrite(gpa, _) => (gpa, false),
        VcpuExit::MmioRead(gpa, data) => {
            data.copy_from_slice(&1u32.to_le_bytes());
            (gpa, true)
        }
        exit => panic!("{exit:?}"),
    }
}

/// `times` turns of the loop, exit by exit.
fn turns(vcpu: &mut VcpuFd, times: usize, exits: &[(u64, bool)]) {
    for n in 0..times {
        for exit in exits {
            assert_eq!(next(vcpu), *exit, "turn {n}");
        }
    }
}

#[test]
fn everything_that_changes_is_noticed() {
    let m = Machine::new();
    let entry = DEVICE | 0x83;
    m.memory
        .write_obj(entry, GuestAddress(PAGE_DIRECTORY + 8))
        .unwrap();
    // EBX counts turns, ECX adds up what is read.
    m.load(CODE, |a| {
        let mut again = a.create_label();
        a.mov(rdi, DEVICE)?;
        a.set_label(&mut again)?;
        a.out(0x80, al)?;
        a.in_(al, 0x81)?;
        a.movzx(eax, al)?;
        a.add(ecx, eax)?;
        a.mov(dword_ptr(rdi + 0x10), ebx)?;
        a.mov(eax, dword_ptr(rdi + 0x20))?;
        a.add(ecx, eax)?;
        a.inc(ebx)?;
        a.jmp(again)
    });
    m.load(OTHER_CODE, |a| {
        let mut again = a.create_label();
        a.set_label(&mut again)?;
        a.out(0x90, al)?;
        a.jmp(again)
    });
    let mut vcpu = m.vcpu(0, CODE);
    let usual = [
        (0x80, false),
        (0x81, true),
        (DEVICE + 0x10, false),
        (DEVICE + 0x20, true),
    ];
    let ports = [usual[0], usual[1]];
    turns(&mut vcpu, 50, &usual);

    // A memslot where the device was, and its end.
    let ram = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), 0x1000)]).unwrap();
    let slot = |memory_size| kvm_userspace_memory_region {
        slot: 9,
        guest_phys_addr: DEVICE,
        memory_size,
        userspace_addr: ram.get_host_address(GuestAddress(0)).unwrap() as u64,
        ..Default::default()
    };
    // SAFETY: the memory outlives the slot, which is removed below.
    unsafe { m.vm.set_user_memory_region(slot(0x1000)) }.unwrap();
    turns(&mut vcpu, 20, &ports);
    assert_eq!(ram.read_obj::<u32>(GuestAddress(0x10)).unwrap(), 68);
    turns(&mut vcpu, 1, &ports);
    // SAFETY: none is left behind.
    unsafe { m.vm.set_user_memory_region(slot(0)) }.unwrap();
    // The last port's answer is still to be taken.
    turns(&mut vcpu, 1, &usual[2..]);
    turns(&mut vcpu, 20, &usual);

    // immediate_exit: the access is completed, and nothing more.
    for (n, exit) in usual.iter().enumerate() {
        assert_eq!(next(&mut vcpu), *exit);
        vcpu.set_kvm_immediate_exit(1);
        assert_eq!(vcpu.run().unwrap_err().errno(), libc::EINTR, "{n}");
        vcpu.set_kvm_immediate_exit(0);
    }
    turns(&mut vcpu, 20, &usual);
    let regs = vcpu.get_regs().unwrap();
    // The last answer is not taken yet, and the slot's RAM was zero for twenty turns.
    assert_eq!(regs.rbx, 50 + 20 + 1 + 20 + 1 + 20 - 1);
    assert_eq!(regs.rcx, 2 * regs.rbx + 1 - 20);
    turns(&mut vcpu, 20, &usual);

    // Other code, written in place while the guest waits.
    let at = (CODE..CODE + 64)
        .find(|at| m.memory.read_obj::<[u8; 2]>(GuestAddress(*at)).unwrap() == [0xe6, 0x80])
        .unwrap();
    m.memory.write_obj(0x82u8, GuestAddress(at + 1)).unwrap();
    let mut changed = usual;
    changed[0].0 = 0x82;
    turns(&mut vcpu, 20, &changed);

    // Another RIP.
    let mut regs = vcpu.get_regs().unwrap();
    regs.rip = OTHER_CODE;
    vcpu.set_regs(&regs).unwrap();
    turns(&mut vcpu, 50, &[(0x90, false)]);

    // Another root of the page tables, by which the code is where it was and the device nowhere.
    let mut sregs = vcpu.get_sregs().unwrap();
    let (pml4, pdpt, directory) = (0x11_0000u64, 0x11_1000u64, 0x11_2000u64);
    for (at, entry) in [(pml4, pdpt | 3), (pdpt, directory | 3), (directory, 0x83)] {
        m.memory.write_obj(entry, GuestAddress(at)).unwrap();
    }
    let mut regs = vcpu.get_regs().unwrap();
    regs.rip = CODE;
    sregs.cr3 = pml4;
    vcpu.set_sregs(&sregs).unwrap();
    vcpu.set_regs(&regs).unwrap();
    assert_eq!(next(&mut vcpu), changed[0]);
    assert_eq!(next(&mut vcpu), changed[1]);
    // A page fault without a gate: the machine ends.
    assert!(matches!(vcpu.run().unwrap(), VcpuExit::Shutdown));
}

/// Code on so many pages, one after the other, of which the VMM writes one while the guest waits: after the first
/// exits, and after many.
#[test]
fn code_on_any_of_many_pages_that_is_written_is_noticed() {
    for pages in [1, 5, 6, 11, 12, 13, 20, 60] {
        let m = Machine::new();
        let page = |n: u64| 0x2_0000 + 0x1000 * n;
        // At the end of what comes before: JMP.
        let jump = |at: u64, bytes: &[u8], to: u64| {
            let next = at + bytes.len() as u64 + 5;
            let distance = (to as i32 - next as i32).to_le_bytes();
            m.write(at, &[bytes, &[0xe9], &distance].concat());
        };
        // OUT 0x80, AL.
        jump(CODE, &[0xe6, 0x80], page(0));
        for n in 0..pages {
            let next = if n + 1 < pages { page(n + 1) } else { CODE };
            // ADD ECX, 0x1000000.
            jump(page(n), &[0x81, 0xc1, 0, 0, 0, 1], next);
        }
        let mut vcpu = m.vcpu(0, CODE);
        turns(&mut vcpu, 1, &[(0x80, false)]);
        let (mut sum, mut before) = (
            0x100_0000 * pages as u32,
            vcpu.get_regs().unwrap().rcx as u32,
        );
        for turn in 0..70u64 {
            if [1, 2, 3, 5, 8, 13, 14, 30, 63, 64, 65].contains(&turn) {
                // The operand's lowest byte, behind opcode and ModRM.
                let at = GuestAddress(page(turn % pages) + 2);
                let old: u8 = m.memory.read_obj(at).unwrap();
                m.memory.write_obj(old + 1, at).unwrap();
                sum += 1;
            }
            turns(&mut vcpu, 1, &[(0x80, false)]);
            let now = vcpu.get_regs().unwrap().rcx as u32;
            assert_eq!(now.wrapping_sub(before), sum, "{pages} pages, turn {turn}");
            before = now;
        }
    }
}

/// The memory that code was fetched from is unmapped while the guest waits, and other memory is put in its place.
#[test]
fn code_whose_memory_goes_away_is_not_looked_for() {
    let m = Machine::new();
    let add = |memory: &GuestMemoryMmap, by: u8| {
        // ADD ECX, BY; OUT 0x80, AL; JMP to the first.
        let code = [0x83, 0xc1, by, 0xe6, 0x80, 0xeb, 0xf9];
        memory.write_slice(&code, GuestAddress(OTHER_GPA)).unwrap();
    };
    const OTHER_GPA: u64 = 4 << 20;
    const GVA: u64 = 0x40_0000;
    m.memory
        .write_obj(OTHER_GPA | 0x83, GuestAddress(PAGE_DIRECTORY + 16))
        .unwrap();
    let mut vcpu = None;
    for by in 1..4 {
        let memory = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(OTHER_GPA), 2 << 20)]);
        let memory = memory.unwrap();
        add(&memory, by);
        let hva = memory.get_host_address(GuestAddress(OTHER_GPA)).unwrap();
        let mut slot = kvm_userspace_memory_region {
            slot: 5,
            flags: 0,
            guest_phys_addr: OTHER_GPA,
            memory_size: 2 << 20,
            userspace_addr: hva as u64,
        };
        // SAFETY: the mapping lives until the slot is deleted.
        unsafe { m.vm.set_user_memory_region(slot).unwrap() };
        let vcpu = vcpu.get_or_insert_with(|| m.vcpu(0, GVA));
        let mut regs = vcpu.get_regs().unwrap();
        (regs.rip, regs.rcx) = (GVA, 0);
        vcpu.set_regs(&regs).unwrap();
        turns(vcpu, 5, &[(0x80, false)]);
        assert_eq!(vcpu.get_regs().unwrap().rcx, 5 * u64::from(by));
        slot.memory_size = 0;
        // SAFETY: it is deleted.
        unsafe { m.vm.set_user_memory_region(slot).unwrap() };
        drop(memory);
        vcpu.set_regs(&regs).unwrap();
        vcpu.set_sregs(&vcpu.get_sregs().unwrap()).unwrap();
    }
}
