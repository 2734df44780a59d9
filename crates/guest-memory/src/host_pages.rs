//! [`HostPages`]: which host pages under a slot the process can access, and how that knowledge ends when the VMM
//! changes them.
//!
//! A VMM may give a slot a range that it has not mapped, or has mapped read-only; KVM_RUN then fails with EFAULT when
//! the guest accesses it. So each page is probed once, and the result holds until the VMM changes the page by
//! mprotect(2), munmap(2) and their kin. The code that intercepts those calls announces the change
//! ([`crate::GuestMemory::begin_host_change`]), as a kernel's MMU notifiers do for KVM.
//!
//! ```text
//! changer                                     vCPU
//! publishes a table whose slots know less,
//! and have a gate
//! epoch += 1
//!                                             takes the table, drops its translations, acknowledges
//! waits for that acknowledgement
//!                                             looks up a page of the range: waits at the gate
//! makes the system call
//! opens the gate
//!                                             probes the page as it is now
//! ```
//!
//! DEVIATION: if memory changes unannounced (a block of `malloc` that `free` unmaps, a file that another process
//! shortens, a user of `anykvm-ioctls` who does not call `begin_memory_change`), a guest access to it is a fault of the
//! process; with KVM it is EFAULT.
//!
//! Each change makes a new `HostPages`, and a vCPU uses the one of its own table. A vCPU that has not acknowledged goes
//! on using the pages, which still exist, and stores what it learns in the old object, which no newer table reads. A
//! vCPU that has acknowledged holds no page of the range.
//!
//! A vCPU that looks pages up in its own table has acknowledged the change at whose gate it waits
//! ([`crate::GuestMemory::table_and_epoch`]). The next change, whose acknowledgement it delays, does not begin before the
//! gate is open. But a vCPU also writes the guest's clock and the like, where it looks pages up in the newest table. The
//! changer may then wait for a vCPU that waits at the gate, or for one that needs a lock of such a vCPU. So a changer
//! that sees threads at the gate for a while ([`HostChange::is_waited_for`]) drops the change and begins another one.

use std::{
    io,
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
    },
    time::Duration,
};

use host::{LazyArray, futex, probe};

/// A gate that is closed while a change of host memory is under way.
#[derive(Debug)]
pub(crate) struct Gate {
    closed: AtomicU32,
    /// Number of threads that wait to access a page.
    waiting: AtomicU32,
}

impl Gate {
    pub(crate) fn closed() -> Arc<Self> {
        Arc::new(Self {
            closed: AtomicU32::new(1),
            waiting: AtomicU32::new(0),
        })
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire) != 0
    }

    fn open(&self) {
        self.closed.store(0, Ordering::Release);
        futex::wake(&self.closed, u32::MAX);
    }

    /// Waits to access a page behind the gate.
    #[cold]
    fn pass(&self) {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        self.wait();
        self.waiting.fetch_sub(1, Ordering::Relaxed);
    }

    /// Waits until the gate is open, which takes as long as a system call that the VMM has begun.
    pub(crate) fn wait(&self) {
        /// Limit of a single sleep: the kernel would restart an unlimited one after a signal handler.
        const NAP: Duration = Duration::from_millis(100);
        while self.is_closed() {
            futex::wait(&self.closed, 1, Some(NAP));
        }
    }
}

/// A change of host memory under a VM's slots. It lasts from before the VMM's system call until it is dropped after the
/// call.
#[derive(Debug)]
#[must_use = "it ends when it is dropped"]
pub struct HostChange {
    gate: Arc<Gate>,
    epoch: u64,
}

impl HostChange {
    pub(crate) fn new(gate: Arc<Gate>, epoch: u64) -> Self {
        Self { gate, epoch }
    }

    /// The epoch that running vCPUs have to acknowledge before the change may be made.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// True if some thread waits for the end of the change, to access a page.
    pub fn is_waited_for(&self) -> bool {
        self.gate.waiting.load(Ordering::Relaxed) != 0
    }
}

impl Drop for HostChange {
    fn drop(&mut self) {
        self.gate.open();
    }
}

/// The pages under a slot that the process is known to be able to access.
#[derive(Debug)]
pub(crate) struct HostPages {
    /// A bit for each page that was found readable.
    readable: LazyArray<AtomicU64>,
    /// A bit for each page that was found writable.
    writable: LazyArray<AtomicU64>,
    /// All pages are mapped readable and writable, and stay so: no page has to be probed.
    is_mapped: AtomicBool,
    /// The gate and the pages of the last change.
    changed: Option<(Arc<Gate>, Range<usize>)>,
}

impl HostPages {
    /// Starts with no knowledge of the `pages` pages.
    pub(crate) fn new(pages: usize) -> io::Result<Self> {
        Ok(Self {
            readable: LazyArray::new(pages.div_ceil(64))?,
            writable: LazyArray::new(pages.div_ceil(64))?,
            is_mapped: AtomicBool::new(false),
            changed: None,
        })
    }

    /// Returns what is known while the pages of `range` change, and afterwards: everything but those pages.
    pub(crate) fn changing(&self, range: Range<usize>, gate: &Arc<Gate>) -> io::Result<Self> {
        let words = self.readable.len();
        let new = Self {
            changed: Some((Arc::clone(gate), range.clone())),
            ..Self::new(words * 64)?
        };
        for (from, to) in [
            (&self.readable, &new.readable),
            (&self.writable, &new.writable),
        ] {
            for (n, (from, to)) in from.iter().zip(to.iter()).enumerate() {
                let kept = from.load(Ordering::Relaxed) & !bits_of(&range, n);
                // Words of unknown pages are not written, so that they take no memory.
                if kept != 0 {
                    to.store(kept, Ordering::Relaxed);
                }
            }
        }
        Ok(new)
    }

    /// Says that all pages are mapped readable and writable, for as long as the slot exists.
    pub(crate) fn set_mapped(&self) {
        self.is_mapped.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_mapped(&self) -> bool {
        self.is_mapped.load(Ordering::Relaxed)
    }

    /// True if the page, which is at address `hva`, can be read.
    #[inline]
    pub(crate) fn is_readable(&self, index: usize, hva: u64) -> bool {
        self.is_good(&self.readable, index, || probe::is_readable(hva))
    }

    /// True if the page, which is at address `hva`, can be read and written.
    #[inline]
    pub(crate) fn is_writable(&self, index: usize, hva: u64) -> bool {
        self.is_good(&self.writable, index, || probe::is_writable(hva))
    }

    /// Returns a bit for each of the 64 pages from `index` on: set if it is already known to be readable.
    pub(crate) fn known_readable(&self, index: usize) -> u64 {
        let word = |n: usize| match self.readable.get(n) {
            Some(word) => AtomicU64::load(word, Ordering::Relaxed),
            None => 0,
        };
        let (n, shift) = (index / 64, index % 64);
        let low = word(n) >> shift;
        if shift == 0 {
            low
        } else {
            low | word(n + 1) << (64 - shift)
        }
    }

    /// True if the page is already known to be readable, be it because it is known to be writable.
    #[inline]
    pub(crate) fn is_known(&self, index: usize) -> bool {
        self.is_mapped() || Self::has(&self.readable, index) || Self::has(&self.writable, index)
    }

    #[inline]
    fn has(bits: &LazyArray<AtomicU64>, index: usize) -> bool {
        let word = bits.get(index / 64);
        word.is_some_and(|w| w.load(Ordering::Relaxed) >> (index % 64) & 1 != 0)
    }

    /// Checks the page's bit, and probes the page if the bit is clear.
    #[inline]
    fn is_good(
        &self,
        bits: &LazyArray<AtomicU64>,
        index: usize,
        ask: impl FnOnce() -> bool,
    ) -> bool {
        let Some(word) = bits.get(index / 64) else {
            return false;
        };
        let bit = 1 << (index % 64);
        if word.load(Ordering::Relaxed) & bit != 0 {
            return true;
        }
        self.ask_once(word, bit, index, ask)
    }

    #[cold]
    fn ask_once(
        &self,
        word: &AtomicU64,
        bit: u64,
        index: usize,
        ask: impl FnOnce() -> bool,
    ) -> bool {
        if let Some((gate, range)) = &self.changed
            && range.contains(&index)
        {
            gate.pass();
        }
        let good = self.is_mapped() || ask();
        if good {
            word.fetch_or(bit, Ordering::Relaxed);
        }
        good
    }
}

/// Returns the bits of the 64 pages from `64 * n` on that are in the range.
fn bits_of(range: &Range<usize>, n: usize) -> u64 {
    let first = range.start.saturating_sub(n * 64).min(64) as u32;
    let end = range.end.saturating_sub(n * 64).min(64) as u32;
    let below = |n: u32| 1u64.checked_shl(n).map_or(u64::MAX, |bit| bit - 1);
    below(end) & !below(first)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_forgets_its_pages_and_no_others() {
        let memory = host::Mapping::anonymous(200 * host::PAGE_SIZE).unwrap();
        let hva = |n: usize| memory.as_ptr() as u64 + (n * host::PAGE_SIZE) as u64;
        let pages = HostPages::new(200).unwrap();
        let all = |pages: &HostPages| (0..200).all(|n| pages.is_writable(n, hva(n)));
        assert!(all(&pages) && (0..200).all(|n| pages.is_readable(n, hva(n))));
        for range in [0..1, 63..65, 64..128, 3..200, 199..200, 0..200, 5..5] {
            let gate = Gate::closed();
            let new = pages.changing(range.clone(), &gate).unwrap();
            for n in 0..200 {
                let known = new.known_readable(n);
                for (bit, page) in (n..n + 64).enumerate() {
                    let is_known = page < 200 && !range.contains(&page);
                    assert_eq!(known >> bit & 1 != 0, is_known, "{range:?}");
                }
            }
            drop(HostChange::new(gate, 0));
            assert!(all(&new));
        }
    }

    #[test]
    fn who_looks_a_changing_page_up_waits_and_finds_it_as_it_is_then() {
        let memory = host::Mapping::anonymous(2 * host::PAGE_SIZE).unwrap();
        let (hva, size) = (memory.as_ptr() as u64, host::PAGE_SIZE);
        let old = HostPages::new(2).unwrap();
        assert!(old.is_writable(0, hva));
        let gate = Gate::closed();
        let new = old.changing(0..1, &gate).unwrap();
        let change = HostChange::new(gate, 7);
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| new.is_writable(0, hva));
            // A lookup of another page does not wait, nor does a thread that uses the old object.
            assert!(new.is_writable(1, hva + size as u64) && old.is_writable(0, hva));
            std::thread::sleep(Duration::from_millis(20));
            assert!(!waiting.is_finished());
            let read_only = [hva as usize, size, libc::PROT_READ as usize];
            // SAFETY: the memory is the test's own.
            unsafe { host::system::call(libc::SYS_mprotect, read_only).unwrap() };
            drop(change);
            assert!(!waiting.join().unwrap());
        });
        assert!(new.is_readable(0, hva));
    }
}
