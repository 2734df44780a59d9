//! Virtual interrupts: CR4.VME in virtual-8086 mode and CR4.PVI at CPL 3 (SDM vol. 3, 21.3 and 21.4).

use x86_cpu::CpuState;
use x86_defs::{control::cr4, reg, rflags};

use crate::{
    Interp, RunStop,
    segment::v86_segment,
    test_bus::{TestBus, at, gate, machine},
};

const CS: u16 = 0x100;
const SS: u16 = 0xa00;
const SP: u64 = 0x100;
/// Offset of the I/O permission map in the TSS.
const PORTS: u16 = 0x200;

/// An 8086 program at CS:0 with the stack SS:SP, the given IOPL, and CR4.VME.
fn program(iopl: u64, vme: bool) -> (CpuState, TestBus) {
    let (mut cpu, mut bus) = machine(false, 3);
    for v in 0..32 {
        gate(&mut bus, false, v, 14, 3, 0);
    }
    gate(&mut bus, false, 0x40, 14, 3, 0);
    bus.put(at::TSS + 0x66, &PORTS.to_le_bytes());
    for s in &mut cpu.seg {
        *s = v86_segment(SS);
    }
    cpu.seg[reg::CS] = v86_segment(CS);
    cpu.set_rip(0);
    cpu.gpr[reg::RSP] = SP;
    cpu.rflags = rflags::FIXED1 | rflags::VM | rflags::IF | iopl << rflags::IOPL_SHIFT;
    if vme {
        cpu.cr4 |= cr4::VME;
    }
    cpu.update_mode();
    assert!(cpu.is_v86());
    (cpu, bus)
}

/// Executes one instruction. True if it completed, false if it raised #GP.
fn step(cpu: &mut CpuState, bus: &mut TestBus, code: &[u8]) -> bool {
    bus.put(cpu.seg[reg::CS].base + cpu.rip(), code);
    let before = cpu.rip();
    assert_eq!(Interp::new().step(cpu, bus), RunStop::Poll);
    if cpu.is_v86() || cpu.cpl == 3 {
        return true;
    }
    // The error code is 0, and RIP is the instruction's.
    assert_eq!(cpu.rip(), at::HANDLER);
    assert_eq!(bus.get32(cpu.gpr[reg::RSP]), 0);
    assert_eq!(u64::from(bus.get32(cpu.gpr[reg::RSP] + 4)), before);
    false
}

fn has(cpu: &CpuState, flags: u64) -> bool {
    cpu.rflags & flags == flags
}

fn top(bus: &mut TestBus, cpu: &CpuState) -> u64 {
    u64::from(bus.get16(cpu.seg[reg::SS].base + cpu.gpr[reg::RSP]))
}

#[test]
fn cli_and_sti_change_vif() {
    let (mut cpu, mut bus) = program(0, true);
    assert!(step(&mut cpu, &mut bus, &[0xfb]));
    assert!(has(&cpu, rflags::VIF | rflags::IF));
    assert!(step(&mut cpu, &mut bus, &[0xfa]));
    assert!(!has(&cpu, rflags::VIF) && has(&cpu, rflags::IF));
    cpu.rflags |= rflags::VIP;
    assert!(step(&mut cpu, &mut bus, &[0xfa]));
    assert!(!step(&mut cpu, &mut bus, &[0xfb]));
    // With IOPL 3, IF itself changes; without VME there is a fault.
    let (mut cpu, mut bus) = program(3, true);
    assert!(step(&mut cpu, &mut bus, &[0xfa]));
    assert!(!has(&cpu, rflags::IF) && !has(&cpu, rflags::VIF));
    for code in [0xfa, 0xfb, 0x9c, 0x9d, 0xcf] {
        let (mut cpu, mut bus) = program(2, false);
        assert!(!step(&mut cpu, &mut bus, &[code]), "{code:x}");
    }
}

#[test]
fn flags_show_vif_as_if() {
    let (mut cpu, mut bus) = program(1, true);
    assert!(step(&mut cpu, &mut bus, &[0x9c]));
    assert_eq!(
        top(&mut bus, &cpu) & (rflags::IF | rflags::IOPL),
        rflags::IOPL
    );
    cpu.rflags |= rflags::VIF;
    assert!(step(&mut cpu, &mut bus, &[0x9c]));
    let image = top(&mut bus, &cpu);
    assert_eq!(
        image & (rflags::IF | rflags::IOPL),
        rflags::IF | rflags::IOPL
    );
    cpu.rflags &= !(rflags::VIF | rflags::CF);
    bus.put(
        0xa000 + cpu.gpr[reg::RSP],
        &(image as u16 | 1).to_le_bytes(),
    );
    assert!(step(&mut cpu, &mut bus, &[0x9d]));
    assert!(has(&cpu, rflags::VIF | rflags::CF | rflags::IF));
    assert_eq!((cpu.iopl(), cpu.gpr[reg::RSP]), (1, SP - 2));
    // The 32-bit forms would show more flags than an 8086 program has.
    for code in [[0x66, 0x9c], [0x66, 0x9d], [0x66, 0xcf]] {
        let (mut cpu, mut bus) = program(1, true);
        assert!(!step(&mut cpu, &mut bus, &code), "{code:x?}");
    }
    // A trap or a waiting interrupt goes to the monitor; SP stays as before.
    for (vip, image) in [(0, rflags::TF), (rflags::VIP, rflags::IF)] {
        for (code, len) in [(0x9d, 2), (0xcf, 6)] {
            let (mut cpu, mut bus) = program(0, true);
            cpu.rflags |= vip;
            bus.put(0xa000 + SP + len - 2, &(image as u16).to_le_bytes());
            assert!(!step(&mut cpu, &mut bus, &[code]));
            let sp = bus.get32(cpu.gpr[reg::RSP] + 16);
            assert_eq!(u64::from(sp), SP, "{code:x}");
        }
    }
    let (mut cpu, mut bus) = program(0, true);
    for (i, v) in [0x12u16, 0x222, rflags::IF as u16].iter().enumerate() {
        bus.put(0xa000 + SP + 2 * i as u64, &v.to_le_bytes());
    }
    assert!(step(&mut cpu, &mut bus, &[0xcf]));
    assert_eq!((cpu.rip(), cpu.seg[reg::CS].base), (0x12, 0x2220));
    assert!(has(&cpu, rflags::VIF | rflags::IF) && cpu.gpr[reg::RSP] == SP + 6);
}

#[test]
fn interrupts_go_where_the_map_says() {
    let redirected = |iopl, vif| {
        let (mut cpu, mut bus) = program(iopl, true);
        cpu.rflags |= vif | rflags::CF;
        bus.put(4 * 0x40, &0x0333_0444u32.to_le_bytes());
        assert!(step(&mut cpu, &mut bus, &[0xcd, 0x40]));
        assert_eq!((cpu.rip(), cpu.seg[reg::CS].base), (0x444, 0x3330));
        assert_eq!(cpu.gpr[reg::RSP], SP - 6);
        assert_eq!(bus.get16(0xa000 + SP - 6), 2);
        assert_eq!(bus.get16(0xa000 + SP - 4), CS);
        (cpu, u64::from(bus.get16(0xa000 + SP - 2)))
    };
    let (cpu, image) = redirected(3, 0);
    assert!(!has(&cpu, rflags::IF) && image & rflags::IF != 0);
    let (cpu, image) = redirected(0, rflags::VIF);
    assert!(has(&cpu, rflags::IF) && !has(&cpu, rflags::VIF));
    assert_eq!(
        image & (rflags::IF | rflags::IOPL | rflags::CF),
        rflags::IF | rflags::IOPL | rflags::CF
    );
    let (_, image) = redirected(0, 0);
    assert_eq!(image & rflags::IF, 0);

    // The bit is set: the interrupt goes to the monitor, by its gate or by #GP.
    let to_monitor = at::TSS + u64::from(PORTS) - 32 + 0x40 / 8;
    let (mut cpu, mut bus) = program(3, true);
    bus.put(to_monitor, &[1]);
    bus.put(0x1000, &[0xcd, 0x40]);
    assert_eq!(Interp::new().step(&mut cpu, &mut bus), RunStop::Poll);
    assert_eq!((cpu.cpl, cpu.rip()), (0, at::HANDLER));
    assert_eq!(bus.get32(cpu.gpr[reg::RSP]), 2);
    let (mut cpu, mut bus) = program(0, true);
    bus.put(to_monitor, &[1]);
    bus.put(0x1000, &[0xcd, 0x40]);
    assert_eq!(Interp::new().step(&mut cpu, &mut bus), RunStop::Poll);
    let code = bus.get32(cpu.gpr[reg::RSP]);
    assert_eq!((cpu.cpl, code), (0, 0));
    // A map beyond the TSS's limit.
    let (mut cpu, mut bus) = program(3, true);
    bus.put(at::TSS + 0x66, &0xffffu16.to_le_bytes());
    assert!(!step(&mut cpu, &mut bus, &[0xcd, 0x40]));
}

#[test]
fn a_pending_interrupt_that_may_be_taken_faults_before_the_next_instruction() {
    let (mut cpu, mut bus) = program(0, true);
    cpu.rflags |= rflags::VIF | rflags::VIP;
    assert!(!step(&mut cpu, &mut bus, &[0x90]));
    let (mut cpu, mut bus) = program(3, true);
    cpu.rflags |= rflags::VIF | rflags::VIP;
    assert!(step(&mut cpu, &mut bus, &[0x90]));
}

#[test]
fn protected_programs_have_them_by_pvi() {
    for long in [false, true] {
        let (mut cpu, mut bus) = machine(long, 3);
        for v in 0..32 {
            gate(&mut bus, long, v, 14, 3, 0);
        }
        cpu.cr4 |= cr4::PVI;
        for (code, vif) in [(0xfb, rflags::VIF), (0xfa, 0)] {
            bus.put(cpu.rip(), &[code]);
            assert_eq!(Interp::new().step(&mut cpu, &mut bus), RunStop::Poll);
            assert_eq!(cpu.cpl, 3);
            assert_eq!(cpu.rflags & (rflags::VIF | rflags::IF), vif | rflags::IF);
        }
        // PUSHF shows the flags as they are, and VIP has STI fault.
        cpu.rflags |= rflags::VIP;
        bus.put(cpu.rip(), &[0x9c]);
        assert_eq!(Interp::new().step(&mut cpu, &mut bus), RunStop::Poll);
        let image = u64::from(bus.get32(cpu.gpr[reg::RSP]));
        let shown = rflags::VIP | rflags::IF;
        assert_eq!(image & shown, shown);
        bus.put(cpu.rip(), &[0xfb]);
        assert_eq!(Interp::new().step(&mut cpu, &mut bus), RunStop::Poll);
        assert_eq!((cpu.cpl, cpu.rip()), (0, at::HANDLER));
    }
}
