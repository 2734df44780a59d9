//! `struct boot_params`: the setup header back to the kernel, e820 map, initrd and command line.

use linux_loader::loader::bootparam::{boot_e820_entry, boot_params, setup_header};
use vm_memory::{Bytes, GuestAddress};

use super::{BootInfo, Placed};
use crate::error::BootError;
use crate::layout::{CMDLINE, EBDA, HIGH_RAM, HOLE_END, PCI_ECAM, PCI_ECAM_LEN};
use crate::memory::{GuestMemory, ram_ranges};

/// e820 type of usable RAM.
pub(super) const E820_RAM: u32 = 1;
/// e820 type of memory that the kernel must leave alone.
pub(super) const E820_RESERVED: u32 = 2;

/// Returns the memory map as (start, length, e820 type).
pub(super) fn memory_map(mem_size: u64) -> Vec<(u64, u64, u32)> {
    let mut map = vec![(0, EBDA, E820_RAM), (EBDA, HIGH_RAM - EBDA, E820_RESERVED)];
    for (start, len) in ram_ranges(mem_size) {
        // The first MiB has entries of its own.
        let skip = HIGH_RAM.saturating_sub(start).min(len);
        if len > skip {
            map.push((start + skip, len - skip, E820_RAM));
        }
    }
    // Kernels use ECAM only where it is reserved.
    let ecam = (u64::from(PCI_ECAM), u64::from(PCI_ECAM_LEN), E820_RESERVED);
    let at = map.iter().position(|(start, ..)| *start >= HOLE_END);
    map.insert(at.unwrap_or(map.len()), ecam);
    map
}

/// Writes the zero page.
pub(super) fn write(
    memory: &GuestMemory,
    at: u64,
    header: setup_header,
    info: &BootInfo<'_>,
    initrd: Placed,
) -> Result<(), BootError> {
    let mut params = boot_params {
        hdr: header,
        acpi_rsdp_addr: info.rsdp,
        ..Default::default()
    };
    // 0xff stands for a boot loader without an assigned number.
    params.hdr.type_of_loader = 0xff;
    params.hdr.cmd_line_ptr = low32(CMDLINE);
    params.hdr.cmdline_size = u32::try_from(info.cmdline.len()).unwrap_or(0);
    params.hdr.ramdisk_image = low32(initrd.start);
    params.hdr.ramdisk_size = low32(initrd.len);
    let map = memory_map(info.mem_size);
    for (entry, (addr, size, type_)) in params.e820_table.iter_mut().zip(&map) {
        *entry = boot_e820_entry {
            addr: *addr,
            size: *size,
            r#type: *type_,
        };
    }
    params.e820_entries = u8::try_from(map.len()).unwrap_or(0);
    memory
        .write_obj(params, GuestAddress(at))
        .map_err(BootError::guest("the boot parameters"))
}

/// Returns an address as 32 bits. All addresses that are passed here lie below 4 GiB (see `layout`).
pub(super) fn low32(value: u64) -> u32 {
    u32::try_from(value).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_map_covers_all_ram_once_and_is_sorted() {
        for mem in [2u64 << 20, 512 << 20, 3 << 30, 6 << 30] {
            let map = memory_map(mem);
            let ram: u64 = map.iter().filter(|e| e.2 == E820_RAM).map(|e| e.1).sum();
            assert_eq!(ram, mem - (HIGH_RAM - EBDA));
            for pair in map.windows(2) {
                assert!(pair[0].0 + pair[0].1 <= pair[1].0, "{map:x?}");
            }
        }
    }
}
