//! PV EOI (KVM document "msr", MSR_KVM_PV_EOI_EN): the guest ends an interrupt by clearing a bit in its memory.
//!
//! The bit is set when an edge-triggered interrupt is injected while no other interrupt waits. Before the LAPIC's state
//! is used again the bit is taken back: if the guest has cleared it, the interrupt has ended, and the LAPIC is told
//! now.

use super::Bus;

/// Bit of the MSR: the guest uses PV EOI.
const ENABLE: u64 = 1;

/// PV EOI of a vCPU.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::vcpu) struct PvEoi {
    /// MSR_KVM_PV_EOI_EN.
    msr: u64,
    /// The bit in guest memory was set and not yet taken back.
    armed: bool,
}

impl Bus {
    pub(in crate::vcpu) const fn pv_eoi_msr(&self) -> u64 {
        self.pv.eoi.msr
    }
    /// WRMSR of MSR_KVM_PV_EOI_EN; false is #GP. As with KVM a guest whose LAPIC is the VMM's may enable it, and it has no effect.
    pub(in crate::vcpu) fn set_pv_eoi_msr(&mut self, value: u64) -> bool {
        if value & 2 != 0 {
            return false;
        }
        self.sync_lapic();
        self.pv.eoi.msr = value;
        true
    }
    /// Sets the bit in guest memory, if possible, after an interrupt of the LAPIC was injected.
    pub(in crate::vcpu) fn arm_pv_eoi(&mut self) {
        let msr = self.pv.eoi.msr;
        let Some(chips) = self.vm.chips().filter(|_| msr & ENABLE != 0) else {
            return;
        };
        let candidate = self
            .shared
            .lapic()
            .pv_eoi_candidate(|vector| chips.has_vector(vector));
        if candidate.is_some() {
            let set = self.vm.memory.rmw_gpa(msr & !ENABLE, 1, |v| v | 1);
            self.pv.eoi.armed = set.is_some();
        }
    }
    /// Takes over what the guest has told its LAPIC through memory. Called before the LAPIC's state is used.
    #[inline]
    pub(in crate::vcpu) fn sync_lapic(&mut self) {
        if self.pv.eoi.armed {
            self.take_pv_eoi();
        }
        self.take_shared_tpr();
    }
    #[cold]
    fn take_pv_eoi(&mut self) {
        self.pv.eoi.armed = false;
        let gpa = self.pv.eoi.msr & !ENABLE;
        let was = self.vm.memory.rmw_gpa(gpa, 1, |v| v & !1);
        if was.is_some_and(|v| v & 1 == 0) {
            // The interrupt is edge-triggered and comes from no chip's pin, so neither a chip nor the VMM needs to be
            // told.
            let _ = self.shared.lapic().eoi();
            self.is_quiet = false;
            self.recheck = true;
        }
    }
}
