//! Image formats that are not raw disks. A file of such a format that is used as a raw disk is destroyed by the first
//! write.

use std::fs::File;
use std::os::unix::fs::FileExt;

/// The format among these that can be used.
pub(super) const QCOW2: &str = "a qcow2 image";

/// Formats with the bytes that a file has at an offset. LUKS is not among them: guests have it on raw disks.
const STARTS: [(&str, usize, &[u8]); 20] = [
    (QCOW2, 0, b"QFI\xfb"),
    ("a QED image", 0, b"QED\0"),
    ("a VMDK image", 0, b"KDMV"),
    ("a VMDK image", 0, b"COWD"),
    ("a VMDK image", 0, b"# Disk DescriptorFile"),
    ("a VDI image", 0x40, b"\x7f\x10\xda\xbe"),
    ("a VHDX image", 0, b"vhdxfile"),
    ("a VHD image", 0, b"conectix"),
    ("a Parallels image", 0, b"WithoutFreeSpace"),
    ("a Parallels image", 0, b"WithouFreSpacExt"),
    ("a Bochs image", 0, b"Bochs Virtual HD Image"),
    ("an Android sparse image", 0, b"\x3a\xff\x26\xed"),
    ("an EWF image", 0, b"EVF\x09\x0d\x0a\xff\0"),
    ("a compressed file (gzip)", 0, b"\x1f\x8b\x08"),
    ("a compressed file (xz)", 0, b"\xfd7zXZ\0"),
    ("a compressed file (zstd)", 0, b"\x28\xb5\x2f\xfd"),
    ("a compressed file (bzip2)", 0, b"BZh91AY&SY"),
    ("a compressed file (lz4)", 0, b"\x04\x22\x4d\x18"),
    ("an archive (zip)", 0, b"PK\x03\x04"),
    ("an archive (7z)", 0, b"7z\xbc\xaf\x27\x1c"),
];
/// Formats with the bytes that the last 512 bytes of a file begin with.
const ENDS: [(&str, &[u8]); 2] = [("a VHD image", b"conectix"), ("a DMG image", b"koly")];

/// Returns the format of a file that is certainly not a raw disk.
pub(super) fn foreign(file: &File, len: u64) -> Option<&'static str> {
    let mut bytes = [0; 128];
    let read = read_at(file, &mut bytes, 0);
    let starts = STARTS.iter().find_map(|(name, at, magic)| {
        let found = read.get(*at..)?.starts_with(magic);
        found.then_some(*name)
    });
    starts.or_else(|| {
        let mut bytes = [0; 8];
        let read = read_at(file, &mut bytes, len.checked_sub(512)?);
        let found = ENDS.iter().find(|(_, magic)| read.starts_with(magic));
        found.map(|(name, _)| *name)
    })
}

/// Returns as many bytes as can be read.
fn read_at<'a>(file: &File, bytes: &'a mut [u8], at: u64) -> &'a [u8] {
    let len = file.read_at(bytes, at).unwrap_or(0);
    bytes.get(..len).unwrap_or_default()
}
