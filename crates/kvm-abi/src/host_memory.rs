//! Changes of host memory under a running guest: the counterpart of a kernel's MMU notifiers.
//!
//! Code that intercepts mprotect(2), munmap(2) and their kin calls [`begin`] before the call and drops the result after
//! it. It does so for every such call of the process, including those in signal handlers and in children, and most of
//! them do not concern a guest. So the ranges under slots are published, and a call outside of all ranges takes no
//! lock.

use std::ops::Range;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Mutex, PoisonError, RwLock, Weak};

use hypervisor::HostChange;

use crate::errno::Result;
use crate::process;
use crate::signals::Section;

/// Largest number of separate ranges. If there are more, the two nearest are merged.
const RANGES: usize = 64;

/// A range of host addresses under slots, and the number of those slots.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Covered {
    range: Range<u64>,
    slots: usize,
}

/// The ranges of all VMs, by address. They neither overlap nor touch.
#[derive(Debug)]
struct Ranges(Vec<Covered>);

impl Ranges {
    const fn new() -> Self {
        Self(Vec::new())
    }

    fn add(&mut self, range: Range<u64>) {
        let mut new = Covered { range, slots: 1 };
        let at = self.0.partition_point(|c| c.range.end < new.range.start);
        let touching = self.0.get(at..).unwrap_or_default().iter();
        let count = touching
            .take_while(|c| c.range.start <= new.range.end)
            .count();
        for old in self.0.drain(at..at + count) {
            new = join(&old, &new);
        }
        self.0.insert(at, new);
        if self.0.len() > RANGES {
            self.join_nearest();
        }
    }

    /// Merges the two ranges with the smallest gap between them.
    fn join_nearest(&mut self) {
        let gaps = self.0.windows(2).enumerate().filter_map(|(n, pair)| {
            let [one, other] = pair else { return None };
            Some((other.range.start - one.range.end, n))
        });
        if let Some((_, n)) = gaps.min() {
            let other = self.0.remove(n + 1);
            if let Some(one) = self.0.get_mut(n) {
                *one = join(one, &other);
            }
        }
    }

    /// Removes a slot's range, which was added before.
    fn remove(&mut self, range: &Range<u64>) {
        let at = self.0.partition_point(|c| c.range.end <= range.start);
        if let Some(covered) = self.0.get_mut(at) {
            covered.slots -= 1;
            if covered.slots == 0 {
                self.0.remove(at);
            }
        }
    }
}

fn join(one: &Covered, other: &Covered) -> Covered {
    let start = one.range.start.min(other.range.start);
    Covered {
        range: start..one.range.end.max(other.range.end),
        slots: one.slots + other.slots,
    }
}

static SLOTS: Mutex<Ranges> = Mutex::new(Ranges::new());
/// Odd while COUNT, STARTS and ENDS are changed.
static VERSION: AtomicU32 = AtomicU32::new(0);
static COUNT: AtomicUsize = AtomicUsize::new(0);
static STARTS: [AtomicU64; RANGES] = [const { AtomicU64::new(0) }; RANGES];
static ENDS: [AtomicU64; RANGES] = [const { AtomicU64::new(0) }; RANGES];

fn change_ranges(change: impl FnOnce(&mut Ranges)) {
    let mut ranges = SLOTS.lock().unwrap_or_else(PoisonError::into_inner);
    change(&mut ranges);
    VERSION.fetch_add(1, Ordering::SeqCst);
    fence(Ordering::SeqCst);
    for (covered, (start, end)) in ranges.0.iter().zip(STARTS.iter().zip(&ENDS)) {
        start.store(covered.range.start, Ordering::Relaxed);
        end.store(covered.range.end, Ordering::Relaxed);
    }
    COUNT.store(ranges.0.len(), Ordering::Relaxed);
    VERSION.fetch_add(1, Ordering::Release);
}

/// False if no slot has memory in the range. Takes no lock.
fn is_covered(range: &Range<u64>) -> bool {
    /// The table changes rarely. A caller that has interrupted such a change gets true, and has the VMs checked.
    const ATTEMPTS: usize = 8;
    for _ in 0..ATTEMPTS {
        let version = VERSION.load(Ordering::Acquire);
        let count = COUNT.load(Ordering::Relaxed);
        let is_covered = STARTS.iter().zip(&ENDS).take(count).any(|(start, end)| {
            start.load(Ordering::Relaxed) < range.end && range.start < end.load(Ordering::Relaxed)
        });
        fence(Ordering::Acquire);
        if version.is_multiple_of(2) && VERSION.load(Ordering::Relaxed) == version {
            return is_covered;
        }
    }
    true
}

/// The VMs, each with the generation of the process that made it. Changes begin in this order.
static VMS: RwLock<Vec<(u32, Weak<hypervisor::Vm>)>> = RwLock::new(Vec::new());
/// Generation of the process that made the newest VM.
static GENERATION: AtomicU32 = AtomicU32::new(0);

/// A VM's entry in the table, for as long as the VM lives.
#[derive(Debug)]
pub(crate) struct Registration {
    /// Memory ranges by slot number.
    slots: Mutex<std::collections::BTreeMap<u32, Range<u64>>>,
}

impl Registration {
    pub(crate) fn new(vm: &Arc<hypervisor::Vm>) -> Self {
        let mut vms = VMS.write().unwrap_or_else(PoisonError::into_inner);
        let generation = process::generation();
        vms.retain(|(_, vm)| vm.strong_count() != 0);
        vms.push((generation, Arc::downgrade(vm)));
        GENERATION.store(generation, Ordering::Relaxed);
        Self {
            slots: Mutex::default(),
        }
    }

    /// Calls `set` to set a slot, and publishes the slot's memory before a guest can use it.
    pub(crate) fn setting<T>(
        &self,
        slot: u32,
        start: u64,
        size: u64,
        set: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        // A change of flags or a move of a slot leaves its memory the same.
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        let range = start..start.saturating_add(size);
        let is_new = size != 0 && !slots.contains_key(&slot);
        if is_new {
            change_ranges(|ranges| ranges.add(range.clone()));
        }
        let result = set();
        if is_new && result.is_err() {
            change_ranges(|ranges| ranges.remove(&range));
        } else if is_new {
            slots.insert(slot, range);
        } else if size == 0
            && result.is_ok()
            && let Some(gone) = slots.remove(&slot)
        {
            change_ranges(|ranges| ranges.remove(&gone));
        }
        result
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        let slots = self.slots.get_mut().unwrap_or_else(PoisonError::into_inner);
        if !slots.is_empty() {
            change_ranges(|ranges| slots.values().for_each(|range| ranges.remove(range)));
        }
    }
}

/// A change of memory under guests. It must be complete when this is dropped.
#[derive(Debug)]
#[must_use = "the change is over when it is dropped"]
pub struct MemoryChange {
    _changes: Vec<HostChange>,
    /// Defers signals: a handler that changes memory as well would wait for its own thread.
    _section: Section,
}

/// Announces that the process is about to change how it can access these addresses. No guest accesses them until the
/// result is dropped. `None` if no guest has memory there, which is found out cheaply.
///
/// Must not be called in a [`Section`], where the thread may hold anykvm's locks. The caller has to ensure that.
///
/// # Errors
///
/// ENOMEM; the change must not be made then.
pub fn begin(start: u64, len: u64) -> Result<Option<MemoryChange>> {
    let len = len.checked_next_multiple_of(host::PAGE_SIZE as u64);
    let range = start..start.saturating_add(len.unwrap_or(u64::MAX));
    if range.is_empty() || COUNT.load(Ordering::Relaxed) == 0 || !is_covered(&range) {
        return Ok(None);
    }
    change(&range)
}

/// Like [`begin`], for memory whose addresses are unknown, such as that of a file that becomes shorter.
///
/// # Errors
///
/// As [`begin`].
pub fn begin_anywhere() -> Result<Option<MemoryChange>> {
    begin(0, u64::MAX)
}

/// True if some guest has memory.
pub fn is_any() -> bool {
    COUNT.load(Ordering::Relaxed) != 0
}

#[cold]
fn change(range: &Range<u64>) -> Result<Option<MemoryChange>> {
    // A forked child has none of the parent's vCPUs, whose threads may have held the locks.
    let generation = process::generation();
    if GENERATION.load(Ordering::Relaxed) != generation {
        return Ok(None);
    }
    let section = Section::enter();
    let vms: Vec<_> = {
        let vms = VMS.read().unwrap_or_else(PoisonError::into_inner);
        let own = vms.iter().filter(|(made_in, _)| *made_in == generation);
        own.filter_map(|(_, vm)| vm.upgrade()).collect()
    };
    let mut changes = Vec::new();
    for vm in &vms {
        changes.extend(vm.begin_host_change(range.start, range.end)?);
    }
    Ok((!changes.is_empty()).then_some(MemoryChange {
        _changes: changes,
        _section: section,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(ranges: &Ranges) -> Vec<(Range<u64>, usize)> {
        let all = ranges.0.iter();
        all.map(|c| (c.range.clone(), c.slots)).collect()
    }

    #[test]
    fn ranges_that_touch_are_one_until_the_last_of_their_slots_is_gone() {
        let mut ranges = Ranges::new();
        ranges.add(10..20);
        ranges.add(30..40);
        assert_eq!(shown(&ranges), [(10..20, 1), (30..40, 1)]);
        ranges.add(20..30);
        assert_eq!(shown(&ranges), [(10..40, 3)]);
        ranges.add(5..6);
        ranges.add(12..13);
        assert_eq!(shown(&ranges), [(5..6, 1), (10..40, 4)]);
        for gone in [10..20, 30..40, 12..13] {
            ranges.remove(&gone);
        }
        assert_eq!(shown(&ranges), [(5..6, 1), (10..40, 1)]);
        ranges.remove(&(20..30));
        ranges.remove(&(5..6));
        assert_eq!(shown(&ranges), []);
    }

    #[test]
    fn many_ranges_are_covered_by_few() {
        let mut ranges = Ranges::new();
        // Squares: the gaps grow.
        let slots: Vec<_> = (0..500u64).map(|n| n * n * 10..n * n * 10 + 5).collect();
        for slot in &slots {
            ranges.add(slot.clone());
            assert!(ranges.0.len() <= RANGES);
            assert!(
                ranges
                    .0
                    .windows(2)
                    .all(|w| w[0].range.end < w[1].range.start)
            );
        }
        let is_in = |ranges: &Ranges, slot: &Range<u64>| {
            let mut all = ranges.0.iter();
            all.any(|c| c.range.start <= slot.start && slot.end <= c.range.end)
        };
        assert!(slots.iter().all(|slot| is_in(&ranges, slot)));
        // The gap before the last range is large, so it is kept.
        assert!(!is_in(
            &ranges,
            &(498 * 498 * 10 + 100..498 * 498 * 10 + 101)
        ));
        for (n, slot) in slots.iter().enumerate() {
            ranges.remove(slot);
            assert!(slots[n + 1..].iter().all(|slot| is_in(&ranges, slot)));
        }
        assert_eq!(shown(&ranges), []);
    }

    #[test]
    fn a_change_is_one_only_over_memory_of_a_slot() {
        let memory = host::Mapping::anonymous(4 * host::PAGE_SIZE).unwrap();
        let start = memory.as_ptr() as u64;
        let is_change = |start, len| begin(start, len).unwrap().is_some();
        let vm = crate::Vm::new().unwrap();
        let set = |size| {
            let region = kvm_bindings::kvm_userspace_memory_region {
                slot: 3,
                memory_size: size,
                userspace_addr: start + 4096,
                ..Default::default()
            };
            vm.set_user_memory_region(&region)
        };
        assert!(!is_change(start, 16384));
        set(8192).unwrap();
        assert!(set(4096).is_err());
        assert!(is_change(start, 16384) && is_change(start + 8192, 1));
        assert!(!is_change(start, 4096) && !is_change(start + 4096, 0));
        assert!(!is_change(start + 12288, 4096));
        set(0).unwrap();
        assert!(!is_change(start, 16384));
        set(8192).unwrap();
        drop(vm);
        assert!(!is_change(start, 16384));
    }
}
