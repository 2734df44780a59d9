//! Irqfds whose interrupts are delivered by the writer's own thread.
//!
//! In a kernel a write to an irqfd's eventfd injects before it returns, takes the counter, and wakes no other waiter.
//! Code that intercepts the VMM's `write(2)` (the preload library) calls [`signal_irqfd`] first, which does just that
//! without the two wake-ups that a thread in between costs. Writes that come another way (by a duplicate, another
//! process, the kernel itself) are handled by the thread that waits for irqfds.
//!
//! The table is indexed by the VMM's descriptor numbers. It is right as long as every close is reported to [`closing`].

use std::{
    collections::BTreeMap,
    sync::{
        Arc, PoisonError, RwLock, Weak,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
};

use super::{Irqfd, VmState};
use crate::bell::Identity;

/// Descriptor numbers that can be in the table. Eventfds with higher numbers are handled by the thread.
const NUMBERS: usize = 1 << 16;

/// One bit for each number in the table. For a write to any other file only this bit is read.
static LISTED: [AtomicU64; NUMBERS / 64] = [const { AtomicU64::new(0) }; NUMBERS / 64];
static TABLE: RwLock<BTreeMap<i32, Entry>> = RwLock::new(BTreeMap::new());
/// [`host::fork::generation`] of the process that filled the table.
static GENERATION: AtomicU32 = AtomicU32::new(0);

#[derive(Debug)]
struct Entry {
    vm: Weak<VmState>,
    irqfd: Arc<Irqfd>,
}

fn bit(fd: i32) -> Option<(&'static AtomicU64, u64)> {
    let fd = usize::try_from(fd).ok()?;
    Some((LISTED.get(fd / 64)?, 1 << (fd % 64)))
}

/// True if the descriptor may be an irqfd's.
#[inline]
pub fn is_irqfd(fd: i32) -> bool {
    bit(fd).is_some_and(|(word, bit)| word.load(Ordering::Acquire) & bit != 0)
}

/// Injects as a write to this eventfd does. Returns false if the descriptor is not known as an irqfd's, so that the
/// kernel's `write` is needed.
///
/// Takes locks, so it must not be called from a signal handler that has interrupted another call of this library.
pub fn signal_irqfd(fd: i32) -> bool {
    // In a forked child the table is void: the child's write must reach its parent's VM through the kernel.
    if !is_irqfd(fd) || GENERATION.load(Ordering::Acquire) != host::fork::generation() {
        return false;
    }
    let (vm, irqfd) = {
        let table = TABLE.read().unwrap_or_else(PoisonError::into_inner);
        let Some(entry) = table.get(&fd) else {
            return false;
        };
        (entry.vm.upgrade(), Arc::clone(&entry.irqfd))
    };
    match vm {
        Some(vm) => irqfd.inject(&vm),
        None => {
            remove(&irqfd);
            false
        }
    }
}

/// Yields the numbers from `first` to `last` that are in the table.
fn listed(first: i32, last: i32) -> impl Iterator<Item = i32> {
    let last = last.min(NUMBERS as i32 - 1);
    let mut fd = first.max(0);
    std::iter::from_fn(move || {
        while fd <= last {
            let (word, _) = bit(fd)?;
            let rest = word.load(Ordering::Acquire) >> (fd % 64);
            if rest == 0 {
                fd += 64 - fd % 64;
                continue;
            }
            let found = fd + rest.trailing_zeros() as i32;
            fd = found + 1;
            return (found <= last).then_some(found);
        }
        None
    })
}

/// True if one of these numbers is in the table.
#[inline]
pub fn has_irqfd(first: i32, last: i32) -> bool {
    listed(first, last).next().is_some()
}

/// Removes these numbers, which are about to be closed or to become other files.
pub fn closing(first: i32, last: i32) {
    for fd in listed(first, last) {
        let gone = {
            let mut table = TABLE.write().unwrap_or_else(PoisonError::into_inner);
            unlist(fd);
            table.remove(&fd)
        };
        // Dropped outside of the lock, because this may be the end of a VM.
        drop(gone);
    }
}

fn unlist(fd: i32) {
    if let Some((word, bit)) = bit(fd) {
        word.fetch_and(!bit, Ordering::AcqRel);
    }
}

/// True if the eventfd is an irqfd of another VM of this process. A signal of an eventfd would wake only one of the two
/// VMs.
pub(super) fn is_anothers(vm: &Arc<VmState>, id: Identity) -> bool {
    if GENERATION.load(Ordering::Acquire) != host::fork::generation() {
        return false;
    }
    let table = TABLE.read().unwrap_or_else(PoisonError::into_inner);
    let mut others = table
        .values()
        .filter(|e| !std::ptr::eq(e.vm.as_ptr(), Arc::as_ptr(vm)));
    others.any(|e| e.irqfd.id.is_surely(id) && e.vm.strong_count() != 0 && e.irqfd.is_open())
}

/// Has writes to `irqfd.fd` delivered by their writers from now on.
pub(super) fn insert(vm: &Arc<VmState>, irqfd: &Arc<Irqfd>) {
    let Some((word, bit)) = bit(irqfd.fd) else {
        return;
    };
    let mut stale = Vec::new();
    {
        let mut table = TABLE.write().unwrap_or_else(PoisonError::into_inner);
        let generation = host::fork::generation();
        if GENERATION.swap(generation, Ordering::AcqRel) != generation {
            // The entries were copied from the parent process.
            for fd in table.keys() {
                unlist(*fd);
            }
            stale.extend(std::mem::take(&mut *table).into_values());
        }
        // If the host does not tell eventfds apart, two VMs may have the same number.
        let is_taken = table
            .get(&irqfd.fd)
            .is_some_and(|e| e.vm.strong_count() != 0 && e.irqfd.is_open());
        if is_taken {
            return;
        }
        let entry = Entry {
            vm: Arc::downgrade(vm),
            irqfd: Arc::clone(irqfd),
        };
        stale.extend(table.insert(irqfd.fd, entry));
        word.fetch_or(bit, Ordering::AcqRel);
    }
    drop(stale);
}

/// Removes the irqfd from the table, if it is there.
pub(super) fn remove(irqfd: &Arc<Irqfd>) {
    if !is_irqfd(irqfd.fd) {
        return;
    }
    let gone = {
        let mut table = TABLE.write().unwrap_or_else(PoisonError::into_inner);
        match table.get(&irqfd.fd) {
            Some(entry) if Arc::ptr_eq(&entry.irqfd, irqfd) => {
                unlist(irqfd.fd);
                table.remove(&irqfd.fd)
            }
            _ => None,
        }
    };
    drop(gone);
}

/// Removes the entries of VMs that are gone.
pub(super) fn forget_dead() {
    let mut stale = Vec::new();
    {
        let mut table = TABLE.write().unwrap_or_else(PoisonError::into_inner);
        let dead: Vec<i32> = table
            .iter()
            .filter(|(_, entry)| entry.vm.strong_count() == 0)
            .map(|(fd, _)| *fd)
            .collect();
        for fd in dead {
            unlist(fd);
            stale.extend(table.remove(&fd));
        }
    }
    drop(stale);
}
