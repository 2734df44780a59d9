//! [`Slot`]: one memslot and the state of its pages.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
};

use host::LazyArray;
use x86_defs::paging::{PAGE_SHIFT, PAGE_SIZE};

use crate::{
    DirtyRings, HostPage, Writer, Writers,
    byte_map::ByteMap,
    dirty::Dirty,
    exact_code::{self, ExactCode},
    host_pages::{Gate, HostPages},
    writers::Mailbox,
};

/// Flag of a slot: the pages written are logged.
pub const KVM_MEM_LOG_DIRTY_PAGES: u32 = 1 << 0;
/// Flag of a slot: guest writes are device accesses.
pub const KVM_MEM_READONLY: u32 = 1 << 1;

/// Bytes of guest code that are tracked together, by one bit of the page's chunk word.
pub const CODE_CHUNK: u64 = 64;

/// The arguments of KVM_SET_USER_MEMORY_REGION.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SlotConfig {
    /// Address space in the high, slot number in the low 16 bits.
    pub slot: u32,
    /// [`KVM_MEM_LOG_DIRTY_PAGES`] and [`KVM_MEM_READONLY`].
    pub flags: u32,
    /// Guest-physical address.
    pub gpa: u64,
    /// Size in bytes; zero deletes the slot.
    pub size: u64,
    /// Host virtual address. It is the VMM's promise, see the crate's documentation.
    pub hva: u64,
}

/// Code tracking of a slot's pages.
#[derive(Debug)]
struct CodeState {
    chunks: LazyArray<AtomicU64>,
    /// A bit per page: the page has had chunks. No bit is ever cleared.
    pages: LazyArray<AtomicU64>,
    generation: LazyArray<AtomicU32>,
    exact: ExactCode,
    /// Start value of this slot's generations. Another slot at the same gpa has another one, so that its code is never
    /// taken for this slot's.
    seed: u32,
    /// The VM's count of changes of any slot's generations.
    changes: Arc<AtomicU64>,
}

/// A memslot. Immutable, except for the atomics of its pages.
#[derive(Debug)]
pub struct Slot {
    config: SlotConfig,
    code: Arc<CodeState>,
    dirty: Option<Arc<Dirty>>,
    writers: Arc<Writers>,
    host: Arc<HostPages>,
    /// The dirty rings of the VM.
    rings: Arc<DirtyRings>,
}

impl Slot {
    /// Makes a slot with fresh page state. `serial` differs in every call; `changes` is the VM's one counter. In a slot
    /// that logs, `is_dirty` says whether its pages begin as dirty.
    pub(crate) fn new(
        config: SlotConfig,
        is_dirty: bool,
        serial: u32,
        changes: &Arc<AtomicU64>,
        rings: &Arc<DirtyRings>,
    ) -> io::Result<Self> {
        let pages = (config.size >> PAGE_SHIFT) as usize;
        Ok(Self {
            config,
            code: Arc::new(CodeState {
                chunks: LazyArray::new(pages)?,
                pages: LazyArray::new(pages.div_ceil(64))?,
                generation: LazyArray::new(pages)?,
                exact: ExactCode::default(),
                // The multiplier is odd, so seeds are distinct; it is large, so they are far apart.
                seed: serial.wrapping_mul(0x9e37_79b1),
                changes: Arc::clone(changes),
            }),
            dirty: Self::new_dirty(&config, is_dirty)?,
            writers: Arc::new(Writers::new(pages)),
            host: Arc::new(HostPages::new(pages)?),
            rings: Arc::clone(rings),
        })
    }

    /// Returns this slot with other flags or at another gpa; `serial` is given if the gpa changes.
    pub(crate) fn changed(
        &self,
        config: SlotConfig,
        is_dirty: bool,
        serial: Option<u32>,
    ) -> io::Result<Self> {
        let dirty = match &self.dirty {
            Some(dirty) if config.flags & KVM_MEM_LOG_DIRTY_PAGES != 0 => Some(Arc::clone(dirty)),
            _ => Self::new_dirty(&config, is_dirty)?,
        };
        match serial {
            Some(serial) => Ok(Self {
                dirty,
                ..Self::new(config, is_dirty, serial, &self.code.changes, &self.rings)?
            }),
            None => Ok(Self {
                config,
                code: Arc::clone(&self.code),
                dirty,
                writers: Arc::clone(&self.writers),
                host: Arc::clone(&self.host),
                rings: Arc::clone(&self.rings),
            }),
        }
    }

    /// Returns this slot for use during and after the VMM's change of the host memory from `start` to `end`, or `None`
    /// if none of that memory is under the slot.
    pub(crate) fn with_host_changing(
        &self,
        start: u64,
        end: u64,
        gate: &Arc<Gate>,
    ) -> io::Result<Option<Self>> {
        let SlotConfig { hva, size, .. } = self.config;
        let first = start.max(hva);
        let last = end.min(hva.saturating_add(size));
        if first >= last {
            return Ok(None);
        }
        let page = |at: u64| ((at - hva) >> PAGE_SHIFT) as usize;
        let host = self.host.changing(page(first)..page(last - 1) + 1, gate)?;
        Ok(Some(Self {
            config: self.config,
            code: Arc::clone(&self.code),
            dirty: self.dirty.clone(),
            writers: Arc::clone(&self.writers),
            host: Arc::new(host),
            rings: Arc::clone(&self.rings),
        }))
    }

    fn new_dirty(config: &SlotConfig, is_dirty: bool) -> io::Result<Option<Arc<Dirty>>> {
        if config.flags & KVM_MEM_LOG_DIRTY_PAGES == 0 {
            return Ok(None);
        }
        let pages = (config.size >> PAGE_SHIFT) as usize;
        Ok(Some(Arc::new(Dirty::new(pages, is_dirty)?)))
    }

    /// Returns the vCPU's entry in the reverse map of this slot, and makes one if it has none.
    ///
    /// # Errors
    /// The host has no memory.
    pub fn writer(&self, mailbox: &Arc<Mailbox>) -> io::Result<Arc<Writer>> {
        self.writers.writer(mailbox)
    }

    /// The reverse map: the vCPUs that may write the slot's pages.
    pub(crate) fn writers(&self) -> &Writers {
        &self.writers
    }

    /// True if this slot, which is `old` with other flags, must note writes to pages that could be written unnoticed in
    /// `old`.
    pub fn notes_more_than(&self, old: &Self) -> bool {
        match (&self.dirty, &old.dirty) {
            (None, _) => false,
            (Some(new), Some(old)) if Arc::ptr_eq(new, old) => false,
            (Some(new), _) => !new.began_whole(),
        }
    }

    /// The arguments that the slot was set with.
    pub fn config(&self) -> &SlotConfig {
        &self.config
    }

    /// True if guest writes are device accesses (KVM_MEM_READONLY).
    #[inline]
    pub fn is_readonly(&self) -> bool {
        self.config.flags & KVM_MEM_READONLY != 0
    }

    /// True if writes are logged.
    #[inline]
    pub fn is_logging(&self) -> bool {
        self.dirty.is_some()
    }

    /// Returns the index of the page that contains `gpa`, if that is in this slot.
    #[inline]
    pub fn page_index(&self, gpa: u64) -> Option<usize> {
        let offset = gpa.wrapping_sub(self.config.gpa);
        (offset < self.config.size).then_some((offset >> PAGE_SHIFT) as usize)
    }

    /// Returns the guest-physical address of the page of that index.
    #[inline]
    pub fn page_gpa(&self, index: usize) -> u64 {
        self.config.gpa + ((index as u64) << PAGE_SHIFT)
    }

    /// Returns the page of that index, if the process can read it.
    #[inline]
    pub fn page(&self, index: usize) -> Option<HostPage> {
        let hva = self.hva(index)?;
        let is_good = self.host.is_readable(index, hva);
        is_good.then(|| HostPage::new(hva as *mut u8))
    }

    /// Returns the page of that index, if it is already known that the process can read it.
    #[inline]
    pub fn known_page(&self, index: usize) -> Option<HostPage> {
        let hva = self.hva(index)?;
        self.host
            .is_known(index)
            .then(|| HostPage::new(hva as *mut u8))
    }

    /// Returns the page of that index, if the process can read and write it. Does not consider [`Self::is_readonly`].
    #[inline]
    pub fn writable_page(&self, index: usize) -> Option<HostPage> {
        let hva = self.hva(index)?;
        let is_good = self.host.is_writable(index, hva);
        is_good.then(|| HostPage::new(hva as *mut u8))
    }

    /// Says that the process has mapped all of the slot readable and writable, for as long as the slot exists.
    pub(crate) fn set_mapped(&self) {
        self.host.set_mapped();
    }

    /// Returns the page of that index for a read or for a write.
    #[inline]
    pub fn page_for(&self, index: usize, write: bool) -> Option<HostPage> {
        if write {
            self.writable_page(index)
        } else {
            self.page(index)
        }
    }

    /// Sets bit `n` of `bits` for each page `first + n` that is known to be readable. Pages before the slot, if `first`
    /// is negative, and beyond its end get no bit.
    pub fn readable_pages(&self, first: isize, bits: &mut [u64]) {
        let pages = (self.config.size >> PAGE_SHIFT) as isize;
        let is_mapped = self.host.is_mapped();
        for (n, word) in (0..).zip(bits) {
            let at = first + 64 * n;
            let (from, to) = (at.max(0), pages.min(at + 64));
            if from < to {
                let known = match is_mapped {
                    true => u64::MAX,
                    false => self.host.known_readable(from as usize),
                };
                *word |= (known & u64::MAX >> (64 - (to - from))) << (from - at);
            }
        }
    }

    /// Returns the host address of the page of that index.
    #[inline]
    fn hva(&self, index: usize) -> Option<u64> {
        let offset = (index as u64).checked_mul(PAGE_SIZE)?;
        (offset < self.config.size).then(|| self.config.hva.wrapping_add(offset))
    }

    /// Returns the page that contains `gpa`, if that is in this slot.
    #[inline]
    pub fn host_page(&self, gpa: u64) -> Option<HostPage> {
        self.page(self.page_index(gpa)?)
    }

    /// Sets the page's dirty bit if the slot logs, and returns true if it was clear. Called after the write. A vCPU
    /// that is recorded as a writer of the page may call this before it, because no harvest is reported until that vCPU
    /// has acknowledged it.
    #[inline]
    pub fn mark_dirty(&self, index: usize) -> bool {
        let is_new = self.dirty.as_ref().is_some_and(|dirty| dirty.mark(index));
        if is_new && self.rings.entries() != 0 {
            self.rings.push(self.config.slot, index as u64);
        }
        is_new
    }

    /// True if a write to the page would change nothing that is noted: it is dirty, if the slot logs, and no code.
    #[inline]
    pub fn is_noted(&self, index: usize) -> bool {
        self.code_chunks(index) == 0 && self.dirty.as_ref().is_none_or(|dirty| dirty.is_set(index))
    }

    /// The dirty state, if the slot logs.
    pub(crate) fn dirty(&self) -> Option<&Dirty> {
        self.dirty.as_deref()
    }

    /// Returns the chunks of the page that were fetched as code, one bit each.
    #[inline]
    pub fn code_chunks(&self, index: usize) -> u64 {
        // Most pages never have code, and 64 of them share a word.
        if self.pages_with_code(index / 64) >> (index % 64) & 1 == 0 {
            return 0;
        }
        let chunks = self.code.chunks.get(index);
        chunks.map_or(0, |c| c.load(Ordering::SeqCst))
    }

    /// Returns the bits of the pages of word `n` (64 pages) that may have code: all others have none.
    #[inline]
    pub fn pages_with_code(&self, n: usize) -> u64 {
        let word = self.code.pages.get(n);
        word.map_or(0, |word| word.load(Ordering::SeqCst))
    }

    /// Returns the bytes of the page that count as code: those that were fetched if the bytes are tracked one by one, and
    /// else all of the chunks.
    pub fn code_map(&self, index: usize) -> ByteMap {
        let mut map = ByteMap::of_chunks(self.code_chunks(index));
        if self.is_exact(index) {
            self.code.exact.narrow(index, &mut map);
        }
        map
    }

    /// Marks `len` bytes from `offset` as fetched as code. Returns true if any of them did not count as code before. Call
    /// this *before* reading the bytes.
    ///
    /// The caller must have read the page's generation before this call. A writer clears the chunks first and changes
    /// the generation afterwards, so if a mark is lost, the caller's generation is out of date.
    #[inline]
    pub fn track_code(&self, index: usize, offset: u64, len: u64) -> bool {
        let mask = chunk_mask(offset, len);
        let Some(chunks) = self.code.chunks.get(index) else {
            return false;
        };
        let is_new = self.is_exact(index) && self.code.exact.track(index, offset, len);
        if chunks.load(Ordering::SeqCst) & mask == mask {
            return is_new;
        }
        if let Some(word) = self.code.pages.get(index / 64) {
            // Before the chunks: who finds none of the page's sees the page's bit, or is asked for the page later.
            word.fetch_or(1 << (index % 64), Ordering::SeqCst);
        }
        let old = chunks.fetch_or(mask, Ordering::SeqCst);
        if old == 0 {
            // KVM maps a page writable at the guest's first access, and reports it as dirty. Fetched pages do the same
            // here.
            self.mark_dirty(index);
        }
        true
    }

    /// Returns true if each byte of the page is tracked that is fetched as code under its present generation.
    pub fn is_exact(&self, index: usize) -> bool {
        let generation = self.code_generation_cell(index);
        generation.is_some_and(|g| g.load(Ordering::SeqCst) >= exact_code::CHANGES)
    }

    /// Returns the generation of the page's code.
    #[inline]
    pub fn code_generation(&self, index: usize) -> u32 {
        self.code.generation.get(index).map_or(0, |g| {
            self.code.seed.wrapping_add(g.load(Ordering::Acquire))
        })
    }

    /// The counter from which [`Self::code_generation`] is computed.
    pub fn code_generation_cell(&self, index: usize) -> Option<&AtomicU32> {
        self.code.generation.get(index)
    }

    /// Invalidates everything decoded from the page.
    pub fn bump_code_generation(&self, index: usize) {
        if let Some(g) = self.code.generation.get(index) {
            g.fetch_add(1, Ordering::SeqCst);
            // After the generation: a thread that sees the count unchanged may rely on generations that it read before.
            self.code.changes.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// Notes that bytes of the page have been written. If any of them were fetched as code, the page's code becomes
    /// invalid and is no longer tracked. Call this after the write.
    #[inline]
    pub fn note_code_write(&self, index: usize, offset: u64, len: u64) {
        // With the fetcher's barrier: either this thread sees the fetcher's mark, or the fetcher sees the written
        // bytes.
        host::cpu::barrier();
        if let Some(chunks) = self.code.chunks.get(index)
            && chunks.load(Ordering::SeqCst) & chunk_mask(offset, len) != 0
            && !(self.is_exact(index) && self.code.exact.spares(index, offset, len))
        {
            // The chunks are cleared before the generation changes: see `track_code`.
            chunks.store(0, Ordering::SeqCst);
            self.bump_code_generation(index);
        }
    }

    /// Notes a write to one page, after it: sets the dirty bit and updates code tracking.
    #[inline]
    pub fn note_write(&self, index: usize, offset: u64, len: u64) {
        self.mark_dirty(index);
        self.note_code_write(index, offset, len);
    }
}

/// Returns the bits of the chunks that `len` bytes from `offset` touch, cut at the page's end.
#[inline]
fn chunk_mask(offset: u64, len: u64) -> u64 {
    if len == 0 {
        return 0;
    }
    let first = (offset / CODE_CHUNK).min(63);
    let last = (offset.saturating_add(len - 1) / CODE_CHUNK).min(63);
    (u64::MAX >> (63 - (last - first))) << first
}
