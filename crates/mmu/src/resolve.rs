//! From a gva to a page that may be accessed: what happens after an L1 miss.

use std::sync::Arc;

use guest_memory::{HostPage, Slot};
use x86_cpu::{Access, CpuState, Exception, Privilege};
use x86_defs::{control::cr4, paging::PAGE_SIZE, vector, vector::pf};

use crate::{
    Miss, Mmu, Mode, Translation, View,
    l1::{Half, L1},
    reach::{Leaf, PIECE_PAGES},
    walk::{self, Walk, WalkFault},
    written::SlotPage,
};

/// One of so many faults of dirty logging is timed and stands for all: reading the time takes a sixth of one.
const TIMED: u64 = 16;

/// A page of RAM on which the access is allowed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Resolved {
    pub host: HostPage,
    /// Slot in this vCPU's table, and page in the slot.
    pub slot: usize,
    pub index: usize,
    /// A write has to be noted afterwards: it has no tag.
    pub note: bool,
}

/// A translation that leads to a device. An access looks here more than once: translated code
/// finds that it cannot make it, and an instruction that has waited for the VMM goes on. Forgotten
/// with every flush and every change of address space. Generated code compares the first two.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct DevicePage {
    /// The gva.
    page: u64,
    /// Address of the view's [`L1`] that it would be in; 0: none.
    tables: u64,
    gpa: u64,
    _pad: u64,
}

impl DevicePage {
    /// log2 of the size.
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
    /// The slot of a resolved page.
    pub(crate) fn slot(&self, slot: usize) -> Option<&Slot> {
        self.table.slots(self.space()).get(slot).map(|s| &**s)
    }

    /// The page after `gva`'s. Linear addresses are 32 bits wide outside 64-bit
    /// mode, but descriptor tables and the TSS are 64-bit in compatibility mode.
    pub fn next_page(&self, cpu: &CpuState, gva: u64, who: Privilege) -> u64 {
        let next = (gva & !(PAGE_SIZE - 1)).wrapping_add(PAGE_SIZE);
        if cpu.is_64bit() || cpu.is_long_mode() && who == Privilege::System {
            next
        } else {
            next & 0xffff_ffff
        }
    }

    /// Where an access goes, if that is the device's page that was read or written last. It is
    /// allowed then, unless it crosses the page.
    #[inline(always)]
    pub fn known_device(&self, gva: u64, write: bool, who: Privilege) -> Option<u64> {
        let known = &self.devices[usize::from(write)];
        let is_same = known.page == gva & !0xfff && known.tables == self.l1_address(who);
        is_same.then_some(known.gpa | gva & 0xfff)
    }

    #[inline(always)]
    fn l1_address(&self, who: Privilege) -> u64 {
        self.views[self.tables_for(who)].l1.base()
    }

    /// Translations may have become others.
    pub(crate) fn forget_devices(&mut self) {
        self.devices = [DevicePage::NONE; 2];
    }

    /// The translation of `gva` for an access, with A and D bits set as the
    /// access sets them.
    pub(crate) fn walk_for(
        &mut self,
        cpu: &mut CpuState,
        gva: u64,
        access: Access,
        who: Privilege,
    ) -> Result<Walk, Miss> {
        if self.paging.mode == Mode::None {
            return Ok(Walk {
                gpa: gva,
                rights: crate::view::Rights::ALL,
                global: false,
                dirty: true,
                level: 1,
            });
        }
        if !self.paging.is_canonical(gva) {
            // Callers check; this keeps a translation from aliasing another.
            return Err(Miss::Exception(Exception::GP0));
        }
        let gva = if cpu.is_long_mode() {
            gva
        } else {
            gva & 0xffff_ffff
        };
        let view = View::of(cpu, who);
        let owner = self.owner();
        if let Some(hit) = self.l2.find(gva, owner) {
            // A denied access walks again: the tables may allow more by now, and
            // no flush is needed for that (SDM vol. 3, 4.10.4.3).
            if view.check(hit.rights, access).is_ok() && (hit.dirty || access != Access::Write) {
                self.stats.l2_hits += 1;
                return Ok(hit);
            }
        }
        self.stats.walks += 1;
        match walk::walk(&self.table, &self.paging, &mut self.near, gva, view, access) {
            Ok((walk, trail)) => {
                self.note_walk(gva, &walk, &trail);
                let tick = self.next_tick();
                self.l2.insert(gva, &walk, owner, tick);
                Ok(walk)
            }
            Err(WalkFault::Host) => Err(Miss::Host),
            Err(WalkFault::Page(bits)) => {
                self.stats.permission_misses += u64::from(bits & pf::P != 0);
                self.forget_faulting(gva);
                cpu.fault_gva = gva;
                let mut code = bits;
                if access == Access::Write {
                    code |= pf::W;
                }
                if cpu.cpl == 3 && who == Privilege::Current {
                    code |= pf::U;
                }
                // CR4.SMEP changes without a new root.
                let is_told = self.paging.nxe || cpu.cr4 & cr4::SMEP != 0;
                if access == Access::Fetch && is_told {
                    code |= pf::I;
                }
                Err(Miss::Exception(Exception::with_code(vector::PF, code)))
            }
        }
    }

    /// Resolves a data access to the page of `gva` and fills L1 if the page
    /// needs no bookkeeping from now on.
    pub(crate) fn resolve(
        &mut self,
        cpu: &mut CpuState,
        gva: u64,
        access: Access,
        who: Privilege,
    ) -> Result<Resolved, Miss> {
        self.stats.l1_misses += 1;
        let write = access == Access::Write;
        if let Some(gpa) = self.known_device(gva, write, who) {
            return Err(Miss::Device { gpa });
        }
        if let Some(page) = self.find_in_reach(gva, write, who) {
            return Ok(page);
        }
        let walk = self.walk_for(cpu, gva, access, who)?;
        let device = Miss::Device { gpa: walk.gpa };
        let slot_index = self
            .table
            .find_near(self.space(), walk.gpa, self.near)
            .filter(|_| self.apic_page != Some(walk.gpa & !0xfff));
        let Some((slot_index, slot)) = slot_index
            .and_then(|n| Some((n, self.slot(n)?)))
            .filter(|(_, slot)| !(write && slot.is_readonly()))
        else {
            self.stats.device_misses += 1;
            let tables = self.l1_address(who);
            self.devices[usize::from(write)] =
                DevicePage::new(gva & !0xfff, tables, walk.gpa & !0xfff);
            return Err(device);
        };
        let index = slot.page_index(walk.gpa).ok_or(device)?;
        let host = slot.page_for(index, write).ok_or(Miss::Host)?;
        let at = SlotPage {
            space: self.paging.space.into(),
            slot: slot_index,
            index,
        };
        let note = write && !(walk.dirty && self.begin_to_write(at, gva));
        self.note_level(gva, walk.level, walk.global);
        let tables = self.tables_for(who);
        let l1 = &mut self.views[tables].l1;
        l1.insert(Half::Read, gva, host, walk.global);
        if write && !note {
            l1.insert(Half::Write, gva, host, walk.global);
        }
        self.enter_in_reach(gva, &walk, at, host, write && !note);
        Ok(Resolved {
            host,
            slot: slot_index,
            index,
            note,
        })
    }

    /// The page is going to have a write tag: it is findable, dirty, and no code. False if it is code, or else cannot have one.
    fn begin_to_write(&mut self, at: SlotPage, gva: u64) -> bool {
        let is_timed = self.is_logging && self.stats.dirty_faults.is_multiple_of(TIMED);
        let start = is_timed.then(host::cpu::rdtsc);
        let held = self.memory.locks_faults().then(|| Arc::clone(&self.memory));
        let _lock = held.as_ref().and_then(|memory| memory.fault_lock());
        // First: who clears the bit, or marks the page as code, asks those that it finds.
        let Some(is_new) = self.written.add(&self.table, &self.mailbox, at, gva) else {
            return false;
        };
        let Some(slot) = self.table.slots(at.space).get(at.slot) else {
            return false;
        };
        if slot.code_chunks(at.index) != 0 {
            if is_new {
                self.written.take(at);
            }
            return false;
        }
        if slot.mark_dirty(at.index) {
            self.stats.dirty_faults += 1;
            if let Some(start) = start {
                let took = host::cpu::rdtsc().wrapping_sub(start);
                self.stats.stall_tsc += took * TIMED;
            }
        }
        true
    }

    /// A page that the second level has, for an access that needs no more than that.
    fn find_in_reach(&mut self, gva: u64, write: bool, who: Privilege) -> Option<Resolved> {
        let keys = self.keys_of(self.current);
        // Most of the upper half is global.
        let is_upper = gva >> 63 != 0;
        let found = [usize::from(is_upper), 0]
            .into_iter()
            .find_map(|n| self.reach.find(gva, keys[n]))?;
        let tables = self.tables_for(who);
        let may = self.views[tables]
            .l1
            .rights()
            .map(|r| r >> found.class & 1 != 0);
        let may_write = may[1] && found.writable;
        if !may[0] || write && !may_write {
            // The write is made once it is noted. So much is to be done until then that its cache and TLB misses would not begin before.
            host::cpu::prefetch_to_write(found.hva + gva % PAGE_SIZE);
            return None;
        }
        let (slot, index, host) = self.page_at(found.hva, write)?;
        self.stats.reach_hits += 1;
        let l1 = &mut self.views[tables].l1;
        l1.insert(Half::Read, gva, host, found.global);
        if may_write {
            l1.insert(Half::Write, gva, host, found.global);
        }
        Some(Resolved {
            host,
            slot,
            index,
            note: false,
        })
    }

    /// The slot's page at a host address.
    fn page_at(&self, hva: u64, write: bool) -> Option<(usize, usize, HostPage)> {
        let slots = self.table.slots(self.space());
        let index_in = |n: usize| {
            let config = slots.get(n)?.config();
            let offset = hva.wrapping_sub(config.hva);
            (offset < config.size).then_some((n, (offset >> 12) as usize))
        };
        let (slot, index) = index_in(self.near).or_else(|| (0..slots.len()).find_map(index_in))?;
        let host = slots.get(slot)?.page_for(index, write)?;
        (host.hva() == hva).then_some((slot, index, host))
    }

    /// The second level has the page from now on.
    fn enter_in_reach(
        &mut self,
        gva: u64,
        walk: &Walk,
        at: SlotPage,
        host: HostPage,
        writable: bool,
    ) {
        let keys = self.keys_of(self.current);
        let key = keys[usize::from(walk.global && gva >> 63 != 0)];
        let mut leaf = Leaf {
            gva,
            hva: host.hva(),
            class: walk.rights.class(),
            global: walk.global,
            writable,
        };
        if walk.level == 1 && self.paging.mode != Mode::None {
            self.reach.insert(&leaf, key, keys);
            self.publish_reach();
            if let Some(derived) = &mut self.contexts[self.current].derived {
                let writes = if writable { self.writes_epoch } else { 0 };
                derived.note_page(gva, leaf.hva, writes);
            }
            return;
        }
        // Pages of the piece before this one; the slot may begin with a later one.
        let before = (gva >> 12) as usize % PIECE_PAGES;
        leaf.hva = leaf.hva.wrapping_sub((before as u64) << 12);
        let Some(slot) = self.table.slots(at.space).get(at.slot) else {
            return;
        };
        let apic = self.apic_page.and_then(|gpa| slot.page_index(gpa));
        self.reach.insert_large(&leaf, key, |bits| {
            let skipped = before.saturating_sub(at.index);
            slot.readable_pages((at.index + skipped) - before, skipped, bits);
            if let Some(n) = apic.and_then(|n| (n + before).checked_sub(at.index))
                && let Some(word) = bits.get_mut(n / 64)
            {
                *word &= !(1 << (n % 64));
            }
        });
    }

    /// The live view's tables, for generated code. They change with every call
    /// that takes `&mut self`, and are others when another view is live.
    pub fn live_tables(&self) -> &L1 {
        &self.views[self.live].l1
    }

    /// Prepares an access at the current privilege level and returns the host
    /// address of its first byte, if it needs no more than that: the page has a
    /// tag from now on, and all bytes are in it.
    ///
    /// 0 if the access has to be made with [`Self::read`] and its kin; `fault` then is the exception that
    /// they will raise, if that is known. (A result of both would go through memory.)
    #[inline(never)]
    pub fn refill(
        &mut self,
        cpu: &mut CpuState,
        gva: u64,
        size: u64,
        access: Access,
        fault: &mut Option<Exception>,
    ) -> u64 {
        let known = self.known_device(gva, access == Access::Write, Privilege::Current);
        if gva % PAGE_SIZE + size > PAGE_SIZE || known.is_some() {
            return 0;
        }
        match self.resolve(cpu, gva, access, Privilege::Current) {
            Ok(page) if !page.note => page.host.hva() + gva % PAGE_SIZE,
            Err(Miss::Exception(e)) => {
                *fault = Some(e);
                0
            }
            _ => 0,
        }
    }

    /// After a write to a resolved page.
    pub(crate) fn written(&self, page: &Resolved, offset: u64, len: u64) {
        if page.note
            && let Some(slot) = self.slot(page.slot)
        {
            slot.note_write(page.index, offset, len);
        }
    }

    /// Where `gva` leads, for an access that the caller carries out itself. For
    /// a write the page counts as written only by [`Self::write_gpa`].
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
        let gpa = self.walk_for(cpu, gva, access, who)?.gpa;
        let write = access == Access::Write;
        let slot = self.table.lookup(self.space(), gpa);
        let slot = slot
            .filter(|slot| self.apic_page != Some(gpa & !0xfff) && !(write && slot.is_readonly()));
        let place = slot.and_then(|slot| Some((slot, slot.page_index(gpa)?)));
        let page = place.map(|(slot, index)| slot.page_for(index, write).ok_or(Miss::Host));
        let page = page.transpose()?;
        Ok(Translation { gpa, page })
    }

    /// KVM_TRANSLATE: no permission check, no side effect.
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
