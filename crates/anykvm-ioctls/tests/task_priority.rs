//! An interrupt waits for a task priority below its own, and comes before the instruction behind the one that lowers
//! it, however that is written.

#![allow(clippy::unwrap_used, reason = "tests")]

mod engines;
mod long_mode;

use anykvm_ioctls::VcpuExit;
use iced_x86::code_asm::*;
use long_mode::{Assemble, Machine, start};

const CODE: u64 = 0x1000;
const HANDLER: u64 = 0x2000;
const GDT: u64 = 0x3000;
const IDT: u64 = 0x4000;
const STACK: u64 = 0x7000;
const VECTOR: u8 = 0x61;
const APIC: u64 = 0xfee0_0000;
const TPR: u32 = 0x80;
const EOI: u32 = 0xb0;
const ICR: u32 = 0x300;
const ROUNDS: u64 = 2000;

/// Ways to write the task priority: `raise` to the interrupt's class, `lower` to the class below.
struct Way {
    name: &'static str,
    raise: Assemble,
    lower: Assemble,
}

fn by_mmio(a: &mut CodeAssembler, priority: u32) -> Result<(), IcedError> {
    a.mov(rbx, APIC + u64::from(TPR))?;
    a.mov(dword_ptr(rbx), priority)
}

fn by_register(a: &mut CodeAssembler, class: u32) -> Result<(), IcedError> {
    a.mov(eax, class)?;
    a.mov(cr8, rax)
}

const WAYS: [Way; 3] = [
    Way {
        name: "page",
        raise: |a| by_mmio(a, 0x60),
        lower: |a| by_mmio(a, 0x5f),
    },
    Way {
        name: "cr8",
        raise: |a| by_register(a, 6),
        lower: |a| by_register(a, 5),
    },
    Way {
        name: "both",
        raise: |a| by_register(a, 6),
        lower: |a| by_mmio(a, 0x50),
    },
];

/// r8: interrupts; r9: rounds; r10: rounds in which the interrupt came early; r11: in which it came late.
fn program(way: &Way) -> Vec<u8> {
    let mut a = CodeAssembler::new(64).unwrap();
    let assemble = |a: &mut CodeAssembler| {
        let mut again = a.create_label();
        a.sti()?;
        a.set_label(&mut again)?;
        (way.raise)(a)?;
        // To itself.
        a.mov(rbx, APIC + u64::from(ICR))?;
        a.mov(dword_ptr(rbx), 0x4_0000 | u32::from(VECTOR))?;
        a.mov(rcx, r8)?;
        a.sub(rcx, r9)?;
        a.add(r10, rcx)?;
        (way.lower)(a)?;
        a.mov(rcx, r8)?;
        a.inc(r9)?;
        a.sub(rcx, r9)?;
        a.sub(r11, rcx)?;
        a.cmp(r9, ROUNDS as i32)?;
        a.jb(again)?;
        a.out(0x80, al)
    };
    assemble(&mut a).unwrap();
    a.assemble(CODE).unwrap()
}

fn machine() -> Machine {
    let m = Machine::new();
    m.vm.create_irq_chip().unwrap();
    m.map_large(APIC);
    m.load(HANDLER, |a| {
        a.push(rbx)?;
        a.inc(r8)?;
        a.mov(rbx, APIC + u64::from(EOI))?;
        a.mov(dword_ptr(rbx), 0)?;
        a.pop(rbx)?;
        a.iretq()
    });
    m
}

#[test]
fn lowering_the_priority_lets_an_interrupt_in() {
    for way in &WAYS {
        let m = machine();
        m.write(CODE, &program(way));
        let mut vcpu = m.vcpu(0, CODE);
        m.handle(&vcpu, VECTOR, [GDT, IDT], HANDLER);
        // The APIC's software enable.
        let mut lapic = vcpu.get_lapic().unwrap();
        lapic.regs[0xf1] = 1;
        vcpu.set_lapic(&lapic).unwrap();
        start(&vcpu, CODE);
        let mut regs = vcpu.get_regs().unwrap();
        regs.rsp = STACK;
        vcpu.set_regs(&regs).unwrap();
        assert!(matches!(vcpu.run().unwrap(), VcpuExit::IoOut(0x80, _)));
        let regs = vcpu.get_regs().unwrap();
        let seen = [regs.r8, regs.r9, regs.r10, regs.r11];
        assert_eq!(seen, [ROUNDS, ROUNDS, 0, 0], "{}", way.name);
        assert_eq!(vcpu.get_sregs().unwrap().cr8, 5, "{}", way.name);
    }
    engines::again_on("interp");
}
