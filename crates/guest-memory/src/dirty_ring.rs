//! Dirty rings (KVM API document, KVM_CAP_DIRTY_LOG_RING): a vCPU tells which pages it has made dirty.
//!
//! The slots' bitmaps stay what write permissions go by: a page's bit is set exactly while it waits in
//! a ring. It comes there with the change of its bit, and its bit is cleared when the VMM gives the
//! entry back. A vCPU stops while there is room for what it still does; what finds none waits beside the ring.
//!
//! The VMM may write anything to a ring: what comes back from it names a slot and a page that are
//! looked up, and indices are our own.

use std::{
    cell::Cell,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
};

/// KVM_DIRTY_GFN_F_DIRTY: an entry is the VMM's to read.
pub const DIRTY: u32 = 1 << 0;
/// KVM_DIRTY_GFN_F_RESET: it has been read.
pub const RESET: u32 = 1 << 1;
/// Entries that are left when a vCPU has to stop (KVM_DIRTY_RING_RSVD_ENTRIES).
pub const RESERVED: u32 = 64;
/// And so many others in rings of at least [`LARGE`], as KVM has them for what VMX's page-modification log holds: a VMM that has
/// stopped all vCPUs reads their rings once, so by then all that they made dirty has to be there.
const MORE: u32 = 512;
const LARGE: u32 = 1024;

/// `struct kvm_dirty_gfn`s that the VMM sees too; `index` is below their number.
pub trait DirtyRingMemory: Send {
    /// Flags; what the VMM did before it set them has happened.
    fn flags(&self, index: u32) -> u32;
    /// Sets them; what was stored before is seen by whoever sees them.
    fn set_flags(&mut self, index: u32, flags: u32);
    /// Slot and page.
    fn place(&self, index: u32) -> (u32, u64);
    /// Sets both.
    fn set_place(&mut self, index: u32, slot: u32, page: u64);
}

/// The ring of a vCPU.
pub struct DirtyRing {
    entries: u32,
    state: Mutex<State>,
    is_full: AtomicBool,
    /// Tells the vCPU to stop.
    stop: Box<dyn Fn() + Send + Sync>,
}

struct State {
    memory: Box<dyn DirtyRingMemory>,
    /// Entries ever published, and ever taken back.
    published: u32,
    taken: u32,
    /// What found no room.
    waiting: Vec<(u32, u64)>,
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
            state: Mutex::new(State {
                memory,
                published: 0,
                taken: 0,
                waiting: Vec::new(),
            }),
            is_full: AtomicBool::new(false),
            stop,
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The VMM has to read before the vCPU may go on.
    #[inline]
    pub fn is_full(&self) -> bool {
        self.is_full.load(Ordering::Acquire)
    }

    fn push(&self, slot: u32, page: u64) {
        let mut state = self.lock();
        state.waiting.push((slot, page));
        if self.settle(&mut state) {
            drop(state);
            (self.stop)();
        }
    }

    /// Publishes what there is room for; true if the ring has just become full.
    fn settle(&self, state: &mut State) -> bool {
        let mask = self.entries - 1;
        let room = self.entries - state.published.wrapping_sub(state.taken);
        let count = state.waiting.len().min(room as usize);
        for (slot, page) in state.waiting.drain(..count) {
            let index = state.published & mask;
            state.memory.set_place(index, slot, page);
            state.memory.set_flags(index, DIRTY);
            state.published = state.published.wrapping_add(1);
        }
        let used = state.published.wrapping_sub(state.taken);
        let more = if self.entries < LARGE { 0 } else { MORE };
        let is_full = used >= self.entries - RESERVED - more;
        !self.is_full.swap(is_full, Ordering::AcqRel) && is_full
    }

    /// Takes back the entries that the VMM has read.
    fn take(&self) -> Vec<(u32, u64)> {
        let mut state = self.lock();
        let mut taken = Vec::new();
        while state.taken != state.published {
            let index = state.taken & (self.entries - 1);
            if state.memory.flags(index) & RESET == 0 {
                break;
            }
            taken.push(state.memory.place(index));
            state.memory.set_flags(index, 0);
            state.taken = state.taken.wrapping_add(1);
        }
        self.settle(&mut state);
        taken
    }
}

/// The rings of a VM.
#[derive(Debug, Default)]
pub struct DirtyRings {
    /// Entries of each; 0: the VM has bitmaps.
    entries: AtomicU32,
    rings: RwLock<Vec<Arc<DirtyRing>>>,
}

thread_local! {
    /// The vCPU that the thread acts for: its VM's rings, by their address, and the number of its own.
    static CURRENT: Cell<(usize, usize)> = const { Cell::new((0, 0)) };
}

impl DirtyRings {
    fn rings(&self) -> RwLockReadGuard<'_, Vec<Arc<DirtyRing>>> {
        self.rings.read().unwrap_or_else(PoisonError::into_inner)
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

    /// The ring of the next vCPU.
    pub fn add(&self, ring: Arc<DirtyRing>) {
        let mut rings = self.rings.write().unwrap_or_else(PoisonError::into_inner);
        rings.push(ring);
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
        let ring = {
            let rings = self.rings();
            let own = rings.get(number).filter(|_| is_own);
            // Who writes without being a vCPU tells by the first one.
            own.or(rings.first()).cloned()
        };
        if let Some(ring) = ring {
            ring.push(slot, page);
        }
    }

    /// The entries of all rings that the VMM has read.
    pub(crate) fn take(&self) -> Vec<(u32, u64)> {
        let rings = self.rings().clone();
        rings.iter().flat_map(|ring| ring.take()).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    type Entry = (u32, u32, u64);

    #[derive(Clone)]
    struct Cells(Arc<Mutex<Vec<Entry>>>);

    impl DirtyRingMemory for Cells {
        fn flags(&self, index: u32) -> u32 {
            self.0.lock().unwrap()[index as usize].0
        }
        fn set_flags(&mut self, index: u32, flags: u32) {
            self.0.lock().unwrap()[index as usize].0 = flags;
        }
        fn place(&self, index: u32) -> (u32, u64) {
            let entry = self.0.lock().unwrap()[index as usize];
            (entry.1, entry.2)
        }
        fn set_place(&mut self, index: u32, slot: u32, page: u64) {
            let entry = &mut self.0.lock().unwrap()[index as usize];
            (entry.1, entry.2) = (slot, page);
        }
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
        assert_eq!(ring.take(), []);
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
            let taken = ring.take();
            assert!(!taken.is_empty() && taken.iter().all(|t| t.0 == 3));
        }
        assert_eq!(seen, (0..200).collect::<Vec<_>>());
        assert!(!ring.is_full());
        // Entries are taken back in order only.
        ring.push(1, 1);
        ring.push(1, 2);
        cells.0.lock().unwrap()[(next + 1) % ENTRIES as usize].0 = RESET;
        assert_eq!(ring.take(), []);
    }
}
