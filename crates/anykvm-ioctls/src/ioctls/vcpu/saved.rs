//! Parts of a vCPU's state that kvm-ioctls reaches by raw addresses only: what a VMM saves and restores.
//!
//! Not in `kvm-ioctls`.

use kvm_bindings::{kvm_sregs2, kvm_xsave};

use super::VcpuFd;
use crate::ioctls::Result;
use crate::kvm_ioctls::refused;

impl VcpuFd {
    /// KVM_SET_XSAVE of a [`Self::get_xsave`] image, which is all that is read.
    ///
    /// # Errors
    ///
    /// EINVAL for state components that the vCPU has not.
    pub fn restore_xsave(&self, xsave: &kvm_xsave) -> Result<()> {
        let vcpu = self.object()?.hypervisor();
        vcpu.set_xsave(xsave).map_err(refused)
    }

    /// KVM_GET_SREGS2.
    ///
    /// # Errors
    ///
    /// ENOTTY or EBADF when this is not a vCPU.
    pub fn get_sregs2(&self) -> Result<kvm_sregs2> {
        let vcpu = self.object()?.hypervisor();
        vcpu.get_sregs2().map_err(refused)
    }

    /// KVM_SET_SREGS2.
    ///
    /// # Errors
    ///
    /// EINVAL for a state that cannot be.
    pub fn set_sregs2(&self, sregs: &kvm_sregs2) -> Result<()> {
        let vcpu = self.object()?.hypervisor();
        vcpu.set_sregs2(sregs).map_err(refused)
    }

    /// KVM_VCPU_TSC_OFFSET: what the guest's TSC has more than the host's, after scaling.
    ///
    /// # Errors
    ///
    /// ENOTTY or EBADF when this is not a vCPU.
    pub fn tsc_offset(&self) -> Result<u64> {
        let vcpu = self.object()?.hypervisor();
        vcpu.tsc_offset().map_err(refused)
    }

    /// Sets KVM_VCPU_TSC_OFFSET.
    ///
    /// # Errors
    ///
    /// ENOTTY or EBADF when this is not a vCPU.
    pub fn set_tsc_offset(&self, offset: u64) -> Result<()> {
        let vcpu = self.object()?.hypervisor();
        vcpu.set_tsc_offset(offset).map_err(refused)
    }
}
