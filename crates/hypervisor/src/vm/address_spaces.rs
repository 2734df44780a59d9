//! Which way vCPUs keep translations: `ANYKVM_MMU`.

use std::sync::Arc;

use guest_memory::GuestMemory;
use mmu::{Mmu, Policy};
use x86_cpu::CpuState;

/// A new vCPU's MMU. `ANYKVM_MMU` is `tdp`, `shadow` or `auto`.
pub(super) fn new_mmu(memory: &Arc<GuestMemory>) -> Mmu {
    let policy = match std::env::var("ANYKVM_MMU").as_deref() {
        Ok("shadow") => Policy::Shadow,
        Ok("auto") => Policy::Auto,
        _ => Policy::Tdp,
    };
    let mut mmu = Mmu::new(Arc::clone(memory));
    mmu.set_policy(&CpuState::default(), policy);
    mmu
}
