//! [`GuestMemory`]: a VM's memory, and the requests to vCPUs that changes of it make.

use std::sync::{
    Arc, Mutex, MutexGuard, PoisonError,
    atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering},
};

use crate::{
    DirtyRings, HostChange, HostPage, MemslotError, Slot, SlotConfig, SlotTable, Writers,
    dirty::{Clean, Dirty},
    host_pages::Gate,
    table::{ADDRESS_SPACES, Planning},
    words::{AtomicU64 as Epoch, RwLock, RwLockReadGuard},
};

/// How harvested pages are taken from the vCPUs that may write them. All but the default exist for benchmarks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum Harvest {
    /// Each vCPU is asked for the harvested pages that it may write; no thread takes a lock.
    #[default]
    Lockless,
    /// Every vCPU drops all its write permissions.
    Everything,
    /// Like `Lockless`, but there is one lock for harvests, faults, and vCPUs that give pages up.
    Locked,
}

/// State that changes of slots need, under their lock.
#[derive(Debug, Default)]
struct Changing {
    /// Serial number of the newest slot.
    serial: u32,
    /// Gate of the last change of host memory.
    gate: Option<Arc<Gate>>,
}

/// A VM's guest-physical memory.
#[derive(Debug, Default)]
pub struct GuestMemory {
    table: RwLock<Arc<SlotTable>>,
    /// Serialises changes of slots, and of the host memory under them.
    changing: Mutex<Changing>,
    /// Counts requests of any kind. vCPUs poll this one word.
    epoch: Epoch,
    /// Counts requests to drop all write permissions (a dirty harvest).
    write_flushes: AtomicU64,
    /// Counts changes of code generations in any slot.
    code_changes: Arc<AtomicU64>,
    /// KVM_DIRTY_LOG_INITIALLY_SET.
    starts_dirty: AtomicBool,
    /// [`Harvest`].
    harvest: AtomicU8,
    /// The lock of [`Harvest::Locked`].
    fault_lock: Mutex<()>,
    /// Number of pages that vCPUs were asked for, counted once per vCPU.
    pages_asked: AtomicU64,
    split_lock: Mutex<()>,
    rings: Arc<DirtyRings>,
}

impl GuestMemory {
    /// Makes a VM's memory without slots.
    pub fn new() -> Arc<Self> {
        Arc::new(Self::default())
    }

    fn read_table(&self) -> RwLockReadGuard<'_, Arc<SlotTable>> {
        self.table.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the current slots.
    pub fn table(&self) -> Arc<SlotTable> {
        Arc::clone(&self.read_table())
    }

    /// Returns the current slots, and the epoch with which they came. A vCPU keeps the snapshot until it synchronises;
    /// it acknowledges this epoch. With an older one, the thread that made the slots would wait for a vCPU that uses
    /// them already, and that may wait at their gate.
    pub fn table_and_epoch(&self) -> (Arc<SlotTable>, u64) {
        let table = self.read_table();
        (Arc::clone(&table), self.epoch())
    }

    /// The number of requests made. It changes when a vCPU has something to do at its next synchronisation point.
    #[inline(always)]
    pub fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::Acquire)
    }

    /// The counter of code generation changes in any slot. While it stays the same, so do all generations.
    pub fn code_changes(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.code_changes)
    }

    /// The number of requests to drop all write permissions.
    #[inline]
    pub fn write_flushes(&self) -> u64 {
        self.write_flushes.load(Ordering::Acquire)
    }

    /// Tells the vCPUs that a request's data is published; returns the new epoch.
    fn request(&self) -> u64 {
        self.epoch.fetch_add(1, Ordering::AcqRel).wrapping_add(1)
    }

    /// Says that the process has mapped all of the slot's memory readable and writable, and keeps it so while the slot
    /// exists. Pages are then not probed at the guest's first access.
    pub fn set_mapped(&self, number: u32) {
        if let Some(slot) = self.table().by_number(number) {
            slot.set_mapped();
        }
    }

    /// Locks changes of slots, once no change of host memory is under way.
    fn lock_changes(&self) -> MutexGuard<'_, Changing> {
        loop {
            let changing = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
            let Some(gate) = changing.gate.clone().filter(|gate| gate.is_closed()) else {
                return changing;
            };
            drop(changing);
            gate.wait();
        }
    }

    /// Begins the VMM's change of what the process can access between two host addresses. A thread that looks up such a
    /// page from now on waits for the end of the change. The caller waits until running vCPUs have acknowledged the
    /// change's epoch, makes the change, and then drops the result. `None` if no slot has memory in the range.
    ///
    /// # Errors
    /// The host has no memory.
    pub fn begin_host_change(
        &self,
        start: u64,
        end: u64,
    ) -> Result<Option<HostChange>, MemslotError> {
        let mut changing = self.lock_changes();
        let gate = Gate::closed();
        let Some(new) = self.table().with_host_changing(start, end, &gate)? else {
            return Ok(None);
        };
        changing.gate = Some(Arc::clone(&gate));
        // As in `set_slot`: once the write lock is held, no other thread uses the old table.
        let mut table = self.table.write().unwrap_or_else(PoisonError::into_inner);
        *table = Arc::new(new);
        Ok(Some(HostChange::new(gate, self.request())))
    }

    /// Creates, moves or deletes a slot, or changes its flags, as KVM_SET_USER_MEMORY_REGION does.
    ///
    /// Returns the epoch that running vCPUs have to acknowledge before the old mapping is unused. Accesses by other
    /// threads through this object have ended when this returns.
    ///
    /// # Errors
    /// KVM's errors, in KVM's order.
    pub fn set_slot(&self, config: SlotConfig) -> Result<u64, MemslotError> {
        let mut changing = self.lock_changes();
        // `changing` is locked, so the table is still the same when the planned change is applied.
        let change = {
            let with = Planning {
                serial: &mut changing.serial,
                changes: &self.code_changes,
                rings: &self.rings,
                // With rings, a dirty bit says that its page is in a ring, so pages cannot begin as dirty.
                starts_dirty: self.starts_dirty.load(Ordering::Relaxed)
                    && self.rings.entries() == 0,
            };
            self.read_table().plan(config, with)?
        };
        let Some(change) = change else {
            return Ok(self.epoch());
        };
        // Readers hold the lock for whole accesses, so none uses the old table once this thread holds the write lock.
        // Snapshots stay as they are.
        let mut table = self.table.write().unwrap_or_else(PoisonError::into_inner);
        Arc::make_mut(&mut table).apply(change);
        // Still under the lock, as `table_and_epoch` needs it.
        Ok(self.request())
    }

    /// Reads bytes of address space 0. Returns false, with nothing read, if some are not RAM.
    #[must_use]
    pub fn read_bytes(&self, gpa: u64, buf: &mut [u8]) -> bool {
        self.read_table().read_bytes(0, gpa, buf)
    }

    /// Writes bytes of address space 0. Returns false, with nothing written, if some are not writable RAM.
    #[must_use]
    pub fn write_bytes(&self, gpa: u64, buf: &[u8]) -> bool {
        self.read_table().write_bytes(0, gpa, buf)
    }

    /// Reads a word of 1, 2, 4, 8 or 16 bytes. The read is a single access if the word is in one page.
    pub fn read_gpa(&self, gpa: u64, size: usize) -> Option<u128> {
        let table = self.read_table();
        let page = table.host_page(0, gpa, false)?;
        if let Some(v) = page.load(gpa % 4096, size) {
            return Some(v);
        }
        let mut b = [0; 16];
        table
            .read_bytes(0, gpa, b.get_mut(..size)?)
            .then(|| u128::from_le_bytes(b))
    }

    /// Writes a word of 1, 2, 4, 8 or 16 bytes. The write is a single access if the word is in one page.
    pub fn write_gpa(&self, gpa: u64, size: usize, value: u128) -> Option<()> {
        let table = self.read_table();
        let slot = table.lookup(0, gpa).filter(|s| !s.is_readonly())?;
        let index = slot.page_index(gpa)?;
        if slot
            .writable_page(index)?
            .store(gpa % 4096, size, value)
            .is_some()
        {
            slot.note_write(index, gpa % 4096, size as u64);
            return Some(());
        }
        let bytes = value.to_le_bytes();
        table.write_bytes(0, gpa, bytes.get(..size)?).then_some(())
    }

    /// Atomically replaces a word of at most 16 bytes, all in one page, by `f` of it; returns the old word.
    pub fn rmw_gpa(&self, gpa: u64, size: usize, f: impl FnMut(u128) -> u128) -> Option<u128> {
        let table = self.read_table();
        let slot = table.lookup(0, gpa).filter(|s| !s.is_readonly())?;
        let index = slot.page_index(gpa)?;
        let old = slot
            .writable_page(index)?
            .rmw(gpa % 4096, size, Some(&self.split_lock), f)?;
        slot.note_write(index, gpa % 4096, size as u64);
        Some(old)
    }

    /// The lock for locked accesses that no host instruction can make atomic; see [`HostPage::rmw`].
    #[inline]
    pub fn split_lock(&self) -> &Mutex<()> {
        &self.split_lock
    }

    /// Marks the page of `gfn` in address space 0 dirty if its slot logs.
    pub fn mark_dirty(&self, gfn: u64) {
        let table = self.read_table();
        let Some(gpa) = gfn.checked_mul(4096) else {
            return;
        };
        if let Some(slot) = table.lookup(0, gpa)
            && let Some(index) = slot.page_index(gpa)
        {
            slot.mark_dirty(index);
        }
    }

    fn logging_slot<R>(
        &self,
        number: u32,
        f: impl FnOnce(&Slot, &Dirty) -> R,
    ) -> Result<R, MemslotError> {
        if number & 0xffff >= crate::table::USER_MEM_SLOTS
            || (number >> 16) as usize >= ADDRESS_SPACES
        {
            return Err(MemslotError::Number(number));
        }
        let table = self.table();
        let slot = table
            .by_number(number)
            .ok_or(MemslotError::NotFound(number))?;
        let dirty = slot.dirty().ok_or(MemslotError::NotLogging(number))?;
        Ok(f(slot, dirty))
    }

    /// Sets how harvests work. Called before there are vCPUs.
    pub fn set_harvest(&self, how: Harvest) {
        self.harvest.store(how as u8, Ordering::Relaxed);
    }

    fn is_harvest(&self, how: Harvest) -> bool {
        self.harvest.load(Ordering::Relaxed) == how as u8
    }

    /// True if faults take [`Self::fault_lock`].
    #[inline]
    pub fn locks_faults(&self) -> bool {
        self.is_harvest(Harvest::Locked)
    }

    /// Locks out harvests, and other vCPUs' changes of the reverse map, with [`Harvest::Locked`]; otherwise returns `None`.
    pub fn fault_lock(&self) -> Option<MutexGuard<'_, ()>> {
        self.is_harvest(Harvest::Locked).then(|| {
            self.fault_lock
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
        })
    }

    /// Has `f` clean pages of the slot, and asks the vCPUs that may write those pages to give them up. Returns the
    /// epoch to wait for, in addition to the vCPUs' mailboxes.
    fn cleaning<R>(&self, slot: &Slot, f: impl FnOnce(&mut Asking<'_>) -> R) -> (R, u64) {
        let _lock = self.fault_lock();
        let mut asking = Asking {
            writers: slot.writers(),
            is_everything: self.is_harvest(Harvest::Everything),
            pages: [(0, 0); ASKED_AT_ONCE],
            count: 0,
            asked: 0,
            is_any: false,
        };
        let result = f(&mut asking);
        asking.ask();
        self.pages_asked.fetch_add(asking.asked, Ordering::Relaxed);
        let epoch = if asking.is_everything && asking.is_any {
            self.request_write_flush()
        } else {
            0
        };
        (result, epoch)
    }

    /// Number of pages that vCPUs were asked to give up, counted once per vCPU.
    pub fn pages_asked(&self) -> u64 {
        self.pages_asked.load(Ordering::Relaxed)
    }

    /// KVM_GET_DIRTY_LOG: takes the bitmap, which has one bit per page, and clears it. `show` gets some of its words at
    /// a time, with the index of the first; if `show` fails, the rest of the bitmap keeps its bits.
    ///
    /// The pages may be reported to the VMM once all running vCPUs have acknowledged the returned epoch and everything
    /// now posted in their mailboxes. A vCPU's write permission exists only for pages whose bit is set, so until then
    /// its writes go to pages that this harvest reports, and afterwards they set the bit again. An epoch of 0 means
    /// that there is none to wait for.
    ///
    /// # Errors
    /// `Number`, `NotFound`, `NotLogging`; the inner error is that of `show`.
    pub fn take_dirty<E>(
        &self,
        number: u32,
        show: impl FnMut(usize, &[u64]) -> Result<(), E>,
    ) -> Result<(Result<(), E>, u64), MemslotError> {
        self.logging_slot(number, |slot, dirty| {
            self.cleaning(slot, |asking| dirty.take(asking, show))
        })
    }

    /// Number of pages of a slot that logs.
    ///
    /// # Errors
    /// `Number`, `NotFound`, `NotLogging`.
    pub fn logged_pages(&self, number: u32) -> Result<u64, MemslotError> {
        self.logging_slot(number, |slot, _| slot.config().size / 4096)
    }

    /// Passes the bitmap to `show`, as [`Self::take_dirty`] does, and leaves it as it is (KVM_GET_DIRTY_LOG under
    /// manual protection).
    ///
    /// # Errors
    /// `Number`, `NotFound`, `NotLogging`; the inner error is that of `show`.
    pub fn peek_dirty<E>(
        &self,
        number: u32,
        show: impl FnMut(usize, &[u64]) -> Result<(), E>,
    ) -> Result<Result<(), E>, MemslotError> {
        self.logging_slot(number, |_, dirty| dirty.peek(show))
    }

    /// Sets whether all pages of a slot that begins to log count as dirty (KVM_DIRTY_LOG_INITIALLY_SET).
    pub fn set_starts_dirty(&self, on: bool) {
        self.starts_dirty.store(on, Ordering::Relaxed);
    }

    /// KVM_CLEAR_DIRTY_LOG: clears the bits set in `mask`, from page `first` (a multiple of 64) on. Returns the epoch
    /// to wait for, as [`Self::take_dirty`] does.
    ///
    /// # Errors
    /// `Number`, `NotFound`, `NotLogging`; `Unaligned` or `Range` for a bad `first` or length.
    pub fn clear_dirty(&self, number: u32, first: u64, mask: &[u64]) -> Result<u64, MemslotError> {
        if !first.is_multiple_of(64) {
            return Err(MemslotError::Unaligned);
        }
        let first = (first / 64) as usize;
        self.logging_slot(number, |slot, dirty| {
            let room = dirty.len().checked_sub(first);
            if room.is_none_or(|room| room < mask.len()) {
                return Err(MemslotError::Range);
            }
            Ok(self
                .cleaning(slot, |asking| dirty.clear(first, mask, asking))
                .1)
        })?
    }

    /// The VM's dirty rings.
    pub fn rings(&self) -> &Arc<DirtyRings> {
        &self.rings
    }

    /// KVM_RESET_DIRTY_RINGS: clears the dirty bits of pages whose ring entries the VMM has read. Returns the number of
    /// those entries, and the epoch to wait for, as [`Self::take_dirty`] does.
    pub fn reset_rings(&self) -> (usize, u64) {
        let taken = self.rings.take();
        let table = self.table();
        let mut epoch = 0;
        let mut rest = &taken[..];
        while let Some((number, _)) = rest.first() {
            let len = rest.iter().take_while(|(n, _)| n == number).count();
            let (same, others) = rest.split_at(len);
            rest = others;
            let slot = table.by_number(*number);
            if let Some((slot, dirty)) = slot.and_then(|slot| Some((slot, slot.dirty()?))) {
                let clean = |asking: &mut Asking<'_>| clear_pages(dirty, same, asking);
                epoch = epoch.max(self.cleaning(slot, clean).1);
            }
        }
        (taken.len(), epoch)
    }

    /// Asks all vCPUs to drop all their write permissions; returns the epoch to wait for.
    pub fn request_write_flush(&self) -> u64 {
        self.write_flushes.fetch_add(1, Ordering::AcqRel);
        self.request()
    }

    /// Asks the vCPUs that may write the page unnoticed to give it up, at each gpa that it has. The page has been
    /// marked as code before.
    pub fn ask_for_code(&self, page: HostPage) {
        let table = self.read_table();
        for slot in (0..ADDRESS_SPACES).flat_map(|space| table.slots(space)) {
            let config = slot.config();
            let offset = page.hva().wrapping_sub(config.hva);
            if offset < config.size {
                let index = (offset / 4096) as usize;
                slot.writers().ask(&[(index / 64, 1 << (index % 64))], None);
            }
        }
    }
}

/// Largest number of bitmap words that vCPUs are asked for at once.
const ASKED_AT_ONCE: usize = 128;

/// Cleaned pages, collected until the vCPUs that may write them are asked.
struct Asking<'a> {
    writers: &'a Writers,
    /// [`Harvest::Everything`] is set.
    is_everything: bool,
    pages: [(usize, u64); ASKED_AT_ONCE],
    count: usize,
    asked: u64,
    is_any: bool,
}

impl Asking<'_> {
    fn ask(&mut self) {
        let pages = &self.pages[..core::mem::take(&mut self.count)];
        if !self.is_everything && !pages.is_empty() {
            self.asked += self.writers.ask(pages, None);
        }
    }
}

impl Clean for Asking<'_> {
    fn clean(&mut self, n: usize, pages: u64) {
        self.is_any = true;
        if self.count == ASKED_AT_ONCE {
            self.ask();
        }
        self.pages[self.count] = (n, pages);
        self.count += 1;
    }
}

/// Clears the pages of ring entries. Consecutive entries of the same bitmap word, which are common, are cleared
/// together.
fn clear_pages(dirty: &Dirty, entries: &[(u32, u64)], clean: &mut impl Clean) {
    let word = |page: &u64| (page / 64) as usize;
    for same in entries.chunk_by(|a, b| word(&a.1) == word(&b.1)) {
        if let Some((_, page)) = same.first() {
            let mask = same
                .iter()
                .fold(0, |mask, (_, page)| mask | 1 << (page % 64));
            dirty.clear_word(word(page), mask, clean);
        }
    }
}
