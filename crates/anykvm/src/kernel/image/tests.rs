//! Recognition of kernel files, on images made here.

use super::*;
use crate::kernel::{BootInfo, load};
use crate::memory;

/// Returns a bzImage whose protected-mode part has `sectors` × 512 bytes.
pub(super) fn bzimage(sectors: usize) -> Vec<u8> {
    let mut image = vec![0u8; 1024 + sectors * 512];
    image[0x1f1] = 1;
    image[0x1f4..0x1f8].copy_from_slice(&u32::try_from(sectors * 32).unwrap().to_le_bytes());
    image[0x1fe..0x200].copy_from_slice(&[0x55, 0xaa]);
    image[0x202..0x206].copy_from_slice(b"HdrS");
    image[0x206..0x208].copy_from_slice(&0x20fu16.to_le_bytes());
    image[0x211] = 1;
    image[0x236] = 1;
    image[0x238..0x23c].copy_from_slice(&2047u32.to_le_bytes());
    image[0x22c..0x230].copy_from_slice(&0x7fff_ffffu32.to_le_bytes());
    image[0x248..0x24c].copy_from_slice(&64u32.to_le_bytes());
    image[0x24c..0x250].copy_from_slice(&128u32.to_le_bytes());
    image[0x258..0x260].copy_from_slice(&0x100_0000u64.to_le_bytes());
    image[0x260..0x264].copy_from_slice(&0x100_0000u32.to_le_bytes());
    image[1024 + 64..1024 + 68].copy_from_slice(b"\x02\x21\x4c\x18");
    image
}

fn with(at: usize, bytes: &[u8]) -> Vec<u8> {
    let mut image = bzimage(4);
    image[at..at + bytes.len()].copy_from_slice(bytes);
    image
}

#[test]
fn wrong_files_are_named_for_what_they_are() {
    let mut elf = vec![0u8; 4096];
    elf[..5].copy_from_slice(b"\x7fELF\x02");
    let mut arm = elf.clone();
    arm[0x12] = 183;
    elf[0x10] = 3;
    elf[0x12] = 62;
    let whole = bzimage(4);
    let rows: [(&[u8], &str); 9] = [
        (b"", "only 0 bytes"),
        (b"#!/bin/sh\n", "only 10 bytes"),
        (&[0; 4096], "neither a bzImage"),
        (&whole[..1500], "truncated"),
        (&with(0x206, &[0, 2]), "too old"),
        (&with(0x1f4, &[0, 0]), "corrupted"),
        (&with(0x24b, &[0xff]), "corrupted"),
        (&arm, "another machine"),
        (&elf, "no executable"),
    ];
    for (bytes, want) in rows {
        let reason = recognise(bytes).unwrap_err();
        assert!(reason.contains(want), "{reason} / {want}");
    }
    assert_eq!(recognise(&whole), Ok(Format::BzImage));
}

#[test]
fn every_truncation_of_a_header_is_refused_without_panic() {
    let whole = bzimage(4);
    for len in 0..whole.len() {
        assert!(recognise(&whole[..len]).is_err(), "{len}");
    }
}

#[test]
fn the_entry_point_follows_xloadflags() {
    let memory = memory::allocate(64 << 20).unwrap();
    let info = BootInfo {
        cmdline: "quiet",
        initrd: &[1; 100],
        mem_size: 64 << 20,
        rsdp: 0xe0000,
    };
    let rows = [
        (1u8, Entry::Long { rip: 0x10_0200 }),
        (0, Entry::Protected { eip: 0x10_0000 }),
    ];
    for (xloadflags, want) in rows {
        let image = Image {
            bytes: with(0x236, &[xloadflags]),
            format: Format::BzImage,
        };
        let entry = load(&memory, Path::new("test"), &image, &info).unwrap();
        assert_eq!(entry, want);
    }
}

#[test]
fn a_kernel_that_needs_more_memory_says_how_much() {
    let image = Image {
        bytes: bzimage(4),
        format: Format::BzImage,
    };
    let memory = memory::allocate(2 << 20).unwrap();
    let error = image.load(&memory, Path::new("k"), 2 << 20).unwrap_err();
    assert!(error.to_string().contains("--mem 48M"), "{error}");
}
