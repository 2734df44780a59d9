//! [`GuestMemory`]: a VM's memory and the requests that its changes make to vCPUs.

use std::sync::{
    Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard,
    atomic::{AtomicBool, AtomicU64, Ordering},
};

use crate::{DirtyRings, HostPage, MemslotError, Slot, SlotConfig, SlotTable};

/// Pages that became code that are remembered one by one.
const CODE_LOG: usize = 256;

/// What a vCPU has seen of [`GuestMemory::epoch`].
///
/// Whoever changed something waits until every *running* vCPU has acknowledged
/// the epoch that the change returned; one that is not running synchronises
/// before it executes again.
#[derive(Debug, Default)]
pub struct Acknowledged(AtomicU64);

impl Acknowledged {
    /// The last epoch whose requests were carried out.
    pub fn epoch(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }
    /// Everything published up to `epoch` is carried out.
    pub fn set(&self, epoch: u64) {
        self.0.store(epoch, Ordering::Release);
    }
}

/// The pages that became code, most recent last.
#[derive(Debug, Default)]
struct CodeLog {
    /// Pages ever logged.
    seq: u64,
    pages: Vec<HostPage>,
}

/// What a vCPU finds in the log of pages that became code.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NewCode {
    /// Nothing new.
    None,
    /// These pages.
    Pages(Vec<HostPage>),
    /// Too many to tell: any page may be code.
    Any,
}

/// A VM's guest-physical memory.
#[derive(Debug, Default)]
pub struct GuestMemory {
    table: RwLock<Arc<SlotTable>>,
    /// Serialises changes of slots.
    changing: Mutex<u32>,
    /// Counts requests of any kind: the one word that vCPUs poll.
    epoch: AtomicU64,
    /// Changes of the slot table.
    generation: AtomicU64,
    /// Requests to drop all write permissions (a dirty harvest).
    write_flushes: AtomicU64,
    /// Counts changes of code generations in any slot.
    code_changes: Arc<AtomicU64>,
    /// KVM_DIRTY_LOG_INITIALLY_SET.
    starts_dirty: AtomicBool,
    code_seq: AtomicU64,
    code_log: Mutex<CodeLog>,
    split_lock: Mutex<()>,
    rings: Arc<DirtyRings>,
}

impl GuestMemory {
    /// A VM without memory.
    pub fn new() -> Arc<Self> {
        Arc::new(Self::default())
    }

    fn read_table(&self) -> RwLockReadGuard<'_, Arc<SlotTable>> {
        self.table.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_code_log(&self) -> MutexGuard<'_, CodeLog> {
        self.code_log.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The current slots. A vCPU keeps the snapshot until it synchronises.
    pub fn table(&self) -> Arc<SlotTable> {
        Arc::clone(&self.read_table())
    }

    /// Changes when a vCPU has something to do at its next synchronisation point.
    #[inline(always)]
    pub fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::Acquire)
    }

    /// The counter of changes of code generations in any slot: while it stays
    /// the same, so do all generations.
    pub fn code_changes(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.code_changes)
    }

    /// Changes with the slot table.
    #[inline]
    pub fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    /// Changes when write permissions have to be dropped.
    #[inline]
    pub fn write_flushes(&self) -> u64 {
        self.write_flushes.load(Ordering::Acquire)
    }

    /// Data is published: tell the vCPUs.
    fn request(&self) -> u64 {
        self.epoch.fetch_add(1, Ordering::AcqRel).wrapping_add(1)
    }

    /// The process has mapped all of the slot's memory, to be read and written, and keeps it while the
    /// slot exists: the host need not be asked for each page when the guest first comes there.
    pub fn set_mapped(&self, number: u32) {
        if let Some(slot) = self.table().by_number(number) {
            slot.set_mapped();
        }
    }

    /// Creates, moves, deletes a slot or changes its flags, as
    /// KVM_SET_USER_MEMORY_REGION does.
    ///
    /// Returns the epoch that running vCPUs have to acknowledge before the old
    /// mapping is unused; accesses by other threads through this object are over.
    ///
    /// # Errors
    /// KVM's, in KVM's order.
    pub fn set_slot(&self, config: SlotConfig) -> Result<u64, MemslotError> {
        let mut serial = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        // Nobody else changes the table, so what is planned on it now can be done later.
        let (change, was_logging) = {
            let table = self.read_table();
            let change = table.plan(config, &mut serial, &self.code_changes, &self.rings)?;
            let old = table.by_number(config.slot);
            (change, old.is_some_and(Slot::is_logging))
        };
        let Some(change) = change else {
            return Ok(self.epoch());
        };
        // A bit says that its page is in a ring.
        if self.starts_dirty.load(Ordering::Relaxed)
            && self.rings.entries() == 0
            && !was_logging
            && let Some(slot) = change.slot()
        {
            slot.set_all_dirty();
        }
        // Readers hold the lock for whole accesses, so none uses the old table
        // once this write lock was ours. Snapshots stay as they are.
        let mut table = self.table.write().unwrap_or_else(PoisonError::into_inner);
        Arc::make_mut(&mut table).apply(change);
        drop(table);
        self.generation.fetch_add(1, Ordering::AcqRel);
        Ok(self.request())
    }

    /// Reads bytes of address space 0; false (and nothing read) if some are not RAM.
    #[must_use]
    pub fn read_bytes(&self, gpa: u64, buf: &mut [u8]) -> bool {
        self.read_table().read_bytes(0, gpa, buf)
    }

    /// Writes bytes of address space 0; false (and nothing written) if some are not writable RAM.
    #[must_use]
    pub fn write_bytes(&self, gpa: u64, buf: &[u8]) -> bool {
        self.read_table().write_bytes(0, gpa, buf)
    }

    /// Reads a word of 1, 2, 4, 8 or 16 bytes, in one piece if it is in one page.
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

    /// Writes a word of 1, 2, 4, 8 or 16 bytes, in one piece if it is in one page.
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

    /// Replaces a word of at most 16 bytes that is in one page by `f` of it,
    /// atomically; returns the old one.
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

    /// Orders locked accesses that no host instruction can do; see [`HostPage::rmw`].
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
        f: impl FnOnce(&Slot, &[AtomicU64]) -> R,
    ) -> Result<R, MemslotError> {
        if number & 0xffff >= crate::table::USER_MEM_SLOTS
            || (number >> 16) as usize >= crate::table::ADDRESS_SPACES
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

    /// KVM_GET_DIRTY_LOG: takes the bitmap and clears it, one bit per page.
    ///
    /// The bits may be shown to the VMM once all running vCPUs have acknowledged
    /// the returned epoch: a vCPU's write permission exists only for pages whose
    /// bit is set, so until then its writes go to pages that this harvest
    /// reports, and afterwards they set the bit again.
    ///
    /// # Errors
    /// `Number`, `NotFound`, `NotLogging`.
    pub fn take_dirty(&self, number: u32) -> Result<(Vec<u64>, u64), MemslotError> {
        let bits: Vec<u64> = self.logging_slot(number, |_, words| {
            words
                .iter()
                .map(|w| match w.load(Ordering::Relaxed) {
                    0 => 0,
                    _ => w.swap(0, Ordering::AcqRel),
                })
                .collect()
        })?;
        Ok((bits, self.request_write_flush()))
    }

    /// Pages of a slot that logs.
    ///
    /// # Errors
    /// `Number`, `NotFound`, `NotLogging`.
    pub fn logged_pages(&self, number: u32) -> Result<u64, MemslotError> {
        self.logging_slot(number, |slot, _| slot.config().size / 4096)
    }

    /// The bitmap, left as it is (KVM_GET_DIRTY_LOG under manual protection).
    ///
    /// # Errors
    /// `Number`, `NotFound`, `NotLogging`.
    pub fn peek_dirty(&self, number: u32) -> Result<Vec<u64>, MemslotError> {
        self.logging_slot(number, |_, words| {
            words.iter().map(|w| w.load(Ordering::Acquire)).collect()
        })
    }

    /// Pages of slots that begin to log count as dirty (KVM_DIRTY_LOG_INITIALLY_SET).
    pub fn set_starts_dirty(&self, on: bool) {
        self.starts_dirty.store(on, Ordering::Relaxed);
    }

    /// KVM_CLEAR_DIRTY_LOG: clears the bits set in `mask`, from page `first`
    /// (a multiple of 64). Returns the epoch to wait for, as [`Self::take_dirty`].
    ///
    /// # Errors
    /// `Number`, `NotFound`, `NotLogging`; `Unaligned` or `Range` for a bad `first` or length.
    pub fn clear_dirty(&self, number: u32, first: u64, mask: &[u64]) -> Result<u64, MemslotError> {
        if !first.is_multiple_of(64) {
            return Err(MemslotError::Unaligned);
        }
        self.logging_slot(number, |_, words| {
            let words = words
                .get((first / 64) as usize..)
                .filter(|w| w.len() >= mask.len())
                .ok_or(MemslotError::Range)?;
            for (word, mask) in words.iter().zip(mask).filter(|(_, m)| **m != 0) {
                word.fetch_and(!mask, Ordering::AcqRel);
            }
            Ok::<(), MemslotError>(())
        })??;
        Ok(self.request_write_flush())
    }

    /// The VM's dirty rings.
    pub fn rings(&self) -> &Arc<DirtyRings> {
        &self.rings
    }

    /// KVM_RESET_DIRTY_RINGS: pages whose entries the VMM has read are clean again. Returns how many
    /// entries that were, and the epoch to wait for, as [`Self::take_dirty`].
    pub fn reset_rings(&self) -> (usize, u64) {
        let taken = self.rings.take();
        if taken.is_empty() {
            return (0, self.epoch());
        }
        let table = self.table();
        for (number, page) in &taken {
            if let Some(slot) = table.by_number(*number) {
                slot.clear_dirty(*page);
            }
        }
        (taken.len(), self.request_write_flush())
    }

    /// Asks all vCPUs to drop their write permissions; returns the epoch to wait for.
    pub fn request_write_flush(&self) -> u64 {
        self.write_flushes.fetch_add(1, Ordering::AcqRel);
        self.request()
    }

    /// A page became code: vCPUs that may write it without being noticed find
    /// it in the log. Returns the log's new length.
    pub fn log_code(&self, page: HostPage) {
        let mut log = self.lock_code_log();
        if log.pages.len() == CODE_LOG {
            log.pages.drain(..CODE_LOG / 2);
        }
        log.pages.push(page);
        log.seq += 1;
        self.code_seq.store(log.seq, Ordering::Release);
        drop(log);
        self.request();
    }

    /// The pages that became code since `seen`, which is brought up to date.
    pub fn new_code(&self, seen: &mut u64) -> NewCode {
        if self.code_seq.load(Ordering::Acquire) == *seen {
            return NewCode::None;
        }
        let log = self.lock_code_log();
        let missing = log.seq.wrapping_sub(*seen);
        *seen = log.seq;
        match log.pages.len().checked_sub(missing as usize) {
            Some(at) => NewCode::Pages(log.pages[at..].to_vec()),
            None => NewCode::Any,
        }
    }
}
