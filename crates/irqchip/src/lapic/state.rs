//! Save and restore: KVM_GET_LAPIC and KVM_SET_LAPIC.
//!
//! IA32_APIC_BASE and IA32_TSC_DEADLINE are not in the register page. They are saved as MSRs, and IA32_APIC_BASE must
//! be restored first.

use super::spec::{NR_REGS, reg};
use super::{Lapic, x2apic_ldr};
use crate::Now;

/// Content of `struct kvm_lapic_state`: the first KiB of the register page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct LapicState {
    /// Registers, little-endian, each at its MMIO offset.
    pub regs: [u8; NR_REGS * 16],
}

impl Default for LapicState {
    /// All zero, which is not a reset LAPIC: see [`Lapic::new`].
    fn default() -> Self {
        Self {
            regs: [0; NR_REGS * 16],
        }
    }
}

impl LapicState {
    /// One register, by MMIO offset divided by 16; 0 above the page.
    pub fn reg(&self, r: usize) -> u32 {
        self.regs
            .get(r * 16..r * 16 + 4)
            .map_or(0, |b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]))
    }
    pub(super) fn set_reg(&mut self, r: usize, value: u32) {
        if let Some(b) = self.regs.get_mut(r * 16..r * 16 + 4) {
            b.copy_from_slice(&value.to_le_bytes());
        }
    }
}

/// The state names another APIC id than the vCPU's; KVM's errno is EINVAL.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("lapic state has x2apic id {found}, the vcpu has {expected}")]
pub struct InvalidState {
    /// The id in the state.
    pub found: u32,
    /// The vCPU's id.
    pub expected: u32,
}

impl Lapic {
    /// KVM_GET_LAPIC. `x2apic_format` is KVM_X2APIC_API_USE_32BIT_IDS; without
    /// it the id of an x2APIC is stored in the top byte, as an xAPIC's.
    pub fn save(&self, now: Now, x2apic_format: bool) -> LapicState {
        let mut state = LapicState::default();
        for (r, &value) in self.regs.iter().enumerate() {
            state.set_reg(r, value);
        }
        state.set_reg(reg::PROCPRI, u32::from(self.ppr()));
        state.set_reg(reg::TMCCT, self.current_count(now));
        if self.is_x2apic() && !x2apic_format {
            state.set_reg(reg::ID, self.get(reg::ID) << 24);
        }
        state
    }

    /// KVM_SET_LAPIC: the timer goes on from the saved current count.
    pub fn restore(
        &mut self,
        state: &LapicState,
        now: Now,
        x2apic_format: bool,
    ) -> Result<(), InvalidState> {
        let mut id = state.reg(reg::ID);
        if self.is_x2apic() {
            let expected = self.config.vcpu_id;
            if !x2apic_format {
                // The id is read-only in x2APIC mode, so the state's is not used.
                id = expected;
            } else if id != expected {
                let found = id;
                return Err(InvalidState { found, expected });
            }
        }
        for (r, value) in self.regs.iter_mut().enumerate() {
            *value = state.reg(r);
        }
        self.set(reg::ID, id);
        if self.is_x2apic() {
            self.set(reg::LDR, x2apic_ldr(id));
        }
        self.set_version();
        let current = self.get(reg::TMCCT);
        self.set(reg::PROCPRI, 0);
        self.set(reg::TMCCT, 0);
        self.restore_timer(current, now);
        Ok(())
    }
}
