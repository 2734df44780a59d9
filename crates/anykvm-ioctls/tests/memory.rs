//! Memslots whose memory the VMM has not mapped, or not so, and slots that are not there.

#![allow(clippy::unwrap_used, reason = "tests")]

mod guest;

use anykvm_ioctls::{VcpuExit, VmFd};
use guest::{Guest, Ram, ioctl};
use kvm_abi::numbers::*;
use kvm_bindings::*;

/// A page at 0x8000 of the guest.
const GPA: u64 = 0x8000;

fn protect(ram: &Ram, rights: libc::c_int) {
    // SAFETY: the tests' own page, which nobody has a reference to.
    let result = unsafe { libc::mprotect(ram.hva() as *mut _, 4096, rights) };
    assert_eq!(result, 0);
}

/// A guest with a page at [`GPA`] that the process may access so.
fn guest(code: &[u8], rights: libc::c_int, memory: &Ram) -> Guest {
    let guest = Guest::new(code, false);
    protect(memory, rights);
    guest::add_slot(&guest.vm, 1, GPA, memory, 0);
    guest
}

/// Runs until the vCPU halts, or returns the page that the process cannot access.
#[track_caller]
fn run(guest: &mut Guest) -> Option<u64> {
    let exit = guest.vcpu.run().unwrap();
    let page = guest::faulting_page(&exit);
    assert!(page.is_some() || matches!(exit, VcpuExit::Hlt), "{exit:?}");
    page
}

/// mov al, [0x8000]; hlt
const LOAD: &[u8] = &[0xa0, 0x00, 0x80, 0xf4];
/// mov [0x8000], al; hlt
const STORE: &[u8] = &[0xa2, 0x00, 0x80, 0xf4];
/// inc byte [0x8000]; hlt
const INCREMENT: &[u8] = &[0xfe, 0x06, 0x00, 0x80, 0xf4];
/// jmp 0:0x8000
const JUMP: &[u8] = &[0xea, 0x00, 0x80, 0x00, 0x00];
/// mov di, 0x8000; mov cx, 4; rep stosb; hlt
const FILL: &[u8] = &[0xbf, 0x00, 0x80, 0xb9, 0x04, 0x00, 0xf3, 0xaa, 0xf4];
/// mov sp, 0x8010; push ax; hlt
const PUSH: &[u8] = &[0xbc, 0x10, 0x80, 0x50, 0xf4];

#[test]
fn memory_that_is_not_mapped_is_efault_and_the_guest_can_go_on() {
    for code in [LOAD, STORE, INCREMENT, JUMP, FILL, PUSH] {
        let memory = Ram::new(4096);
        memory.write(0, &[0xf4]);
        let mut guest = guest(code, libc::PROT_NONE, &memory);
        assert_eq!(run(&mut guest), Some(GPA), "{code:x?}");
        let rip = guest.vcpu.get_regs().unwrap().rip;
        assert!((guest::RAM..GPA + 1).contains(&rip), "{rip:#x}");
        assert_eq!(run(&mut guest), Some(GPA), "{code:x?}");
        protect(&memory, libc::PROT_READ | libc::PROT_WRITE);
        assert_eq!(run(&mut guest), None, "{code:x?}");
    }
}

#[test]
fn memory_that_can_only_be_read_is_read() {
    for (code, good) in [
        (LOAD, true),
        (STORE, false),
        (INCREMENT, false),
        (JUMP, true),
        (FILL, false),
        (PUSH, false),
    ] {
        let memory = Ram::new(4096);
        memory.write(0, &[0xf4]);
        let mut guest = guest(code, libc::PROT_READ, &memory);
        let expected = if good { None } else { Some(GPA) };
        assert_eq!(run(&mut guest), expected, "{code:x?}");
    }
}

#[test]
fn a_slot_that_is_not_there_cannot_be_deleted() {
    let guest = Guest::new(&[0xf4], false);
    let mut region = kvm_userspace_memory_region {
        slot: 7,
        guest_phys_addr: GPA,
        ..Default::default()
    };
    let set = |vm: &VmFd, region: &mut kvm_userspace_memory_region| {
        ioctl(vm, KVM_SET_USER_MEMORY_REGION, region).map(drop)
    };
    assert_eq!(set(&guest.vm, &mut region), Err(libc::EINVAL));
}

#[test]
fn memory_is_made_present_before_the_guest_comes() {
    let guest = Guest::new(&[0xf4], false);
    let memory = Ram::new(0x4000);
    guest::add_slot(&guest.vm, 1, GPA, &memory, 0);
    let fault = |gpa: u64, size: u64, flags: u64| {
        let mut range = kvm_pre_fault_memory {
            gpa,
            size,
            flags,
            ..Default::default()
        };
        let result = ioctl(&guest.vcpu, KVM_PRE_FAULT_MEMORY, &mut range);
        (result, range.gpa, range.size)
    };
    assert_eq!(fault(GPA, 0x4000, 0), (Ok(0), GPA + 0x4000, 0));
    // What is left: the slot ends.
    let end = GPA + 0x4000;
    assert_eq!(fault(GPA + 0x3000, 0x3000, 0), (Ok(0), end, 0x2000));
    for (gpa, size, flags, errno) in [
        (end, 0x1000, 0, libc::ENOENT),
        (GPA, 0, 0, libc::EINVAL),
        (GPA + 1, 0x1000, 0, libc::EINVAL),
        (GPA, 0x800, 0, libc::EINVAL),
        (GPA, 0x1000, 1, libc::EINVAL),
        (u64::MAX - 0xfff, 0x2000, 0, libc::EINVAL),
    ] {
        let wanted = (Err(errno), gpa, size);
        assert_eq!(fault(gpa, size, flags), wanted, "{gpa:#x} {size:#x}");
    }
    let hole = Ram::new(4096);
    protect(&hole, libc::PROT_NONE);
    guest::add_slot(&guest.vm, 2, 0x10_0000, &hole, 0);
    assert_eq!(fault(0x10_0000, 0x1000, 0).0, Err(libc::EFAULT));
}
