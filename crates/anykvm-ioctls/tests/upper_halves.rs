//! Upper halves of YMM registers, each alone not zero, while instructions are executed that are not translated.

#![allow(clippy::unwrap_used, reason = "a test that cannot be set up fails")]

mod long_mode;
mod stats_fd;

use anykvm_ioctls::VcpuExit;
use iced_x86::code_asm::*;
use long_mode::Machine;

const TURNS: u32 = 500;
const CODE: u64 = 0x1000;
/// The lower halves at first, then those that are found, 16 bytes each.
const LOWER: u64 = 0x10_8000;
/// The upper half that is found, 16 bytes for each register.
const UPPER: u64 = 0x10_9000;
/// What upper halves become.
const PATTERN: u64 = 0x10_a000;

#[test]
fn survive_alone() {
    if !std::is_x86_feature_detected!("avx") {
        return;
    }
    let machine = Machine::new();
    machine.load(CODE, |a| {
        let lower = [
            xmm0, xmm1, xmm2, xmm3, xmm4, xmm5, xmm6, xmm7, xmm8, xmm9, xmm10, xmm11, xmm12, xmm13,
            xmm14, xmm15,
        ];
        let whole = [
            ymm0, ymm1, ymm2, ymm3, ymm4, ymm5, ymm6, ymm7, ymm8, ymm9, ymm10, ymm11, ymm12, ymm13,
            ymm14, ymm15,
        ];
        let mut again = a.create_label();
        // Code with unmasked exceptions is interpreted.
        a.fninit()?;
        a.mov(ecx, TURNS)?;
        a.set_label(&mut again)?;
        for (n, half) in lower.into_iter().enumerate() {
            a.vmovups(half, xmmword_ptr(LOWER + 16 * n as u64))?;
        }
        // With no upper half, and with each.
        a.str(eax)?;
        for (n, register) in whole.into_iter().enumerate() {
            a.vinsertf128(register, register, xmmword_ptr(PATTERN), 1)?;
            a.str(eax)?;
            a.vextractf128(xmmword_ptr(UPPER + 16 * n as u64), register, 1)?;
            a.vmovups(lower[n], lower[n])?;
        }
        a.str(eax)?;
        for (n, half) in lower.into_iter().enumerate() {
            a.vmovups(xmmword_ptr(LOWER + 16 * n as u64), half)?;
        }
        a.dec(ecx)?;
        a.jne(again)?;
        a.hlt()
    });
    let pattern: [u8; 16] = core::array::from_fn(|n| if n == 11 { 0x40 } else { 0 });
    machine.write(PATTERN, &pattern);
    let halves: [u8; 256] = core::array::from_fn(|n| n as u8 ^ 0x5a);
    machine.write(LOWER, &halves);
    let mut vcpu = machine.vcpu(0, CODE);
    // OSFXSR, OSXSAVE.
    long_mode::set_cr4(&vcpu, 1 << 9 | 1 << 18);
    long_mode::set_xcr0(&vcpu, 7);
    assert!(matches!(vcpu.run().unwrap(), VcpuExit::Hlt));
    let interpreted = stats_fd::counter(&vcpu, "jit_interpreted");
    assert!(
        interpreted < 2 * 18 * u64::from(TURNS),
        "{interpreted}: all of it"
    );
    assert_eq!(machine.read::<256>(LOWER), halves);
    for n in 0..16 {
        assert_eq!(machine.read::<16>(UPPER + 16 * n), pattern, "YMM{n}");
    }
}
