//! Hypercalls (KVM document "hypercalls"): number in RAX, arguments in RBX, RCX, RDX, RSI.

use io_bus::Space;
use irqchip::{DeliveryMode, LapicIrq};
use x86_cpu::{CpuState, Exception, Fault};
use x86_defs::reg::{RAX, RBX, RCX, RDX, RSI};

use super::{Bus, EFAULT, EINVAL};
use crate::{Exit, shared::VcpuShared, vcpu::replay::DeviceAccess};

/// KVM_HC_VAPIC_POLL_IRQ.
const VAPIC_POLL_IRQ: u64 = 1;
/// KVM_HC_KICK_CPU.
const KICK_CPU: u64 = 5;
/// KVM_HC_MAP_GPA_RANGE.
const MAP_GPA_RANGE: u64 = 12;
/// KVM_HC_SEND_IPI.
const SEND_IPI: u64 = 10;
/// KVM_HC_SCHED_YIELD.
const SCHED_YIELD: u64 = 11;
/// Rings a doorbell, see docs/paravirt.md. The number is "ak" and an index, which KVM does not use.
const DOORBELL: u64 = 0x616b_0001;
/// Says that the guest has freed a page directory, see docs/paravirt.md.
const ROOT_FREED: u64 = 0x616b_0002;
/// KVM_HC_CLOCK_PAIRING.
const CLOCK_PAIRING: u64 = 9;
/// -KVM_ENOENT.
const ENOENT: u64 = 2u64.wrapping_neg();
/// -KVM_ENOSYS.
const ENOSYS: u64 = 1000u64.wrapping_neg();
/// -KVM_EPERM.
const EPERM: u64 = 1u64.wrapping_neg();
/// -KVM_EOPNOTSUPP.
const EOPNOTSUPP: u64 = 95u64.wrapping_neg();

/// Executes VMCALL or VMMCALL.
pub(in crate::vcpu) fn execute(bus: &mut Bus, cpu: &mut CpuState) -> Result<(), Fault> {
    if bus.vm.xen.has_hypercalls()
        && let Some(result) = super::xen::execute(bus, cpu)
    {
        return result;
    }
    if bus.has_hv_hypercalls() {
        return super::hyperv::calls::execute(bus, cpu);
    }
    // In real mode the instruction raises #UD. Hypercalls from user mode are refused below by a result, as in KVM.
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
    bus.counters.hypercalls += 1;
    let (a2, a3) = (arg(RDX), arg(RSI));
    let result = match nr {
        _ if cpu.cpl != 0 => EPERM,
        VAPIC_POLL_IRQ => 0,
        KICK_CPU | SEND_IPI | SCHED_YIELD if !bus.has_pv(pv_feature(nr)) => ENOSYS,
        MAP_GPA_RANGE => map_gpa_range(bus, cpu, [a0, a1, a2], wide)?,
        KICK_CPU => {
            send(bus, a1, DeliveryMode::RemoteRead as u32);
            0
        }
        SEND_IPI => send_ipi(bus, [a0, a1], a2, a3, wide),
        SCHED_YIELD => {
            bus.give_way(cpu);
            0
        }
        CLOCK_PAIRING => clock_pairing(bus, a0, a1),
        DOORBELL => doorbell(bus, a0, a1, a2),
        ROOT_FREED if !bus.has_root_cache() => ENOSYS,
        ROOT_FREED if a0 & 0xfff != 0 => EINVAL,
        ROOT_FREED => super::roots::free_root(&bus.vm, a0),
        _ => ENOSYS,
    };
    cpu.gpr[RAX] = if wide { result } else { result & 0xffff_ffff };
    Ok(())
}

/// Does what a write of the low bytes of `value` to a doorbell does, without the writing instruction. Bits 7:0 of
/// `place` are 0 for memory and 1 for ports; the bits above are the write's length. Length 0 asks whether the hypercall
/// exists.
fn doorbell(bus: &mut Bus, address: u64, place: u64, value: u64) -> u64 {
    let space = match place & 0xff {
        0 => Space::Mmio,
        1 => Space::Pio,
        _ => return EINVAL,
    };
    match place >> 8 {
        0 => 0,
        len @ (1 | 2 | 4 | 8) if bus.ring_doorbell(space, address, len as u8, value) => 0,
        1 | 2 | 4 | 8 => ENOENT,
        _ => EINVAL,
    }
}

/// Returns the KVM_FEATURE_* bit that promises the hypercall.
const fn pv_feature(nr: u64) -> u32 {
    match nr {
        KICK_CPU => 7,
        SEND_IPI => 11,
        _ => 13,
    }
}

/// KVM_HC_MAP_GPA_RANGE: the encryption of a range changes. The VMM is told if it has asked for that.
fn map_gpa_range(
    bus: &mut Bus,
    cpu: &CpuState,
    [gpa, pages, attributes]: [u64; 3],
    longmode: bool,
) -> Result<u64, Fault> {
    let access = DeviceAccess::Hypercall { nr: MAP_GPA_RANGE };
    if bus.replay.is_new(access) {
        if !bus.vm.options.exits_for_hypercall(MAP_GPA_RANGE) {
            return Ok(ENOSYS);
        }
        let wraps = (gpa >> 12).checked_add(pages).is_none();
        if gpa & 0xfff != 0 || pages == 0 || wraps {
            return Ok(EINVAL);
        }
    }
    let exit = || Exit::Hypercall {
        nr: MAP_GPA_RANGE,
        args: [gpa, pages, attributes, 0, 0, 0],
        longmode,
    };
    Ok(bus.ask(cpu, access, exit)?.value)
}

/// Sends an IPI for each bit of `bitmap`, counted from the APIC id `first`; returns how many were delivered.
fn send_ipi(bus: &mut Bus, bitmap: [u64; 2], first: u64, icr: u64, wide: bool) -> u64 {
    // A shorthand or a logical destination contradicts the bitmap.
    const DESTINATION: u64 = 3 << 18 | 1 << 11;
    if icr & DESTINATION != 0 {
        return EINVAL;
    }
    let width = if wide { 64 } else { 32 };
    let mut count = 0;
    for (word, mut bits) in bitmap.into_iter().enumerate() {
        while bits != 0 {
            let bit = u64::from(bits.trailing_zeros());
            bits &= bits - 1;
            let id = first.wrapping_add(word as u64 * width + bit);
            // Delivery mode and vector are at the same bits as in an ICR.
            count += u64::from(send(
                bus,
                id,
                (icr >> 8 & 7) as u32 | (icr as u32 & 0xff) << 8,
            ));
        }
    }
    count
}

/// Sends an interrupt to one APIC id, which may have more than 8 bits. `what` is the delivery mode and, from bit 8 on,
/// the vector.
fn send(bus: &mut Bus, id: u64, what: u32) -> bool {
    let irq = LapicIrq::edge(id as u32, DeliveryMode::from_bits(what), (what >> 8) as u8);
    let vcpus = bus.vm.vcpus();
    // APIC ids are vCPU ids.
    let target = u32::try_from(id).ok();
    let target = target.and_then(|id| VcpuShared::with_id(&vcpus, id));
    let Some(target) = target.filter(|_| bus.vm.chips().is_some()) else {
        return false;
    };
    !matches!(
        target.interrupt(&irq),
        irqchip::Accepted::Ignored | irqchip::Accepted::Coalesced
    )
}

/// Writes `struct kvm_clock_pairing`: wall time and guest TSC of the same moment.
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
