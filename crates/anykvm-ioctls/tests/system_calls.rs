//! SYSCALL and SYSRETQ lead to the views that belong to what CR0.WP, PKRU and the page tables say now, however often they
//! have led to others.

#![allow(clippy::unwrap_used, reason = "tests")]

mod long_mode;

use anykvm_ioctls::{VcpuExit, VcpuFd};
use iced_x86::code_asm::*;
use long_mode::{Machine, PML4, STACK, become_user, set_cr4, set_xcr0};
use vm_memory::{Bytes, GuestAddress};

const CALLS: u64 = 6000;
const USER_CODE: u64 = 0x5000;
const KERNEL_CODE: u64 = 0x6000;
const FAULTS: u64 = 0x7000;
const GDT: u64 = 0x8000;
const IDT: u64 = 0x9000;
/// Two pages with a function each, which takes turns in being the user's page at [`FUNCTION`].
const FUNCTIONS: u64 = 0xa000;
const DATA: u64 = 0xc000;
const PAGE_TABLE: u64 = PML4 + 0x4000;

/// gpa 0 for the user.
const USER: u64 = 0x20_0000;
const FUNCTION: u64 = 0x40_0000;
/// gpa 0 for the supervisor, read-only.
const READ_ONLY: u64 = 0x60_0000;
/// gpa 0 for the user, under protection key 3.
const KEYED: u64 = 0x80_0000;
const NO_ACCESS: u64 = 1 << 6;

const CR0_WP: u64 = 1 << 16;
const CR4_PKE: u64 = 1 << 22;
const CR4_OSXSAVE: u64 = 1 << 18;

/// What the user asks for: nothing, or one of these.
const TOGGLE_WP: [u64; 2] = [1, 6];
const TOGGLE_FUNCTION: u64 = 2;
const NOTHING: i32 = 3;
const END: u64 = 0xff;

fn machine() -> (Machine, VcpuFd) {
    let m = Machine::new();
    for (at, entry) in [
        (PML4, PML4 + 0x1007),
        (PML4 + 0x1000, PML4 + 0x2007),
        (PML4 + 0x2008, 0x87),
        (PML4 + 0x2010, PAGE_TABLE + 7),
        (PML4 + 0x2018, 0x81),
        (PML4 + 0x2020, 0x87 | 3 << 59),
        (PAGE_TABLE, FUNCTIONS + 7),
    ] {
        m.memory.write_obj(entry, GuestAddress(at)).unwrap();
    }
    m.load(FUNCTIONS, |a| {
        a.mov(eax, 1)?;
        a.ret()
    });
    m.load(FUNCTIONS + 0x1000, |a| {
        a.mov(eax, 1000)?;
        a.ret()
    });
    m.load(USER_CODE, |a| {
        let mut again = a.create_label();
        a.mov(r12, CALLS)?;
        a.set_label(&mut again)?;
        a.mov(edi, r12d)?;
        a.and(edi, 15)?;
        a.syscall()?;
        // With a prefix, which makes the return address another one.
        a.mov(edi, NOTHING)?;
        a.db(&[0x48, 0x0f, 0x05])?;
        a.mov(rbx, FUNCTION)?;
        a.call(rbx)?;
        a.add(r8, rax)?;
        // Every 32 calls the kernel loses access to a page of the user's, or gets it back.
        a.mov(eax, r12d)?;
        a.shl(eax, 1)?;
        a.and(eax, NO_ACCESS as i32)?;
        a.xor(ecx, ecx)?;
        a.xor(edx, edx)?;
        a.wrpkru()?;
        a.dec(r12)?;
        a.jnz(again)?;
        a.mov(edi, END as i32)?;
        a.syscall()
    });
    m.load(KERNEL_CODE, |a| {
        let (mut end, mut toggle, mut next, mut accesses) = (
            a.create_label(),
            a.create_label(),
            a.create_label(),
            a.create_label(),
        );
        let (mut written, mut read) = (a.create_label(), a.create_label());
        a.cmp(edi, END as i32)?;
        a.je(end)?;
        a.cmp(edi, TOGGLE_WP[0] as i32)?;
        a.je(toggle)?;
        a.cmp(edi, TOGGLE_WP[1] as i32)?;
        a.jne(next)?;
        a.set_label(&mut toggle)?;
        a.mov(rax, cr0)?;
        a.btc(rax, 16)?;
        a.mov(cr0, rax)?;
        a.set_label(&mut next)?;
        a.cmp(edi, TOGGLE_FUNCTION as i32)?;
        a.jne(accesses)?;
        a.xor(qword_ptr(PAGE_TABLE), 0x1000)?;
        a.mov(rbx, FUNCTION)?;
        a.invlpg(byte_ptr(rbx))?;
        a.set_label(&mut accesses)?;
        a.lea(r14, qword_ptr(written))?;
        a.mov(rbx, READ_ONLY + DATA)?;
        a.mov(qword_ptr(rbx), rbx)?;
        a.set_label(&mut written)?;
        a.lea(r14, qword_ptr(read))?;
        a.mov(rbx, KEYED + DATA)?;
        a.mov(rbx, qword_ptr(rbx))?;
        a.set_label(&mut read)?;
        a.sysretq()?;
        a.set_label(&mut end)?;
        a.hlt()
    });
    // Faults by a key are counted in R13, others in R15.
    m.load(FAULTS, |a| {
        let (mut other, mut done) = (a.create_label(), a.create_label());
        a.pop(rax)?;
        a.test(eax, 0x20)?;
        a.jz(other)?;
        a.inc(r13)?;
        a.jmp(done)?;
        a.set_label(&mut other)?;
        a.inc(r15)?;
        a.set_label(&mut done)?;
        a.mov(qword_ptr(rsp), r14)?;
        a.iretq()
    });
    let vcpu = m.vcpu(0, USER + USER_CODE);
    m.handle_page_faults(&vcpu, [GDT, IDT], FAULTS);
    set_cr4(&vcpu, CR4_PKE | CR4_OSXSAVE);
    set_xcr0(&vcpu, 0x203);
    (m, vcpu)
}

/// Has the vCPU execute the user's code.
fn enter_user(vcpu: &VcpuFd) {
    become_user(vcpu, KERNEL_CODE);
    let mut sregs = vcpu.get_sregs().unwrap();
    sregs.cr0 |= CR0_WP;
    vcpu.set_sregs(&sregs).unwrap();
    let mut regs = vcpu.get_regs().unwrap();
    regs.rsp = USER + STACK;
    vcpu.set_regs(&regs).unwrap();
}

#[test]
fn lead_to_the_present_views() {
    let (_m, mut vcpu) = machine();
    enter_user(&vcpu);
    assert!(matches!(vcpu.run().unwrap(), VcpuExit::Hlt));
    let regs = vcpu.get_regs().unwrap();
    let (mut by_key, mut by_wp, mut sum) = (0, 0, 0);
    let (mut wp, mut function, mut pkru) = (1, 1, 0);
    for n in (1..=CALLS).rev() {
        match n & 15 {
            n if TOGGLE_WP.contains(&n) => wp ^= 1,
            TOGGLE_FUNCTION => function = 1001 - function,
            _ => {}
        }
        // Two calls each time.
        by_wp += 2 * wp;
        by_key += 2 * u64::from(pkru != 0);
        sum += function;
        pkru = n << 1 & NO_ACCESS;
    }
    assert_eq!((regs.r15, regs.r13, regs.r8), (by_wp, by_key, sum));
}
