//! Dirty rings (KVM API document, KVM_CAP_DIRTY_LOG_RING): each vCPU reports the pages that it has made dirty in a
//! ring.
//!
//! Write permission still depends on the slots' bitmaps: a page's bit is set exactly while the page waits in a ring.
//! The page is pushed when its bit becomes set, and the bit is cleared when the VMM gives the entry back. A vCPU has to
//! stop while there is still room for the pages that it may dirty before it stops; pages that find no room wait beside
//! the ring.
//!
//! A push claims an entry by incrementing a counter and takes no lock; the entry's own flags say when it is filled.
//! Resets wait only for each other. Only a page that finds no room, beyond the entries reserved for a stopping vCPU,
//! takes a lock.
//!
//! The VMM may write anything to a ring. A slot and page read back from it are looked up like any other, and indices
//! are never taken from it.

use std::{
    cell::Cell,
    sync::{
        Arc, OnceLock, PoisonError,
        atomic::{AtomicU32 as PlainU32, AtomicUsize, Ordering},
    },
};

use crate::words::{AtomicBool, AtomicU32, Mutex};

/// KVM_DIRTY_GFN_F_DIRTY: the entry is filled, and the VMM may read it.
pub const DIRTY: u32 = 1 << 0;
/// KVM_DIRTY_GFN_F_RESET: the VMM has read the entry.
pub const RESET: u32 = 1 << 1;
/// Free entries below which a vCPU has to stop (KVM_DIRTY_RING_RSVD_ENTRIES). Loom models have rings of two entries.
pub const RESERVED: u32 = if cfg!(loom) { 1 } else { 64 };
/// Additional free entries in rings of at least [`LARGE`] entries, as KVM reserves for VMX's page-modification log. A
/// VMM that has stopped all vCPUs reads their rings once, so all pages made dirty by then have to fit.
const MORE: u32 = 512;
const LARGE: u32 = 1024;

/// The ring's `struct kvm_dirty_gfn`s, which the VMM sees too. `index` is below their number.
pub trait DirtyRingMemory: Send + Sync {
    /// Returns the entry's flags. Acquires: the VMM's accesses before it set them have happened.
    fn flags(&self, index: u32) -> u32;
    /// Sets the entry's flags. Releases: a reader that sees them sees all earlier stores.
    fn set_flags(&self, index: u32, flags: u32);
    /// Returns the entry's slot and page.
    fn place(&self, index: u32) -> (u32, u64);
    /// Sets the entry's slot and page, and then its flags, as [`Self::set_flags`] does.
    fn fill(&self, index: u32, place: (u32, u64), flags: u32);
}

/// The dirty ring of one vCPU.
pub struct DirtyRing {
    entries: u32,
    memory: Box<dyn DirtyRingMemory>,
    /// Entries claimed, and entries taken back, since the ring was made.
    claimed: AtomicU32,
    taken: AtomicU32,
    /// The vCPU was told to stop since the ring last had room.
    is_told: AtomicBool,
    /// Pages, with their slots, that found no room.
    waiting: Mutex<Vec<(u32, u64)>>,
    /// Held while entries are taken back.
    resetting: Mutex<()>,
    /// Tells the vCPU to stop.
    stop: Box<dyn Fn() + Send + Sync>,
}

impl core::fmt::Debug for DirtyRing {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("DirtyRing")
            .field("entries", &self.entries)
            .finish_non_exhaustive()
    }
}

impl DirtyRing {
    /// Makes a ring of `entries` entries, a power of two above [`RESERVED`]. `stop` is called when the ring is so full
    /// that the vCPU has to leave KVM_RUN.
    pub fn new(
        entries: u32,
        memory: Box<dyn DirtyRingMemory>,
        stop: Box<dyn Fn() + Send + Sync>,
    ) -> Self {
        Self {
            entries,
            memory,
            claimed: AtomicU32::new(0),
            taken: AtomicU32::new(0),
            is_told: AtomicBool::new(false),
            waiting: Mutex::new(Vec::new()),
            resetting: Mutex::new(()),
            stop,
        }
    }

    /// True if the VMM has to read entries before the vCPU may go on.
    #[inline]
    pub fn is_full(&self) -> bool {
        let more = if self.entries < LARGE { 0 } else { MORE };
        let taken = self.taken.load(Ordering::Acquire);
        self.claimed.load(Ordering::Acquire).wrapping_sub(taken) >= self.entries - RESERVED - more
    }

    pub(crate) fn push(&self, slot: u32, page: u64) {
        if !self.publish(slot, page) {
            self.publish_waiting(Some((slot, page)));
        }
        self.tell();
    }

    /// Tells the vCPU to stop, once, if the ring is full.
    fn tell(&self) {
        if self.is_full() && !self.is_told.swap(true, Ordering::AcqRel) {
            (self.stop)();
        }
    }

    /// Pushes a page into the ring; returns false if there is no room.
    fn publish(&self, slot: u32, page: u64) -> bool {
        let mut at = self.claimed.load(Ordering::Relaxed);
        loop {
            if at.wrapping_sub(self.taken.load(Ordering::Acquire)) >= self.entries {
                return false;
            }
            let next = at.wrapping_add(1);
            let claim =
                self.claimed
                    .compare_exchange(at, next, Ordering::AcqRel, Ordering::Relaxed);
            match claim {
                Ok(_) => break,
                Err(now) => at = now,
            }
        }
        let index = at & (self.entries - 1);
        self.memory.fill(index, (slot, page), DIRTY);
        true
    }

    /// Pushes the waiting pages, with `more` behind them, as far as there is room now.
    #[cold]
    fn publish_waiting(&self, more: Option<(u32, u64)>) {
        // The lock orders this against resets: either a reset has made room before, or it comes here later.
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        waiting.extend(more);
        let published = waiting
            .iter()
            .take_while(|(slot, page)| self.publish(*slot, *page));
        let count = published.count();
        waiting.drain(..count);
    }

    /// Takes back the entries that the VMM has read, and appends them to `taken`.
    pub(crate) fn take(&self, taken: &mut Vec<(u32, u64)>) {
        let resetting = self
            .resetting
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let mut at = self.taken.load(Ordering::Relaxed);
        let before = at;
        let claimed = self.claimed.load(Ordering::Acquire);
        while at != claimed {
            let index = at & (self.entries - 1);
            if self.memory.flags(index) & RESET == 0 {
                break;
            }
            taken.push(self.memory.place(index));
            self.memory.set_flags(index, 0);
            at = at.wrapping_add(1);
        }
        self.taken.store(at, Ordering::Release);
        drop(resetting);
        if at != before {
            self.publish_waiting(None);
            self.is_told.store(false, Ordering::Release);
            self.tell();
        }
    }
}

/// Number of rings that are allocated together.
const GROUP: usize = 64;

type Group = [OnceLock<Arc<DirtyRing>>; GROUP];

/// The rings of a VM.
#[derive(Debug)]
pub struct DirtyRings {
    /// Entries of each ring; 0 if the VM uses bitmaps.
    entries: PlainU32,
    /// Rings by vCPU number. A ring that was added is never removed.
    groups: [OnceLock<Box<Group>>; GROUP],
    count: AtomicUsize,
}

impl Default for DirtyRings {
    fn default() -> Self {
        Self {
            entries: PlainU32::new(0),
            groups: [const { OnceLock::new() }; GROUP],
            count: AtomicUsize::new(0),
        }
    }
}

thread_local! {
    /// The vCPU that the thread acts for: the address of its VM's rings, and its number in them.
    static CURRENT: Cell<(usize, usize)> = const { Cell::new((0, 0)) };
}

impl DirtyRings {
    fn ring(&self, number: usize) -> Option<&Arc<DirtyRing>> {
        self.groups.get(number / GROUP)?.get()?[number % GROUP].get()
    }

    /// Entries of each ring; 0 if the VM uses bitmaps.
    #[inline]
    pub fn entries(&self) -> u32 {
        self.entries.load(Ordering::Relaxed)
    }

    /// Gives vCPUs rings from now on. Returns false if the VM has them already.
    pub fn enable(&self, entries: u32) -> bool {
        self.entries
            .compare_exchange(0, entries, Ordering::Relaxed, Ordering::Relaxed)
            .is_ok()
    }

    /// Sets the ring of the vCPU of that number, which has none yet.
    pub fn add(&self, number: usize, ring: Arc<DirtyRing>) {
        let Some(group) = self.groups.get(number / GROUP) else {
            return;
        };
        let group = group.get_or_init(|| Box::new([const { OnceLock::new() }; GROUP]));
        if group[number % GROUP].set(ring).is_ok() {
            self.count.fetch_max(number + 1, Ordering::AcqRel);
        }
    }

    /// Attributes the pages that the calling thread writes from now on to the vCPU of that number.
    pub fn act_for(&self, number: usize) {
        CURRENT.set((std::ptr::from_ref(self) as usize, number));
    }

    /// Reports that a page has become dirty.
    #[cold]
    pub(crate) fn push(&self, slot: u32, page: u64) {
        let (vm, number) = CURRENT.get();
        let is_own = vm == std::ptr::from_ref(self) as usize;
        let own = self.ring(number).filter(|_| is_own);
        // A thread that acts for no vCPU uses the first vCPU's ring.
        if let Some(ring) = own.or_else(|| self.ring(0)) {
            ring.push(slot, page);
        }
    }

    /// Takes back the entries of all rings that the VMM has read.
    pub(crate) fn take(&self) -> Vec<(u32, u64)> {
        let mut taken = Vec::new();
        for number in 0..self.count.load(Ordering::Acquire) {
            if let Some(ring) = self.ring(number) {
                ring.take(&mut taken);
            }
        }
        taken
    }
}

#[cfg(all(test, not(loom)))]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use std::sync::Mutex;

    use super::*;

    type Entry = (u32, u32, u64);

    #[derive(Clone)]
    struct Cells(Arc<Mutex<Vec<Entry>>>);

    impl DirtyRingMemory for Cells {
        fn flags(&self, index: u32) -> u32 {
            self.0.lock().unwrap()[index as usize].0
        }
        fn set_flags(&self, index: u32, flags: u32) {
            self.0.lock().unwrap()[index as usize].0 = flags;
        }
        fn place(&self, index: u32) -> (u32, u64) {
            let entry = self.0.lock().unwrap()[index as usize];
            (entry.1, entry.2)
        }
        fn fill(&self, index: u32, (slot, page): (u32, u64), flags: u32) {
            self.0.lock().unwrap()[index as usize] = (flags, slot, page);
        }
    }

    fn taken(ring: &DirtyRing) -> Vec<(u32, u64)> {
        let mut taken = Vec::new();
        ring.take(&mut taken);
        taken
    }

    #[test]
    fn nothing_is_lost_when_a_ring_is_full() {
        const ENTRIES: u32 = 128;
        let cells = Cells(Arc::new(Mutex::new(vec![(0, 0, 0); ENTRIES as usize])));
        let stops = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&stops);
        let stop = move || _ = count.fetch_add(1, Ordering::Relaxed);
        let ring = DirtyRing::new(ENTRIES, Box::new(cells.clone()), Box::new(stop));
        for page in 0..200 {
            ring.push(3, page);
            assert_eq!(ring.is_full(), page >= 63, "{page}");
        }
        assert_eq!(stops.load(Ordering::Relaxed), 1);
        assert_eq!(taken(&ring), []);
        let mut seen = Vec::new();
        let mut next = 0;
        while seen.len() < 200 {
            // The VMM reads some entries.
            for _ in 0..50 {
                let mut cells = cells.0.lock().unwrap();
                let entry = &mut cells[next % ENTRIES as usize];
                if entry.0 != DIRTY {
                    break;
                }
                seen.push(entry.2);
                entry.0 = RESET;
                next += 1;
            }
            let back = taken(&ring);
            assert!(!back.is_empty() && back.iter().all(|t| t.0 == 3));
        }
        assert_eq!(seen, (0..200).collect::<Vec<_>>());
        assert!(!ring.is_full());
        // Entries are taken back in order only.
        ring.push(1, 1);
        ring.push(1, 2);
        cells.0.lock().unwrap()[(next + 1) % ENTRIES as usize].0 = RESET;
        assert_eq!(taken(&ring), []);
    }

    /// Four threads push, and one reads and resets as a VMM does: each page comes out exactly once, whether or not the
    /// ring overflows.
    #[test]
    fn pages_go_in_while_others_come_out() {
        const ENTRIES: u32 = 128;
        const EACH: u64 = 20_000;
        let cells = Cells(Arc::new(Mutex::new(vec![(0, 0, 0); ENTRIES as usize])));
        let ring = DirtyRing::new(ENTRIES, Box::new(cells.clone()), Box::new(|| ()));
        let mut seen = vec![0u8; 4 * EACH as usize];
        std::thread::scope(|s| {
            for n in 0..4 {
                let ring = &ring;
                s.spawn(move || {
                    for page in 0..EACH {
                        ring.push(1, n * EACH + page);
                        // For part of the pages the thread does not wait for room, so that the ring overflows.
                        while page % 512 > 64 && ring.is_full() {
                            std::thread::yield_now();
                        }
                    }
                });
            }
            let (mut next, mut read, mut back) = (0u32, 0, 0);
            while back < 4 * EACH as usize {
                loop {
                    let mut cells = cells.0.lock().unwrap();
                    let entry = &mut cells[(next % ENTRIES) as usize];
                    if entry.0 != DIRTY {
                        break;
                    }
                    entry.0 = RESET;
                    seen[entry.2 as usize] += 1;
                    next = next.wrapping_add(1);
                    read += 1;
                }
                back += taken(&ring).len();
                assert!(back <= read);
                std::thread::yield_now();
            }
        });
        assert!(seen.iter().all(|n| *n == 1));
        assert!(!ring.is_full());
    }
}
