//! Mixed pages: code that was fetched, and data beside it that the guest writes. Firmware, boot loaders and bare programs
//! lay themselves out so, and a JIT does while it fills a page.
//!
//! A page with code has no write tag. Translated code may write its data all the same, by a [`MixedPage`], which says which
//! bytes are code. The vCPU counts as a writer of the page ([`crate::written`]) while the page is here. So a vCPU that
//! fetches other bytes asks this one to give the page up, and this one may have written those bytes unnoticed: what is
//! fetched then counts as changed.

use std::sync::Arc;

use guest_memory::{HostPage, byte_map::ByteMap};
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
    /// Address of the [`ByteMap`] of the bytes that are code. Eight bytes may be read from each byte of the map.
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
    /// The bytes of each page that are code. There are no maps before the first page is added, and one more than entries
    /// from then on: a read of eight bytes that begins in the last entry's map ends in it.
    maps: Vec<ByteMap>,
    /// Which page each entry is of.
    places: [Option<SlotPage>; MIXED_PAGES],
    /// Number of entries that are of a page.
    count: usize,
}

impl Default for Mixed {
    fn default() -> Self {
        Self {
            entries: [MixedPage::NONE; MIXED_PAGES],
            maps: Vec::new(),
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

    /// Has entry `n` be of the page `at`, whose bytes `code` are code.
    fn set(&mut self, n: usize, at: SlotPage, page: MixedPage, code: ByteMap) {
        self.maps.resize(MIXED_PAGES + 1, ByteMap::EMPTY);
        self.maps[n] = code;
        self.count += usize::from(self.places[n].is_none());
        self.places[n] = Some(at);
        let code = (&raw const self.maps[n]) as u64;
        self.entries[n] = MixedPage { code, ..page };
    }

    /// Returns which entry is of a page.
    fn find(&self, at: SlotPage) -> Option<usize> {
        if self.count == 0 {
            return None;
        }
        self.places.iter().position(|place| *place == Some(at))
    }

    /// Returns true if the page is here.
    pub(crate) fn has(&self, at: SlotPage) -> bool {
        self.find(at).is_some()
    }

    /// Returns the bytes of a page that are not to be written, if the page is here.
    fn code(&self, at: SlotPage) -> Option<&ByteMap> {
        self.maps.get(self.find(at)?)
    }

    /// Returns the bytes that are not to be written of the page at `gva`, if the others may be written with these tables.
    pub(crate) fn code_at(&self, gva: u64, tables: u64) -> Option<&ByteMap> {
        let n = Self::index(gva);
        let entry = &self.entries[n];
        let is_here = entry.page == gva & !0xfff && entry.tables == tables;
        self.maps.get(n).filter(|_| is_here)
    }

    /// Removes a page. Returns the bytes that were not to be written, if the page was here.
    pub(crate) fn take(&mut self, at: SlotPage) -> Option<ByteMap> {
        let n = self.find(at)?;
        self.places[n] = None;
        self.count -= 1;
        self.entries[n] = MixedPage::NONE;
        self.maps.get(n).copied()
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
        let table = Arc::clone(&self.table);
        let Some(slot) = table.slots(at.space).get(at.slot) else {
            return;
        };
        let n = Mixed::index(gva);
        let mut code = slot.code_map(at.index);
        if self.mixed.places[n] != Some(at) || self.mixed.maps.get(n) != Some(&code) {
            self.leave_mixed(at);
            if let Some(other) = self.mixed.places[n] {
                self.leave_mixed(other);
            }
            // `false`: there are tags that the vCPU was asked to give up, and has not yet.
            if self.written.add(&table, &self.mailbox, at, gva) != Some(true) {
                return;
            }
            // Behind `add`: who makes more of the page code finds this vCPU.
            code = slot.code_map(at.index);
        }
        let page = MixedPage {
            page: gva & !0xfff,
            tables: self.l1_address(who),
            host: host.hva(),
            code: 0,
        };
        self.mixed.set(n, at, page, code);
        slot.mark_dirty(at.index);
    }

    /// Makes a page no mixed page any more.
    fn leave_mixed(&mut self, at: SlotPage) {
        if let Some(code) = self.mixed.take(at) {
            self.written.take(at);
            self.bump_unless_spared(at, Some(&code));
        }
    }

    /// Returns true if this vCPU cannot write these bytes of a page unnoticed.
    pub(crate) fn is_spared(&self, at: SlotPage, offset: u64, len: u64) -> bool {
        !self.written.may_write(at)
            || self
                .mixed
                .code(at)
                .is_some_and(|code| code.has_all(offset, len))
    }
}
