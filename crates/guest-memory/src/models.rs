//! Loom models of the lock-free parts, which try all orders of steps: `cargo xtask loom`.
//!
//! Each model has a vCPU and another thread that requests something of it, with the product's own types. A page's
//! content is a number; "lost" is a number that no requester has seen and that no dirty bit reports. A vCPU that takes
//! its steps in another order has to fail.

use std::sync::{Arc, atomic::Ordering};

use loom::{
    sync::atomic::{AtomicBool, AtomicU64},
    thread,
};

use crate::{
    DirtyRing, DirtyRingMemory, GuestMemory, Mailbox, SlotConfig, Writer, Writers,
    dirty::{Clean, Dirty},
    dirty_ring::{DIRTY, RESET},
};

/// A page, and the vCPU's state that concerns it.
struct Page {
    content: AtomicU64,
    /// The vCPU is outside of the guest: it answers its requests before it comes back.
    is_outside: AtomicBool,
    mailbox: Arc<Mailbox>,
}

impl Page {
    fn new() -> Self {
        Self {
            content: AtomicU64::new(0),
            is_outside: AtomicBool::new(false),
            mailbox: Arc::new(Mailbox::default()),
        }
    }

    /// Returns the page's content once the vCPU has answered all requests made to it so far.
    fn when_answered(&self) -> u64 {
        let posted = self.mailbox.posted();
        while self.mailbox.done() < posted && !self.is_outside.load(Ordering::Acquire) {
            thread::yield_now();
        }
        self.content.load(Ordering::Relaxed)
    }
}

/// The order in which the vCPU takes its steps.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Order {
    Right,
    /// The vCPU marks the page dirty before it is recorded as a writer.
    MarksFirst,
    /// The vCPU answers before it has dropped its tag.
    AnswersFirst,
}

/// Acts as a vCPU that writes 1, then 2, and polls after each write.
fn write(page: &Page, dirty: &Dirty, writer: &Writer, order: Order) {
    let (mut seen, mut has_tag) = (0, false);
    for number in 1..=2 {
        if !has_tag && order == Order::MarksFirst {
            dirty.mark(0);
            writer.add(0);
        } else if !has_tag {
            writer.add(0);
            dirty.mark(0);
        }
        has_tag = true;
        if number == 1 {
            page.content.store(number, Ordering::Relaxed);
        }
        let posted = page.mailbox.posted();
        if order == Order::AnswersFirst && posted != seen {
            page.mailbox.set_done(posted);
        }
        if number == 2 {
            page.content.store(number, Ordering::Relaxed);
        }
        if posted != seen {
            writer.take_asked(|_, _| ());
            has_tag = false;
            seen = posted;
            page.mailbox.set_done(posted);
        }
    }
    page.is_outside.store(true, Ordering::Release);
}

/// Collects cleaned pages, for the harvest to ask for.
#[derive(Default)]
struct Cleaned(Vec<(usize, u64)>);

impl Clean for Cleaned {
    fn clean(&mut self, n: usize, pages: u64) {
        self.0.push((n, pages));
    }
}

fn harvest(dirty: &Dirty, writers: &Writers) -> bool {
    let (mut cleaned, mut is_reported) = (Cleaned::default(), false);
    let show = |_, words: &[u64]| {
        is_reported |= words.first().is_some_and(|word| word & 1 != 0);
        Ok::<(), ()>(())
    };
    dirty.take(&mut cleaned, show).unwrap_or_default();
    writers.ask(&cleaned.0, None);
    is_reported
}

fn harvest_and_fault(order: Order) {
    model(move || {
        let page = Arc::new(Page::new());
        let dirty = Arc::new(Dirty::new(1, false).unwrap());
        let writers = Arc::new(Writers::new(1));
        let writer = writers.writer(&page.mailbox).unwrap();
        let vcpu = {
            let (page, dirty) = (Arc::clone(&page), Arc::clone(&dirty));
            thread::spawn(move || write(&page, &dirty, &writer, order))
        };
        let is_first = harvest(&dirty, &writers);
        let copied = if is_first { page.when_answered() } else { 0 };
        vcpu.join().unwrap();
        let is_second = harvest(&dirty, &writers);
        let last = page.content.load(Ordering::Relaxed);
        assert!(last == copied || is_second, "{last} is lost: {copied} was");
        assert!(last != 0 && (is_first || is_second));
    });
}

/// At most two harvests find all that a vCPU writes, however the vCPU and the first harvest interleave.
#[test]
fn no_write_is_lost_to_a_harvest() {
    harvest_and_fault(Order::Right);
}

#[test]
#[should_panic(expected = "is lost")]
fn a_vcpu_that_marks_before_it_can_be_found_loses_a_write() {
    harvest_and_fault(Order::MarksFirst);
}

#[test]
#[should_panic(expected = "is lost")]
fn a_vcpu_that_answers_with_its_tag_in_place_loses_a_write() {
    harvest_and_fault(Order::AnswersFirst);
}

/// Two vCPUs record a page, and another thread searches for writers meanwhile. Each vCPU is asked for the page, or sees
/// the reason for the search.
#[test]
fn a_writer_is_found_or_sees_why_it_was_looked_for() {
    model(|| {
        let writers = Arc::new(Writers::new(1));
        let why = Arc::new(AtomicU64::new(0));
        let vcpus: Vec<_> = (0..2)
            .map(|n| {
                let why = Arc::clone(&why);
                let mailbox = Arc::new(Mailbox::default());
                // Loom does not see how a writer is appended to the list; `writers` has a test of that.
                let writer = writers.writer(&mailbox).unwrap();
                let vcpu = move || {
                    // The second vCPU has had the page before and has given it up.
                    if n == 1 {
                        writer.add(0);
                        writer.remove(0, 1);
                    }
                    writer.add(0);
                    why.load(Ordering::Relaxed) != 0
                };
                (mailbox, thread::spawn(vcpu))
            })
            .collect();
        why.store(1, Ordering::Relaxed);
        writers.ask(&[(0, 1)], None);
        for (mailbox, vcpu) in vcpus {
            let sees = vcpu.join().unwrap();
            let mut asked = 0;
            let writer = writers.writer(&mailbox).unwrap();
            writer.take_asked(|_, pages| asked |= pages);
            assert_eq!(asked != 0, mailbox.posted() != 0);
            assert!(sees || asked == 1, "neither saw the other");
        }
    });
}

/// Two harvests at once ask for two pages of one word while their vCPU answers: no request is lost.
#[test]
fn requests_that_come_at_once_are_all_answered() {
    model(|| {
        let writers = Arc::new(Writers::new(2));
        let mailbox = Arc::new(Mailbox::default());
        let writer = writers.writer(&mailbox).unwrap();
        writer.add(0);
        writer.add(1);
        let askers: Vec<_> = (0..2)
            .map(|page| {
                let writers = Arc::clone(&writers);
                thread::spawn(move || writers.ask(&[(0, 1 << page)], None))
            })
            .collect();
        let mut given = 0;
        let mut poll = || {
            let posted = mailbox.posted();
            writer.take_asked(|_, pages| given |= pages);
            mailbox.set_done(posted);
        };
        poll();
        for asker in askers {
            assert_eq!(asker.join().unwrap(), 1);
        }
        poll();
        assert!(mailbox.is_empty());
        assert_eq!((given, mailbox.posted()), (3, 2));
    });
}

const ENTRIES: u32 = 2;

/// A ring's memory: flags and page of each entry.
#[derive(Clone)]
struct Cells(Arc<[(AtomicU64, AtomicU64); ENTRIES as usize]>);

impl DirtyRingMemory for Cells {
    fn flags(&self, index: u32) -> u32 {
        self.0[index as usize].0.load(Ordering::Acquire) as u32
    }
    fn set_flags(&self, index: u32, flags: u32) {
        self.0[index as usize]
            .0
            .store(flags.into(), Ordering::Release);
    }
    fn place(&self, index: u32) -> (u32, u64) {
        (0, self.0[index as usize].1.load(Ordering::Relaxed))
    }
    fn fill(&self, index: u32, (_, page): (u32, u64), flags: u32) {
        self.0[index as usize].1.store(page, Ordering::Relaxed);
        self.set_flags(index, flags);
    }
}

impl Cells {
    /// Acts as a VMM: reads the filled entries and gives them back.
    fn read(&self, next: &mut u32, seen: &mut Vec<u64>) {
        loop {
            let index = *next % ENTRIES;
            if self.flags(index) != DIRTY {
                return;
            }
            seen.push(self.place(index).1);
            self.set_flags(index, RESET);
            *next += 1;
        }
    }
}

/// A vCPU pushes more pages than there is room for while a VMM reads and resets: each page comes out once, in order.
#[test]
fn a_ring_that_is_overrun_loses_nothing() {
    model(|| {
        let cell = || (AtomicU64::new(0), AtomicU64::new(0));
        let cells = Cells(Arc::new([cell(), cell()]));
        let memory = Box::new(cells.clone());
        let ring = Arc::new(DirtyRing::new(ENTRIES, memory, Box::new(|| ())));
        let vcpu = {
            let ring = Arc::clone(&ring);
            thread::spawn(move || (1..=3).for_each(|page| ring.push(0, page)))
        };
        let (mut next, mut seen, mut back) = (0, Vec::new(), Vec::new());
        cells.read(&mut next, &mut seen);
        ring.take(&mut back);
        vcpu.join().unwrap();
        for _ in 0..2 {
            cells.read(&mut next, &mut seen);
            ring.take(&mut back);
        }
        assert_eq!(seen, [1, 2, 3]);
        assert_eq!(back, [(0, 1), (0, 2), (0, 3)]);
        assert!(!ring.is_full());
    });
}

/// A slot of one page. No thread accesses the memory at `hva`.
const SLOT: SlotConfig = SlotConfig {
    slot: 0,
    flags: 0,
    gpa: 0,
    size: 0x1000,
    hva: 0x7000_0000_0000,
};

/// How [`slot_and_fault`] changes the slot.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Change {
    Logs,
    Deleted,
}

/// A vCPU works on a slot that changes meanwhile.
fn slot_and_fault(change: Change) {
    model(move || {
        let memory = GuestMemory::new();
        memory.set_slot(SLOT).unwrap();
        let page = Arc::new(Page::new());
        let vcpu = {
            let (page, memory) = (Arc::clone(&page), Arc::clone(&memory));
            thread::spawn(move || run_on_slot(&page, &memory))
        };
        let (flags, size) = match change {
            Change::Logs => (1, 0x1000),
            Change::Deleted => (0, 0),
        };
        let changed = SlotConfig {
            flags,
            size,
            ..SLOT
        };
        let epoch = memory.set_slot(changed).unwrap();
        while page.mailbox.epoch() < epoch && !page.is_outside.load(Ordering::Acquire) {
            thread::yield_now();
        }
        let copied = page.content.load(Ordering::Relaxed);
        vcpu.join().unwrap();
        let last = page.content.load(Ordering::Relaxed);
        let mut is_reported = false;
        if change == Change::Logs {
            let show = |_, words: &[u64]| {
                is_reported |= words[0] & 1 != 0;
                Ok::<(), ()>(())
            };
            memory.take_dirty(0, show).unwrap().0.unwrap();
        }
        assert!(last == copied || is_reported, "{last} is lost");
    });
}

/// Acts as the MMU does: takes the table at a poll, drops tags of slots that are gone or that note more writes, and
/// looks the slot up before it makes a tag.
fn run_on_slot(page: &Page, memory: &GuestMemory) {
    let (mut table, mut seen) = memory.table_and_epoch();
    let mut has_tag = false;
    for number in 1..=2 {
        if memory.epoch() != seen {
            (table, seen) = memory.table_and_epoch();
            has_tag = false;
            page.mailbox.set_epoch(seen);
        }
        let Some(slot) = table.by_number(0) else {
            break;
        };
        if !has_tag {
            slot.writer(&page.mailbox).unwrap().add(0);
            slot.mark_dirty(0);
            has_tag = true;
        }
        page.content.store(number, Ordering::Relaxed);
    }
    page.is_outside.store(true, Ordering::Release);
}

#[test]
fn a_table_comes_with_its_epoch() {
    model(|| {
        let memory = GuestMemory::new();
        let before = memory.epoch();
        let setter = {
            let memory = Arc::clone(&memory);
            thread::spawn(move || memory.set_slot(SLOT).unwrap())
        };
        let (table, epoch) = memory.table_and_epoch();
        let is_new = table.by_number(0).is_some();
        assert_eq!(is_new, epoch != before);
        assert_eq!(setter.join().unwrap(), before + 1);
    });
}

#[test]
fn no_write_is_lost_when_logging_begins() {
    slot_and_fault(Change::Logs);
}

#[test]
fn nothing_is_written_to_a_slot_that_is_gone() {
    slot_and_fault(Change::Deleted);
}

/// Runs a model with at most three preemptions: more of them find nothing new and take hours.
fn model(f: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(f);
}
