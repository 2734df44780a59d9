//! A disk image that the firmware boots: an MBR, and one FAT partition with SYSLINUX, the kernel and the initramfs.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use super::{Setup, guest};
use crate::tool::tool;

const SECTOR: usize = 512;
/// First sector of the partition.
const START: usize = 2048;
/// Size of the partition in MiB.
const SIZE: usize = 64;

/// Writes the image into the case's folder.
pub(super) fn bootable(setup: &Setup) -> Result<PathBuf, String> {
    let partition = setup.dir.join("partition.img");
    let configuration = setup.dir.join("syslinux.cfg");
    write(&partition, &vec![0; SIZE << 20])?;
    write(
        &configuration,
        format!(
            "DEFAULT linux\nPROMPT 0\nSERIAL 0 115200\nLABEL linux\n KERNEL vmlinuz\n INITRD initrd\n APPEND {}\n",
            guest::COMMAND_LINE
        )
        .as_bytes(),
    )?;
    let hidden = START.to_string();
    tool(
        Command::new("mformat")
            .arg("-i")
            .arg(&partition)
            .args(["-F", "-H", &hidden, "::"]),
    )?;
    for (file, name) in [
        (&setup.kernel, "::vmlinuz"),
        (&setup.initrd, "::initrd"),
        (&configuration, "::syslinux.cfg"),
    ] {
        tool(
            Command::new("mcopy")
                .arg("-i")
                .arg(&partition)
                .arg(file)
                .arg(name),
        )?;
    }
    tool(Command::new("syslinux").arg("--install").arg(&partition))?;
    let mut image = read(Path::new("/usr/lib/SYSLINUX/mbr.bin"))?;
    image.resize(START * SECTOR, 0);
    image.extend(read(&partition)?);
    let sectors = ((SIZE << 20) / SECTOR) as u32;
    // The first entry of the partition table: active, FAT32 with LBA.
    let mut entry = vec![0x80, 0xfe, 0xff, 0xff, 0x0c, 0xfe, 0xff, 0xff];
    entry.extend_from_slice(&(START as u32).to_le_bytes());
    entry.extend_from_slice(&sectors.to_le_bytes());
    image[446..446 + entry.len()].copy_from_slice(&entry);
    image[510..512].copy_from_slice(&[0x55, 0xaa]);
    let path = setup.dir.join("boot.img");
    write(&path, &image)?;
    Ok(path)
}

fn read(path: &Path) -> Result<Vec<u8>, String> {
    fs::read(path).map_err(|e| format!("{}: {e}", path.display()))
}

fn write(path: &Path, content: &[u8]) -> Result<(), String> {
    fs::write(path, content).map_err(|e| format!("{}: {e}", path.display()))
}
