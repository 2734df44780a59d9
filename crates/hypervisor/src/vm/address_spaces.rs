//! The MMU of a new vCPU, and a new VM's memory: how dirty pages are harvested, `ANYKVM_DIRTY`.

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

/// A new VM's memory. `ANYKVM_DIRTY` is `lockless`, or for comparison `locked` or `everything`.
pub(super) fn new_memory() -> Arc<GuestMemory> {
    let memory = GuestMemory::new();
    memory.set_harvest(match std::env::var("ANYKVM_DIRTY").as_deref() {
        Ok("locked") => Harvest::Locked,
        Ok("everything") => Harvest::Everything,
        _ => Harvest::Lockless,
    });
    memory
}
