//! Sends and receives guest memory.

use anykvm_ioctls::VmFd;
use sha2::{Digest, Sha256};
use vm_memory::bitmap::AtomicBitmap;
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryRegion, MmapRegion};

use super::line::Line;
use super::stream::{self, MessageKind, StreamError};
use crate::error::BootError;
use crate::fields::{Malformed, Reader, Writer};
use crate::memory::GuestMemory;

pub(super) const PAGE: u64 = 4096;
/// Maximum number of pages that are sent together.
const TOGETHER: u64 = 256;
const ZERO: [u8; PAGE as usize] = [0; PAGE as usize];

/// Pages of all memory: a bitmap for each region.
pub(super) type Pages = Vec<Vec<u64>>;

/// Returns the bitmap of pages of a region that devices have written.
fn written(region: &MmapRegion<AtomicBitmap>) -> &AtomicBitmap {
    region.bitmap()
}

/// Dirty logging of all memory, which ends when this is dropped.
pub(super) struct Logging<'a> {
    vm: &'a VmFd,
    memory: &'static GuestMemory,
}

impl<'a> Logging<'a> {
    pub(super) fn start(vm: &'a VmFd, memory: &'static GuestMemory) -> Result<Self, BootError> {
        let this = Self { vm, memory };
        // Pages that devices have written before do not matter.
        memory.iter().for_each(|region| written(region).reset());
        this.set(true)?;
        Ok(this)
    }

    fn set(&self, is_on: bool) -> Result<(), BootError> {
        for (slot, _) in (0..).zip(self.memory.iter()) {
            self.vm
                .log_static_memory(self.memory, slot, is_on)
                .map_err(BootError::kvm("KVM_SET_USER_MEMORY_REGION"))?;
        }
        Ok(())
    }

    /// Returns the pages that vCPUs and devices have written since the last call.
    pub(super) fn harvest(&self) -> Result<Pages, BootError> {
        let mut all = Vec::new();
        for (slot, region) in (0..).zip(self.memory.iter()) {
            let len = usize::try_from(region.len()).unwrap_or(usize::MAX);
            let mut pages = self
                .vm
                .get_dirty_log(slot, len)
                .map_err(BootError::kvm("KVM_GET_DIRTY_LOG"))?;
            for (to, from) in pages.iter_mut().zip(written(region).get_and_reset()) {
                *to |= from;
            }
            all.push(pages);
        }
        Ok(all)
    }
}

impl Drop for Logging<'_> {
    fn drop(&mut self) {
        // If logging stays on, that costs time and nothing else.
        let _ = self.set(false);
    }
}

/// Returns all pages.
pub(super) fn all(memory: &GuestMemory) -> Pages {
    let words = |len: u64| (len / PAGE).div_ceil(64);
    let region = |len| {
        let mut bits = vec![u64::MAX; usize::try_from(words(len)).unwrap_or(0)];
        let rest = len / PAGE % 64;
        if let Some(last) = bits.last_mut().filter(|_| rest != 0) {
            *last = (1 << rest) - 1;
        }
        bits
    };
    memory.iter().map(|r| region(r.len())).collect()
}

/// Returns the number of pages.
pub(super) fn count(pages: &Pages) -> u64 {
    pages
        .iter()
        .flatten()
        .map(|w| u64::from(w.count_ones()))
        .sum()
}

/// Returns first page and number of each run of pages, at most [`TOGETHER`] long.
fn runs(words: &[u64]) -> impl Iterator<Item = (u64, u64)> {
    let mut at = 0;
    let end = words.len() as u64 * 64;
    core::iter::from_fn(move || {
        let word = |at: u64| usize::try_from(at / 64).ok().and_then(|n| words.get(n));
        let is_set = |at: u64| word(at).is_some_and(|w| w >> (at % 64) & 1 != 0);
        while at < end && !is_set(at) {
            let rest = word(at).map_or(0, |w| w >> (at % 64));
            at += if rest == 0 { 64 - at % 64 } else { 1 };
        }
        let first = at;
        while at < end && at - first < TOGETHER && is_set(at) {
            at += 1;
        }
        (at > first).then_some((first, at - first))
    })
}

/// Sends these pages as they are now. `is_first`: pages of zeros need not be sent, because the target's are zero.
/// `progress` is called for each page.
pub(super) fn send(
    line: &mut Line,
    memory: &GuestMemory,
    pages: &Pages,
    is_first: bool,
    progress: &mut dyn FnMut(u64, &Line),
) -> Result<(), StreamError> {
    let mut frame = Vec::new();
    for (region, words) in memory.iter().zip(pages) {
        for (first, len) in runs(words) {
            let gpa = region.start_addr().0 + first * PAGE;
            send_run(line, memory, gpa, len, is_first, &mut frame)?;
            progress(len, line);
        }
    }
    Ok(())
}

fn send_run(
    line: &mut Line,
    memory: &GuestMemory,
    gpa: u64,
    len: u64,
    is_first: bool,
    frame: &mut Vec<u8>,
) -> Result<(), StreamError> {
    let bytes = usize::try_from(len * PAGE).unwrap_or(0);
    frame.resize(8 + bytes, 0);
    let (head, body) = frame.split_at_mut(8);
    memory
        .read_slice(body, GuestAddress(gpa))
        .map_err(|error| Malformed::new(error.to_string()))?;
    let is_zero = |page: &[u8]| page == ZERO;
    if !body.chunks(ZERO.len()).any(is_zero) {
        head.copy_from_slice(&gpa.to_le_bytes());
        return Ok(stream::send(line, MessageKind::Pages, frame)?);
    }
    // The body is split into stretches of zeros and others.
    let mut at = gpa;
    for same in body
        .as_chunks::<{ PAGE as usize }>()
        .0
        .chunk_by(|a, b| is_zero(a) == is_zero(b))
    {
        let count = same.len() as u64;
        if !same.first().is_some_and(|page| is_zero(page)) {
            let mut part = at.to_le_bytes().to_vec();
            part.extend(same.as_flattened());
            stream::send(line, MessageKind::Pages, &part)?;
        } else if !is_first {
            let mut w = Writer::default();
            w.put(&[at, count]);
            stream::send(line, MessageKind::Zeros, &w.into_bytes())?;
        }
        at += count * PAGE;
    }
    Ok(())
}

/// Writes received pages to where they belong.
pub(super) fn put(memory: &GuestMemory, kind: MessageKind, frame: &[u8]) -> Result<(), Malformed> {
    let r = &mut Reader::new(frame, "a page");
    let gpa: u64 = r.get()?;
    let outside = |_| Malformed::new(format!("a page at {gpa:#x}, where the guest has none"));
    if kind == MessageKind::Zeros {
        let count: u64 = r.get()?;
        if count > TOGETHER {
            return Err(r.wrong("more than there can be"));
        }
        for page in 0..count {
            let at = gpa.saturating_add(page * PAGE);
            memory
                .write_slice(&ZERO, GuestAddress(at))
                .map_err(outside)?;
        }
        return r.end();
    }
    let (_, bytes) = frame.split_at_checked(8).unwrap_or_default();
    memory
        .write_slice(bytes, GuestAddress(gpa))
        .map_err(outside)
}

/// Returns the digest of all memory.
pub(super) fn digest(memory: &GuestMemory) -> Result<[u8; 32], Malformed> {
    let mut digest = Sha256::new();
    let mut chunk = vec![0; 1 << 20];
    for region in memory.iter() {
        let (start, end) = (region.start_addr().0, region.len());
        let mut at = 0;
        while at < end {
            let len = usize::try_from(end - at)
                .unwrap_or(usize::MAX)
                .min(chunk.len());
            let part = chunk.get_mut(..len).unwrap_or_default();
            memory
                .read_slice(part, GuestAddress(start + at))
                .map_err(|error| Malformed::new(error.to_string()))?;
            digest.update(&*part);
            at += len as u64;
        }
    }
    Ok(digest.finalize().into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_all_pages_once() {
        type Row = (&'static [u64], Vec<(u64, u64)>);
        let rows: [Row; 4] = [
            (&[0, 0], vec![]),
            (&[0b1011, 1 << 63], vec![(0, 2), (3, 1), (127, 1)]),
            (&[1 << 63, 1], vec![(63, 2)]),
            (&[u64::MAX; 5], vec![(0, 256), (256, 64)]),
        ];
        for (words, want) in rows {
            assert_eq!(runs(words).collect::<Vec<_>>(), want);
        }
    }
}
