//! The MMU of a new vCPU, and a new VM's memory.

use std::sync::Arc;

use guest_memory::{GuestMemory, Harvest};
use mmu::{Mmu, Policy};
use x86_cpu::CpuState;

/// A new vCPU's MMU.
pub(super) fn new_mmu(memory: &Arc<GuestMemory>, policy: Policy) -> Mmu {
    let mut mmu = Mmu::new(Arc::clone(memory));
    mmu.set_policy(&CpuState::default(), policy);
    mmu
}

/// A new VM's memory.
pub(super) fn new_memory(harvest: Harvest) -> Arc<GuestMemory> {
    let memory = GuestMemory::new();
    memory.set_harvest(harvest);
    memory
}
