//! L2: results of page walks, shared by all contexts and views of the vCPU.
//!
//! Set-associative; 4 KiB leaves in one array, larger ones in another in pieces
//! of 2 MiB. An entry carries the tick of its making; a flush of a context or of
//! everything moves a mark beyond it instead of touching entries.

use crate::{l1::RegionFilter, view::Rights, walk::Walk};

const WAYS: usize = 4;
const SMALL_SETS: usize = 2048;
const LARGE_SETS: usize = 256;

/// Whose translation an entry is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Owner {
    /// The context's index.
    pub context: u16,
    /// Paging mode and address space of slots: global pages are shared within one world only.
    pub world: u8,
    /// Entries of the context up to this tick are flushed unless global.
    pub flushed: u64,
    /// Entries of [`crate::structures`] up to this tick are flushed. Not less than `flushed`.
    pub flushed_structures: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Entry {
    /// gva >> shift, plus one; zero is empty.
    key: u64,
    /// gpa of the piece, with the flags below in its low bits.
    gpa: u64,
    tick: u64,
    context: u16,
    world: u8,
    pkey: u8,
}

const WRITE: u64 = 1 << 0;
const USER: u64 = 1 << 1;
const NO_EXECUTE: u64 = 1 << 2;
const GLOBAL: u64 = 1 << 3;
const DIRTY: u64 = 1 << 4;
const LEVEL_SHIFT: u32 = 5;

#[derive(Debug)]
struct Array {
    /// The sets. Empty before the first entry is made, because a VM may have a thousand vCPUs that do nothing.
    sets: Box<[[Entry; WAYS]]>,
    /// Number of sets once there are any.
    count: usize,
    shift: u32,
    victim: usize,
}

impl Array {
    fn new(count: usize, shift: u32) -> Self {
        Self {
            sets: Box::default(),
            count,
            shift,
            victim: 0,
        }
    }

    #[inline]
    fn set(&self, gva: u64) -> usize {
        // Multiplicative: kernel and user halves do not collide systematically.
        let hash = (gva >> self.shift).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (hash >> 40) as usize & (self.count - 1)
    }
}

/// The second level.
#[derive(Debug)]
pub(crate) struct L2 {
    small: Array,
    large: Array,
    regions: RegionFilter,
    /// Everything up to this tick is flushed.
    flushed: u64,
}

impl L2 {
    pub(crate) fn new() -> Self {
        Self {
            small: Array::new(SMALL_SETS, 12),
            large: Array::new(LARGE_SETS, 21),
            regions: RegionFilter::default(),
            flushed: 0,
        }
    }

    /// Returns a translation of `gva` as the walk found it that made the entry.
    #[inline]
    pub(crate) fn find(&self, gva: u64, owner: Owner) -> Option<Walk> {
        [&self.small, &self.large].into_iter().find_map(|array| {
            let key = (gva >> array.shift) + 1;
            let set = array.sets.get(array.set(gva))?;
            let e = set.iter().find(|e| {
                e.key == key
                    && e.world == owner.world
                    && e.tick > self.flushed
                    && (e.gpa & GLOBAL != 0 || e.context == owner.context && e.tick > owner.flushed)
            })?;
            Some(Walk {
                gpa: e.gpa & !0xfff | gva & ((1 << array.shift) - 1),
                rights: Rights {
                    write: e.gpa & WRITE != 0,
                    user: e.gpa & USER != 0,
                    no_execute: e.gpa & NO_EXECUTE != 0,
                    pkey: e.pkey,
                },
                global: e.gpa & GLOBAL != 0,
                dirty: e.gpa & DIRTY != 0,
                level: (e.gpa >> LEVEL_SHIFT & 7) as u8,
            })
        })
    }

    /// Remembers a walk.
    pub(crate) fn insert(&mut self, gva: u64, walk: &Walk, owner: Owner, tick: u64) {
        let array = if walk.level == 1 {
            &mut self.small
        } else {
            &mut self.large
        };
        let flag = |on: bool, bit: u64| if on { bit } else { 0 };
        let entry = Entry {
            key: (gva >> array.shift) + 1,
            gpa: walk.gpa & !((1 << array.shift) - 1)
                | flag(walk.rights.write, WRITE)
                | flag(walk.rights.user, USER)
                | flag(walk.rights.no_execute, NO_EXECUTE)
                | flag(walk.global, GLOBAL)
                | flag(walk.dirty, DIRTY)
                | u64::from(walk.level) << LEVEL_SHIFT,
            tick,
            context: owner.context,
            world: owner.world,
            pkey: walk.rights.pkey,
        };
        self.regions.add(gva, walk.level);
        let flushed = self.flushed;
        let i = array.set(gva);
        if array.sets.is_empty() {
            array.sets = vec![[Entry::default(); WAYS]; array.count].into_boxed_slice();
        }
        let set = &mut array.sets[i];
        let same = set.iter().position(|e| {
            e.key == entry.key && e.world == entry.world && e.context == entry.context
        });
        let way = same
            .or_else(|| set.iter().position(|e| e.key == 0 || e.tick <= flushed))
            .unwrap_or_else(|| {
                array.victim = (array.victim + 1) % WAYS;
                array.victim
            });
        set[way] = entry;
    }

    /// Forgets the page (all of it, if large) in every context.
    pub(crate) fn flush_page(&mut self, gva: u64) {
        let key = (gva >> 12) + 1;
        let i = self.small.set(gva);
        for e in self.small.sets.get_mut(i).into_iter().flatten() {
            if e.key == key {
                *e = Entry::default();
            }
        }
        match self.regions.region_shift(gva) {
            // Each piece of a large page has an entry of its own.
            Some(shift) if shift < 30 => {
                for piece in 0..1 << (shift - self.large.shift) {
                    let gva = gva >> shift << shift | piece << self.large.shift;
                    let key = (gva >> self.large.shift) + 1;
                    let i = self.large.set(gva);
                    for e in self.large.sets.get_mut(i).into_iter().flatten() {
                        if e.key == key {
                            *e = Entry::default();
                        }
                    }
                }
            }
            Some(shift) => {
                for e in self.large.sets.iter_mut().flatten() {
                    if e.key != 0 && ((e.key - 1) << self.large.shift) >> shift == gva >> shift {
                        *e = Entry::default();
                    }
                }
            }
            None => {}
        }
    }

    /// Forgets everything made up to `tick`.
    pub(crate) fn flush_all(&mut self, tick: u64) {
        self.flushed = tick;
        self.regions.clear();
    }
}
