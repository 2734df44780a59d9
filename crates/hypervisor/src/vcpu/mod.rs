//! A virtual CPU: state, run loop and the bus through which it executes.

use kvm_bindings::*;

use crate::{Error, Result, RunInput, RunOutput};

/// A virtual CPU.
#[derive(Debug)]
pub struct Vcpu {}

impl Vcpu {
    /// KVM_RUN.
    pub fn run(&self, _input: RunInput<'_>) -> Result<RunOutput> {
        Err(Error::NotSupported)
    }
    /// Makes a running or halted vCPU look at immediate_exit soon.
    pub fn kick(&self) {}
    /// Size of [`Self::get_xsave2`]'s image in bytes.
    pub fn xsave2_size(&self) -> usize {
        4096
    }
    /// KVM_GET_XSAVE2.
    pub fn get_xsave2(&self) -> Result<Vec<u8>> {
        Err(Error::NotSupported)
    }
    /// KVM_GET_REGS.
    pub fn get_regs(&self) -> Result<kvm_regs> {
        Err(Error::NotSupported)
    }
    /// KVM_SET_REGS.
    pub fn set_regs(&self, _regs: &kvm_regs) -> Result<()> {
        Err(Error::NotSupported)
    }
    /// KVM_GET_SREGS.
    pub fn get_sregs(&self) -> Result<kvm_sregs> {
        Err(Error::NotSupported)
    }
    /// KVM_SET_SREGS.
    pub fn set_sregs(&self, _sregs: &kvm_sregs) -> Result<()> {
        Err(Error::NotSupported)
    }
    /// KVM_GET_SREGS2.
    pub fn get_sregs2(&self) -> Result<kvm_sregs2> {
        Err(Error::NotSupported)
    }
    /// KVM_SET_SREGS2.
    pub fn set_sregs2(&self, _sregs: &kvm_sregs2) -> Result<()> {
        Err(Error::NotSupported)
    }
    /// KVM_GET_FPU.
    pub fn get_fpu(&self) -> Result<kvm_fpu> {
        Err(Error::NotSupported)
    }
    /// KVM_SET_FPU.
    pub fn set_fpu(&self, _fpu: &kvm_fpu) -> Result<()> {
        Err(Error::NotSupported)
    }
    /// KVM_GET_MSRS: how many were read.
    pub fn get_msrs(&self, _entries: &mut [kvm_msr_entry]) -> Result<usize> {
        Err(Error::NotSupported)
    }
    /// KVM_SET_MSRS: how many were set.
    pub fn set_msrs(&self, _entries: &[kvm_msr_entry]) -> Result<usize> {
        Err(Error::NotSupported)
    }
    /// KVM_GET_CPUID2.
    pub fn get_cpuid2(&self) -> Result<Vec<kvm_cpuid_entry2>> {
        Err(Error::NotSupported)
    }
    /// KVM_SET_CPUID2.
    pub fn set_cpuid2(&self, _entries: &[kvm_cpuid_entry2]) -> Result<()> {
        Err(Error::NotSupported)
    }
    /// KVM_GET_LAPIC.
    pub fn get_lapic(&self) -> Result<kvm_lapic_state> {
        Err(Error::NotSupported)
    }
    /// KVM_SET_LAPIC.
    pub fn set_lapic(&self, _state: &kvm_lapic_state) -> Result<()> {
        Err(Error::NotSupported)
    }
    /// KVM_GET_MP_STATE.
    pub fn get_mp_state(&self) -> Result<kvm_mp_state> {
        Err(Error::NotSupported)
    }
    /// KVM_SET_MP_STATE.
    pub fn set_mp_state(&self, _state: kvm_mp_state) -> Result<()> {
        Err(Error::NotSupported)
    }
    /// KVM_GET_VCPU_EVENTS.
    pub fn get_vcpu_events(&self) -> Result<kvm_vcpu_events> {
        Err(Error::NotSupported)
    }
    /// KVM_SET_VCPU_EVENTS.
    pub fn set_vcpu_events(&self, _events: &kvm_vcpu_events) -> Result<()> {
        Err(Error::NotSupported)
    }
    /// KVM_GET_DEBUGREGS.
    pub fn get_debugregs(&self) -> Result<kvm_debugregs> {
        Err(Error::NotSupported)
    }
    /// KVM_SET_DEBUGREGS.
    pub fn set_debugregs(&self, _regs: &kvm_debugregs) -> Result<()> {
        Err(Error::NotSupported)
    }
    /// KVM_GET_XSAVE.
    pub fn get_xsave(&self) -> Result<kvm_xsave> {
        Err(Error::NotSupported)
    }
    /// KVM_SET_XSAVE.
    pub fn set_xsave(&self, _xsave: &kvm_xsave) -> Result<()> {
        Err(Error::NotSupported)
    }
    /// KVM_GET_XCRS.
    pub fn get_xcrs(&self) -> Result<kvm_xcrs> {
        Err(Error::NotSupported)
    }
    /// KVM_SET_XCRS.
    pub fn set_xcrs(&self, _xcrs: &kvm_xcrs) -> Result<()> {
        Err(Error::NotSupported)
    }
    /// KVM_INTERRUPT.
    pub fn interrupt(&self, _vector: u32) -> Result<()> {
        Err(Error::NotSupported)
    }
    /// KVM_NMI.
    pub fn nmi(&self) -> Result<()> {
        Err(Error::NotSupported)
    }
    /// KVM_SMI.
    pub fn smi(&self) -> Result<()> {
        Err(Error::NotSupported)
    }
    /// KVM_SET_GUEST_DEBUG.
    pub fn set_guest_debug(&self, _debug: &kvm_guest_debug) -> Result<()> {
        Err(Error::NotSupported)
    }
    /// KVM_TRANSLATE.
    pub fn translate(&self, _gva: u64) -> Result<kvm_translation> {
        Err(Error::NotSupported)
    }
    /// KVM_GET_TSC_KHZ.
    pub fn tsc_khz(&self) -> Result<u32> {
        Err(Error::NotSupported)
    }
    /// KVM_SET_TSC_KHZ.
    pub fn set_tsc_khz(&self, _khz: u32) -> Result<()> {
        Err(Error::NotSupported)
    }
    /// KVM_KVMCLOCK_CTRL.
    pub fn kvmclock_ctrl(&self) -> Result<()> {
        Err(Error::NotSupported)
    }
    /// KVM_SET_VAPIC_ADDR.
    pub fn set_vapic_addr(&self, _gpa: u64) -> Result<()> {
        Err(Error::NotSupported)
    }
    /// KVM_TPR_ACCESS_REPORTING.
    pub fn tpr_access_reporting(&self, _control: &mut kvm_tpr_access_ctl) -> Result<()> {
        Err(Error::NotSupported)
    }
    /// KVM_X86_SETUP_MCE.
    pub fn setup_mce(&self, _cap: u64) -> Result<()> {
        Err(Error::NotSupported)
    }
    /// KVM_X86_SET_MCE.
    pub fn set_mce(&self, _mce: &kvm_x86_mce) -> Result<()> {
        Err(Error::NotSupported)
    }
    /// KVM_ENABLE_CAP on the vCPU.
    pub fn enable_cap(&self, _cap: &kvm_enable_cap) -> Result<()> {
        Err(Error::NotSupported)
    }
}
