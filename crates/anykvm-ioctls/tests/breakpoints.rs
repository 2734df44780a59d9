//! Hardware breakpoints beside hot code, a debugger's and the guest's own: each hit is told at its instruction, and all else
//! is executed as translated code.

#![allow(clippy::unwrap_used, reason = "a test that cannot be set up fails")]

mod engines;
mod long_mode;
mod stats_fd;

use anykvm_ioctls::{VcpuExit, VcpuFd};
use iced_x86::code_asm::*;
use kvm_bindings::*;
use long_mode::{Machine, PML4};

const CODE: u64 = 0x1000;
/// A function in the page of the loop that calls it.
const COLD: u64 = 0x1f00;
/// A page that the loop uses, and one that only the function uses.
const HOT_DATA: u64 = 0x6000;
const DATA: u64 = 0x8000;
/// A page table for 2 MiB from [`WINDOW`] on.
const TABLE: u64 = 0xa000;
const WINDOW: u64 = 0x20_0000;

const TURNS: u32 = 1 << 18;
/// The function is called once in so many turns.
const EVERY: u32 = 1 << 15;
const CALLS: u64 = (TURNS / EVERY) as u64;

/// Fields of DR7.
const EXECUTE: u64 = 0;
const WRITE_8: u64 = 0b1001;
const ACCESS_4: u64 = 0b1111;

/// DR7 with these breakpoints, by number.
fn enabled(kinds: &[(u32, u64)]) -> u64 {
    let bits = |(n, kind): &(u32, u64)| 1 << (2 * n) | kind << (16 + 4 * n);
    kinds.iter().map(bits).sum()
}

fn set(vcpu: &VcpuFd, registers: [u64; 4], control: u64) {
    let mut debug = kvm_guest_debug {
        control: KVM_GUESTDBG_ENABLE | KVM_GUESTDBG_USE_HW_BP,
        ..Default::default()
    };
    debug.arch.debugreg[..4].copy_from_slice(&registers);
    debug.arch.debugreg[7] = control;
    vcpu.set_guest_debug(&debug).unwrap();
}

/// Goes on, behind a breakpoint on execution, to the next hit. `None`: HLT.
fn next(vcpu: &mut VcpuFd) -> Option<(u64, u64)> {
    let mut regs = vcpu.get_regs().unwrap();
    regs.rflags |= 1 << 16;
    vcpu.set_regs(&regs).unwrap();
    match vcpu.run().unwrap() {
        VcpuExit::Debug(d) => Some((d.pc, d.dr6 & 15)),
        VcpuExit::Hlt => None,
        exit => panic!("{exit:?}"),
    }
}

fn interpreted(vcpu: &VcpuFd) -> u64 {
    stats_fd::counter(vcpu, "jit_interpreted")
}

/// A loop that uses memory and the stack, and calls the function at [`COLD`] now and then.
fn with_cold_call(a: &mut CodeAssembler) -> Result<(), IcedError> {
    let (mut turn, mut goes_on) = (a.create_label(), a.create_label());
    a.mov(ecx, TURNS)?;
    a.set_label(&mut turn)?;
    a.add(rbx, qword_ptr(HOT_DATA))?;
    a.mov(qword_ptr(HOT_DATA + 8), rbx)?;
    a.push(rbx)?;
    a.pop(rdx)?;
    a.test(ecx, EVERY - 1)?;
    a.jne(goes_on)?;
    a.call(COLD)?;
    a.set_label(&mut goes_on)?;
    a.dec(ecx)?;
    a.jne(turn)?;
    a.hlt()
}

/// The function: its instructions begin at offsets 0, 1, 9 and 17.
fn cold(a: &mut CodeAssembler) -> Result<(), IcedError> {
    a.nop()?;
    a.mov(rdx, qword_ptr(DATA))?;
    a.mov(qword_ptr(DATA + 8), rcx)?;
    a.ret()
}

fn with_function() -> Machine {
    let m = Machine::new();
    m.load(CODE, with_cold_call);
    m.load(COLD, cold);
    m
}

/// Breakpoints of all kinds beside a hot loop. First the loop runs without, so that it is translated as hot code.
#[test]
fn hot_code_stays_translated() {
    let m = with_function();
    let mut vcpu = m.vcpu(0, CODE);
    assert!(matches!(vcpu.run().unwrap(), VcpuExit::Hlt));
    for round in 0..3 {
        long_mode::start(&vcpu, CODE);
        let before = interpreted(&vcpu);
        let control = enabled(&[(0, EXECUTE), (2, ACCESS_4), (3, WRITE_8)]);
        set(&vcpu, [COLD, 0, DATA + 4, DATA + 8], control);
        for n in 0..CALLS {
            let left = u64::from(TURNS) - n * u64::from(EVERY);
            for hit in [(COLD, 1), (COLD + 9, 4), (COLD + 17, 8)] {
                assert_eq!(next(&mut vcpu), Some(hit), "round {round}, call {n}");
                assert_eq!(vcpu.get_regs().unwrap().rcx, left);
            }
        }
        assert_eq!(next(&mut vcpu), None);
        let count = interpreted(&vcpu) - before;
        assert!(count < 4000, "{count} instructions were interpreted");
    }
}

/// A breakpoint within the hot loop stops each turn, one that has moved stops where it is now, and none stops nothing.
#[test]
fn a_breakpoint_that_moves() {
    let m = with_function();
    let mut vcpu = m.vcpu(0, CODE);
    assert!(matches!(vcpu.run().unwrap(), VcpuExit::Hlt));
    long_mode::start(&vcpu, CODE);
    let (at_add, at_store) = (CODE + 5, CODE + 13);
    for (at, turns) in [(at_add, 5u64), (at_store, 5), (at_add, 3)] {
        set(&vcpu, [0, at, 0, 0], enabled(&[(1, EXECUTE)]));
        for _ in 0..turns {
            assert_eq!(next(&mut vcpu), Some((at, 2)));
        }
    }
    // 5 at the first place, the same 5 at the second, where the last one still is to be left, and 3.
    assert_eq!(vcpu.get_regs().unwrap().rcx, u64::from(TURNS) - 4 - 3 - 4);
    // A disabled one is forgotten before it has cost much.
    let before = interpreted(&vcpu);
    set(&vcpu, [0, at_add, 0, 0], 0);
    assert_eq!(next(&mut vcpu), None);
    let count = interpreted(&vcpu) - before;
    assert!(count < 20_000, "{count} instructions were interpreted");
}

/// Breakpoints are linear addresses. The function's page is mapped a second time, and only one of its addresses stops it.
#[test]
fn a_page_at_two_addresses() {
    let m = Machine::new();
    m.write(PML4 + 0x2008, &(TABLE + 3).to_le_bytes());
    m.write(TABLE, &(0x5003u64).to_le_bytes());
    m.load(0x5f00, cold);
    m.load(CODE, |a| {
        let mut turn = a.create_label();
        a.mov(rsi, WINDOW + 0xf00)?;
        a.mov(edi, 0x5f00)?;
        a.mov(ecx, 100_000)?;
        a.set_label(&mut turn)?;
        a.call(rdi)?;
        a.test(ecx, 0x3fff)?;
        let mut goes_on = a.create_label();
        a.jne(goes_on)?;
        a.call(rsi)?;
        a.set_label(&mut goes_on)?;
        a.dec(ecx)?;
        a.jne(turn)?;
        a.hlt()
    });
    let mut vcpu = m.vcpu(0, CODE);
    assert!(matches!(vcpu.run().unwrap(), VcpuExit::Hlt));
    for at in [WINDOW + 0xf00, WINDOW + 0xf01, WINDOW + 0xf11] {
        long_mode::start(&vcpu, CODE);
        set(&vcpu, [at, 0, 0, 0], enabled(&[(0, EXECUTE)]));
        for left in (1..=100_000u64 / 0x4000).rev() {
            assert_eq!(next(&mut vcpu), Some((at, 1)));
            assert_eq!(vcpu.get_regs().unwrap().rcx, left * 0x4000);
        }
        assert_eq!(next(&mut vcpu), None);
    }
}

/// The guest's own breakpoints, which its handler counts.
#[test]
fn the_guests_own() {
    const GDT: u64 = 0xb000;
    const IDT: u64 = 0xc000;
    const HANDLER: u64 = 0xd000;
    let m = with_function();
    m.load(HANDLER, |a| {
        a.inc(r8)?;
        a.mov(rax, dr6)?;
        a.add(r9, rax)?;
        a.mov(eax, 0xffff_0ff0u32)?;
        a.mov(dr6, rax)?;
        // RF, which the processor does not set for an instruction's breakpoint.
        a.or(dword_ptr(rsp + 16), 0x1_0000)?;
        a.iretq()
    });
    let mut vcpu = m.vcpu(0, CODE);
    m.handle_page_faults(&vcpu, [GDT, IDT], HANDLER);
    m.write(IDT + 16, &(HANDLER | 8 << 16 | 0x8e << 40).to_le_bytes());
    let mut own = vcpu.get_debug_regs().unwrap();
    own.db = [COLD, DATA + 8, 0, 0];
    own.dr7 = 0x400 | enabled(&[(0, EXECUTE), (1, WRITE_8)]);
    vcpu.set_debug_regs(&own).unwrap();
    assert!(matches!(vcpu.run().unwrap(), VcpuExit::Hlt));
    let regs = vcpu.get_regs().unwrap();
    assert_eq!(regs.r8, 2 * CALLS);
    assert_eq!(regs.r9, 2 * CALLS * 0xffff_0ff0 + 3 * CALLS);
    let count = interpreted(&vcpu);
    assert!(count < 4000, "{count} instructions were interpreted");
}

/// Repeated string instructions stop after the iteration that hits, wherever in its pages the watchpoint is.
#[test]
fn string_instructions() {
    let m = Machine::new();
    m.load(CODE, |a| {
        a.mov(esi, 0x1_0000)?;
        a.mov(edi, 0x2_0000)?;
        a.mov(ecx, 0x3000)?;
        a.rep().movsb()?;
        a.mov(edi, 0x2_0004)?;
        a.mov(ecx, 0x600)?;
        a.rep().stosq()?;
        a.hlt()
    });
    let mut vcpu = m.vcpu(0, CODE);
    let (at_copy, at_fill) = (CODE + 15, CODE + 27);
    for at in [0x2_0ff8u64, 0x2_1000, 0x2_1800, 0x2_2ff8] {
        long_mode::start(&vcpu, CODE);
        set(&vcpu, [0, at, 0, 0], enabled(&[(1, WRITE_8)]));
        for n in 0..8 {
            let hit = if at + n == 0x2_2fff {
                at_copy + 2
            } else {
                at_copy
            };
            assert_eq!(next(&mut vcpu), Some((hit, 2)), "{at:#x}");
            let regs = vcpu.get_regs().unwrap();
            assert_eq!(regs.rdi, at + n + 1);
            assert_eq!(regs.rcx, 0x3000 - (at + n + 1 - 0x2_0000));
        }
        // The elements straddle the watched word.
        for n in 0..2 {
            let is_last = at + n == 0x2_2ff9;
            let hit = if is_last { at_fill + 3 } else { at_fill };
            assert_eq!(next(&mut vcpu), Some((hit, 2)), "{at:#x}");
            assert_eq!(vcpu.get_regs().unwrap().rdi, at + 4 + 8 * n);
        }
        assert_eq!(next(&mut vcpu), None);
    }
}

/// Accesses to the page of a watchpoint that do not hit it have their effect and stop nothing; those that straddle into the
/// page, and those of the stack, hit.
#[test]
fn beside_a_watchpoint() {
    let m = Machine::new();
    m.load(CODE, |a| {
        let mut turn = a.create_label();
        a.mov(ecx, 2000)?;
        a.set_label(&mut turn)?;
        a.inc(qword_ptr(DATA + 0x10))?;
        a.add(rbx, qword_ptr(DATA + 0x10))?;
        a.movups(xmm0, xmmword_ptr(DATA - 8))?;
        a.dec(ecx)?;
        a.jne(turn)?;
        a.mov(qword_ptr(DATA - 4), rbx)?;
        a.mov(esp, DATA as u32 + 8)?;
        a.push(rbx)?;
        a.pop(rdx)?;
        a.hlt()
    });
    let mut vcpu = m.vcpu(0, CODE);
    let mut sregs = vcpu.get_sregs().unwrap();
    // OSFXSR.
    sregs.cr4 |= 0x200;
    vcpu.set_sregs(&sregs).unwrap();
    assert!(matches!(vcpu.run().unwrap(), VcpuExit::Hlt));
    long_mode::start(&vcpu, CODE);
    m.write(DATA + 0x10, &[0; 8]);
    set(&vcpu, [DATA, 0, 0, 0], enabled(&[(0, WRITE_8)]));
    let mut hits = Vec::new();
    while let Some(hit) = next(&mut vcpu) {
        hits.push(hit);
    }
    let regs = vcpu.get_regs().unwrap();
    assert_eq!(regs.rbx, (1..=2000).sum::<u64>());
    assert_eq!(regs.rdx, regs.rbx);
    let [store, push] = [0, 1].map(|n| hits[n]);
    assert_eq!((hits.len(), store.1, push.1), (2, 1, 1));
    // MOV to ESP has five bytes, PUSH one.
    assert_eq!(push.0, store.0 + 6);
    // One on accesses sees each vector load.
    long_mode::start(&vcpu, CODE);
    set(&vcpu, [0, 0, 0, DATA + 4], enabled(&[(3, ACCESS_4)]));
    let count = std::iter::from_fn(|| next(&mut vcpu)).count();
    assert_eq!(count, 2000 + 2);
}

#[test]
fn in_the_interpreter_too() {
    engines::again_on("interp");
}
