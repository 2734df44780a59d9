//! KVM_SET_GUEST_DEBUG: exceptions that go to the VMM instead of the guest, and the VMM's breakpoints in place of the
//! guest's.

use kvm_bindings::{
    KVM_GUESTDBG_BLOCKIRQ, KVM_GUESTDBG_ENABLE, KVM_GUESTDBG_INJECT_BP, KVM_GUESTDBG_INJECT_DB,
    KVM_GUESTDBG_SINGLESTEP, KVM_GUESTDBG_USE_HW_BP, KVM_GUESTDBG_USE_SW_BP, kvm_guest_debug,
};
use x86_cpu::{CpuState, Exception, PendingException};
use x86_defs::{dr, vector};

use super::Bus;
use crate::{Error, Exit, Result};

/// Applies the settings of KVM_SET_GUEST_DEBUG, whose bits have been checked.
pub(in crate::vcpu) fn set(
    cpu: &mut CpuState,
    bus: &mut Bus,
    debug: &kvm_guest_debug,
) -> Result<()> {
    let control = debug.control;
    if control & (KVM_GUESTDBG_INJECT_DB | KVM_GUESTDBG_INJECT_BP) != 0 {
        if cpu.events.exception.is_some() {
            return Err(Error::Busy);
        }
        let vector = if control & KVM_GUESTDBG_INJECT_DB != 0 {
            vector::DB
        } else {
            vector::BP
        };
        cpu.events.exception = Some(PendingException {
            vector,
            ..PendingException::default()
        });
    }
    let control = if control & KVM_GUESTDBG_ENABLE == 0 {
        0
    } else {
        control
    };
    bus.guest_debug = control;
    let registers = debug.arch.debugreg;
    cpu.vmm_debug.active = control & KVM_GUESTDBG_USE_HW_BP != 0;
    cpu.vmm_debug.dr.copy_from_slice(&registers[..4]);
    cpu.vmm_debug.dr7 = registers[7] | dr::DR7_FIXED1;
    Ok(())
}

/// True with KVM_GUESTDBG_BLOCKIRQ: no SMI, NMI or interrupt is taken.
pub(in crate::vcpu) fn blocks_interrupts(bus: &Bus) -> bool {
    bus.guest_debug & KVM_GUESTDBG_BLOCKIRQ != 0
}

/// True if the VMM debugs the guest and this exception goes to the VMM.
pub(in crate::vcpu) fn intercept(bus: &mut Bus, cpu: &CpuState, exception: Exception) -> bool {
    let control = bus.guest_debug;
    if control & KVM_GUESTDBG_ENABLE == 0 {
        return false;
    }
    let wanted = match exception.vector {
        vector::BP => control & KVM_GUESTDBG_USE_SW_BP != 0,
        vector::DB => control & (KVM_GUESTDBG_SINGLESTEP | KVM_GUESTDBG_USE_HW_BP) != 0,
        _ => false,
    };
    if wanted {
        bus.exit = Some(Exit::Debug {
            exception: exception.vector.into(),
            pc: crate::vcpu::linear_rip(cpu),
            dr6: dr::DR6_FIXED1 | cpu.fault_dr6,
            dr7: cpu.effective_dr7(),
        });
    }
    wanted
}
