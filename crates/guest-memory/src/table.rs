//! [`SlotTable`]: an immutable set of memslots, and KVM's rules for changing it
//! (KVM API, KVM_SET_USER_MEMORY_REGION).

use std::{
    collections::BTreeMap,
    io,
    sync::{Arc, atomic::AtomicU64},
};

use x86_defs::paging::PAGE_SIZE;

use crate::{
    DirtyRings, HostPage, Slot, SlotConfig,
    host_pages::Gate,
    slot::{KVM_MEM_LOG_DIRTY_PAGES, KVM_MEM_READONLY},
};

/// Address spaces: 0 for ordinary execution, 1 for SMM.
pub const ADDRESS_SPACES: usize = 2;
/// Slots per address space that a VMM may use (KVM_CAP_NR_MEMSLOTS).
pub const USER_MEM_SLOTS: u32 = 32764;
/// Largest number of pages of a slot.
const MAX_NR_PAGES: u64 = (1 << 31) - 1;
/// End of the host's user address space.
const TASK_SIZE: u64 = 0x7fff_ffff_f000;
/// End of the guest-physical addresses that a slot may have.
const GPA_END: u64 = 1 << 52;

/// Why a slot was not set or found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MemslotError {
    /// A flag that KVM does not define.
    #[error("unknown memslot flags {0:#x}")]
    Flags(u32),
    /// The slot number or address space is out of range.
    #[error("no such slot number {0:#x}")]
    Number(u32),
    /// gpa, size or hva is not page aligned.
    #[error("slot is not page aligned")]
    Unaligned,
    /// The gpa or hva range wraps or lies beyond what can be addressed, or the slot has too many pages.
    #[error("slot is out of range")]
    Range,
    /// The slot overlaps another one.
    #[error("slot overlaps slot {0}")]
    Overlap(u32),
    /// An existing slot's size, hva or read-only flag cannot change.
    #[error("size, hva and read-only flag of an existing slot are fixed")]
    Immutable,
    /// The slot to delete does not exist.
    #[error("there is no slot {0:#x} to delete")]
    Nothing(u32),
    /// The requested slot does not exist.
    #[error("slot {0:#x} does not exist")]
    NotFound(u32),
    /// The slot does not log dirty pages.
    #[error("slot {0:#x} does not log dirty pages")]
    NotLogging(u32),
    /// The host gave no memory for the slot's page state.
    #[error("no memory for the slot's page state")]
    NoMemory,
}

impl From<io::Error> for MemslotError {
    fn from(_: io::Error) -> Self {
        Self::NoMemory
    }
}

/// A set of memslots, sorted by gpa.
///
/// Before a change it is copied only if a thread holds a snapshot of it, so that a VMM that sets thousands of slots
/// before its guest runs pays for each slot alone.
#[derive(Clone, Debug, Default)]
pub struct SlotTable {
    spaces: [Vec<Arc<Slot>>; ADDRESS_SPACES],
    /// gpa of each slot, by slot number with the address space in its upper half.
    places: BTreeMap<u32, u64>,
    /// Counts changes of which slots exist, of their gpas, and of the host memory under them.
    generation: u64,
    /// Bytes of all slots.
    bytes: u64,
}

/// A change that was found to be allowed.
#[derive(Debug)]
pub(crate) struct Change {
    number: u32,
    /// The slot after the change; `None` deletes it.
    slot: Option<Arc<Slot>>,
    /// The slot keeps its gpa and gets other flags.
    is_in_place: bool,
}

/// The VM's state that [`SlotTable::plan`] uses.
pub(crate) struct Planning<'a> {
    /// Serial number of the newest slot.
    pub(crate) serial: &'a mut u32,
    /// The VM's counter of code changes.
    pub(crate) changes: &'a Arc<AtomicU64>,
    pub(crate) rings: &'a Arc<DirtyRings>,
    /// True if the pages of a slot that begins to log are dirty.
    pub(crate) starts_dirty: bool,
}

impl SlotTable {
    /// Changes whenever slots are added, deleted or moved, or the host memory under them changes. While it stays the
    /// same, slots keep their indices in [`Self::slots`].
    #[inline]
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// Bytes of all slots.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The slots of an address space by ascending gpa.
    #[inline]
    pub fn slots(&self, space: usize) -> &[Arc<Slot>] {
        self.spaces.get(space).map_or(&[], |s| &s[..])
    }

    /// Returns the index of the slot that contains `gpa`.
    #[inline]
    pub fn find(&self, space: usize, gpa: u64) -> Option<usize> {
        let slots = self.slots(space);
        let i = slots
            .partition_point(|s| s.config().gpa <= gpa)
            .checked_sub(1)?;
        slots.get(i)?.page_index(gpa)?;
        Some(i)
    }

    /// Like [`Self::find`], but looks at slot `near` first.
    #[inline]
    pub fn find_near(&self, space: usize, gpa: u64, near: usize) -> Option<usize> {
        let slot = self.slots(space).get(near);
        if slot.is_some_and(|s| s.page_index(gpa).is_some()) {
            return Some(near);
        }
        self.find(space, gpa)
    }

    /// Returns the slot that contains `gpa`.
    #[inline]
    pub fn lookup(&self, space: usize, gpa: u64) -> Option<&Slot> {
        self.slots(space).get(self.find(space, gpa)?).map(|s| &**s)
    }

    /// Returns the slot of that number.
    pub fn by_number(&self, number: u32) -> Option<&Slot> {
        let space = (number >> 16) as usize;
        let at = self.position(space, *self.places.get(&number)?);
        self.slots(space).get(at).map(|s| &**s)
    }

    /// Returns the index of the first slot that begins at or above `gpa`.
    fn position(&self, space: usize, gpa: u64) -> usize {
        self.slots(space).partition_point(|s| s.config().gpa < gpa)
    }

    /// Returns the host page that contains `gpa`; with `write` only if the guest may write it.
    pub fn host_page(&self, space: usize, gpa: u64, write: bool) -> Option<HostPage> {
        let slot = self.lookup(space, gpa)?;
        if write && slot.is_readonly() {
            return None;
        }
        let index = slot.page_index(gpa)?;
        slot.page_for(index, write)
    }

    /// Calls `f(slot, page index, host page, offset in page, range in the buffer)` for each page. Returns false at the
    /// first page that does not exist.
    fn pages(
        &self,
        space: usize,
        gpa: u64,
        len: usize,
        write: bool,
        mut f: impl FnMut(&Slot, usize, HostPage, u64, core::ops::Range<usize>),
    ) -> bool {
        let mut done = 0;
        while done < len {
            let Some(at) = gpa.checked_add(done as u64) else {
                return false;
            };
            let Some(slot) = self
                .lookup(space, at)
                .filter(|s| !(write && s.is_readonly()))
            else {
                return false;
            };
            let Some(index) = slot.page_index(at) else {
                return false;
            };
            let Some(page) = slot.page_for(index, write) else {
                return false;
            };
            let offset = at % PAGE_SIZE;
            let n = (len - done).min((PAGE_SIZE - offset) as usize);
            f(slot, index, page, offset, done..done + n);
            done += n;
        }
        true
    }

    /// Reads bytes across pages and slots. Returns false, with nothing read, if some are not RAM.
    pub fn read_bytes(&self, space: usize, gpa: u64, buf: &mut [u8]) -> bool {
        if !self.pages(space, gpa, buf.len(), false, |_, _, _, _, _| ()) {
            return false;
        }
        self.pages(space, gpa, buf.len(), false, |_, _, page, offset, range| {
            if let Some(part) = buf.get_mut(range) {
                page.read_bytes(offset, part);
            }
        })
    }

    /// Writes bytes across pages and slots, marks the pages dirty and notes writes to code. Returns false, with nothing
    /// written, if some bytes are not writable RAM.
    pub fn write_bytes(&self, space: usize, gpa: u64, buf: &[u8]) -> bool {
        if !self.pages(space, gpa, buf.len(), true, |_, _, _, _, _| ()) {
            return false;
        }
        self.pages(
            space,
            gpa,
            buf.len(),
            true,
            |slot, index, page, offset, range| {
                if let Some(part) = buf.get(range) {
                    page.write_bytes(offset, part);
                    slot.note_write(index, offset, part.len() as u64);
                }
            },
        )
    }

    /// Returns the change that `config` asks for, or `None` if it changes nothing. Checks are made in KVM's order, so
    /// that each request gets the same error as from KVM.
    pub(crate) fn plan(
        &self,
        config: SlotConfig,
        with: Planning<'_>,
    ) -> Result<Option<Change>, MemslotError> {
        const FLAGS: u32 = KVM_MEM_LOG_DIRTY_PAGES | KVM_MEM_READONLY;
        let space = (config.slot >> 16) as usize;
        if config.slot & 0xffff >= USER_MEM_SLOTS {
            return Err(MemslotError::Number(config.slot));
        }
        if config.flags & !FLAGS != 0 {
            return Err(MemslotError::Flags(config.flags & !FLAGS));
        }
        if [config.size, config.gpa, config.hva]
            .iter()
            .any(|v| !v.is_multiple_of(PAGE_SIZE))
        {
            return Err(MemslotError::Unaligned);
        }
        if config
            .hva
            .checked_add(config.size)
            .is_none_or(|end| end > TASK_SIZE)
        {
            return Err(MemslotError::Range);
        }
        if space >= ADDRESS_SPACES {
            return Err(MemslotError::Number(config.slot));
        }
        let Some(end) = config.gpa.checked_add(config.size) else {
            return Err(MemslotError::Range);
        };
        if config.size / PAGE_SIZE > MAX_NR_PAGES {
            return Err(MemslotError::Range);
        }
        let old = self.by_number(config.slot);
        if config.size == 0 {
            return match old {
                Some(_) => Ok(Some(Change {
                    number: config.slot,
                    slot: None,
                    is_in_place: false,
                })),
                None => Err(MemslotError::Nothing(config.slot)),
            };
        }
        let moved = match old.map(Slot::config) {
            Some(old) => {
                if old.size != config.size
                    || old.hva != config.hva
                    || (old.flags ^ config.flags) & KVM_MEM_READONLY != 0
                {
                    return Err(MemslotError::Immutable);
                }
                if *old == config {
                    return Ok(None);
                }
                old.gpa != config.gpa
            }
            None => true,
        };
        if moved {
            if end > GPA_END {
                return Err(MemslotError::Range);
            }
            // Slots do not overlap, so only the two last ones that begin before the new one's end can overlap it: two,
            // because one of them may be the slot itself.
            let before = self.position(space, end);
            let near = self.slots(space).get(..before).unwrap_or_default();
            let other = near.iter().rev().take(2).map(|s| s.config());
            if let Some(other) = other
                .filter(|s| s.slot != config.slot)
                .find(|s| config.gpa < s.gpa.saturating_add(s.size))
            {
                return Err(MemslotError::Overlap(other.slot));
            }
        }
        let fresh = moved.then(|| {
            *with.serial = with.serial.wrapping_add(1);
            *with.serial
        });
        let slot = match (old, fresh) {
            (Some(old), fresh) => old.changed(config, with.starts_dirty, fresh)?,
            (None, fresh) => {
                let serial = fresh.unwrap_or_default();
                Slot::new(config, with.starts_dirty, serial, with.changes, with.rings)?
            }
        };
        Ok(Some(Change {
            number: config.slot,
            slot: Some(Arc::new(slot)),
            is_in_place: !moved,
        }))
    }

    /// Returns this table for use during and after the VMM's change of the host memory from `start` to `end`, or `None`
    /// if that is under no slot.
    pub(crate) fn with_host_changing(
        &self,
        start: u64,
        end: u64,
        gate: &Arc<Gate>,
    ) -> Result<Option<Self>, MemslotError> {
        let mut new = None;
        for (space, slots) in self.spaces.iter().enumerate() {
            for (n, slot) in slots.iter().enumerate() {
                let Some(slot) = slot.with_host_changing(start, end, gate)? else {
                    continue;
                };
                let new: &mut Self = new.get_or_insert_with(|| self.clone());
                if let Some(place) = new.spaces.get_mut(space).and_then(|s| s.get_mut(n)) {
                    *place = Arc::new(slot);
                }
            }
        }
        if let Some(new) = &mut new {
            new.generation += 1;
        }
        Ok(new)
    }

    /// Makes a change that was planned for this very table.
    pub(crate) fn apply(&mut self, change: Change) {
        self.generation += u64::from(!change.is_in_place);
        let space = (change.number >> 16) as usize;
        let old = self
            .places
            .remove(&change.number)
            .map(|gpa| self.position(space, gpa));
        let at = change.slot.as_ref().map(|slot| {
            let gpa = slot.config().gpa;
            self.places.insert(change.number, gpa);
            self.position(space, gpa)
        });
        let Some(slots) = self.spaces.get_mut(space) else {
            return;
        };
        let size = |slot: &Arc<Slot>| slot.config().size;
        let gone = old.and_then(|at| slots.get(at)).map_or(0, size);
        self.bytes = self.bytes - gone + change.slot.as_ref().map_or(0, size);
        match (old, at.zip(change.slot)) {
            // The slot keeps its index: only its flags change, or its move passes no other slot.
            (Some(old), Some((at, slot))) if old == at => {
                if let Some(place) = slots.get_mut(old) {
                    *place = slot;
                }
            }
            (Some(old), new) => {
                slots.remove(old);
                if let Some((at, slot)) = new {
                    slots.insert(if old < at { at - 1 } else { at }, slot);
                }
            }
            (None, Some((at, slot))) => slots.insert(at, slot),
            (None, None) => {}
        }
    }
}
