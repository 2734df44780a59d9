//! [`Writers`]: who may write a slot's pages unnoticed, and how they are told to stop: the VM's reverse map.
//!
//! Each vCPU that has ever had a write tag in a slot has a [`Writer`] there: a bit per page that it *may* write without anybody
//! noticing, which it sets and clears itself, and a bit per page that it is *asked* to give up, which others set. Where its
//! tags of a page are is for the vCPU alone to know.
//!
//! ```text
//! vCPU, before it makes a tag             who wants the page noted (a harvest, or a page that becomes code)
//! may |= page                             the page's dirty bit is cleared, or its code is marked
//! fence                                   fence
//! looks: is it dirty? is it code?         asked |= page of each writer whose `may` has it; posted += 1
//! makes the tag                           waits for done >= posted, or a vCPU that is outside
//! ```
//!
//! One of the two sees the other's store. The vCPU looks at what it was asked at its next poll, after it has made the tag, so
//! no tag outlives the answer. Nobody takes a lock, a page that is asked for twice is one bit, and nothing can overflow: the cost of
//! asking follows the pages, and that of answering the pages of the one who is asked.

use std::{
    io,
    sync::{Arc, OnceLock, atomic::Ordering},
};

use crate::{
    page_set::{PageSet, bits},
    words::{AtomicBool, AtomicU64, barrier, barrier_after_locked},
};

/// What a vCPU has done of what other threads have asked of it.
///
/// Whoever changed something waits until every *running* vCPU has acknowledged; one that is not running does what is asked
/// before it executes again.
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
    /// The last epoch of [`crate::GuestMemory::epoch`] whose requests were carried out.
    pub fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::Acquire)
    }

    /// Everything published up to `epoch` is carried out.
    pub fn set_epoch(&self, epoch: u64) {
        self.epoch.store(epoch, Ordering::Release);
    }

    /// Counts the times that pages were asked for.
    #[inline(always)]
    pub fn posted(&self) -> u64 {
        self.posted.load(Ordering::Acquire)
    }

    /// All that was asked up to this count of [`Self::posted`] is given up.
    pub fn done(&self) -> u64 {
        self.done.load(Ordering::Acquire)
    }

    /// Nothing is waited for.
    pub fn is_empty(&self) -> bool {
        self.done() == self.posted()
    }

    /// All of the count is given up.
    pub fn set_done(&self, posted: u64) {
        self.done.store(posted, Ordering::Release);
    }

    fn post(&self) {
        self.posted.fetch_add(1, Ordering::AcqRel);
    }
}

/// A vCPU's part in a slot.
#[derive(Debug)]
pub struct Writer {
    mailbox: Arc<Mailbox>,
    may: PageSet,
    asked: PageSet,
    is_asked: AtomicBool,
    next: OnceLock<Arc<Writer>>,
}

impl Writer {
    /// The page is findable as one that this vCPU may write: what it looks at after this is as new as what anybody has
    /// looked for pages with. True if it was not before. The vCPU's thread only.
    #[inline]
    pub fn add(&self, page: usize) -> bool {
        // No one else clears the bit.
        if self.may.contains(page) {
            return false;
        }
        self.may.insert(page);
        // The bit was clear, so it was set by a locked instruction.
        barrier_after_locked();
        true
    }

    /// It may not write these of 64 pages any more: it has no tag. Returns those that it might have. The vCPU's thread only.
    #[inline]
    pub fn remove(&self, n: usize, pages: u64) -> u64 {
        let removed = self.may.remove_word(n, pages);
        // What was written before is seen by whoever marks code that the caller does not see.
        barrier();
        removed
    }

    /// True if it may write the page.
    #[inline]
    pub fn may_write(&self, page: usize) -> bool {
        self.may.contains(page)
    }

    /// The pages of `n` of 64 that it may write.
    pub fn pages(&self, n: usize) -> u64 {
        self.may.word(n)
    }

    /// Takes all pages that it may write. The vCPU's thread only.
    pub fn take_all(&self, f: impl FnMut(usize, u64)) {
        self.may.take(f);
        barrier();
    }

    /// Takes what it is asked to give up, if anything. The vCPU's thread only.
    pub fn take_asked(&self, f: impl FnMut(usize, u64)) {
        if self.is_asked.swap(false, Ordering::AcqRel) {
            self.asked.take(f);
        }
    }
}

/// All that write the pages of a slot.
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

    /// The vCPU's part, from now on if it had none.
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
            // If another vCPU was first, this one comes behind it.
            match place.set(Arc::clone(&writer)) {
                Ok(()) => return Ok(writer),
                Err(_) => own = Some(writer),
            }
        }
    }

    /// Asks all that may write these pages to give them up: the caller has published why, and `f` gives them word by
    /// word. Returns how many were asked for, each as often as it has a writer. `except` is the caller's own.
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
                // In one order with the vCPU's swap.
                writer.is_asked.swap(true, Ordering::AcqRel);
                writer.mailbox.post();
                count += asked;
            }
        }
        count
    }
}

/// Pages of 64, as a list of them one by one.
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
        // It may write them until it says that it does not.
        assert!(own[1].may_write(999));
        assert_eq!(own[1].remove(15, u64::MAX), 1 << 39);
        assert!(!own[1].may_write(999) && own[1].may_write(5));
        assert_eq!(writers.ask(&[(15, u64::MAX)], None), 0);
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
