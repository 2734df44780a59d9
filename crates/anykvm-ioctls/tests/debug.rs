//! KVM_SET_GUEST_DEBUG: the debugger's breakpoints and watchpoints, whatever engine runs the
//! guest, and events that it holds back or injects.

#![allow(clippy::unwrap_used, reason = "tests")]

mod guest;
mod long_mode;

use anykvm_ioctls::{VcpuExit, VcpuFd};
use guest::{Guest, RAM, Ram, add_slot, enable_lapic};
use iced_x86::code_asm::*;
use kvm_bindings::*;
use long_mode::Machine;

const CODE: u64 = 0x1000;
const DATA: u64 = 0x6000;

fn debug(vcpu: &VcpuFd, control: u32, registers: [u64; 4], control7: u64) -> Result<(), i32> {
    let mut debug = kvm_guest_debug {
        control,
        ..Default::default()
    };
    debug.arch.debugreg[..4].copy_from_slice(&registers);
    debug.arch.debugreg[7] = control7;
    vcpu.set_guest_debug(&debug).map_err(|e| e.errno())
}

const HARDWARE: u32 = KVM_GUESTDBG_ENABLE | KVM_GUESTDBG_USE_HW_BP;

/// pc, DR6 and DR7 of the KVM_EXIT_DEBUG with #DB that comes next.
fn next(vcpu: &mut VcpuFd) -> (u64, u64, u64) {
    match vcpu.run().unwrap() {
        VcpuExit::Debug(d) => {
            assert_eq!(d.exception, 1);
            (d.pc, d.dr6, d.dr7)
        }
        exit => panic!("{exit:?}"),
    }
}

/// A loop of ten stores, and HLT.
fn stores(a: &mut CodeAssembler) -> Result<(), IcedError> {
    let mut again = a.create_label();
    a.mov(ecx, 10)?;
    a.set_label(&mut again)?;
    a.mov(qword_ptr(DATA), rcx)?;
    a.mov(rdx, qword_ptr(DATA + 8))?;
    a.dec(ecx)?;
    a.jnz(again)?;
    a.hlt()
}

#[test]
fn breakpoints_and_watchpoints_in_translated_code() {
    let m = Machine::new();
    m.load(CODE, stores);
    let mut vcpu = m.vcpu(0, CODE);
    // Once without, so that the loop is translated.
    assert!(matches!(vcpu.run().unwrap(), VcpuExit::Hlt));
    let at_store = CODE + 5;
    let after_store = at_store + 8;

    // An execution breakpoint is before the instruction; RF gets over it.
    long_mode::start(&vcpu, CODE);
    debug(&vcpu, HARDWARE, [0, at_store, 0, 0], 0x4).unwrap();
    assert_eq!(next(&mut vcpu), (at_store, 0xffff_0ff2, 0x404));
    assert_eq!(vcpu.get_regs().unwrap().rcx, 10);
    let mut regs = vcpu.get_regs().unwrap();
    regs.rflags |= 1 << 16;
    vcpu.set_regs(&regs).unwrap();
    assert_eq!(next(&mut vcpu).0, at_store);
    assert_eq!(vcpu.get_regs().unwrap().rcx, 9);

    // A watchpoint for writes is after the store, each time; reads of it do not count.
    long_mode::start(&vcpu, CODE);
    let write = 0x1 | 0b1001 << 16;
    debug(&vcpu, HARDWARE, [DATA, 0, 0, 0], write).unwrap();
    for left in (1..=10).rev() {
        assert_eq!(next(&mut vcpu), (after_store, 0xffff_0ff1, write | 0x400));
        assert_eq!(vcpu.get_regs().unwrap().rcx, left);
    }
    assert!(matches!(vcpu.run().unwrap(), VcpuExit::Hlt));

    // One for accesses sees reads.
    long_mode::start(&vcpu, CODE);
    let access = 0x40 | 0b1111 << 28;
    debug(&vcpu, HARDWARE, [0, 0, 0, DATA + 12], access).unwrap();
    assert_eq!(
        next(&mut vcpu),
        (after_store + 8, 0xffff_0ff8, access | 0x400)
    );

    // Off: nothing stops it.
    long_mode::start(&vcpu, CODE);
    debug(&vcpu, 0, [CODE; 4], 0xff).unwrap();
    assert!(matches!(vcpu.run().unwrap(), VcpuExit::Hlt));
}

#[test]
fn the_guests_own_breakpoints_rest_meanwhile() {
    let m = Machine::new();
    m.load(CODE, stores);
    let mut vcpu = m.vcpu(0, CODE);
    let mut own = vcpu.get_debug_regs().unwrap();
    (own.db[0], own.dr7) = (CODE, 0x401);
    vcpu.set_debug_regs(&own).unwrap();
    debug(&vcpu, HARDWARE, [CODE + 5, 0, 0, 0], 1).unwrap();
    assert_eq!(next(&mut vcpu).0, CODE + 5);
    let shown = vcpu.get_debug_regs().unwrap();
    assert_eq!((shown.db[0], shown.dr7), (CODE, 0x401));
    // The guest has no IDT: its own #DB is a triple fault.
    debug(&vcpu, 0, [0; 4], 0).unwrap();
    long_mode::start(&vcpu, CODE);
    assert!(matches!(vcpu.run().unwrap(), VcpuExit::Shutdown));
}

#[test]
fn general_detect_is_the_debuggers() {
    let m = Machine::new();
    m.load(CODE, |a| {
        a.nop()?;
        a.mov(dr0, rax)?;
        a.hlt()
    });
    let mut vcpu = m.vcpu(0, CODE);
    debug(&vcpu, HARDWARE, [0; 4], 1 << 13).unwrap();
    assert_eq!(next(&mut vcpu), (CODE + 1, 0xffff_2ff0, 0x2400));
}

#[test]
fn interrupts_wait_while_they_are_blocked() {
    // sti; nop; nop; nop; hlt
    let mut g = Guest::new(&[0xfb, 0x90, 0x90, 0x90, 0xf4], true);
    let ivt = Ram::new(0x1000);
    ivt.write(0x31 * 4, &[0x00, 0x18, 0, 0]);
    add_slot(&g.vm, 1, 0, &ivt, 0);
    // out 0x80, al
    g.ram.write(0x800, &[0xe6, 0x80]);
    enable_lapic(&g.vcpu);
    let msi = kvm_msi {
        address_lo: 0xfee0_0000,
        data: 0x31,
        ..Default::default()
    };
    assert_eq!(g.vm.signal_msi(msi).unwrap(), 1);
    let step = KVM_GUESTDBG_ENABLE | KVM_GUESTDBG_SINGLESTEP;
    debug(&g.vcpu, step | KVM_GUESTDBG_BLOCKIRQ, [0; 4], 0).unwrap();
    for pc in [1, 2, 3] {
        assert_eq!(next(&mut g.vcpu).0, RAM + pc);
    }
    debug(&g.vcpu, 0, [0; 4], 0).unwrap();
    assert!(matches!(g.vcpu.run().unwrap(), VcpuExit::IoOut(0x80, _)));
}

#[test]
fn injected_exceptions_reach_the_guest() {
    for (control, vector) in [(KVM_GUESTDBG_INJECT_DB, 1u64), (KVM_GUESTDBG_INJECT_BP, 3)] {
        let mut g = Guest::new(&[0x90, 0xf4], false);
        let ivt = Ram::new(0x1000);
        ivt.write(vector * 4, &[0x00, 0x18, 0, 0]);
        add_slot(&g.vm, 1, 0, &ivt, 0);
        g.ram.write(0x800, &[0xe6, 0x80]);
        let mut regs = g.vcpu.get_debug_regs().unwrap();
        regs.dr6 = 0xffff_4ff3;
        g.vcpu.set_debug_regs(&regs).unwrap();
        debug(&g.vcpu, control, [0; 4], 0).unwrap();
        assert_eq!(debug(&g.vcpu, control, [0; 4], 0), Err(libc::EBUSY));
        assert!(matches!(g.vcpu.run().unwrap(), VcpuExit::IoOut(0x80, _)));
        // DR6 is as the debugger left it.
        assert_eq!(g.vcpu.get_debug_regs().unwrap().dr6, 0xffff_4ff3);
    }
    let g = Guest::new(&[0x90], false);
    assert_eq!(debug(&g.vcpu, 1 << 30, [0; 4], 0), Err(libc::EINVAL));
}

/// Leaf 0 says whose processor it is.
fn vendor(vcpu: &VcpuFd, name: &[u8; 12]) {
    let word = |at: usize| u32::from_le_bytes(name[at..at + 4].try_into().unwrap());
    let leaf = kvm_cpuid_entry2 {
        eax: 1,
        ebx: word(0),
        edx: word(4),
        ecx: word(8),
        ..Default::default()
    };
    let cpuid = CpuId::from_entries(&[leaf]).unwrap();
    vcpu.set_cpuid2(&cpuid).unwrap();
}

#[test]
fn breakpoints_after_mov_ss_are_the_vendors() {
    for (name, at_once) in [(b"AuthenticAMD", true), (b"GenuineIntel", false)] {
        // mov ax, ss; mov ss, ax; nop; nop; hlt
        let mut g = Guest::new(&[0x8c, 0xd0, 0x8e, 0xd0, 0x90, 0x90, 0xf4], false);
        vendor(&g.vcpu, name);
        debug(&g.vcpu, HARDWARE, [RAM + 4, RAM + 5, 0, 0], 0x4 | 0x1).unwrap();
        let first = if at_once { RAM + 4 } else { RAM + 5 };
        assert_eq!(next(&mut g.vcpu).0, first);
    }
}
