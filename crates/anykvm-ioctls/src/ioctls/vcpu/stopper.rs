//! Ending KVM_RUN from another thread without a signal handler.
//!
//! Not in `kvm-ioctls`: a kernel's KVM_RUN is left only by a signal, whose handler sets
//! `immediate_exit` in the run page.

use std::sync::Arc;

use kvm_abi::Vcpu;

use super::VcpuFd;
use crate::ioctls::Result;

/// Ends KVM_RUN of one vCPU; may be used from any thread.
#[derive(Debug, Clone)]
pub struct VcpuStopper(Arc<Vcpu>);

impl VcpuStopper {
    /// Sets kvm_run.immediate_exit and wakes the vCPU: KVM_RUN fails with EINTR, at once if it
    /// runs, and whenever it is called until [`VcpuFd::set_kvm_immediate_exit`] clears the field.
    pub fn stop(&self) {
        self.0.stop();
    }

    /// Makes the vCPU's KVM_RUN fail with EINTR soon, or the next one if it is in none. May be
    /// called in a signal handler; a handler that runs on the vCPU's own thread can call
    /// [`crate::interrupt_current_thread`] instead.
    pub fn kick(&self) {
        self.0.hypervisor().kick();
    }
}

impl VcpuFd {
    /// What KVM_GET_STATS_FD shows, by name: nothing that `kvm-ioctls` has.
    ///
    /// # Errors
    ///
    /// ENOTTY or EBADF when this is not a vCPU.
    pub fn statistics(&self) -> Result<Vec<(&'static str, u64)>> {
        Ok(self.object()?.hypervisor().statistics())
    }

    /// A handle for other threads.
    ///
    /// # Errors
    ///
    /// ENOTTY or EBADF when this is not a vCPU.
    pub fn stopper(&self) -> Result<VcpuStopper> {
        Ok(VcpuStopper(Arc::clone(self.object()?)))
    }
}
