//! The cache of roots that a guest shares: docs/paravirt.md, "Address spaces that are kept".
//!
//! Here is what the guest and the hypervisor agree on: versions, and how many roots. The MMU has
//! the roots ([`mmu::RootArea`]).

use mmu::RootArea;
use x86_cpu::CpuState;

use super::Bus;
use crate::{
    system::own_cpuid::{self, ROOT_CACHE, VERSION},
    vm::VmState,
};

/// The area is in use.
const ENABLE: u64 = 1;
/// Bits 1 to 11 are reserved: the area is a page.
const RESERVED: u64 = 0xffe;
/// Offsets in the area.
const GUEST_VERSION: u64 = 0;
const HOST_VERSION: u64 = 4;
const SIZE: u64 = 8;
const ENTRIES: u64 = 12;
const STATUS: u64 = 16;
const FIRST_ENTRY: u64 = own_cpuid::FIRST_ENTRY as u64;
const ENTRY: u64 = own_cpuid::ENTRY as u64;
/// Where in an entry the word is that says whether the root is kept.
const STATE: u64 = 8;
/// Why nothing is kept: [`STATUS`].
const TOO_NEW: u32 = 1;
const TOO_SMALL: u32 = 2;

/// A vCPU's part.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::vcpu) struct RootCache {
    msr: u64,
    /// The VMM has set it: the area is looked at when the guest runs, as its memory may come later.
    is_restored: bool,
}

impl Bus {
    /// The vCPU's share of KVM_SET_NR_MMU_PAGES has changed.
    pub(in crate::vcpu) fn follow_mmu_pages(&mut self, cpu: &CpuState) {
        let vcpus = self.vm.vcpus().len();
        if let Some(pages) = self.vm.mmu_pages_of_vcpu(vcpus) {
            self.mmu.set_budget(cpu, pages);
        }
    }

    /// CPUID promises it.
    pub(in crate::vcpu) fn has_root_cache(&self) -> bool {
        crate::vcpu::cpuid::own_features(&self.cpuid) & ROOT_CACHE != 0
    }

    pub(in crate::vcpu) const fn root_cache_msr(&self) -> u64 {
        self.pv.roots.msr
    }

    /// WRMSR, or KVM_SET_MSRS; false is #GP.
    pub(in crate::vcpu) fn set_root_cache_msr(
        &mut self,
        cpu: &CpuState,
        value: u64,
        host: bool,
    ) -> bool {
        if value & RESERVED != 0 || value & ENABLE == 0 && value != 0 {
            return false;
        }
        let gpa = value & !ENABLE;
        if value == 0 {
            self.pv.roots = RootCache::default();
            self.keep_roots(cpu, None);
            return true;
        }
        if host {
            self.pv.roots = RootCache {
                msr: value,
                is_restored: true,
            };
            return true;
        }
        if self.mmu.table().host_page(0, gpa, true).is_none() {
            return false;
        }
        let agreed = self.agree(gpa);
        self.pv.roots = RootCache {
            msr: if agreed.is_some() { value } else { 0 },
            is_restored: false,
        };
        self.keep_roots(cpu, agreed);
        true
    }

    /// Before the guest runs: what the VMM has restored comes into force. Where nothing can be
    /// agreed on any more, loads may have bit 63 set all the same, and flush.
    pub(in crate::vcpu) fn restore_root_cache(&mut self, cpu: &CpuState) {
        if std::mem::take(&mut self.pv.roots.is_restored) {
            let area = self.agree(self.pv.roots.msr & !ENABLE);
            self.keep_roots(cpu, Some(area.unwrap_or_default()));
        }
    }

    fn keep_roots(&mut self, cpu: &CpuState, area: Option<RootArea>) {
        let shared = area.filter(|a| a.entries != 0);
        self.shared
            .set_root_area(shared.map_or(0, |a| a.gpa - FIRST_ENTRY + u64::from(a.entries)));
        if self.mmu.has_promise() || area.is_some() {
            self.mmu.set_promise(cpu, area);
        }
    }

    /// Reads what the guest says in its area, and answers.
    fn agree(&self, gpa: u64) -> Option<RootArea> {
        let memory = &self.vm.memory;
        let read = |at: u64| memory.read_gpa(gpa + at, 4).map(|v| v as u32);
        let write = |at: u64, value: u32| memory.write_gpa(gpa + at, 4, value.into());
        let (version, size, wanted) = (read(GUEST_VERSION)?, read(SIZE)?, read(ENTRIES)?);
        let room = u64::from(size.min(0x1000)).saturating_sub(FIRST_ENTRY) / ENTRY;
        let entries = wanted.min(room as u32).min(RootArea::MAX_ENTRIES.into());
        let status = match version {
            1..=VERSION if entries == 0 => TOO_SMALL,
            1..=VERSION => 0,
            _ => TOO_NEW,
        };
        let entries = if status == 0 { entries } else { 0 };
        write(HOST_VERSION, VERSION)?;
        write(SIZE, FIRST_ENTRY as u32 + ENTRY as u32 * entries)?;
        write(ENTRIES, entries)?;
        write(STATUS, status)?;
        (status == 0).then_some(RootArea {
            gpa: gpa + FIRST_ENTRY,
            entries: entries as u16,
        })
    }
}

/// The page directory at `root` is one no more: no vCPU keeps anything of it when it is loaded next.
/// How many had it.
pub(super) fn free_root(vm: &VmState, root: u64) -> u64 {
    let mut count = 0;
    for vcpu in vm.vcpus().iter() {
        let area = vcpu.root_area();
        let first = (area & !0xfff) + FIRST_ENTRY;
        for entry in (0..area & 0xfff).map(|n| first + ENTRY * n) {
            let is_it = vm.memory.read_gpa(entry, 8) == Some(root.into())
                && vm.memory.read_gpa(entry + STATE, 4).is_some_and(|s| s != 0);
            if is_it && vm.memory.write_gpa(entry + STATE, 4, 0).is_some() {
                count += 1;
            }
        }
    }
    count
}
