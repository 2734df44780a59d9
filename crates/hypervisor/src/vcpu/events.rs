//! KVM_GET/SET_VCPU_EVENTS (KVM API document, 4.31 and 4.32).

use kvm_bindings::*;
use x86_cpu::{CpuState, PendingException, PendingInterrupt, Shadow};

use crate::{Error, Result, vm::options::Options};

pub(super) fn vcpu_events(cpu: &CpuState, options: &Options) -> kvm_vcpu_events {
    let exception_payload = options.has_exception_payload();
    let e = &cpu.events;
    let mut out = kvm_vcpu_events::default();
    if let Some(x) = e.exception {
        // Without KVM_CAP_EXCEPTION_PAYLOAD a pending exception is shown as injected.
        let injected = x.injected || !exception_payload;
        out.exception.injected = injected.into();
        out.exception.pending = (!injected).into();
        out.exception.nr = x.vector;
        out.exception.has_error_code = x.error_code.is_some().into();
        out.exception.error_code = x.error_code.unwrap_or(0);
        out.exception_has_payload = (x.payload.is_some() && !injected).into();
        out.exception_payload = if injected { 0 } else { x.payload.unwrap_or(0) };
    }
    if let Some(i) = e.interrupt {
        out.interrupt.injected = 1;
        out.interrupt.nr = i.vector;
        out.interrupt.soft = i.soft.into();
    }
    out.interrupt.shadow = match cpu.shadow {
        Shadow::None => 0,
        Shadow::Sti => KVM_X86_SHADOW_INT_STI as u8,
        Shadow::MovSs => KVM_X86_SHADOW_INT_MOV_SS as u8,
    };
    out.nmi.injected = e.nmi_injected.into();
    out.nmi.pending = e.nmi_pending;
    out.nmi.masked = e.nmi_masked.into();
    out.sipi_vector = 0;
    out.smi.smm = e.in_smm.into();
    out.smi.pending = e.smi_pending.into();
    out.smi.smm_inside_nmi = e.smm_inside_nmi.into();
    out.smi.latched_init = e.latched_init.into();
    out.flags =
        KVM_VCPUEVENT_VALID_NMI_PENDING | KVM_VCPUEVENT_VALID_SHADOW | KVM_VCPUEVENT_VALID_SMM;
    if exception_payload {
        out.flags |= KVM_VCPUEVENT_VALID_PAYLOAD;
    }
    if options.has_triple_fault_event() {
        out.triple_fault.pending = e.triple_fault.into();
        out.flags |= KVM_VCPUEVENT_VALID_TRIPLE_FAULT;
    }
    out
}

pub(super) fn set_vcpu_events(
    cpu: &mut CpuState,
    v: &kvm_vcpu_events,
    options: &Options,
) -> Result<()> {
    let known = KVM_VCPUEVENT_VALID_NMI_PENDING
        | KVM_VCPUEVENT_VALID_SIPI_VECTOR
        | KVM_VCPUEVENT_VALID_SHADOW
        | KVM_VCPUEVENT_VALID_SMM
        | KVM_VCPUEVENT_VALID_PAYLOAD
        | KVM_VCPUEVENT_VALID_TRIPLE_FAULT;
    let has_payload = v.flags & KVM_VCPUEVENT_VALID_PAYLOAD != 0;
    let has_triple_fault = v.flags & KVM_VCPUEVENT_VALID_TRIPLE_FAULT != 0;
    if v.flags & !known != 0
        || has_payload && !options.has_exception_payload()
        || has_triple_fault && !options.has_triple_fault_event()
    {
        return Err(Error::InvalidArgument);
    }
    let x = &v.exception;
    let pending = has_payload && x.pending != 0;
    if (x.injected != 0 || pending) && (x.nr > 31 || x.nr == 2) || pending && x.injected != 0 {
        return Err(Error::InvalidArgument);
    }
    let e = &mut cpu.events;
    e.exception = (x.injected != 0 || pending).then(|| PendingException {
        vector: x.nr,
        error_code: (x.has_error_code != 0).then_some(x.error_code),
        payload: (pending && v.exception_has_payload != 0).then_some(v.exception_payload),
        injected: x.injected != 0,
    });
    e.interrupt = (v.interrupt.injected != 0).then_some(PendingInterrupt {
        vector: v.interrupt.nr,
        soft: v.interrupt.soft != 0,
    });
    e.nmi_injected = v.nmi.injected != 0;
    if v.flags & KVM_VCPUEVENT_VALID_NMI_PENDING != 0 {
        e.nmi_pending = v.nmi.pending.min(2);
    }
    e.nmi_masked = v.nmi.masked != 0;
    if v.flags & KVM_VCPUEVENT_VALID_SIPI_VECTOR != 0 {
        e.sipi_vector = v.sipi_vector;
    }
    if v.flags & KVM_VCPUEVENT_VALID_SMM != 0 {
        e.in_smm = v.smi.smm != 0;
        e.smi_pending = v.smi.pending != 0;
        e.smm_inside_nmi = v.smi.smm_inside_nmi != 0;
        e.latched_init = v.smi.latched_init != 0;
    }
    if has_triple_fault {
        e.triple_fault = v.triple_fault.pending != 0;
    }
    if v.flags & KVM_VCPUEVENT_VALID_SHADOW != 0 {
        cpu.shadow = match u32::from(v.interrupt.shadow) {
            0 => Shadow::None,
            s if s & KVM_X86_SHADOW_INT_MOV_SS != 0 => Shadow::MovSs,
            _ => Shadow::Sti,
        };
    }
    Ok(())
}
