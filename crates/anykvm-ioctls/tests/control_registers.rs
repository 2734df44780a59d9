//! Writes of control registers and MSRs that change little: what they leave, and that translated code makes them.

#![allow(clippy::unwrap_used, reason = "tests")]

mod long_mode;
mod stats_fd;

use anykvm_ioctls::VcpuExit;
use iced_x86::code_asm::*;
use long_mode::Machine;

const CODE: u64 = 0x1000;
const TURNS: u32 = 20_000;
/// PG and PE.
const CR0: u64 = 0x8000_0001;
const WP: u64 = 1 << 16;
const ET: u64 = 1 << 4;

/// CR0.ET is 1 whatever is written, so a value without it is no other change.
#[test]
fn wp_is_toggled_by_values_without_et() {
    let machine = Machine::new();
    machine.load(CODE, |a| {
        let mut again = a.create_label();
        a.mov(ecx, TURNS)?;
        a.set_label(&mut again)?;
        a.mov(rax, CR0)?;
        a.mov(cr0, rax)?;
        a.mov(rbx, cr0)?;
        a.or(rax, WP as i32)?;
        a.mov(cr0, rax)?;
        a.mov(rdx, cr0)?;
        a.dec(ecx)?;
        a.jnz(again)?;
        a.hlt()
    });
    let mut vcpu = machine.vcpu(0, CODE);
    let mut sregs = vcpu.get_sregs().unwrap();
    sregs.cr0 = CR0 | ET;
    vcpu.set_sregs(&sregs).unwrap();
    assert!(matches!(vcpu.run().unwrap(), VcpuExit::Hlt));
    let regs = vcpu.get_regs().unwrap();
    assert_eq!([regs.rbx, regs.rdx], [CR0 | ET, CR0 | ET | WP]);
    assert_eq!(vcpu.get_sregs().unwrap().cr0, CR0 | ET | WP);
    let interpreted = stats_fd::counter(&vcpu, "jit_interpreted");
    assert!(interpreted < u64::from(TURNS) / 100, "{interpreted}");
}
