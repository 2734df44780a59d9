//! [`Writers`]: the VM's reverse map. It says which vCPUs may write a slot's pages unnoticed, and carries the requests
//! to stop.
//!
//! Each vCPU that has ever had a write tag in a slot has a [`Writer`] there. The writer has a bit per page that the
//! vCPU *may* write without being noticed, which only the vCPU sets and clears, and a bit per page that the vCPU is
//! *asked* to give up, which other threads set. Where a page's tags are, only the vCPU knows.
//!
//! ```text
//! vCPU, before it makes a tag             requester (a harvest, or a fetch that makes the page code)
//! may |= page                             the page's dirty bit is cleared, or its code is marked
//! fence                                   fence
//! checks: is it dirty? is it code?        asked |= page of each writer whose `may` has it; posted += 1
//! makes the tag                           waits for done >= posted, or a vCPU that is outside
//! ```
//!
//! One of the two sees the other's store. The vCPU reads its requests at its next poll, after it has made the tag, so
//! no tag outlives the answer. No side takes a lock, two requests for the same page are one bit, and nothing can
//! overflow. The cost of asking grows with the pages asked for, the cost of answering with the pages of the vCPU that
//! is asked.

use std::{
    io,
    sync::{Arc, OnceLock, atomic::Ordering},
};

use crate::{
    page_set::{PageSet, bits},
    words::{AtomicBool, AtomicU64, barrier, barrier_after_locked},
};

/// What a vCPU has carried out of the requests that other threads made to it.
///
/// A thread that changed something waits until every *running* vCPU has acknowledged the change. A vCPU that is not
/// running carries out its requests before it executes again.
#[derive(Debug)]
pub struct Mailbox {
    epoch: AtomicU64,
    posted: AtomicU64,
    done: AtomicU64,
}

impl Default for Mailbox {
    fn default() -> Self {
        Self {
            epoch: AtomicU64::new(0),
            posted: AtomicU64::new(0),
            done: AtomicU64::new(0),
        }
    }
}

impl Mailbox {
    /// Returns the last value of [`crate::GuestMemory::epoch`] up to which the vCPU has carried out all requests.
    pub fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::Acquire)
    }

    /// Acknowledges everything published up to `epoch`.
    pub fn set_epoch(&self, epoch: u64) {
        self.epoch.store(epoch, Ordering::Release);
    }

    /// Returns how many times the vCPU was asked for pages.
    #[inline(always)]
    pub fn posted(&self) -> u64 {
        self.posted.load(Ordering::Acquire)
    }

    /// Returns the count of [`Self::posted`] up to which the vCPU has given up all pages it was asked for.
    pub fn done(&self) -> u64 {
        self.done.load(Ordering::Acquire)
    }

    /// True if no request is unanswered.
    pub fn is_empty(&self) -> bool {
        self.done() == self.posted()
    }

    /// Says that the vCPU has given up the pages of the first `posted` requests.
    pub fn set_done(&self, posted: u64) {
        self.done.store(posted, Ordering::Release);
    }

    fn post(&self) {
        self.posted.fetch_add(1, Ordering::AcqRel);
    }
}

/// A vCPU's entry in the reverse map of one slot.
#[derive(Debug)]
pub struct Writer {
    mailbox: Arc<Mailbox>,
    may: PageSet,
    asked: PageSet,
    is_asked: AtomicBool,
    next: OnceLock<Arc<Writer>>,
}

impl Writer {
    /// Records that this vCPU may write the page. Whatever the vCPU reads after this call is at least as new as what
    /// any requester published before it searched for writers without finding this one. Returns true if the page was
    /// not recorded before. Only the vCPU's own thread calls this.
    #[inline]
    pub fn add(&self, page: usize) -> bool {
        // Only this thread clears the bit, so a set bit stays set.
        if self.may.contains(page) {
            return false;
        }
        self.may.insert(page);
        // The bit was clear, so a locked instruction has set it, which is a barrier.
        barrier_after_locked();
        true
    }

    /// Removes the pages of `pages` in word `n`, for which the vCPU has no tag any more. Returns those that were
    /// recorded. Only the vCPU's own thread calls this.
    #[inline]
    pub fn remove(&self, n: usize, pages: u64) -> u64 {
        let removed = self.may.remove_word(n, pages);
        // A thread that marks code after the caller has looked for code sees all writes made before this barrier.
        barrier();
        removed
    }

    /// True if this vCPU may write the page.
    #[inline]
    pub fn may_write(&self, page: usize) -> bool {
        self.may.contains(page)
    }

    /// Returns the bits of word `n` (64 pages) that this vCPU may write.
    pub fn pages(&self, n: usize) -> u64 {
        self.may.word(n)
    }

    /// Removes all pages that this vCPU may write. Only the vCPU's own thread calls this.
    pub fn take_all(&self, f: impl FnMut(usize, u64)) {
        self.may.take(f);
        barrier();
    }

    /// Removes the pages that the vCPU is asked to give up, if there are any: it may not write them any more. Passes
    /// those that it could write to `f`. Only the vCPU's own thread calls this.
    pub fn take_asked(&self, mut f: impl FnMut(usize, u64)) {
        if self.is_asked.swap(false, Ordering::AcqRel) {
            self.asked
                .take(|n, pages| match self.may.remove_word(n, pages) {
                    0 => {}
                    removed => f(n, removed),
                });
            barrier();
        }
    }
}

/// The vCPUs that may write a slot's pages.
#[derive(Debug)]
pub struct Writers {
    pages: usize,
    first: OnceLock<Arc<Writer>>,
}

impl Writers {
    pub(crate) fn new(pages: usize) -> Self {
        Self {
            pages,
            first: OnceLock::new(),
        }
    }

    fn iter(&self) -> impl Iterator<Item = &Arc<Writer>> {
        core::iter::successors(self.first.get(), |w| w.next.get())
    }

    /// Returns the vCPU's writer, and makes one if it has none.
    ///
    /// # Errors
    /// The host has no memory.
    pub fn writer(&self, mailbox: &Arc<Mailbox>) -> io::Result<Arc<Writer>> {
        let mut place = &self.first;
        let mut own = None;
        loop {
            if let Some(writer) = place.get() {
                if Arc::ptr_eq(&writer.mailbox, mailbox) {
                    return Ok(Arc::clone(writer));
                }
                place = &writer.next;
                continue;
            }
            let writer = match own.take() {
                Some(writer) => writer,
                None => Arc::new(Writer {
                    mailbox: Arc::clone(mailbox),
                    may: PageSet::new(self.pages)?,
                    asked: PageSet::new(self.pages)?,
                    is_asked: AtomicBool::new(false),
                    next: OnceLock::new(),
                }),
            };
            // If another vCPU was first, this one is appended behind it.
            match place.set(Arc::clone(&writer)) {
                Ok(()) => return Ok(writer),
                Err(_) => own = Some(writer),
            }
        }
    }

    /// Asks every vCPU that may write one of these pages to give it up. `pages` has pairs of a word's index and its
    /// bits; the caller has published the reason. The vCPU of `except` is not asked. Returns the number of pages asked
    /// for, counted once per writer.
    pub(crate) fn ask(&self, pages: &[(usize, u64)], except: Option<&Arc<Mailbox>>) -> u64 {
        barrier();
        let mut count = 0;
        for writer in self.iter() {
            if except.is_some_and(|own| Arc::ptr_eq(own, &writer.mailbox)) {
                continue;
            }
            let mut asked = 0;
            for (n, pages) in pages {
                let pages = pages & writer.may.word(*n);
                if pages != 0 {
                    writer.asked.insert_word(*n, pages);
                    asked += u64::from(pages.count_ones());
                }
            }
            if asked != 0 {
                // A swap, so that it is in one order with the vCPU's swap in `take_asked`.
                writer.is_asked.swap(true, Ordering::AcqRel);
                writer.mailbox.post();
                count += asked;
            }
        }
        count
    }
}

/// Yields the pages whose bits are set in word `n`.
pub fn each_page(n: usize, pages: u64) -> impl Iterator<Item = usize> {
    bits(pages).map(move |bit| n * 64 + bit)
}

#[cfg(all(test, not(loom)))]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn only_who_may_write_is_asked() {
        let writers = Writers::new(1000);
        let boxes: Vec<_> = (0..3).map(|_| Arc::new(Mailbox::default())).collect();
        let own: Vec<_> = boxes.iter().map(|b| writers.writer(b).unwrap()).collect();
        for (mailbox, writer) in boxes.iter().zip(&own) {
            assert!(Arc::ptr_eq(&writers.writer(mailbox).unwrap(), writer));
        }
        assert!(own[0].add(5) && !own[0].add(5) && own[1].add(5) && own[1].add(999));
        assert_eq!(writers.ask(&[(0, 1 << 6), (3, 1)], None), 0);
        assert!(boxes.iter().all(|b| b.is_empty()));
        assert_eq!(
            writers.ask(&[(0, 1 << 5 | 1 << 6), (15, u64::MAX)], None),
            3
        );
        assert_eq!(writers.ask(&[(0, 1 << 5)], Some(&boxes[0])), 1);
        let posted: Vec<u64> = boxes.iter().map(|b| b.posted()).collect();
        assert_eq!(posted, [1, 2, 0]);
        let mut asked = Vec::new();
        own[1].take_asked(|n, word| asked.extend(each_page(n, word)));
        assert_eq!(asked, [5, 999]);
        own[1].take_asked(|_, _| panic!("nothing more"));
        assert!(!own[1].may_write(5) && !own[1].may_write(999));
        assert_eq!(writers.ask(&[(15, u64::MAX)], None), 0);
        // What the vCPU has removed itself is not given up once more.
        assert!(own[1].add(7) && own[1].add(8));
        assert_eq!(writers.ask(&[(0, 3 << 7)], None), 2);
        assert_eq!(own[1].remove(0, 1 << 7), 1 << 7);
        let mut given_up = Vec::new();
        own[1].take_asked(|n, word| given_up.extend(each_page(n, word)));
        assert_eq!(given_up, [8]);
        let mut all = Vec::new();
        own[0].take_all(|n, word| all.push((n, word)));
        assert_eq!(all, [(0, 1 << 5)]);
    }

    #[test]
    fn vcpus_that_come_at_once_all_have_a_place() {
        let writers = Writers::new(64);
        let boxes: Vec<_> = (0..8).map(|_| Arc::new(Mailbox::default())).collect();
        std::thread::scope(|s| {
            for mailbox in &boxes {
                let writers = &writers;
                s.spawn(move || writers.writer(mailbox).unwrap().add(1));
            }
        });
        assert_eq!(writers.iter().count(), 8);
        assert_eq!(writers.ask(&[(0, 2)], None), 8);
        assert!(boxes.iter().all(|b| b.posted() == 1));
    }
}
