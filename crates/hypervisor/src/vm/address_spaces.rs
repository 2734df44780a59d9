//! The MMU of a new vCPU, and a VM's memory.

use std::sync::{Arc, atomic::Ordering};

use guest_memory::{GuestMemory, Harvest};
use mmu::Mmu;
use x86_cpu::CpuState;

use super::{Vm, VmState};
use crate::{Error, Result, shared::request};

/// A guest with less memory than that is small.
const SMALL: usize = 256 << 20;
/// Pages that the address spaces of a small guest's vCPU may take.
const SMALL_PAGES: usize = (36 << 20) / 4096;

impl Vm {
    /// KVM_SET_NR_MMU_PAGES: EINVAL below KVM's least. vCPUs have the pages in equal shares; one that runs
    /// gives up what is too much at its next poll.
    ///
    /// DEVIATION: a vCPU keeps four address spaces and two views whatever its share is (`mmu::Kept::LEAST_PAGES`).
    pub fn set_nr_mmu_pages(&self, pages: u32) -> Result<()> {
        const LEAST: u32 = 64;
        if pages < LEAST {
            return Err(Error::InvalidArgument);
        }
        self.state.options.mmu_pages.store(pages, Ordering::Relaxed);
        self.state.request_all(request::MMU_PAGES);
        Ok(())
    }

    /// KVM_GET_NR_MMU_PAGES; 0 before it is set: each vCPU has bounds of its own then.
    pub fn nr_mmu_pages(&self) -> u32 {
        self.state.options.mmu_pages.load(Ordering::Relaxed)
    }
}

impl VmState {
    /// The MMU of a vCPU that becomes one of so many.
    pub(super) fn new_mmu(&self, vcpus: usize) -> Mmu {
        let mut mmu = Mmu::new(Arc::clone(&self.memory));
        let cpu = CpuState::default();
        mmu.set_policy(&cpu, self.engine.translations);
        let of_small = || self.small_memory().map(|_| SMALL_PAGES);
        if let Some(pages) = self.mmu_pages_of_vcpu(vcpus).or_else(of_small) {
            mmu.set_budget(&cpu, pages);
        }
        mmu
    }

    /// A vCPU's share; none before KVM_SET_NR_MMU_PAGES.
    pub(crate) fn mmu_pages_of_vcpu(&self, vcpus: usize) -> Option<usize> {
        let set = self.options.mmu_pages.load(Ordering::Relaxed);
        let pages = Some(set).filter(|pages| *pages != 0);
        pages.map(|pages| pages as usize / vcpus.max(1))
    }

    /// Bytes of a guest's memory that are fewer than those for which the bounds of translated code and of address spaces are made.
    pub(crate) fn small_memory(&self) -> Option<usize> {
        let bytes = usize::try_from(self.memory.table().bytes()).ok()?;
        (bytes != 0 && bytes < SMALL).then_some(bytes)
    }
}

/// A new VM's memory.
pub(super) fn new_memory(harvest: Harvest) -> Arc<GuestMemory> {
    let memory = GuestMemory::new();
    memory.set_harvest(harvest);
    memory
}
