//! A vCPU's MMU with some RAM, and the means to build page tables in it.

#![allow(dead_code, reason = "each test uses part of it")]
#![allow(clippy::unwrap_used, reason = "only tests use it")]

use std::sync::Arc;

use guest_memory::{GuestMemory, MemslotError, SlotConfig};
use host::Mapping;
use mmu::{Miss, Mmu};
use x86_cpu::{CpuState, Feature, Flush, Privilege::Current};
use x86_defs::control::{cr0, cr4, efer};

pub(crate) const RAM: u64 = 16 << 20;

pub(crate) struct Machine {
    pub(crate) mmu: Mmu,
    pub(crate) cpu: CpuState,
    pub(crate) memory: Arc<GuestMemory>,
    pub(crate) ram: Mapping,
}

pub(crate) fn slot(number: u32, gpa: u64, size: u64, hva: u64, flags: u32) -> SlotConfig {
    SlotConfig {
        slot: number,
        flags,
        gpa,
        size,
        hva,
    }
}

impl Machine {
    /// Without paging.
    pub(crate) fn new() -> Self {
        Self::with_flags(0)
    }

    pub(crate) fn with_flags(flags: u32) -> Self {
        let memory = GuestMemory::new();
        let ram = Mapping::anonymous(RAM as usize).unwrap();
        memory
            .set_slot(slot(0, 0, RAM, ram.as_ptr() as u64, flags))
            .unwrap();
        let mut cpu = CpuState::default();
        cpu.features.maxphyaddr = 40;
        for f in [Feature::Pdpe1gb, Feature::Pse36, Feature::Lm, Feature::Nx] {
            cpu.features.set(f, true);
        }
        cpu.cr0 |= cr0::PE;
        Self {
            mmu: Mmu::new(Arc::clone(&memory)),
            cpu,
            memory,
            ram,
        }
    }

    /// With 4-level paging from the given root.
    pub(crate) fn long_mode(root: u64) -> Self {
        let mut m = Self::new();
        m.cpu.cr0 |= cr0::PG | cr0::WP;
        m.cpu.cr4 |= cr4::PAE | cr4::PGE;
        m.cpu.efer |= efer::LME | efer::LMA | efer::NXE;
        m.cpu.cr3 = root;
        m.cpu.seg[x86_defs::reg::CS].attr.0 |= x86_defs::segment::Attr::L;
        m.cpu.update_mode();
        m.reload();
        m
    }

    /// Another vCPU of the same VM, in the same state.
    pub(crate) fn second(&self) -> (Mmu, CpuState) {
        let mut mmu = Mmu::new(Arc::clone(&self.memory));
        mmu.set_root(&self.cpu);
        (mmu, self.cpu.clone())
    }

    /// After a change of control registers: as the VMM's KVM_SET_SREGS.
    pub(crate) fn reload(&mut self) {
        self.mmu.set_root(&self.cpu);
        self.mmu.flush(&self.cpu, Flush::All);
    }

    pub(crate) fn poke(&self, gpa: u64, size: usize, value: u64) {
        self.memory.write_gpa(gpa, size, value.into()).unwrap();
    }

    pub(crate) fn peek(&self, gpa: u64, size: usize) -> u64 {
        self.memory.read_gpa(gpa, size).unwrap() as u64
    }

    /// Maps one 4 KiB page in 4-level tables; tables are taken from `pool`.
    pub(crate) fn map(&self, root: u64, gva: u64, leaf: u64, pool: &mut u64) {
        let mut table = root;
        for level in [4, 3, 2] {
            let at = table + (gva >> (12 + 9 * (level - 1)) & 511) * 8;
            let mut entry = self.peek(at, 8);
            if entry & 1 == 0 {
                entry = *pool | 7;
                *pool += 4096;
                self.poke(at, 8, entry);
            }
            table = entry & 0x000f_ffff_ffff_f000;
        }
        self.poke(table + (gva >> 12 & 511) * 8, 8, leaf);
    }
}

/// Flag of a slot.
pub(crate) const LOG: u32 = 1;
/// Flag of a slot.
pub(crate) const READONLY: u32 = 2;

pub(crate) fn write(m: &mut Machine, gpa: u64, v: u64) -> Result<(), Miss> {
    m.mmu.write(&mut m.cpu, gpa, v, Current)
}

/// The bitmap of a slot, which is clean from now on.
pub(crate) fn harvest(memory: &GuestMemory, slot: u32) -> Result<Vec<u64>, MemslotError> {
    let mut bitmap = Vec::new();
    let show = |_, words: &[u64]| {
        bitmap.extend_from_slice(words);
        Ok::<(), ()>(())
    };
    memory.take_dirty(slot, show)?.0.unwrap();
    Ok(bitmap)
}

/// The bitmap, left as it is.
pub(crate) fn look(memory: &GuestMemory, slot: u32) -> Vec<u64> {
    let mut bitmap = Vec::new();
    let show = |_, words: &[u64]| {
        bitmap.extend_from_slice(words);
        Ok::<(), ()>(())
    };
    memory.peek_dirty(slot, show).unwrap().unwrap();
    bitmap
}

pub(crate) fn fetch(mmu: &mut Mmu, cpu: &mut CpuState, gva: u64) -> (u64, u32, [u8; 8]) {
    let page = mmu.code_page(cpu, gva).unwrap();
    let mut bytes = [0; 8];
    assert_eq!(mmu.code_bytes(cpu, gva, &mut bytes), Ok(8));
    (page.id, page.generation, bytes)
}
