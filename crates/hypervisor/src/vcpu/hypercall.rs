//! Hypercalls (KVM document "hypercalls"): number in RAX, arguments in RBX, RCX, RDX, RSI.

use x86_cpu::{CpuState, Exception, Fault};
use x86_defs::reg::{RAX, RBX, RCX};

use super::bus::Bus;

/// KVM_HC_VAPIC_POLL_IRQ.
const VAPIC_POLL_IRQ: u64 = 1;
/// KVM_HC_CLOCK_PAIRING.
const CLOCK_PAIRING: u64 = 9;
/// -KVM_ENOSYS.
const ENOSYS: u64 = 1000u64.wrapping_neg();
/// -KVM_EPERM.
const EPERM: u64 = 1u64.wrapping_neg();
/// -KVM_EFAULT.
const EFAULT: u64 = 14u64.wrapping_neg();
/// -KVM_EOPNOTSUPP.
const EOPNOTSUPP: u64 = 95u64.wrapping_neg();

/// Executes VMCALL or VMMCALL.
pub(super) fn execute(bus: &mut Bus, cpu: &mut CpuState) -> Result<(), Fault> {
    // KVM refuses hypercalls from user mode with a result, in real mode too late to matter.
    if cpu.cr0 & 1 == 0 {
        return Err(Exception::UD.into());
    }
    let wide = cpu.is_64bit();
    let arg = |r: usize| {
        if wide {
            cpu.gpr[r]
        } else {
            cpu.gpr[r] & 0xffff_ffff
        }
    };
    let (nr, a0, a1) = (arg(RAX), arg(RBX), arg(RCX));
    let result = match nr {
        _ if cpu.cpl != 0 => EPERM,
        VAPIC_POLL_IRQ => 0,
        CLOCK_PAIRING => clock_pairing(bus, a0, a1),
        _ => ENOSYS,
    };
    cpu.gpr[RAX] = if wide { result } else { result & 0xffff_ffff };
    Ok(())
}

/// Writes `struct kvm_clock_pairing`: wall time and the guest TSC of the same moment.
fn clock_pairing(bus: &mut Bus, gpa: u64, kind: u64) -> u64 {
    if kind != 0 {
        return EOPNOTSUPP;
    }
    let ns = host::clock::realtime_ns();
    let tsc = bus.tsc.guest(host::cpu::rdtsc());
    let mut out = [0u8; 64];
    out[..8].copy_from_slice(&(ns / 1_000_000_000).to_le_bytes());
    out[8..16].copy_from_slice(&(ns % 1_000_000_000).to_le_bytes());
    out[16..24].copy_from_slice(&tsc.to_le_bytes());
    if bus.vm.memory.write_bytes(gpa, &out) {
        0
    } else {
        EFAULT
    }
}
