//! KVM_SET_GUEST_DEBUG: exceptions that go to the VMM instead of the guest.

use kvm_bindings::{
    KVM_GUESTDBG_ENABLE, KVM_GUESTDBG_SINGLESTEP, KVM_GUESTDBG_USE_HW_BP, KVM_GUESTDBG_USE_SW_BP,
};
use x86_cpu::{CpuState, Exception};
use x86_defs::{dr, vector};

use super::bus::Bus;
use crate::Exit;

/// True if the VMM debugs the guest and this exception is its own.
pub(super) fn intercept(bus: &mut Bus, cpu: &CpuState, exception: Exception) -> bool {
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
            pc: super::linear_rip(cpu),
            dr6: dr::DR6_FIXED1 | cpu.fault_dr6,
            dr7: cpu.dr7,
        });
    }
    wanted
}
