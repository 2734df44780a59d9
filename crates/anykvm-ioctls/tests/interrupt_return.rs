//! IRETQ and RETF to another privilege level, and RF, on whatever engine runs the guest.

#![allow(clippy::unwrap_used, reason = "tests")]

mod engines;
mod long_mode;

use anykvm_ioctls::{VcpuExit, VcpuFd};
use iced_x86::code_asm::*;
use kvm_bindings::kvm_sregs;
use long_mode::Machine;

const CODE: u64 = 0x1000;
const USER: u64 = 0x2000;
const GDT: u64 = 0x6000;
const RF: u64 = 1 << 16;
/// Its bits beyond those of a base are none of ours.
const BASE: u64 = 0x1234_5000;
/// Not in a memslot.
const DEVICE: u64 = 0xc000_0000;

/// A kernel's and a user's segments, and the user's half of the tables.
fn machine() -> (Machine, VcpuFd, kvm_sregs) {
    let m = Machine::new();
    for (n, descriptor) in [
        0x00af_9b00_0000_ffff_u64,
        0x00cf_9300_0000_ffff,
        0x00cf_f300_0000_ffff,
        0x00af_fb00_0000_ffff,
    ]
    .into_iter()
    .enumerate()
    {
        m.write(GDT + 8 + 8 * n as u64, &descriptor.to_le_bytes());
    }
    m.map_large(DEVICE);
    for at in [0, 0x1000, 0x1018, 0x2000, 0x3000] {
        let at = long_mode::PML4 + at;
        let [entry] = m.read::<1>(at);
        m.write(at, &[entry | 4]);
    }
    let vcpu = m.vcpu(0, CODE);
    let mut sregs = vcpu.get_sregs().unwrap();
    (sregs.gdt.base, sregs.gdt.limit) = (GDT, 39);
    // FSGSBASE.
    sregs.cr4 |= 1 << 16;
    vcpu.set_sregs(&sregs).unwrap();
    (m, vcpu, sregs)
}

/// Null selectors with other RPLs than 0, and a base that is not theirs.
fn load_nulls(a: &mut CodeAssembler) -> Result<(), IcedError> {
    a.mov(eax, 3)?;
    a.mov(ds, eax)?;
    a.mov(eax, 1)?;
    a.mov(es, eax)?;
    a.mov(eax, 2)?;
    a.mov(gs, eax)?;
    a.mov(rax, BASE)?;
    a.wrgsbase(rax)
}

fn to_user_by_iret(a: &mut CodeAssembler) -> Result<(), IcedError> {
    load_nulls(a)?;
    for word in [0x1b, 0x4000, 2, 0x23, USER as i32] {
        a.push(word)?;
    }
    a.iretq()
}

fn to_user_by_retf(a: &mut CodeAssembler) -> Result<(), IcedError> {
    load_nulls(a)?;
    for word in [0x1b, 0x4000, 0x23, USER as i32] {
        a.push(word)?;
    }
    a.db(&[0x48, 0xcb])
}

/// To the same level.
fn to_kernel(a: &mut CodeAssembler) -> Result<(), IcedError> {
    load_nulls(a)?;
    for word in [0x10, 0x4000, 2, 8, USER as i32] {
        a.push(word)?;
    }
    a.iretq()
}

/// Shows its selectors to the VMM.
fn user(a: &mut CodeAssembler) -> Result<(), IcedError> {
    a.mov(eax, ds)?;
    a.mov(ebx, es)?;
    a.mov(ecx, gs)?;
    a.rdgsbase(rdx)?;
    a.mov(esi, DEVICE as i32)?;
    a.mov(dword_ptr(rsi), eax)?;
    a.ud2()
}

#[test]
fn a_return_to_an_outer_level_clears_null_selectors_whatever_their_rpl() {
    for (kernel, want) in [
        (to_user_by_iret as long_mode::Assemble, [0, 0, 0, BASE]),
        (to_user_by_retf, [0, 0, 0, BASE]),
        (to_kernel, [3, 1, 2, BASE]),
    ] {
        let (m, mut vcpu, start) = machine();
        m.load(CODE, kernel);
        m.load(USER, user);
        // Translated code goes other ways when it has been there before.
        for _ in 0..3 {
            let exit = vcpu.run().unwrap();
            assert!(matches!(exit, VcpuExit::MmioWrite(DEVICE, _)), "{exit:?}");
            let regs = vcpu.get_regs().unwrap();
            assert_eq!([regs.rax, regs.rbx, regs.rcx, regs.rdx], want);
            let sregs = vcpu.get_sregs().unwrap();
            assert_eq!(
                [sregs.ds, sregs.es, sregs.gs].map(|s| u64::from(s.selector)),
                want[..3]
            );
            vcpu.set_sregs(&start).unwrap();
            long_mode::start(&vcpu, CODE);
        }
    }
}

/// R12 returns, each to the next target, with RF set; each target is gone to four times.
fn returns(a: &mut CodeAssembler) -> Result<(), IcedError> {
    let mut next = a.create_label();
    let mut done = a.create_label();
    a.lea(r13, ptr(next))?;
    a.mov(ebx, DEVICE as i32)?;
    a.set_label(&mut next)?;
    a.mov(rax, r12)?;
    a.inc(r12)?;
    a.cmp(r12, 80)?;
    a.jae(done)?;
    a.shr(rax, 2)?;
    a.shl(rax, 6)?;
    a.add(rax, 0x8_0000)?;
    a.mov(esp, 0x4000)?;
    a.push(0x10)?;
    a.push(0x4000)?;
    a.push(RF as i32 | 2)?;
    a.push(8)?;
    a.push(rax)?;
    a.iretq()?;
    a.set_label(&mut done)?;
    a.hlt()
}

#[test]
fn rf_is_set_until_the_instruction_after_iret_is_complete() {
    let (m, mut vcpu, _) = machine();
    m.load(CODE, returns);
    for target in 0..20 {
        // mov al, [rbx]; mov al, [rbx]; jmp r13
        let code = [0x8a, 3, 0x8a, 3, 0x41, 0xff, 0xe5];
        m.write(0x8_0000 + 64 * target, &code);
    }
    let mut flags = Vec::new();
    loop {
        match vcpu.run().unwrap() {
            VcpuExit::MmioRead(..) => {
                flags.push(vcpu.get_regs().unwrap().rflags & RF != 0);
            }
            VcpuExit::Hlt => break,
            exit => panic!("{exit:?}"),
        }
    }
    // It is for the first load, not for the second.
    assert_eq!(flags, [true, false].repeat(79));
}

/// The iterations of a loop before a return, for which translated code looks at requests about when it returns.
const NEAR_POLL: core::ops::Range<i32> = 17000..20000;

/// Returns to `USER` with RF set, R12 iterations after the entry to translated code.
fn returns_after_a_while(a: &mut CodeAssembler) -> Result<(), IcedError> {
    let mut next = a.create_label();
    let mut again = a.create_label();
    a.lea(r13, ptr(next))?;
    a.mov(ebx, DEVICE as i32)?;
    a.mov(r12d, NEAR_POLL.start)?;
    a.set_label(&mut next)?;
    a.mov(ecx, r12d)?;
    a.inc(r12)?;
    a.mov(esp, 0x4000)?;
    a.push(0x10)?;
    a.push(0x4000)?;
    a.push(RF as i32 | 2)?;
    a.push(8)?;
    a.push(USER as i32)?;
    a.set_label(&mut again)?;
    a.dec(ecx)?;
    a.jne(again)?;
    a.iretq()
}

#[test]
fn rf_is_set_though_a_poll_is_due_before_the_instruction() {
    let (m, mut vcpu, _) = machine();
    m.load(CODE, returns_after_a_while);
    // mov al, [rbx]; jmp r13
    m.write(USER, &[0x8a, 3, 0x41, 0xff, 0xe5]);
    for iterations in NEAR_POLL {
        let exit = vcpu.run().unwrap();
        assert!(matches!(exit, VcpuExit::MmioRead(..)), "{exit:?}");
        let flags = vcpu.get_regs().unwrap().rflags;
        assert!(flags & RF != 0, "after {iterations} iterations");
    }
}

#[test]
fn the_interpreter_does_the_same() {
    engines::again_on("interp");
}
