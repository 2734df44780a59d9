//! SGDT and SIDT in a loop, wherever their operand is: UEFI's firmware finds its services by the IDT.

#![allow(clippy::unwrap_used, reason = "a test that cannot be set up fails")]

mod long_mode;

use anykvm_ioctls::VcpuExit;
use iced_x86::code_asm::*;
use long_mode::Machine;
use vm_memory::{Bytes, GuestAddress};

const CODE: u64 = 0x1000;
/// Operands up to this one's end are on one page, the next straddle two.
const LAST: u64 = 0x7ff6;
const TURNS: u32 = 1000;

#[test]
fn their_base_and_limit_are_stored() {
    for at in [0x7000, LAST, LAST + 1, LAST + 3, 0x7fff] {
        let m = Machine::new();
        m.load(CODE, |a| {
            let mut again = a.create_label();
            a.mov(ecx, TURNS)?;
            a.set_label(&mut again)?;
            a.mov(qword_ptr(rdi), 0)?;
            a.mov(word_ptr(rdi + 8), 0)?;
            a.stc()?;
            a.sidt(ptr(rdi))?;
            a.adc(ebx, 0)?;
            a.sgdt(ptr(rdi + 0x100))?;
            a.dec(ecx)?;
            a.jne(again)?;
            a.hlt()
        });
        let mut vcpu = m.vcpu(0, CODE);
        let mut sregs = vcpu.get_sregs().unwrap();
        sregs.idt.base = 0xffff_8123_4567_89a0;
        sregs.idt.limit = 0x0fff;
        sregs.gdt.limit = 0x7f;
        vcpu.set_sregs(&sregs).unwrap();
        let mut regs = vcpu.get_regs().unwrap();
        (regs.rdi, regs.rbx) = (at, 0);
        vcpu.set_regs(&regs).unwrap();
        assert!(matches!(vcpu.run().unwrap(), VcpuExit::Hlt));
        // Flags are left alone.
        assert_eq!(vcpu.get_regs().unwrap().rbx, u64::from(TURNS));
        for (at, table) in [(at, sregs.idt), (at + 0x100, sregs.gdt)] {
            let limit: u16 = m.memory.read_obj(GuestAddress(at)).unwrap();
            let base: u64 = m.memory.read_obj(GuestAddress(at + 2)).unwrap();
            assert_eq!((base, limit), (table.base, table.limit), "{at:#x}");
        }
    }
}
