//! The header of a qcow2 image, which is checked before the image is used.
//!
//! `imago` opens what it can read. Here images are refused because of what it does not look at (an encrypted image
//! would be taken for a plain one), because of what it does not handle with care, and where a user needs a clear
//! reason.

use std::fs::File;
use std::os::unix::fs::FileExt;

/// Lengths of a header of version 3, and of version 2, in bytes.
const LEN: usize = 104;
const LEN_2: u64 = 72;
/// Extensions of the header: the end, the backing file's format, the names of features.
const END: u32 = 0;
const BACKING_FORMAT: u32 = 0xe279_2aca;
const FEATURE_NAMES: u32 = 0x6803_f857;
/// Length of a feature's name in bytes.
const FEATURE_LEN: u32 = 48;
/// Features that a reader has to know, by bit.
const FEATURES: [&str; 5] = [
    "it was not closed properly: repair it with qemu-img check -r all",
    "it is damaged: repair it with qemu-img check -r all",
    "its data is in a file of its own",
    "it is compressed by something else than zlib",
    "it has extended L2 entries",
];

/// Where an image's tables are.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tables {
    pub(super) cluster_bits: u32,
    pub(super) l1: u64,
    pub(super) l1_entries: u32,
    /// The table of blocks of reference counts.
    pub(super) counts: u64,
    pub(super) counts_clusters: u32,
    /// A reference count has 2^n bits.
    pub(super) counts_order: u32,
    pub(super) snapshots: u32,
    pub(super) snapshots_at: u64,
}

/// An image's header.
#[derive(Debug)]
pub(super) struct Header {
    pub(super) tables: Tables,
    /// Length of the disk in bytes.
    pub(super) len: u64,
    /// The backing file that the header names.
    pub(super) backing: Option<String>,
    pub(super) backing_format: Option<String>,
}

impl Header {
    /// Reads a header. The error says why the image cannot be used.
    pub(super) fn read(file: &File) -> Result<Self, String> {
        let mut bytes = [0; LEN];
        let mut read = 0;
        while let Some(rest) = bytes.get_mut(read..).filter(|rest| !rest.is_empty()) {
            match file.read_at(rest, read as u64).map_err(|e| e.to_string())? {
                0 => break,
                more => read += more,
            }
        }
        if read < LEN_2 as usize || !bytes.starts_with(b"QFI\xfb") {
            return Err("this is no qcow2 image".into());
        }
        let version = be32(&bytes, 4);
        if !(2..=3).contains(&version) {
            return Err(format!("qcow2 of version {version} is not known"));
        }
        let cluster_bits = be32(&bytes, 20);
        if !(9..=21).contains(&cluster_bits) {
            return Err(format!("its clusters have 2^{cluster_bits} bytes"));
        }
        match be32(&bytes, 32) {
            0 => {}
            _ => return Err("it is encrypted".into()),
        }
        let features = if version == 2 { 0 } else { be64(&bytes, 72) };
        if features != 0 {
            let bit = features.trailing_zeros();
            let known = FEATURES.get(bit as usize).copied();
            return Err(known.map_or_else(
                || format!("it has a feature that is not known ({bit})"),
                str::to_owned,
            ));
        }
        let len = be64(&bytes, 24);
        // An L2 table takes a cluster, and has entries of eight bytes.
        let covered = u128::from(be32(&bytes, 36)) << (2 * cluster_bits - 3);
        if u128::from(len) > covered {
            return Err("its first table is too short".into());
        }
        let tables = Tables {
            cluster_bits,
            l1: be64(&bytes, 40),
            l1_entries: be32(&bytes, 36),
            counts: be64(&bytes, 48),
            counts_clusters: be32(&bytes, 56),
            counts_order: if version == 2 { 4 } else { be32(&bytes, 96) },
            snapshots: be32(&bytes, 60),
            snapshots_at: be64(&bytes, 64),
        };
        if tables.counts_order > 6 {
            return Err("its reference counts are too wide".into());
        }
        let mut header = Self {
            tables,
            len,
            backing: None,
            backing_format: None,
        };
        let start = if version == 2 {
            LEN_2
        } else {
            u64::from(be32(&bytes, 100))
        };
        let cluster = 1 << cluster_bits;
        if start < LEN_2 || start > cluster {
            return Err("its header is too long".into());
        }
        let (name, name_len) = (be64(&bytes, 8), be32(&bytes, 16));
        if name != 0 {
            if name_len > 1023 || name > cluster {
                return Err("its backing file's name is too long".into());
            }
            header.backing = Some(text(file, name, name_len)?);
        }
        header.extensions(file, start, cluster)?;
        Ok(header)
    }

    /// Reads the extensions behind the header, up to the end of the first cluster.
    fn extensions(&mut self, file: &File, start: u64, cluster: u64) -> Result<(), String> {
        let mut at = start;
        loop {
            let mut head = [0; 8];
            if at + 8 > cluster || file.read_exact_at(&mut head, at).is_err() {
                // A header of version 2 need not have extensions.
                return Ok(());
            }
            at += 8;
            let (kind, len) = (be32(&head, 0), be32(&head, 4));
            if kind == END {
                return Ok(());
            }
            if u64::from(len) > cluster - at {
                return Err("its header's extensions are too long".into());
            }
            if kind == FEATURE_NAMES && !len.is_multiple_of(FEATURE_LEN) {
                return Err("its table of features' names is damaged".into());
            }
            if kind == BACKING_FORMAT {
                self.backing_format = Some(text(file, at, len)?);
            }
            at += u64::from(len).next_multiple_of(8);
        }
    }
}

fn text(file: &File, at: u64, len: u32) -> Result<String, String> {
    let mut bytes = vec![0; len as usize];
    file.read_exact_at(&mut bytes, at)
        .map_err(|e| e.to_string())?;
    String::from_utf8(bytes).map_err(|_| "a name in its header is no text".into())
}

pub(super) fn be32(bytes: &[u8], at: usize) -> u32 {
    let field = bytes.get(at..).and_then(|rest| rest.first_chunk());
    field.copied().map_or(0, u32::from_be_bytes)
}

pub(super) fn be64(bytes: &[u8], at: usize) -> u64 {
    let field = bytes.get(at..).and_then(|rest| rest.first_chunk());
    field.copied().map_or(0, u64::from_be_bytes)
}
