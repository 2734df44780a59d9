//! Checks that a qcow2 image's tables agree, before anything is written to it.
//!
//! `imago` believes what it reads. In an image with wrong reference counts it would write over clusters that are in
//! use, and on some images it recurses without end. So what `qemu-img check` would find is found here first. In an
//! image that passes, each cluster has at least as many references counted as there are; no table is in a cluster that
//! anything else uses; and nothing that is shared is marked as its own (`COPIED`). Clusters that are counted and not
//! used are no danger.

use std::fs::File;
use std::io::{Seek, SeekFrom};
use std::os::unix::fs::FileExt;

use super::header::{Tables, be32, be64};

/// Bit of an entry whose cluster has no other user.
const COPIED: u64 = 1 << 63;
/// Bit of an L2 entry that leads to compressed data.
const COMPRESSED: u64 = 1 << 62;
/// Bits of an entry that are the offset it leads to.
const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;
/// Maximum number of clusters that are counted, in two bytes each.
const CLUSTERS_MAX: u64 = 1 << 28;
/// Maximum size in bytes of an L1 table, and of a table of reference counts, as in QEMU.
const L1_MAX: u64 = 32 << 20;
const COUNTS_MAX: u64 = 8 << 20;
const SNAPSHOTS_MAX: u32 = 65536;
/// Bit of a cluster that the disk's own tables mark as their own.
const OWN: u16 = 1 << 15;

/// Returns an error that says why the image may not be written to.
pub(super) fn check(file: &File, tables: &Tables) -> Result<(), String> {
    Check::new(file, *tables)?.run()
}

struct Check<'a> {
    file: &'a File,
    tables: Tables,
    /// The number of references to each cluster, and [`OWN`].
    used: Vec<u16>,
}

impl<'a> Check<'a> {
    fn new(mut file: &'a File, tables: Tables) -> Result<Self, String> {
        let len = file.seek(SeekFrom::End(0)).map_err(|e| e.to_string())?;
        let clusters = len.div_ceil(1 << tables.cluster_bits);
        if clusters > CLUSTERS_MAX {
            return Err("it has too many clusters to be checked".into());
        }
        let clusters = usize::try_from(clusters).map_err(|e| e.to_string())?;
        let mut used = Vec::new();
        used.try_reserve_exact(clusters)
            .map_err(|_| "there is no memory to check it".to_owned())?;
        used.resize(clusters, 0);
        Ok(Self { file, tables, used })
    }

    fn run(mut self) -> Result<(), String> {
        let tables = self.tables;
        let mut fixed = vec![(0, self.cluster())];
        fixed.extend(self.snapshots()?);
        if tables.l1 != 0 {
            fixed.push((tables.l1, u64::from(tables.l1_entries) * 8));
        }
        let counts = u64::from(tables.counts_clusters) << tables.cluster_bits;
        fixed.push((tables.counts, counts));
        if counts > COUNTS_MAX {
            return Err("its table of reference counts is too long".into());
        }
        let blocks = self.table(tables.counts, counts)?;
        for block in entries(&blocks).filter(|block| *block != 0) {
            fixed.push((block, self.cluster()));
        }
        for (at, len) in &fixed {
            self.uses(*at, *len)?;
        }
        self.l1(tables.l1, tables.l1_entries, COPIED)?;
        // Each of these is used once, and by nothing else.
        for (at, len) in fixed {
            for cluster in self.clusters(at, len)? {
                if self.used.get(cluster) != Some(&1) {
                    return Err("a table of its shares a cluster".into());
                }
            }
        }
        self.compare(&blocks)
    }

    fn cluster(&self) -> u64 {
        1 << self.tables.cluster_bits
    }

    /// Returns the clusters of a range, which has to be in the file.
    fn clusters(&self, at: u64, len: u64) -> Result<std::ops::Range<usize>, String> {
        let bits = self.tables.cluster_bits;
        let last = at.checked_add(len).map(|end| end.div_ceil(1 << bits));
        let last = last.filter(|last| *last <= self.used.len() as u64);
        let last = last.ok_or("a table of its leads out of the file")?;
        Ok((at >> bits) as usize..last as usize)
    }

    /// Counts one more reference to each cluster of a range.
    fn uses(&mut self, at: u64, len: u64) -> Result<(), String> {
        let range = self.clusters(at, len)?;
        for count in self.used.get_mut(range).unwrap_or_default() {
            *count += 1;
            if *count & !OWN == OWN - 1 {
                return Err("a cluster is used too often".into());
            }
        }
        Ok(())
    }

    /// Counts one more reference to the cluster that an entry leads to. `marks`: the bits of entries that mark the
    /// cluster as their own.
    fn entry(&mut self, entry: u64, marks: u64) -> Result<u64, String> {
        let at = entry & OFFSET;
        if !at.is_multiple_of(self.cluster()) {
            return Err("an entry of a table leads between clusters".into());
        }
        self.uses(at, self.cluster())?;
        if entry & marks != 0
            && let Ok(cluster) = usize::try_from(at >> self.tables.cluster_bits)
            && let Some(count) = self.used.get_mut(cluster)
        {
            *count |= OWN;
        }
        Ok(at)
    }

    fn table(&self, at: u64, len: u64) -> Result<Vec<u8>, String> {
        if !at.is_multiple_of(self.cluster()) {
            return Err("a table is between clusters".into());
        }
        self.clusters(at, len)?;
        let mut bytes = vec![0; usize::try_from(len).map_err(|e| e.to_string())?];
        self.read(&mut bytes, at)?;
        Ok(bytes)
    }

    /// Reads bytes; behind the file's end there are zeros.
    fn read(&self, mut bytes: &mut [u8], mut at: u64) -> Result<(), String> {
        while !bytes.is_empty() {
            let read = match self.file.read_at(bytes, at) {
                Ok(0) => return Ok(()),
                Ok(read) => read,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error.to_string()),
            };
            bytes = bytes.get_mut(read..).unwrap_or_default();
            at += read as u64;
        }
        Ok(())
    }

    /// Counts an L1 table, and all clusters that it leads to.
    fn l1(&mut self, at: u64, count: u32, marks: u64) -> Result<(), String> {
        let len = u64::from(count) * 8;
        if len > L1_MAX {
            return Err("its first table is too long".into());
        }
        if count == 0 {
            return Ok(());
        }
        let l1 = self.table(at, len)?;
        for entry in entries(&l1).filter(|entry| *entry & OFFSET != 0) {
            let at = self.entry(entry, marks)?;
            let l2 = self.table(at, self.cluster())?;
            for entry in entries(&l2) {
                self.data(entry, marks)?;
            }
        }
        Ok(())
    }

    fn data(&mut self, entry: u64, marks: u64) -> Result<(), String> {
        if entry & COMPRESSED == 0 {
            // Other entries are empty, or stand for zeros without a cluster.
            if entry & OFFSET != 0 {
                self.entry(entry, marks)?;
            }
            return Ok(());
        }
        if entry & COPIED != 0 {
            return Err("compressed data is marked as its own".into());
        }
        let sectors_bits = self.tables.cluster_bits - 8;
        let shift = 62 - sectors_bits;
        let at = entry & ((1 << shift) - 1);
        let sectors = (entry >> shift & ((1 << sectors_bits) - 1)) + 1;
        let end = (at & !511) + sectors * 512;
        self.uses(at, end - at)
    }

    /// Returns where the snapshots' tables are, whose clusters it counts.
    fn snapshots(&mut self) -> Result<Vec<(u64, u64)>, String> {
        let Tables {
            snapshots,
            snapshots_at: start,
            ..
        } = self.tables;
        if snapshots == 0 {
            return Ok(Vec::new());
        }
        if snapshots > SNAPSHOTS_MAX {
            return Err("it has too many snapshots".into());
        }
        let mut fixed = Vec::new();
        let mut at = start;
        for _ in 0..snapshots {
            let mut head = [0; 40];
            self.clusters(at, 40)?;
            self.read(&mut head, at)?;
            let (l1, l1_entries) = (be64(&head, 0), be32(&head, 8));
            let names = u64::from(be32(&head, 12) >> 16) + u64::from(be32(&head, 12) & 0xffff);
            let extra = u64::from(be32(&head, 36));
            // Marks in a snapshot's tables were right when it was taken.
            self.l1(l1, l1_entries, 0)?;
            if l1_entries > 0 {
                fixed.push((l1, u64::from(l1_entries) * 8));
            }
            at += (40 + extra + names).next_multiple_of(8);
        }
        fixed.push((start, at - start));
        Ok(fixed)
    }

    /// Compares the image's reference counts with the references that were found.
    fn compare(&self, blocks: &[u8]) -> Result<(), String> {
        let order = self.tables.counts_order;
        let per_block = ((self.cluster() * 8) >> order) as usize;
        let mut blocks = entries(blocks);
        for used in self.used.chunks(per_block) {
            let block = match blocks.next() {
                Some(at) if at != 0 => self.table(at, self.cluster())?,
                _ => Vec::new(),
            };
            for (index, used) in used.iter().enumerate() {
                let counted = count(&block, index, order);
                if counted < u64::from(used & !OWN) {
                    return Err("a cluster is used more often than is counted".into());
                }
                if used & OWN != 0 && (counted, *used) != (1, OWN | 1) {
                    return Err("a cluster that is marked as one user's own is shared".into());
                }
            }
        }
        Ok(())
    }
}

fn entries(table: &[u8]) -> impl Iterator<Item = u64> + '_ {
    let (entries, _) = table.as_chunks::<8>();
    entries.iter().copied().map(u64::from_be_bytes)
}

/// Returns a reference count of 2^`order` bits.
fn count(block: &[u8], index: usize, order: u32) -> u64 {
    let byte = |n: usize| u64::from(block.get(n).copied().unwrap_or(0));
    if order < 3 {
        let bits = 1 << order;
        let at = index * bits;
        return byte(at / 8) >> (at % 8) & ((1 << bits) - 1);
    }
    let len = 1 << (order - 3);
    (0..len).fold(0, |sum, n| sum << 8 | byte(index * len + n))
}
