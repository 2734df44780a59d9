//! Kernel image formats: recognising them, checking that they are whole, loading them.

mod signature;

use std::fs;
use std::io::Cursor;
use std::path::Path;

use linux_loader::loader::bootparam::setup_header;
use linux_loader::loader::elf::{Elf, PvhBootCapability};
use linux_loader::loader::{BzImage, KernelLoader};
use vm_memory::GuestAddress;

use super::Entry;
use crate::error::BootError;
use crate::layout::HIGH_RAM;
use crate::memory::GuestMemory;

/// Offsets in a bzImage, from `boot.rst`.
mod spec {
    /// `setup_sects`: 512-byte sectors of real-mode code, 0 means 4.
    pub(super) const SETUP_SECTS: usize = 0x1f1;
    /// `syssize`: the protected-mode part in 16-byte units.
    pub(super) const SYSSIZE: usize = 0x1f4;
    /// "HdrS".
    pub(super) const MAGIC: usize = 0x202;
    /// `xloadflags`.
    pub(super) const XLF_KERNEL_64: u16 = 1;
    /// Offset of the 64-bit entry point in the protected-mode part.
    pub(super) const ENTRY_64: u64 = 0x200;
    /// ELF `e_machine` of x86-64.
    pub(super) const EM_X86_64: u16 = 62;
}

/// A kernel file that was read and recognised.
#[derive(Debug)]
pub(crate) struct Image {
    bytes: Vec<u8>,
    format: Format,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Format {
    BzImage,
    Elf,
}

/// The kernel that [`Image::load`] has put into memory.
#[derive(Debug)]
pub(super) struct Loaded {
    pub(super) entry: Entry,
    pub(super) header: Option<setup_header>,
    /// The first address behind what the kernel needs before it manages its own memory.
    pub(super) end: u64,
    /// Highest address that an initrd byte may have.
    pub(super) initrd_max: u64,
}

impl Image {
    /// Reads `path`. The error says why the file is no x86 kernel.
    pub(crate) fn open(path: &Path) -> Result<Self, BootError> {
        let bytes = fs::read(path).map_err(|source| BootError::Unreadable {
            what: "kernel",
            path: path.into(),
            source,
        })?;
        let format = recognise(&bytes).map_err(|reason| bad(path, reason))?;
        Ok(Self { bytes, format })
    }

    /// Returns the maximum length of the command line, without its NUL.
    pub(super) fn cmdline_limit(&self) -> usize {
        let limit = match self.format {
            Format::BzImage => u32_at(&self.bytes, 0x238).unwrap_or(0),
            Format::Elf => 2047,
        };
        if limit == 0 { 255 } else { limit as usize }
    }

    /// Copies the kernel into memory.
    pub(super) fn load(
        &self,
        memory: &GuestMemory,
        path: &Path,
        mem_size: u64,
    ) -> Result<Loaded, BootError> {
        let mut file = Cursor::new(&self.bytes);
        match self.format {
            Format::BzImage => {
                let end = self.bzimage_end();
                check_fits(end, mem_size)?;
                let load = GuestAddress(HIGH_RAM);
                let result = BzImage::load(memory, Some(load), &mut file, None)
                    .map_err(|e| bad(path, e.to_string()))?;
                let header = result
                    .setup_header
                    .ok_or_else(|| bad(path, "no setup header".into()))?;
                let xloadflags = header.xloadflags;
                let entry = if xloadflags & spec::XLF_KERNEL_64 != 0 {
                    Entry::Long {
                        rip: HIGH_RAM + spec::ENTRY_64,
                    }
                } else {
                    Entry::Protected { eip: HIGH_RAM }
                };
                let initrd_max = match header.initrd_addr_max {
                    0 => 0x37ff_ffff,
                    max => u64::from(max),
                };
                Ok(Loaded {
                    entry,
                    header: Some(header),
                    end,
                    initrd_max,
                })
            }
            Format::Elf => {
                check_fits(self.elf_end(), mem_size)?;
                let result = Elf::load(memory, None, &mut file, None)
                    .map_err(|e| bad(path, e.to_string()))?;
                let entry = match result.pvh_boot_cap {
                    PvhBootCapability::PvhEntryPresent(eip) => Entry::Pvh { eip: eip.0 },
                    _ => Entry::Long {
                        rip: result.kernel_load.0,
                    },
                };
                Ok(Loaded {
                    entry,
                    header: None,
                    end: result.kernel_end,
                    initrd_max: 0x7fff_ffff,
                })
            }
        }
    }

    /// Returns the first address that a bzImage's decompressor does not use: `pref_address` + `init_size`.
    fn bzimage_end(&self) -> u64 {
        let file_end = HIGH_RAM + self.bytes.len() as u64;
        let pref_address = u64::from(u32_at(&self.bytes, 0x258).unwrap_or(0));
        let init_size = u64::from(u32_at(&self.bytes, 0x260).unwrap_or(0));
        file_end.max(pref_address + init_size)
    }

    /// Returns the highest end of a loadable segment.
    fn elf_end(&self) -> u64 {
        let phoff = u64_at(&self.bytes, 0x20).unwrap_or(0);
        let phnum = u64::from(u16_at(&self.bytes, 0x38).unwrap_or(0));
        (0..phnum)
            .filter_map(|i| {
                let at = usize::try_from(phoff.checked_add(i * 56)?).ok()?;
                let is_load = u32_at(&self.bytes, at)? == 1;
                let paddr = u64_at(&self.bytes, at.checked_add(0x18)?)?;
                let memsz = u64_at(&self.bytes, at.checked_add(0x28)?)?;
                is_load.then(|| paddr.saturating_add(memsz))
            })
            .max()
            .unwrap_or(0)
    }
}

fn check_fits(end: u64, mem_size: u64) -> Result<(), BootError> {
    if end <= mem_size {
        return Ok(());
    }
    Err(BootError::MemoryTooSmall {
        have_mib: mem_size >> 20,
        need_mib: (end >> 20).saturating_add(16),
        what: "this kernel",
    })
}

/// Returns the format. The error is a sentence that says why the file cannot be booted.
fn recognise(bytes: &[u8]) -> Result<Format, String> {
    if bytes.starts_with(b"\x7fELF") {
        return recognise_elf(bytes);
    }
    if bytes.get(spec::MAGIC..spec::MAGIC + 4) != Some(b"HdrS") {
        return Err(if bytes.len() < 1024 {
            format!("not a kernel: the file has only {} bytes", bytes.len())
        } else {
            "not an x86 kernel: neither a bzImage nor an ELF vmlinux".into()
        });
    }
    let version = u16_at(bytes, 0x206).unwrap_or(0);
    let loadflags = bytes.get(0x211).copied().unwrap_or(0);
    if version < 0x206 || loadflags & 1 == 0 {
        return Err(format!(
            "boot protocol {}.{:02} is too old, or this is a zImage",
            version >> 8,
            version & 0xff
        ));
    }
    let setup_sects = match bytes.get(spec::SETUP_SECTS) {
        Some(0) | None => 4,
        Some(n) => usize::from(*n),
    };
    let syssize = u32_at(bytes, spec::SYSSIZE).unwrap_or(0) as usize;
    let need = (setup_sects + 1) * 512 + syssize * 16;
    if syssize == 0 {
        return Err("corrupted: the header gives the kernel no size".into());
    }
    if bytes.len() < need {
        return Err(format!(
            "truncated: {} of {need} bytes are there",
            bytes.len()
        ));
    }
    check_payload(bytes, (setup_sects + 1) * 512)?;
    signature::check(bytes)?;
    Ok(Format::BzImage)
}

/// Checks that the compressed kernel lies inside the file, and begins with a known magic number.
fn check_payload(bytes: &[u8], protected_mode: usize) -> Result<(), String> {
    const MAGICS: [&[u8]; 8] = [
        b"\x1f\x8b",
        b"BZh",
        b"\x5d\x00\x00",
        b"\xfd7zXZ",
        b"\x89LZO",
        b"\x02\x21\x4c\x18",
        b"\x28\xb5\x2f\xfd",
        b"\x7fELF",
    ];
    let version = u16_at(bytes, 0x206).unwrap_or(0);
    if version < 0x208 {
        return Ok(());
    }
    let offset = u32_at(bytes, 0x248).unwrap_or(0) as usize;
    let len = u32_at(bytes, 0x24c).unwrap_or(0) as usize;
    let start = protected_mode.saturating_add(offset);
    let payload = bytes.get(start..start.saturating_add(len));
    match payload {
        Some(payload) if MAGICS.iter().any(|magic| payload.starts_with(magic)) => Ok(()),
        _ => Err("corrupted: there is no compressed kernel where the header says".into()),
    }
}

fn recognise_elf(bytes: &[u8]) -> Result<Format, String> {
    let is_64_bit = bytes.get(4) == Some(&2);
    let machine = u16_at(bytes, 0x12).unwrap_or(0);
    if !is_64_bit || machine != spec::EM_X86_64 {
        return Err("not an x86-64 kernel: an ELF file for another machine (32-bit x86 kernels boot as bzImage)".into());
    }
    // vmlinux is of the type ET_EXEC. A shared object or a module is not a kernel.
    if u16_at(bytes, 0x10) != Some(2) {
        return Err("not a kernel: an ELF file, but no executable".into());
    }
    let phoff = u64_at(bytes, 0x20).unwrap_or(0);
    let phnum = u64::from(u16_at(bytes, 0x38).unwrap_or(0));
    for i in 0..phnum {
        let end = usize::try_from(phoff.saturating_add(i * 56))
            .ok()
            .and_then(|at| {
                let offset = u64_at(bytes, at.checked_add(0x08)?)?;
                let filesz = u64_at(bytes, at.checked_add(0x20)?)?;
                offset.checked_add(filesz)
            });
        if end.is_none_or(|end| end > bytes.len() as u64) {
            return Err("truncated: a segment lies beyond the end of the file".into());
        }
    }
    if phnum == 0 {
        return Err("not a kernel: an ELF file without segments".into());
    }
    Ok(Format::Elf)
}

fn bad(path: &Path, reason: String) -> BootError {
    BootError::BadKernel {
        path: path.into(),
        reason,
    }
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    let field = bytes.get(at..at.checked_add(2)?)?;
    Some(u16::from_le_bytes(field.try_into().ok()?))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    let field = bytes.get(at..at.checked_add(4)?)?;
    Some(u32::from_le_bytes(field.try_into().ok()?))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    let field = bytes.get(at..at.checked_add(8)?)?;
    Some(u64::from_le_bytes(field.try_into().ok()?))
}

#[cfg(test)]
mod tests;
