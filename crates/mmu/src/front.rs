//! [`Front`]: what translated code and its run-time system ask of the MMU.

use std::sync::atomic::AtomicU32;

use guest_memory::byte_map::ByteMap;
use x86_cpu::{Access, CpuState, Exception, Privilege, Word};

use crate::{
    DevicePage, Mmu, RootIsKept, SwitchEpochs,
    fetch::space_of,
    l1::{L1, SITE_ENTRIES},
    mixed::{MIXED_PAGES, MixedPage},
};

/// The MMU as a JIT sees it: the miss, tables that generated code reads, and numbers that say whether what the JIT has
/// noted is still true.
///
/// What instructions do to the MMU (loads of control registers, flushes, accesses) is not here: both engines do that
/// through [`x86_cpu::GuestBus`].
#[derive(Debug)]
pub struct Front<'a>(&'a mut Mmu);

impl Mmu {
    /// The MMU as a JIT sees it.
    #[inline(always)]
    pub fn front(&mut self) -> Front<'_> {
        Front(self)
    }
}

/// The miss, and requests of other threads.
impl Front<'_> {
    /// Prepares an access of `size` bytes at the current privilege level and returns the host address of its first
    /// byte, if the access needs no more than that: the live view's table has the page from now on, and all bytes are
    /// in it.
    ///
    /// 0 if the access has to be made through [`x86_cpu::GuestBus`]; `fault` then is the exception that it will raise,
    /// if that is known. (A result of both would go through memory.)
    #[inline(always)]
    pub fn refill(
        &mut self,
        cpu: &mut CpuState,
        gva: u64,
        size: u64,
        access: Access,
        fault: &mut Option<Exception>,
    ) -> u64 {
        self.0.refill(cpu, gva, size, access, fault)
    }

    /// See [`Mmu::known_device`].
    #[inline(always)]
    pub fn known_device(&self, gva: u64, write: bool, who: Privilege) -> Option<u64> {
        self.0.known_device(gva, write, who)
    }

    /// See [`Mmu::read_hit`].
    #[inline(always)]
    pub fn read_hit<T: Word>(&self, gva: u64, who: Privilege) -> Option<T> {
        self.0.read_hit(gva, who)
    }

    /// Watches these pages, which have data breakpoints, and no others: translated code gets none of them, and the refill
    /// is 0 for each access.
    pub fn watch(&mut self, pages: &[u64]) {
        self.0.watch(pages);
    }

    /// Returns true if the page of `gva` is watched.
    #[inline(always)]
    pub fn is_watched(&self, gva: u64) -> bool {
        self.0.is_watched(gva)
    }

    /// See [`Mmu::needs_sync`].
    #[inline(always)]
    pub fn needs_sync(&self) -> bool {
        self.0.needs_sync()
    }

    /// See [`Mmu::sync`].
    pub fn sync(&mut self) {
        self.0.sync();
    }
}

/// Tables that generated code reads by itself.
impl<'a> Front<'a> {
    /// See [`Mmu::live_tables`].
    #[inline]
    pub fn live_tables(self) -> &'a L1 {
        self.0.live_tables()
    }

    /// The live view's tables, for who sets page guards. Page guards and inline caches are right as long as the view's
    /// [`Mmu::fetch_epoch`] and `generation` stay the same, and are 0 when this is called after a change of either.
    #[inline]
    pub fn live_page_guards(self, generation: u64) -> &'a mut L1 {
        let tables = &mut self.0.views[self.0.live];
        tables.l1.renew_page_guards((tables.epoch, generation));
        &mut tables.l1
    }

    /// Makes the live view's inline caches 0, so that generated code looks up anew where its branches lead.
    pub fn forget_branches(&mut self) {
        self.0.views[self.0.live].l1.clear_inline_caches();
    }

    /// What generated code has counted of the live view's per-site entries.
    pub fn site_entry_counts(self) -> &'a mut [u32; SITE_ENTRIES] {
        self.0.views[self.0.live].l1.site_entry_counts()
    }

    /// The last device pages read and written, in this order.
    pub fn device_pages(&self) -> *const DevicePage {
        self.0.devices.as_ptr()
    }

    /// The mixed pages.
    pub fn mixed_pages(&self) -> &[MixedPage; MIXED_PAGES] {
        self.0.mixed.entries()
    }

    /// Returns the bytes of the page at `gva` that translated code must not write, if it may write the others.
    pub fn code_at(&self, gva: u64) -> Option<&ByteMap> {
        let tables = self.0.live_tables().base();
        self.0.mixed.code_at(gva, tables)
    }
}

/// Pages of code.
impl<'a> Front<'a> {
    /// True if [`x86_cpu::GuestBus::code_page`] needs no walk for `gva`. (A walk would set accessed flags.)
    pub fn is_fetched(&self, gva: u64) -> bool {
        self.0.views[self.0.live].fetch.find(gva).is_some()
    }

    /// The code generation of a page, for code that compares it by itself. Its address stays until
    /// [`Self::slots_generation`] changes.
    pub fn code_generation_cell(self, id: u64) -> Option<&'a AtomicU32> {
        let (slot, index) = self.0.find_id(id)?;
        let slots = self.0.table.slots(space_of(id));
        slots.get(slot)?.code_generation_cell(index)
    }
}

/// Numbers that vouch for what was noted: it is true while they are unchanged.
impl Front<'_> {
    /// Changes when this vCPU takes over other slots.
    #[inline]
    pub fn slots_generation(&self) -> u64 {
        self.0.slots_generation()
    }

    /// Changes when the tables of a view that is not live may have become another's.
    #[inline]
    pub fn views_made(&self) -> u64 {
        self.0.views_made
    }

    /// Looks at how many misses translated code has had in the live view since the last call, about 100 us ago: its tables
    /// may have to grow.
    pub fn sample_misses(self, cpu: &CpuState) {
        self.0.sample_misses(cpu);
    }

    /// Exchanges the live tables for larger ones if they are to grow. [`Self::views_made`] changes then, and who has
    /// noted where the tables are has to look anew.
    #[inline]
    pub fn grow_tables(self, cpu: &CpuState) {
        if self.0.growth.due.is_some() {
            self.0.grow_tables(cpu);
        }
    }

    /// See [`Mmu::exchange_tables`].
    pub fn exchange_tables(self) {
        self.0.exchange_tables();
    }

    /// The number of the current address space, whose tables others may share. It does not change its meaning while
    /// [`Self::switch_epoch`] stays the same.
    pub fn address_space(&self) -> u64 {
        self.0.current as u64
    }

    /// True if the live view's tables are shared: see [`Self::address_space`].
    pub fn are_tables_shared(&self) -> bool {
        self.0.views[self.0.live].is_shared
    }

    /// The number of the live view. The tables of the same view in other contexts have the same number, and tables of
    /// other views have others.
    pub fn live_view(&self) -> u64 {
        self.0.views[self.0.live].l1.view()
    }

    /// As [`Mmu::fetch_epoch`], but the same in all contexts while a supervisor executes from global pages only, or from
    /// pages that are the same in all of them: for a cache of branch targets.
    #[inline]
    pub fn target_epoch(&mut self, cpu: &CpuState) -> u64 {
        if cpu.cpl == 0
            && let Some(epoch) = self.0.common_epoch(cpu)
        {
            return epoch;
        }
        let live = &self.0.views[self.0.live];
        if cpu.cpl == 0 && self.0.paging.global_pages && !live.fetch.is_private() {
            self.0.global_fetch.epoch
        } else {
            live.epoch
        }
    }

    /// Vouch for remembered loads of CR3. They do not move in memory.
    pub fn switch_epochs(&self) -> &SwitchEpochs {
        &self.0.switch_epochs
    }

    /// Returns the number that vouches for loads of CR3 which lead to the current address space. `flushes`: for loads that
    /// flush, and for changes of the level in it.
    pub fn switch_epoch(&self, flushes: bool) -> u64 {
        self.0.switch_epochs.of(self.address_space(), flushes)
    }

    /// Returns the address of the current context's list of entries of guest tables ([`crate::compared`]). The list stays
    /// there while [`Self::switch_epoch`] is unchanged. `None`: a load that flushes has more to do than to compare
    /// entries.
    pub fn compared(&self) -> Option<u64> {
        self.0.compared()
    }

    /// Takes note of loads of CR3 that generated code has made, of which `loads` have flushed. The last one loaded what
    /// `cpu` has; [`x86_cpu::GuestBus::load_root`] comes next.
    pub fn note_flushing_loads(&mut self, cpu: &CpuState, loads: u64) {
        self.0.note_flushing_loads(cpu, loads);
    }

    /// Notes that generated code has changed to another view by itself: [`x86_cpu::GuestBus::select_view`] comes next, and
    /// the view has the tables that it had.
    pub fn tell_view(&mut self) {
        self.0.tell_view();
    }

    /// Returns how long the current root's translations are kept when it is loaded without a flush. `None`: not at all.
    pub fn root_is_kept(&self) -> Option<RootIsKept> {
        self.0.root_is_kept()
    }
}
