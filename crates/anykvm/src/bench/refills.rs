//! What `anykvm bench wp` measures of flushes: a page that is accessed again after one.
//!
//! A bare guest flushes, and accesses 64 pages; what the flush and the accesses take without each other is subtracted.

use std::path::Path;

use vm_memory::{Bytes, GuestAddress};

use super::bare::{PAGE_DIRECTORY, RAM};
use super::bare_tcg::Guest;
use crate::error::BootError;
use crate::memory::GuestMemory;

/// Pages that are accessed after each flush.
pub(super) const PAGES: u32 = 64;
/// Where the pages are: not in the 4 MiB that may be one page with the code.
const GVA: u32 = 16 << 20;
/// The page table of 2 MiB from there on.
const TABLE: u64 = 0x5000;
/// The pages that they lead to.
const DATA: u64 = 0x2_0000;
const _: () = assert!(DATA + 0x1000 * PAGES as u64 <= RAM);

/// What is done before the pages are accessed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Flush {
    /// MOV to CR3.
    Root,
    /// INVLPG of each.
    Pages,
}

/// A row of the table.
#[derive(Clone, Copy, Debug)]
pub(super) struct Refill {
    /// What `--only` calls it.
    pub(super) id: &'static str,
    pub(super) name: &'static str,
    pub(super) flush: Flush,
    /// From one page to the next, in pages: 1 or 8.
    pub(super) stride: u8,
    pub(super) writes: bool,
    /// Nanoseconds that it may take.
    pub(super) bar: Option<f64>,
}

const fn refill(
    id: &'static str,
    name: &'static str,
    flush: Flush,
    (stride, writes): (u8, bool),
    bar: Option<f64>,
) -> Refill {
    Refill {
        id,
        name,
        flush,
        stride,
        writes,
        bar,
    }
}

pub(super) const REFILLS: [Refill; 5] = [
    refill(
        "refill",
        "page read again after MOV CR3: neighbours",
        Flush::Root,
        (1, false),
        Some(60.0),
    ),
    refill(
        "refill-write",
        "page written again after MOV CR3: neighbours",
        Flush::Root,
        (1, true),
        Some(60.0),
    ),
    refill(
        "refill-apart",
        "page read again after MOV CR3: 8 apart",
        Flush::Root,
        (8, false),
        None,
    ),
    refill(
        "refill-page",
        "page read again after INVLPG: neighbours",
        Flush::Pages,
        (1, false),
        None,
    ),
    refill(
        "refill-page-apart",
        "page read again after INVLPG: 8 apart",
        Flush::Pages,
        (8, false),
        None,
    ),
];

impl Refill {
    /// The code of the flush.
    pub(super) fn flush_code(&self) -> Vec<u8> {
        match self.flush {
            // mov rax, cr3; mov cr3, rax
            Flush::Root => vec![0x0f, 0x20, 0xd8, 0x0f, 0x22, 0xd8],
            // invlpg [rdi]
            Flush::Pages => self.each_page(&[0x0f, 1, 0x3f]),
        }
    }

    /// The code of the accesses.
    pub(super) fn access_code(&self) -> Vec<u8> {
        // mov [rdi], eax, or mov eax, [rdi]
        self.each_page(&[if self.writes { 0x89 } else { 0x8b }, 7])
    }

    fn each_page(&self, code: &[u8]) -> Vec<u8> {
        // mov edi, GVA; mov ecx, PAGES; …; add edi, stride; dec ecx; jnz …
        let mut all = vec![0xbf];
        all.extend(GVA.to_le_bytes());
        all.push(0xb9);
        all.extend(PAGES.to_le_bytes());
        all.extend(code);
        all.extend([0x81, 0xc7]);
        all.extend((u32::from(self.stride) << 12).to_le_bytes());
        all.extend([0xff, 0xc9, 0x75, (code.len() as u8 + 10).wrapping_neg()]);
        all
    }
}

/// Maps the pages.
pub(super) fn map(ram: &GuestMemory) -> Result<(), BootError> {
    let write = |at: u64, entry: u64| {
        ram.write_slice(&entry.to_le_bytes(), GuestAddress(at))
            .map_err(BootError::guest("page tables"))
    };
    let present_writable = 3;
    write(
        PAGE_DIRECTORY + 8 * u64::from(GVA >> 21),
        TABLE | present_writable,
    )?;
    for n in 0..512 {
        // Those that are 8 apart are other pages, too.
        let page = (n % u64::from(PAGES) + n / u64::from(PAGES)) % u64::from(PAGES);
        write(TABLE + 8 * n, (DATA + (page << 12)) | present_writable)?;
    }
    Ok(())
}

/// Flushes in each part of `refills.c`.
const LOOPS: f64 = 4000.0;
/// The best of so many runs counts.
const TCG_RUNS: usize = 5;
/// Flushes, accesses, and both, of each row.
const GUEST: Guest = Guest {
    source: include_str!("refills.c"),
    devices: &[],
    parts: 3 * REFILLS.len(),
};

/// The same rows under QEMU's TCG.
pub(super) fn under_tcg(qemu: &Path) -> Result<Vec<f64>, BootError> {
    let mut times = GUEST.times(qemu)?;
    for _ in 1..TCG_RUNS {
        for (best, time) in times.iter_mut().zip(GUEST.times(qemu)?) {
            *best = time.min(*best);
        }
    }
    let rows = times.chunks_exact(3).map(|parts| {
        let ns = |n: usize| parts.get(n).map_or(0.0, |time| time.as_secs_f64() * 1e9);
        (ns(2) - ns(1) - ns(0)) / LOOPS / f64::from(PAGES)
    });
    Ok(rows.collect())
}
