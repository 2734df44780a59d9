//! PVH: `hvm_start_info`, its module list (the initrd) and memory map.

use linux_loader::loader::elf::start_info::{
    hvm_memmap_table_entry, hvm_modlist_entry, hvm_start_info,
};
use vm_memory::{Bytes, GuestAddress};

use super::params::memory_map;
use super::{BootInfo, Placed};
use crate::error::BootError;
use crate::layout::CMDLINE;
use crate::memory::GuestMemory;

/// "xEn3" with the high bit of the E set.
const MAGIC: u32 = 0x336e_c578;
const MODLIST_OFFSET: u64 = 0x40;
const MEMMAP_OFFSET: u64 = 0x80;
const MEMMAP_ENTRY_LEN: u64 = 24;

/// Writes all three structures, from `at` on.
pub(super) fn write(
    memory: &GuestMemory,
    at: u64,
    info: &BootInfo<'_>,
    initrd: Placed,
) -> Result<(), BootError> {
    let what = "the PVH start info";
    let map = memory_map(info.mem_size);
    let start_info = hvm_start_info {
        magic: MAGIC,
        // Version 1 has the memory map.
        version: 1,
        nr_modules: u32::from(initrd.len > 0),
        modlist_paddr: at + MODLIST_OFFSET,
        cmdline_paddr: CMDLINE,
        rsdp_paddr: info.rsdp,
        memmap_paddr: at + MEMMAP_OFFSET,
        memmap_entries: u32::try_from(map.len()).unwrap_or(0),
        ..Default::default()
    };
    memory
        .write_obj(start_info, GuestAddress(at))
        .map_err(BootError::guest(what))?;
    let module = hvm_modlist_entry {
        paddr: initrd.start,
        size: initrd.len,
        ..Default::default()
    };
    memory
        .write_obj(module, GuestAddress(at + MODLIST_OFFSET))
        .map_err(BootError::guest(what))?;
    let mut entry_at = at + MEMMAP_OFFSET;
    for (addr, size, type_) in map {
        let entry = hvm_memmap_table_entry {
            addr,
            size,
            type_,
            reserved: 0,
        };
        memory
            .write_obj(entry, GuestAddress(entry_at))
            .map_err(BootError::guest(what))?;
        entry_at += MEMMAP_ENTRY_LEN;
    }
    Ok(())
}
