//! Mixed pages: code that was fetched, and data beside it that the guest writes. Firmware, boot loaders and bare programs
//! lay themselves out so, and a JIT does while it fills a page.
//!
//! A page with code has no write tag. Translated code may write its data all the same, by a [`MixedPage`], which says which
//! chunks of 64 bytes are code. The vCPU counts as a writer of the page ([`crate::written`]) while the page is here. So a
//! vCPU that fetches another chunk asks this one to give the page up, and this one may have written that chunk
//! unnoticed: what is fetched then counts as changed.

use guest_memory::HostPage;
pub use guest_memory::slot::CODE_CHUNK;
use x86_cpu::Privilege;

use crate::{Mmu, written::SlotPage};

/// Number of mixed pages, selected by the low bits of a page's number: a power of two.
pub const MIXED_PAGES: usize = 32;

/// A mixed page as translated code sees it.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct MixedPage {
    /// The page's gva.
    pub page: u64,
    /// Address of the [`crate::l1::L1`] of the view in which the page may be written; 0 if it may not be written.
    pub tables: u64,
    /// Host address of the page.
    pub host: u64,
    /// The chunks that are code, one bit each.
    pub code: u64,
}

impl MixedPage {
    /// log2 of the size in bytes.
    pub const SHIFT: u32 = 5;
    const NONE: Self = Self {
        page: 0,
        tables: 0,
        host: 0,
        code: 0,
    };
}

const _: () = assert!(size_of::<MixedPage>() == 1 << MixedPage::SHIFT);

/// The mixed pages of a vCPU.
#[derive(Debug)]
pub(crate) struct Mixed {
    entries: [MixedPage; MIXED_PAGES],
    /// Which page each entry is of.
    places: [Option<SlotPage>; MIXED_PAGES],
    /// Number of entries that are of a page.
    count: usize,
}

impl Default for Mixed {
    fn default() -> Self {
        Self {
            entries: [MixedPage::NONE; MIXED_PAGES],
            places: [None; MIXED_PAGES],
            count: 0,
        }
    }
}

impl Mixed {
    /// The entries, for translated code.
    pub(crate) fn entries(&self) -> &[MixedPage; MIXED_PAGES] {
        &self.entries
    }

    /// Forgets by which addresses the pages may be written.
    #[inline]
    pub(crate) fn forget_addresses(&mut self) {
        if self.count != 0 {
            self.entries.iter_mut().for_each(|e| e.tables = 0);
        }
    }

    /// Forgets all pages.
    pub(crate) fn clear(&mut self) {
        *self = Self::default();
    }

    /// Removes a page. Returns the chunks that were not to be written, if the page was here.
    pub(crate) fn take(&mut self, at: SlotPage) -> Option<u64> {
        if self.count == 0 {
            return None;
        }
        let n = self.places.iter().position(|place| *place == Some(at))?;
        self.places[n] = None;
        self.count -= 1;
        Some(core::mem::replace(&mut self.entries[n], MixedPage::NONE).code)
    }

    fn index(gva: u64) -> usize {
        (gva >> 12) as usize % MIXED_PAGES
    }
}

impl Mmu {
    /// Lets translated code write the data of a page that has code. The write tag was refused.
    #[cold]
    pub(crate) fn allow_beside_code(
        &mut self,
        at: SlotPage,
        gva: u64,
        host: HostPage,
        who: Privilege,
    ) {
        let n = Mixed::index(gva);
        let entry = self.mixed.entries[n];
        let is_known = self.mixed.places[n] == Some(at) && entry.code == self.code_chunks(at);
        if !is_known {
            self.leave_mixed(at);
            if let Some(other) = self.mixed.places[n] {
                self.leave_mixed(other);
            }
            // `false`: there are tags that the vCPU was asked to give up, and has not yet.
            if self.written.add(&self.table, &self.mailbox, at, gva) != Some(true) {
                return;
            }
            self.mixed.places[n] = Some(at);
            self.mixed.count += 1;
        }
        // Behind `add`: who makes more of the page code finds this vCPU.
        self.mixed.entries[n] = MixedPage {
            page: gva & !0xfff,
            tables: self.l1_address(who),
            host: host.hva(),
            code: if is_known {
                entry.code
            } else {
                self.code_chunks(at)
            },
        };
        if let Some(slot) = self.table.slots(at.space).get(at.slot) {
            slot.mark_dirty(at.index);
        }
    }

    fn code_chunks(&self, at: SlotPage) -> u64 {
        let slot = self.table.slots(at.space).get(at.slot);
        slot.map_or(0, |slot| slot.code_chunks(at.index))
    }

    /// Makes a page no mixed page any more.
    fn leave_mixed(&mut self, at: SlotPage) {
        if let Some(code) = self.mixed.take(at) {
            self.written.take(at);
            self.bump_chunks(at, !code);
        }
    }
}
