//! Loads a kernel: which format the file has, where it goes, and how the first vCPU enters it.
//!
//! References: the kernel's `Documentation/arch/x86/boot.rst` (bzImage, 32- and 64-bit entry) and
//! Xen's PVH start-of-day ABI (ELF with a PHYS32_ENTRY note).

mod image;
mod params;
mod pvh;

use std::path::Path;

use linux_loader::loader::bootparam::setup_header;
use vm_memory::{Bytes, GuestAddress};

pub(crate) use image::Image;

use crate::error::BootError;
use crate::layout::{CMDLINE, CMDLINE_MAX, HIGH_RAM, HOLE_START, PVH_INFO, ZERO_PAGE};
use crate::memory::GuestMemory;

/// How the boot vCPU starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Entry {
    /// 64-bit mode, paging on, RSI = zero page.
    Long {
        /// First instruction.
        rip: u64,
    },
    /// 32-bit protected mode, paging off, ESI = zero page.
    Protected {
        /// First instruction.
        eip: u64,
    },
    /// 32-bit protected mode, paging off, EBX = `hvm_start_info`.
    Pvh {
        /// First instruction.
        eip: u64,
    },
}

/// What the kernel is told besides the memory map.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BootInfo<'a> {
    /// Kernel command line.
    pub(crate) cmdline: &'a str,
    /// The initramfs; may be empty.
    pub(crate) initrd: &'a [u8],
    /// `--mem`.
    pub(crate) mem_size: u64,
    /// Address of the RSDP.
    pub(crate) rsdp: u64,
}

/// Where the initramfs was put.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Placed {
    /// Guest physical address; 0 if there is no initramfs.
    pub(crate) start: u64,
    /// Length in bytes.
    pub(crate) len: u64,
}

/// Puts kernel, initramfs, command line and boot structures into guest memory.
pub(crate) fn load(
    memory: &GuestMemory,
    path: &Path,
    image: &Image,
    info: &BootInfo<'_>,
) -> Result<Entry, BootError> {
    let limit = image.cmdline_limit().min(CMDLINE_MAX - 1);
    if info.cmdline.len() > limit || info.cmdline.contains('\0') {
        return Err(BootError::Usage(format!(
            "the kernel command line has {} bytes; this kernel takes {limit}",
            info.cmdline.len()
        )));
    }
    memory
        .write_slice(info.cmdline.as_bytes(), GuestAddress(CMDLINE))
        .map_err(BootError::guest("the command line"))?;

    let loaded = image.load(memory, path, info.mem_size)?;
    let initrd = place_initrd(info, loaded.end, loaded.initrd_max)?;
    if initrd.len > 0 {
        memory
            .write_slice(info.initrd, GuestAddress(initrd.start))
            .map_err(BootError::guest("the initramfs"))?;
    }

    if let Entry::Pvh { .. } = loaded.entry {
        pvh::write(memory, PVH_INFO, info, initrd)?;
    } else {
        let header = loaded.header.unwrap_or_else(plain_header);
        params::write(memory, ZERO_PAGE, header, info, initrd)?;
    }
    Ok(loaded.entry)
}

/// Places the initramfs as high as the kernel accepts it, so that it is out of the decompressor's way.
fn place_initrd(info: &BootInfo<'_>, kernel_end: u64, max: u64) -> Result<Placed, BootError> {
    let len = info.initrd.len() as u64;
    if len == 0 {
        return Ok(Placed::default());
    }
    let top = info.mem_size.min(HOLE_START).min(max.saturating_add(1));
    match top.checked_sub(len).map(|start| start & !0xfff) {
        Some(start) if start >= kernel_end => Ok(Placed { start, len }),
        _ => Err(BootError::MemoryTooSmall {
            have_mib: info.mem_size >> 20,
            need_mib: (kernel_end.saturating_add(len) >> 20).saturating_add(2),
            what: "the kernel with its initramfs",
        }),
    }
}

/// Returns the setup header for a vmlinux, which has none itself.
fn plain_header() -> setup_header {
    setup_header {
        boot_flag: 0xaa55,
        header: 0x5372_6448,
        version: 0x20c,
        loadflags: 1,
        kernel_alignment: 0x100_0000,
        code32_start: u32::try_from(HIGH_RAM).unwrap_or(0),
        ..Default::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info(initrd: &[u8], mem_mib: u64) -> BootInfo<'_> {
        BootInfo {
            cmdline: "",
            initrd,
            mem_size: mem_mib << 20,
            rsdp: 0,
        }
    }

    #[test]
    fn initrd_goes_to_the_top_of_low_memory() {
        let initrd = vec![0; 5000];
        let placed = place_initrd(&info(&initrd, 64), 32 << 20, 0x7fff_ffff).unwrap();
        assert_eq!(placed.start, (64 << 20) - 8192);
        let placed = place_initrd(&info(&initrd, 6 << 10), 32 << 20, 0x7fff_ffff).unwrap();
        assert_eq!(placed.start, 0x8000_0000 - 8192);
    }

    #[test]
    fn initrd_that_does_not_fit_is_refused_with_a_size_that_would_do() {
        let initrd = vec![0; 8 << 20];
        let error = place_initrd(&info(&initrd, 36), 32 << 20, 0x7fff_ffff).unwrap_err();
        assert!(error.to_string().contains("--mem 42M"), "{error}");
        assert!(place_initrd(&info(&initrd, 42), 32 << 20, 0x7fff_ffff).is_ok());
    }
}
