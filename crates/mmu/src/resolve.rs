//! Answers for translated code and for devices: refills, translations without an access, and the last device pages.

use guest_memory::Slot;
use x86_cpu::{Access, CpuState, Exception, Privilege};
use x86_defs::paging::PAGE_SIZE;

use crate::{Miss, Mmu, Translation, fault::Resolved, l1::L1, walk};

/// A translation that leads to a device. An access looks here more than once: translated code
/// finds that it cannot make it, and an instruction that has waited for the VMM goes on. Forgotten
/// with every flush and every change of address space. Generated code compares the first two.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct DevicePage {
    /// The page's gva.
    page: u64,
    /// Address of the [`L1`] of the view that the page was accessed in; 0 if the entry has no page.
    tables: u64,
    gpa: u64,
    _pad: u64,
}

impl DevicePage {
    /// log2 of the size in bytes.
    pub const SHIFT: u32 = 5;
    pub(crate) const NONE: Self = Self::new(0, 0, 0);

    const fn new(page: u64, tables: u64, gpa: u64) -> Self {
        Self {
            page,
            tables,
            gpa,
            _pad: 0,
        }
    }
}

const _: () = assert!(size_of::<DevicePage>() == 1 << DevicePage::SHIFT);
const _: () = assert!(core::mem::offset_of!(DevicePage, page) == 0);
const _: () = assert!(core::mem::offset_of!(DevicePage, tables) == 8);

impl Mmu {
    /// Returns the slot of a resolved page.
    pub(crate) fn slot(&self, slot: usize) -> Option<&Slot> {
        self.table.slots(self.space()).get(slot).map(|s| &**s)
    }

    /// Returns the page after `gva`'s. Linear addresses are 32 bits wide outside 64-bit
    /// mode, but descriptor tables and the TSS are 64-bit in compatibility mode.
    pub fn next_page(&self, cpu: &CpuState, gva: u64, who: Privilege) -> u64 {
        let next = (gva & !(PAGE_SIZE - 1)).wrapping_add(PAGE_SIZE);
        if cpu.is_64bit() || cpu.is_long_mode() && who == Privilege::System {
            next
        } else {
            next & 0xffff_ffff
        }
    }

    /// Returns the gpa of an access if it leads to the device page that was read, or written, last. Then the access is
    /// allowed unless it crosses the page.
    #[inline(always)]
    pub fn known_device(&self, gva: u64, write: bool, who: Privilege) -> Option<u64> {
        let known = &self.devices[usize::from(write)];
        let is_same = known.page == gva & !0xfff && known.tables == self.l1_address(who);
        is_same.then_some(known.gpa | gva & 0xfff)
    }

    #[inline(always)]
    pub(crate) fn l1_address(&self, who: Privilege) -> u64 {
        self.views[self.tables_for(who)].l1.base()
    }

    /// Notes that an access to the page has led to a device.
    pub(crate) fn note_device(&mut self, gva: u64, gpa: u64, write: bool, who: Privilege) {
        self.stats.device_misses += 1;
        let tables = self.l1_address(who);
        self.devices[usize::from(write)] = DevicePage::new(gva & !0xfff, tables, gpa & !0xfff);
    }

    /// Forgets the last device pages, and the addresses of mixed pages, because translations may have changed.
    pub(crate) fn forget_pages(&mut self) {
        self.devices = [DevicePage::NONE; 2];
        self.mixed.forget_addresses();
    }

    /// The live view's tables, for generated code. They change with every call
    /// that takes `&mut self`, and are others when another view is live.
    pub fn live_tables(&self) -> &L1 {
        &self.views[self.live].l1
    }

    /// See [`Front::refill`](crate::Front::refill).
    #[inline(never)]
    pub(crate) fn refill(
        &mut self,
        cpu: &mut CpuState,
        gva: u64,
        size: u64,
        access: Access,
        fault: &mut Option<Exception>,
    ) -> u64 {
        let known = self.known_device(gva, access == Access::Write, Privilege::Current);
        if gva % PAGE_SIZE + size > PAGE_SIZE || known.is_some() || self.is_watched(gva) {
            return 0;
        }
        match self.resolve(cpu, gva, access, Privilege::Current) {
            Ok(page) if page.entered && !page.note => page.host.hva() + gva % PAGE_SIZE,
            Err(Miss::Exception(e)) => {
                *fault = Some(e);
                0
            }
            _ => 0,
        }
    }

    /// Notes a write to a resolved page, if it has to be noted.
    pub(crate) fn written(&self, page: &Resolved, offset: u64, len: u64) {
        if page.note
            && let Some(slot) = self.slot(page.slot)
        {
            slot.note_write(page.index, offset, len);
        }
    }

    /// Translates `gva` for an access that the caller carries out itself. [`Self::write_gpa`] is what makes a page count as
    /// written.
    ///
    /// # Errors
    /// The exception that the access raises, or [`Miss::Host`]. Never [`Miss::Device`].
    pub fn translate(
        &mut self,
        cpu: &mut CpuState,
        gva: u64,
        access: Access,
        who: Privilege,
    ) -> Result<Translation, Miss> {
        match self.mapped(cpu, gva, access, who) {
            Ok(mapped) => Ok(Translation {
                gpa: mapped.translated.walk.gpa,
                page: Some(mapped.host),
            }),
            Err(Miss::Device { gpa }) => Ok(Translation { gpa, page: None }),
            Err(miss) => Err(miss),
        }
    }

    /// Translates `gva` without permission check and side effect, for KVM_TRANSLATE.
    pub fn translate_debug(&self, cpu: &CpuState, gva: u64) -> Option<u64> {
        let paging = crate::Paging::of(cpu);
        if !paging.is_canonical(gva) {
            return None;
        }
        walk::look_up(&self.table, &paging, gva).ok().map(|w| w.gpa)
    }

    /// Reads guest-physical memory of the current address space; false (and
    /// nothing read) if some is not RAM.
    pub fn read_gpa(&self, gpa: u64, buf: &mut [u8]) -> bool {
        self.table.read_bytes(self.space(), gpa, buf)
    }

    /// Writes guest-physical memory of the current address space; false (and
    /// nothing written) if some is not writable RAM.
    pub fn write_gpa(&self, gpa: u64, buf: &[u8]) -> bool {
        self.table.write_bytes(self.space(), gpa, buf)
    }
}
