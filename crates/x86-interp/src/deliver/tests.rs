//! Delivery in each mode, nested faults, and restart after an exit.

use x86_cpu::{CpuState, Event, Exception};
use x86_defs::{reg, rflags, vector};

use crate::{
    Interp, RunStop,
    test_bus::{TestBus, at, gate, machine, memory, sel},
};

fn inject(cpu: &mut CpuState, bus: &mut TestBus, event: Event) -> Result<(), RunStop> {
    Interp::new().inject(cpu, bus, event)
}

#[test]
fn long_mode_frames() {
    // (cpl, vector, error code, kind, ist, expected frame top)
    for (cpl, v, code, kind, ist, top) in [
        (3, vector::GP, Some(0x18), 14, 0, at::STACK0),
        (3, vector::UD, None, 15, 0, at::STACK0),
        (0, vector::PF, Some(2), 14, 0, at::STACK),
        (0, vector::DF, Some(0), 14, 1, at::IST1),
        (3, vector::DB, None, 14, 1, at::IST1),
    ] {
        let (mut cpu, mut bus) = machine(true, cpl);
        gate(&mut bus, true, v, kind, 0, ist);
        cpu.fault_gva = 0x777;
        let before = cpu.clone();
        let e = Exception {
            vector: v,
            error_code: code,
        };
        assert_eq!(inject(&mut cpu, &mut bus, Event::Exception(e)), Ok(()));
        // A trap and an abort leave RF.
        let rf = if v == vector::DB || v == vector::DF {
            0
        } else {
            rflags::RF
        };
        assert_eq!(bus.get64(top - 8), u64::from(before.seg[reg::SS].selector));
        assert_eq!(bus.get64(top - 16), at::STACK);
        assert_eq!(bus.get64(top - 24), before.rflags | rf, "vector {v}");
        assert_eq!(bus.get64(top - 32), u64::from(before.seg[reg::CS].selector));
        assert_eq!(bus.get64(top - 40), at::CODE);
        let mut sp = top - 40;
        if let Some(code) = code {
            sp -= 8;
            assert_eq!(bus.get64(sp), u64::from(code));
        }
        assert_eq!(cpu.gpr[reg::RSP], sp);
        assert_eq!((cpu.cpl, cpu.rip()), (0, at::HANDLER));
        assert_eq!(cpu.rflags & rflags::IF != 0, kind == 15);
        assert_eq!(cpu.cr2, if v == vector::PF { 0x777 } else { 0 });
        assert_eq!(cpu.seg[reg::SS].attr.is_unusable(), cpl == 3);
        assert_eq!(cpu.seg[reg::CS].selector, sel::CODE0);
    }
}

#[test]
fn nested_faults() {
    // No gates at all: anything ends in a triple fault.
    let (mut cpu, mut bus) = machine(true, 0);
    let before = cpu.clone();
    let pf = Event::Exception(Exception::with_code(vector::PF, 0));
    assert_eq!(inject(&mut cpu, &mut bus, pf), Err(RunStop::TripleFault));
    assert_eq!(cpu.rip(), before.rip());

    // (event, gates present, vector reached, its error code)
    let external = Event::Interrupt(0x40);
    let software = Event::Software {
        vector: 0x40,
        next_rip: at::CODE + 2,
        privileged: false,
    };
    for (event, present, code) in [
        (external, vector::GP, 0x40 << 3 | 3),
        (software, vector::GP, 0x40 << 3 | 2),
        (Event::Exception(Exception::UD), vector::GP, 6 << 3 | 3),
        (Event::Exception(Exception::GP0), vector::DF, 0),
        (pf, vector::DF, 0),
    ] {
        let (mut cpu, mut bus) = machine(true, 0);
        gate(&mut bus, true, present, 14, 0, 0);
        assert_eq!(inject(&mut cpu, &mut bus, event), Ok(()));
        assert_eq!(bus.get64(cpu.gpr[reg::RSP]), code, "{event:?}");
    }
    // A gate that is there but not present is #NP.
    let (mut cpu, mut bus) = machine(true, 0);
    gate(&mut bus, true, 0x40, 14, 0, 0);
    bus.memory(0)[at::IDT as usize + 0x405] &= 0x7f;
    gate(&mut bus, true, vector::NP, 14, 0, 0);
    assert_eq!(inject(&mut cpu, &mut bus, external), Ok(()));
    assert_eq!(bus.get64(cpu.gpr[reg::RSP]), 0x40 << 3 | 3);
}

#[test]
fn software_interrupts_check_the_gates_dpl() {
    for (dpl, reached) in [(3, 0x80), (0, vector::GP)] {
        let (mut cpu, mut bus) = machine(true, 3);
        gate(&mut bus, true, 0x80, 14, dpl, 0);
        gate(&mut bus, true, vector::GP, 15, 0, 0);
        bus.put(at::CODE, &[0xcd, 0x80]);
        assert_eq!(Interp::new().step(&mut cpu, &mut bus), RunStop::Poll);
        let frame = at::STACK0 - 40;
        if reached == 0x80 {
            assert_eq!(bus.get64(frame), at::CODE + 2);
        } else {
            assert_eq!(bus.get64(frame), at::CODE);
            assert_eq!(bus.get64(frame - 8), 0x80 << 3 | 2);
        }
    }
}

#[test]
fn nmi_is_masked_until_iret() {
    let (mut cpu, mut bus) = machine(true, 3);
    gate(&mut bus, true, vector::NMI, 14, 0, 1);
    bus.put(at::HANDLER, &[0x48, 0xcf]);
    let before = cpu.clone();
    assert_eq!(inject(&mut cpu, &mut bus, Event::Nmi), Ok(()));
    assert!(cpu.events.nmi_masked);
    assert_eq!(Interp::new().step(&mut cpu, &mut bus), RunStop::Poll);
    assert_eq!(bus.unmasked, 1);
    assert_eq!(cpu.gpr, before.gpr);
    assert_eq!(
        (cpu.cpl, cpu.rflags, cpu.events),
        (3, before.rflags, before.events)
    );
    assert_eq!(cpu.seg[reg::CS], before.seg[reg::CS]);
}

#[test]
fn real_mode() {
    let mut bus = memory();
    let mut cpu = CpuState::default();
    cpu.seg[reg::CS].base = 0;
    cpu.seg[reg::CS].selector = 0;
    cpu.set_rip(at::CODE);
    cpu.gpr[reg::RSP] = at::STACK;
    cpu.rflags |= rflags::IF | rflags::TF;
    bus.put(4 * 0x21, &0x0200_0345u32.to_le_bytes());
    assert_eq!(inject(&mut cpu, &mut bus, Event::Interrupt(0x21)), Ok(()));
    assert_eq!((cpu.rip(), cpu.seg[reg::CS].base), (0x345, 0x2000));
    assert_eq!(cpu.rflags, rflags::FIXED1);
    assert_eq!(bus.get16(at::STACK - 2), 0x302);
    assert_eq!(bus.get16(at::STACK - 6), at::CODE as u16);
    bus.put(0x2345, &[0xcf]);
    assert_eq!(Interp::new().step(&mut cpu, &mut bus), RunStop::Poll);
    assert_eq!((cpu.rip(), cpu.seg[reg::CS].base), (at::CODE, 0));
    assert_eq!(cpu.gpr[reg::RSP], at::STACK);
    assert_ne!(cpu.rflags & rflags::IF, 0);
}

#[test]
fn protected_mode_and_v86_return() {
    let (mut cpu, mut bus) = machine(false, 3);
    gate(&mut bus, false, 0x40, 14, 0, 0);
    let before = cpu.clone();
    assert_eq!(inject(&mut cpu, &mut bus, Event::Interrupt(0x40)), Ok(()));
    assert_eq!(cpu.gpr[reg::RSP], at::STACK0 - 20);
    assert_eq!(bus.get32(at::STACK0 - 8), at::STACK as u32);
    bus.put(at::HANDLER, &[0xcf]);
    assert_eq!(Interp::new().step(&mut cpu, &mut bus), RunStop::Poll);
    assert_eq!(
        (cpu.cpl, cpu.gpr, cpu.rflags),
        (3, before.gpr, before.rflags)
    );

    // Into virtual-8086 mode and back out through an interrupt.
    let (mut cpu, mut bus) = machine(false, 0);
    gate(&mut bus, false, 0x40, 14, 0, 0);
    bus.put(at::CODE, &[0xcf]);
    let flags = rflags::VM | rflags::IF | rflags::FIXED1;
    let frame = [0x300, 0x100, flags, 0x500, 0x900, 1, 2, 3, 4];
    for (i, v) in frame.iter().enumerate() {
        bus.put(at::STACK + 4 * i as u64, &(*v as u32).to_le_bytes());
    }
    assert_eq!(Interp::new().step(&mut cpu, &mut bus), RunStop::Poll);
    assert!(cpu.is_v86());
    assert_eq!(
        (cpu.cpl, cpu.rip(), cpu.seg[reg::CS].base),
        (3, 0x300, 0x1000)
    );
    assert_eq!((cpu.seg[reg::SS].base, cpu.gpr[reg::RSP]), (0x9000, 0x500));
    assert_eq!(inject(&mut cpu, &mut bus, Event::Interrupt(0x40)), Ok(()));
    assert!(!cpu.is_v86());
    assert_eq!(cpu.cpl, 0);
    let top = at::STACK0 - 36;
    assert_eq!(cpu.gpr[reg::RSP], top);
    for (i, v) in frame.iter().enumerate() {
        assert_eq!(u64::from(bus.get32(top + 4 * i as u64)), *v, "slot {i}");
    }
    assert!(cpu.seg[reg::DS].attr.is_unusable());
}

#[test]
fn an_exit_leaves_the_cpu_as_it_was() {
    for long in [false, true] {
        for cpl in [0, 3] {
            for budget in 0.. {
                let (mut cpu, mut bus) = machine(long, cpl);
                gate(&mut bus, long, vector::PF, 14, 0, 0);
                cpu.fault_gva = 0x1234;
                bus.budget = budget;
                let before = cpu.clone();
                let pf = Event::Exception(Exception::with_code(vector::PF, 4));
                match inject(&mut cpu, &mut bus, pf) {
                    Ok(()) => {
                        assert!(budget > 6);
                        break;
                    }
                    other => assert_eq!(other, Err(RunStop::Exit)),
                }
                assert_eq!(cpu, before, "long {long} cpl {cpl} budget {budget}");
            }
        }
    }
}

/// The engine is in the middle of the instruction.
#[test]
fn a_task_switch_that_fails_leaves_what_the_engine_has() {
    let (mut cpu, mut bus) = machine(false, 0);
    gate(&mut bus, false, vector::TS, 14, 0, 0);
    cpu.engine.page = 77;
    // A far jump to a task whose CS is null.
    let [low, high] = sel::TSS2.to_le_bytes();
    bus.put(at::CODE, &[0xea, 0, 0, 0, 0, low, high]);
    assert_eq!(Interp::new().step(&mut cpu, &mut bus), RunStop::Poll);
    assert_eq!(cpu.rip(), at::HANDLER);
    assert_eq!(cpu.engine.page, 77);
}
