//! The task priority in the guest's memory, and exits that tell of accesses to its register.

#![allow(clippy::unwrap_used, reason = "tests")]

mod guest;

use anykvm_ioctls::{VcpuExit, VcpuFd};
use guest::{Guest, RAM, enable_lapic, ioctl};
use kvm_abi::numbers::{KVM_SET_VAPIC_ADDR, KVM_TPR_ACCESS_REPORTING};
use kvm_bindings::*;

/// In the second page of RAM.
const WORD: u64 = 0x2000;

/// Real mode with segments of 4 GiB, and a LAPIC that is switched on.
fn guest(code: &[u8]) -> Guest {
    let guest = Guest::new(code, true);
    let mut sregs = guest.vcpu.get_sregs().unwrap();
    sregs.ds.limit = u32::MAX;
    guest.vcpu.set_sregs(&sregs).unwrap();
    enable_lapic(&guest.vcpu);
    guest
}

fn set_vapic_addr(vcpu: &VcpuFd, vapic_addr: u64) -> Result<i32, i32> {
    ioctl(vcpu, KVM_SET_VAPIC_ADDR, &mut kvm_vapic_addr { vapic_addr })
}

fn report(vcpu: &VcpuFd, enabled: u32, flags: u32) -> Result<i32, i32> {
    let mut control = kvm_tpr_access_ctl {
        enabled,
        flags,
        ..Default::default()
    };
    ioctl(vcpu, KVM_TPR_ACCESS_REPORTING, &mut control)
}

fn tpr(vcpu: &VcpuFd) -> u8 {
    vcpu.get_lapic().unwrap().regs[0x80] as u8
}

#[test]
fn what_is_no_word_of_memory_is_refused() {
    let with = guest(&[0xf4]);
    for (gpa, result) in [(0, Ok(0)), (WORD, Ok(0)), (0x7000_0000, Err(libc::EINVAL))] {
        assert_eq!(set_vapic_addr(&with.vcpu, gpa), result, "{gpa:#x}");
    }
    assert_eq!(report(&with.vcpu, 1, 1), Err(libc::EINVAL));
    assert_eq!(report(&with.vcpu, 1, 0), Ok(0));
    let without = Guest::new(&[0xf4], false);
    assert_eq!(set_vapic_addr(&without.vcpu, 0), Err(libc::EINVAL));
    assert_eq!(report(&without.vcpu, 1, 0), Ok(0));
}

#[test]
fn accesses_to_the_register_are_exits() {
    let mut guest = guest(&[
        // mov eax, [0xfee00080]; jmp next; add al, 0x20; mov [0xfee00080], eax; jmp next
        0x67, 0x66, 0xa1, 0x80, 0x00, 0xe0, 0xfe, 0xeb, 0x00, 0x04, 0x20, 0x67, 0x66, 0xa3, 0x80,
        0x00, 0xe0, 0xfe, 0xeb, 0x00, // mov eax, [0xfee00020]; out 0x80, al
        0x67, 0x66, 0xa1, 0x20, 0x00, 0xe0, 0xfe, 0xe6, 0x80,
    ]);
    assert_eq!(report(&guest.vcpu, 1, 0), Ok(0));
    for (rip, is_write) in [(RAM, 0), (RAM + 11, 1)] {
        assert!(matches!(guest.vcpu.run().unwrap(), VcpuExit::TprAccess));
        // SAFETY: the member that the exit says.
        let access = unsafe { guest.vcpu.get_kvm_run().__bindgen_anon_1.tpr_access };
        assert_eq!((access.rip, access.is_write), (rip, is_write));
        // The instruction is complete; the interpreter executes the rest of its block, a jump.
        let after = guest.vcpu.get_regs().unwrap().rip;
        assert!(after == rip + 7 || after == rip + 9, "{after:#x}");
    }
    assert_eq!(tpr(&guest.vcpu), 0x20);
    assert!(matches!(
        guest.vcpu.run().unwrap(),
        VcpuExit::IoOut(0x80, _)
    ));
    assert_eq!(report(&guest.vcpu, 0, 0), Ok(0));
    let mut regs = guest.vcpu.get_regs().unwrap();
    regs.rip = RAM;
    guest.vcpu.set_regs(&regs).unwrap();
    assert!(matches!(
        guest.vcpu.run().unwrap(),
        VcpuExit::IoOut(0x80, _)
    ));
    assert_eq!(tpr(&guest.vcpu), 0x40);
}

/// A VMM that does not replace an instruction is not told of it forever.
#[test]
fn accesses_of_one_instruction_are_not_exits_forever() {
    let mut guest = guest(&[
        // mov ecx, 1000; next: mov [0xfee00080], eax; dec ecx; jnz next; out 0x80, al
        0x66, 0xb9, 0xe8, 0x03, 0, 0, 0x67, 0x66, 0xa3, 0x80, 0x00, 0xe0, 0xfe, 0x66, 0x49, 0x75,
        0xf5, 0xe6, 0x80,
    ]);
    assert_eq!(report(&guest.vcpu, 1, 0), Ok(0));
    let mut told = 0;
    loop {
        match guest.vcpu.run().unwrap() {
            VcpuExit::TprAccess => told += 1,
            VcpuExit::IoOut(0x80, _) => break,
            exit => panic!("{exit:?}"),
        }
    }
    assert_eq!(told, 64);
}

#[test]
fn the_word_is_the_register() {
    let mut guest = guest(&[
        // mov al, [0x2000]; out 0x80, al: what the VMM has set
        0xa0, 0x00, 0x20, 0xe6, 0x80, // mov byte [0x2000], 0x50; out 0x7e, al
        0xc6, 0x06, 0x00, 0x20, 0x50, 0xe6, 0x7e,
        // mov dword [0xfee00080], 0x70; mov al, [0x2000]; out 0x80, al
        0x67, 0x66, 0xc7, 0x05, 0x80, 0x00, 0xe0, 0xfe, 0x70, 0, 0, 0, 0xa0, 0x00, 0x20, 0xe6, 0x80,
        // mov byte [0x2000], 0x60; mov eax, [0xfee00080]; out 0x80, al
        0xc6, 0x06, 0x00, 0x20, 0x60, 0x67, 0x66, 0xa1, 0x80, 0x00, 0xe0, 0xfe, 0xe6, 0x80,
    ]);
    assert_eq!(set_vapic_addr(&guest.vcpu, WORD), Ok(0));
    // What is there does not count.
    guest.ram.write(WORD - RAM, &[0x33; 4]);
    let mut lapic = guest.vcpu.get_lapic().unwrap();
    lapic.regs[0x80] = 0x30;
    // Requested: 0x91. In service: 0x82.
    lapic.regs[0x200 + 0x91 / 32 * 16 + 2] = 1 << 1;
    lapic.regs[0x100 + 0x82 / 32 * 16] = 1 << 2;
    guest.vcpu.set_lapic(&lapic).unwrap();
    let out = |guest: &mut Guest| match guest.vcpu.run().unwrap() {
        VcpuExit::IoOut(_, data) => data[0],
        other => panic!("{other:?}"),
    };
    assert_eq!(out(&mut guest), 0x30);
    assert_eq!(guest.ram.read::<4>(WORD - RAM), [0x30, 0x80, 0, 0x91]);
    out(&mut guest);
    assert_eq!(tpr(&guest.vcpu), 0x50);
    assert_eq!(out(&mut guest), 0x70);
    assert_eq!(tpr(&guest.vcpu), 0x70);
    assert_eq!(out(&mut guest), 0x60);
    assert_eq!(tpr(&guest.vcpu), 0x60);
}

#[test]
fn what_the_guest_lets_through_by_the_word_is_delivered() {
    let mut guest = guest(&[
        // sti; mov byte [0x2000], 0x20; out 0x7e, al; hlt
        0xfb, 0xc6, 0x06, 0x00, 0x20, 0x20, 0xe6, 0x7e, 0xf4,
    ]);
    // The handler: out 0x81, al; hlt. Its vector is in memory that has yet to be.
    guest.ram.write(0x800, &[0xe6, 0x81, 0xf4]);
    let vectors = guest::Ram::new(0x1000);
    vectors.write(0x41 * 4, &[0x00, 0x18, 0, 0]);
    guest::add_slot(&guest.vm, 1, 0, &vectors, 0);
    assert_eq!(set_vapic_addr(&guest.vcpu, WORD), Ok(0));
    let mut lapic = guest.vcpu.get_lapic().unwrap();
    lapic.regs[0x80] = 0x50;
    lapic.regs[0x200 + 0x41 / 32 * 16] = 1 << 1;
    guest.vcpu.set_lapic(&lapic).unwrap();
    let port = |guest: &mut Guest| match guest.vcpu.run().unwrap() {
        VcpuExit::IoOut(port, _) => port,
        other => panic!("{other:?}"),
    };
    // At the latest once the guest has told of it.
    let first = port(&mut guest);
    assert!(first == 0x81 || first == 0x7e && port(&mut guest) == 0x81);
    assert_eq!(guest.ram.read::<4>(WORD - RAM), [0x20, 0x40, 0, 0]);
}
