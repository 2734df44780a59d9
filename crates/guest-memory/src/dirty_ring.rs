//! Dirty rings (KVM API document, KVM_CAP_DIRTY_LOG_RING): a vCPU tells which pages it has made dirty.
//!
//! The slots' bitmaps stay what write permissions go by: a page's bit is set exactly while it waits in
//! a ring. It comes there with the change of its bit, and its bit is cleared when the VMM gives the
//! entry back. A vCPU stops while there is room for what it still does; what finds none waits beside the ring.
//!
//! Who pushes claims an entry by counting it and takes no lock; the entry's own flags say when it is there. Resets wait for each other
//! alone. Only what finds no room at all, beyond the entries that are kept for what a stopped vCPU still does, goes through a lock.
//!
//! The VMM may write anything to a ring: what comes back from it names a slot and a page that are
//! looked up, and indices are our own.

use std::{
    cell::Cell,
    sync::{
        Arc, OnceLock, PoisonError,
        atomic::{AtomicU32 as PlainU32, AtomicUsize, Ordering},
    },
};

use crate::words::{AtomicBool, AtomicU32, Mutex};

/// KVM_DIRTY_GFN_F_DIRTY: an entry is the VMM's to read.
pub const DIRTY: u32 = 1 << 0;
/// KVM_DIRTY_GFN_F_RESET: it has been read.
pub const RESET: u32 = 1 << 1;
/// Entries that are left when a vCPU has to stop (KVM_DIRTY_RING_RSVD_ENTRIES). Models have rings of two entries.
pub const RESERVED: u32 = if cfg!(loom) { 1 } else { 64 };
/// And so many others in rings of at least [`LARGE`], as KVM has them for what VMX's page-modification log holds: a VMM that has
/// stopped all vCPUs reads their rings once, so by then all that they made dirty has to be there.
const MORE: u32 = 512;
const LARGE: u32 = 1024;

/// `struct kvm_dirty_gfn`s that the VMM sees too; `index` is below their number.
pub trait DirtyRingMemory: Send + Sync {
    /// Flags; what the VMM did before it set them has happened.
    fn flags(&self, index: u32) -> u32;
    /// Sets them; what was stored before is seen by whoever sees them.
    fn set_flags(&self, index: u32, flags: u32);
    /// Slot and page.
    fn place(&self, index: u32) -> (u32, u64);
    /// Sets both.
    fn set_place(&self, index: u32, slot: u32, page: u64);
}

/// The ring of a vCPU.
pub struct DirtyRing {
    entries: u32,
    memory: Box<dyn DirtyRingMemory>,
    /// Entries ever claimed by who publishes them, and ever taken back.
    claimed: AtomicU32,
    taken: AtomicU32,
    /// The vCPU was told to stop since there was room.
    is_told: AtomicBool,
    /// What found no room.
    waiting: Mutex<Vec<(u32, u64)>>,
    /// Held by who takes entries back.
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
    /// A ring of `entries`, a power of two above [`RESERVED`]; `stop` is called when it has become
    /// so full that the vCPU has to leave KVM_RUN.
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

    /// The VMM has to read before the vCPU may go on.
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

    /// If it is full, the vCPU is told once.
    fn tell(&self) {
        if self.is_full() && !self.is_told.swap(true, Ordering::AcqRel) {
            (self.stop)();
        }
    }

    /// False if there is no room.
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
        self.memory.set_place(index, slot, page);
        self.memory.set_flags(index, DIRTY);
        true
    }

    /// Publishes what found no room, as far as there is room now; `more` comes last.
    #[cold]
    fn publish_waiting(&self, more: Option<(u32, u64)>) {
        // Under the lock: a reset that made room before this is seen, and one that makes it later comes here.
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        waiting.extend(more);
        let published = waiting
            .iter()
            .take_while(|(slot, page)| self.publish(*slot, *page));
        let count = published.count();
        waiting.drain(..count);
    }

    /// Takes back the entries that the VMM has read.
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

/// vCPUs' rings that are found together.
const GROUP: usize = 64;

type Group = [OnceLock<Arc<DirtyRing>>; GROUP];

/// The rings of a VM.
#[derive(Debug)]
pub struct DirtyRings {
    /// Entries of each; 0: the VM has bitmaps.
    entries: PlainU32,
    /// Rings by their number, which stay.
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
    /// The vCPU that the thread acts for: its VM's rings, by their address, and the number of its own.
    static CURRENT: Cell<(usize, usize)> = const { Cell::new((0, 0)) };
}

impl DirtyRings {
    fn ring(&self, number: usize) -> Option<&Arc<DirtyRing>> {
        self.groups.get(number / GROUP)?.get()?[number % GROUP].get()
    }

    /// Entries of each ring; 0 if the VM has bitmaps.
    #[inline]
    pub fn entries(&self) -> u32 {
        self.entries.load(Ordering::Relaxed)
    }

    /// From now on vCPUs have rings. False if that was decided before.
    pub fn enable(&self, entries: u32) -> bool {
        self.entries
            .compare_exchange(0, entries, Ordering::Relaxed, Ordering::Relaxed)
            .is_ok()
    }

    /// The ring of the vCPU of that number, which has none yet.
    pub fn add(&self, number: usize, ring: Arc<DirtyRing>) {
        let Some(group) = self.groups.get(number / GROUP) else {
            return;
        };
        let group = group.get_or_init(|| Box::new([const { OnceLock::new() }; GROUP]));
        if group[number % GROUP].set(ring).is_ok() {
            self.count.fetch_max(number + 1, Ordering::AcqRel);
        }
    }

    /// What the calling thread writes from now on is the vCPU's whose ring is that one.
    pub fn act_for(&self, number: usize) {
        CURRENT.set((std::ptr::from_ref(self) as usize, number));
    }

    /// The page has become dirty.
    #[cold]
    pub(crate) fn push(&self, slot: u32, page: u64) {
        let (vm, number) = CURRENT.get();
        let is_own = vm == std::ptr::from_ref(self) as usize;
        let own = self.ring(number).filter(|_| is_own);
        // Who writes without being a vCPU tells by the first one.
        if let Some(ring) = own.or_else(|| self.ring(0)) {
            ring.push(slot, page);
        }
    }

    /// The entries of all rings that the VMM has read.
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
        fn set_place(&self, index: u32, slot: u32, page: u64) {
            let entry = &mut self.0.lock().unwrap()[index as usize];
            (entry.1, entry.2) = (slot, page);
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
            // The VMM reads some.
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

    /// Four threads push, one is the VMM that reads and resets: each page comes out once, the ring overrun or not.
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
                        // Now and then there is no wait for room.
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
