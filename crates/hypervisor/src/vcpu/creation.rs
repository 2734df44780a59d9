//! KVM_CREATE_VCPU, and what a vCPU is given at its creation.

use std::sync::Arc;

use guest_memory::{DirtyRing, DirtyRingMemory};

use super::Vcpu;
use crate::{Result, Vm, shared::request};

impl Vm {
    /// KVM_CREATE_VCPU: EEXIST for an id in use, EINVAL above KVM_CAP_MAX_VCPU_ID.
    pub fn create_vcpu(&self, id: u32) -> Result<Arc<Vcpu>> {
        let (shared, mmu) = self.state().add_vcpu(id)?;
        Ok(Arc::new(Vcpu::new(Arc::clone(self.state()), shared, mmu)))
    }
}

impl Vcpu {
    /// Sets the memory of the vCPU's dirty ring. Called before anything else is done with the vCPU.
    pub fn set_dirty_ring(&self, entries: u32, memory: Box<dyn DirtyRingMemory>) {
        let shared = Arc::downgrade(self.shared());
        let stop = move || {
            if let Some(vcpu) = shared.upgrade() {
                vcpu.request(request::RING);
            }
        };
        let ring = Arc::new(DirtyRing::new(entries, memory, Box::new(stop)));
        self.attach_dirty_ring(ring);
    }
}
