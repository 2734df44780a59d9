//! KVM_GET_MP_STATE, KVM_GET_LAPIC and their counterparts: a vCPU's state as one processor of several.

use kvm_bindings::*;

use super::Vcpu;
use crate::{Error, Result};

impl Vcpu {
    /// KVM_GET_MP_STATE.
    pub fn get_mp_state(&self) -> Result<kvm_mp_state> {
        Ok(kvm_mp_state {
            mp_state: self.lock().mp_state,
        })
    }
    /// KVM_SET_MP_STATE. Without an in-kernel LAPIC only RUNNABLE exists. INIT and start-up IPIs wait for the end of
    /// SMM, so the states that they lead to are EINVAL in SMM and while an SMI is pending.
    pub fn set_mp_state(&self, state: kvm_mp_state) -> Result<()> {
        let inner = &mut *self.lock();
        let events = &inner.cpu.events;
        if (events.in_smm || events.smi_pending)
            && matches!(
                state.mp_state,
                KVM_MP_STATE_INIT_RECEIVED | KVM_MP_STATE_SIPI_RECEIVED
            )
        {
            return Err(Error::InvalidArgument);
        }
        match state.mp_state {
            KVM_MP_STATE_RUNNABLE => {}
            KVM_MP_STATE_UNINITIALIZED | KVM_MP_STATE_INIT_RECEIVED | KVM_MP_STATE_HALTED
                if inner.bus.has_lapic() => {}
            KVM_MP_STATE_SIPI_RECEIVED if inner.bus.has_lapic() => {
                inner.mp_state = KVM_MP_STATE_INIT_RECEIVED;
                inner.startup(self.shared.sipi_page());
                return Ok(());
            }
            _ => return Err(Error::InvalidArgument),
        }
        inner.mp_state = state.mp_state;
        Ok(())
    }
    /// KVM_GET_LAPIC: EINVAL without an in-kernel LAPIC.
    pub fn get_lapic(&self) -> Result<kvm_lapic_state> {
        let inner = self.lock();
        if !inner.bus.has_lapic() {
            return Err(Error::InvalidArgument);
        }
        let format = inner.bus.vm.options.has_x2apic_format();
        let saved = self.shared.lapic().save(inner.bus.now(), format);
        let mut out = kvm_lapic_state::default();
        for (to, from) in out.regs.iter_mut().zip(saved.regs) {
            *to = from as std::ffi::c_char;
        }
        Ok(out)
    }
    /// KVM_SET_LAPIC: EINVAL without an in-kernel LAPIC.
    pub fn set_lapic(&self, state: &kvm_lapic_state) -> Result<()> {
        let inner = &mut *self.lock();
        if !inner.bus.has_lapic() {
            return Err(Error::InvalidArgument);
        }
        let mut saved = irqchip::LapicState::default();
        for (to, from) in saved.regs.iter_mut().zip(state.regs) {
            *to = from as u8;
        }
        let now = inner.bus.now();
        self.shared
            .lapic()
            .restore(&saved, now, inner.bus.vm.options.has_x2apic_format())
            .map_err(|_| Error::InvalidArgument)?;
        if !self.shared.lapic().has_own_id() {
            inner.bus.vm.note_renumbered();
        }
        inner.bus.lapic_changed();
        inner.bus.update_timer();
        inner.bus.recheck = true;
        Ok(())
    }
}
