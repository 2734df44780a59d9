//! One vCPU: its state before the first instruction, and the loop that handles its exits.

mod cpuid;
mod gate;
mod registers;
pub(crate) mod state;

use std::sync::atomic::{AtomicBool, Ordering};

use anykvm_ioctls::{VcpuExit, VcpuFd};
use kvm_bindings::{
    CpuId, KVM_MP_STATE_HALTED, KVM_MP_STATE_INIT_RECEIVED, KVM_MP_STATE_UNINITIALIZED,
    KVM_SYSTEM_EVENT_RESET, KVM_SYSTEM_EVENT_SHUTDOWN,
};

use crate::devices::Devices;
use crate::ending::Ending;
use crate::error::BootError;
use crate::kernel::Entry;

pub(crate) use cpuid::offer_tsc_deadline;
pub(crate) use gate::Gate;
pub(crate) use registers::write_boot_structures;

const EINTR: i32 = rustix::io::Errno::INTR.raw_os_error();
/// Port at which a write prints the vCPU's counters, if the user wants to see them.
const STATS_PORT: u16 = 0xee0;
/// RFLAGS.IF: interrupts are enabled.
const IF: u64 = 1 << 9;
const EAGAIN: i32 = rustix::io::Errno::AGAIN.raw_os_error();

/// Gives vCPU `id` its CPUID, LAPIC pins and, if it is the boot vCPU, the kernel's entry state.
pub(crate) fn set_up(
    vcpu: &VcpuFd,
    id: u8,
    cpus: u8,
    supported: &CpuId,
    entry: Option<Entry>,
) -> Result<(), BootError> {
    let leaves = cpuid::for_vcpu(supported, id, cpus);
    vcpu.set_cpuid2(&leaves)
        .map_err(BootError::kvm("KVM_SET_CPUID2"))?;
    registers::set_msrs(vcpu)?;
    registers::set_fpu(vcpu)?;
    registers::set_lapic(vcpu)?;
    if let Some(entry) = entry {
        registers::set_entry(vcpu, entry)?;
    }
    Ok(())
}

/// What a vCPU's loop uses.
pub(crate) struct Surroundings<'a> {
    /// The devices that answer the vCPU's accesses.
    pub(crate) devices: &'a Devices,
    /// True if the vCPU prints its counters when the guest asks for them.
    pub(crate) shows_stats: bool,
    /// True if the machine ends, and the vCPU is stopped.
    pub(crate) is_ending: &'a AtomicBool,
    /// Called when the vCPU was kicked, with whether it has halted for good. Returns true if all vCPUs have.
    pub(crate) report: &'a dyn Fn(bool) -> bool,
    /// Where the vCPU waits while the machine stands still.
    pub(crate) gate: &'a Gate,
    /// MSRs that the vCPU may have.
    pub(crate) msrs: &'a [u32],
}

/// Runs the vCPU until it ends the machine, and returns that ending; or until something else ends the machine.
pub(crate) fn run(vcpu: &mut VcpuFd, id: u8, around: &Surroundings<'_>) -> Option<Ending> {
    let Surroundings {
        devices, is_ending, ..
    } = *around;
    while !is_ending.load(Ordering::SeqCst) {
        let is_closing = around.gate.is_closed();
        if is_closing {
            // The guest's access that was answered last is completed, and nothing more is executed.
            vcpu.set_kvm_immediate_exit(1);
        }
        let ending = match vcpu.run() {
            Ok(VcpuExit::IoIn(port, data)) => {
                // A repeated INS asks for several elements. Ports with more than one element are bytes here.
                if matches!(data.len(), 1 | 2 | 4) {
                    devices.port_read(port, data);
                } else {
                    for byte in data.chunks_mut(1) {
                        devices.port_read(port, byte);
                    }
                }
                None
            }
            Ok(VcpuExit::IoOut(STATS_PORT, _)) if around.shows_stats => {
                print_counted(vcpu);
                None
            }
            Ok(VcpuExit::IoOut(port, data)) => devices.port_write(port, data),
            Ok(VcpuExit::MmioRead(gpa, data)) => {
                devices.mmio_read(gpa, data);
                None
            }
            Ok(VcpuExit::MmioWrite(gpa, data)) => {
                devices.mmio_write(gpa, data);
                None
            }
            Ok(VcpuExit::Shutdown) => Some(Ending::TripleFault { vcpu: id }),
            Ok(VcpuExit::SystemEvent(KVM_SYSTEM_EVENT_SHUTDOWN, _)) => Some(Ending::PowerOff),
            Ok(VcpuExit::SystemEvent(KVM_SYSTEM_EVENT_RESET, _)) => Some(Ending::Reset),
            // With an in-kernel irqchip, HLT waits inside KVM_RUN. The other exits ask for nothing.
            Ok(VcpuExit::Hlt | VcpuExit::Intr | VcpuExit::IrqWindowOpen | VcpuExit::SetTpr) => None,
            Ok(exit) => {
                let reason = format!("{exit:?}");
                Some(stopped(vcpu, id, reason))
            }
            Err(errno) if errno.errno() == EINTR && is_closing => {
                vcpu.set_kvm_immediate_exit(0);
                let saved = state::save(vcpu, around.msrs);
                around.gate.wait(id, saved, stalled(vcpu), is_ending);
                None
            }
            // The vCPU was kicked to say whether it has halted.
            Err(errno) if errno.errno() == EINTR => {
                (around.report)(has_halted(vcpu)).then_some(Ending::Halted)
            }
            // An AP has just been started.
            Err(errno) if errno.errno() == EAGAIN => None,
            Err(errno) => Some(stopped(vcpu, id, format!("KVM_RUN: {errno}"))),
        };
        if ending.is_some() {
            return ending;
        }
    }
    None
}

/// Returns the nanoseconds that dirty logging has taken of the vCPU's time.
fn stalled(vcpu: &VcpuFd) -> u64 {
    let counted = vcpu.statistics().unwrap_or_default();
    let stall = counted.iter().find(|(name, _)| *name == "dirty_stall_ns");
    stall.map_or(0, |(_, ns)| *ns)
}

/// Prints a line with all counters.
fn print_counted(vcpu: &VcpuFd) {
    let counted = vcpu.statistics().unwrap_or_default();
    let words: Vec<String> = counted.iter().map(|(n, v)| format!(" {n}={v}")).collect();
    crate::stdio::note(&format!("counted{}", words.concat()));
}

/// Returns true if the vCPU waits and no interrupt can end that, or if it was never started.
fn has_halted(vcpu: &VcpuFd) -> bool {
    let state = vcpu.get_mp_state().map(|state| state.mp_state);
    match state {
        Ok(KVM_MP_STATE_HALTED) => vcpu.get_regs().is_ok_and(|regs| regs.rflags & IF == 0),
        Ok(KVM_MP_STATE_UNINITIALIZED | KVM_MP_STATE_INIT_RECEIVED) => true,
        _ => false,
    }
}

fn stopped(vcpu: &VcpuFd, id: u8, reason: String) -> Ending {
    let rip = vcpu.get_regs().map_or(0, |regs| regs.rip);
    Ending::Failed(BootError::VcpuStopped { id, reason, rip })
}
