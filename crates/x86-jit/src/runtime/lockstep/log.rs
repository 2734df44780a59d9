//! [`Log`]: the pages that a run has written, with their content before.
//!
//! Translated code works with the log's tables in place of the MMU's, so that its first write to each page comes
//! through `refill`.

use guest_memory::HostPage;
use mmu::l1::{Half, L1};
use x86_cpu::CpuState;

use crate::JitBus;

/// Number of words in a page.
const WORDS: usize = 512;

/// A page that was written.
#[derive(Debug)]
struct Page {
    /// Host address of the page.
    host: u64,
    old: Box<[u64; WORDS]>,
    new: Box<[u64; WORDS]>,
}

/// The pages that a run has written.
#[derive(Debug, Default)]
pub(crate) struct Log {
    pages: Vec<Page>,
    used: usize,
    tables: L1,
}

fn load(host: u64, n: usize) -> u64 {
    // SAFETY: `note` is called with pages of guest memory, which stay mapped while a vCPU
    // executes; they are never Rust objects, and a race gives some value.
    unsafe { core::ptr::read_volatile((host as *const u64).wrapping_add(n)) }
}

fn store(host: u64, n: usize, value: u64) {
    // SAFETY: `note` is called with pages of guest memory, which stay mapped while a vCPU executes and are never Rust
    // objects. This page was found to be writable for the guest.
    unsafe { core::ptr::write_volatile((host as *mut u64).wrapping_add(n), value) };
}

impl Log {
    /// Forgets all pages.
    pub(crate) fn clear(&mut self) {
        self.used = 0;
        self.clear_tables();
    }

    pub(crate) fn clear_tables(&mut self) {
        self.tables.flush(&Half::ALL);
    }

    /// Gives the log's tables the page guards of `live`.
    pub(crate) fn set_page_guards(&mut self, live: &L1) {
        self.tables.deny_reach(live);
        self.tables.clear_page_guards();
        for (n, value) in live.page_guards() {
            self.tables.set_page_guard(n, value);
        }
    }

    /// Returns the address of the log's tables, for generated code.
    pub(crate) fn tables(&self) -> u64 {
        self.tables.base()
    }

    /// Enters `page` in the tables, before it is accessed at `gva`.
    pub(crate) fn allow(&mut self, half: Half, gva: u64, page: HostPage) {
        if half == Half::Write {
            self.note(page.hva());
        }
        self.tables.insert(&[half], gva, page, false);
    }

    /// Keeps the page that holds host address `host`, which is about to be written.
    pub(crate) fn note(&mut self, host: u64) {
        let host = host & !0xfff;
        if self.has(host) {
            return;
        }
        if self.used == self.pages.len() {
            self.pages.push(Page {
                host: 0,
                old: Box::new([0; WORDS]),
                new: Box::new([0; WORDS]),
            });
        }
        let page = &mut self.pages[self.used];
        page.host = host;
        for (n, word) in page.old.iter_mut().enumerate() {
            *word = load(host, n);
        }
        self.used += 1;
    }

    fn pages(&self) -> &[Page] {
        &self.pages[..self.used]
    }

    fn has(&self, host: u64) -> bool {
        self.pages().iter().rev().any(|p| p.host == host)
    }

    /// Puts back what the run has written, and keeps it in the log. Words that the run has not changed are left alone:
    /// something else may have written them.
    pub(crate) fn undo(&mut self) {
        for page in &mut self.pages[..self.used] {
            for n in 0..WORDS {
                let new = load(page.host, n);
                page.new[n] = new;
                if new != page.old[n] {
                    store(page.host, n, page.old[n]);
                }
            }
        }
    }

    /// Returns a host address at which memory is not what it was before [`Self::undo`].
    pub(crate) fn differs_from_new(&self) -> Option<u64> {
        let differing = |page: &Page| {
            let n = (0..WORDS).find(|n| load(page.host, *n) != page.new[*n])?;
            Some(page.host + 8 * n as u64)
        };
        self.pages().iter().find_map(differing)
    }

    /// Returns a host address that was changed, on a page that `other` does not have.
    pub(crate) fn differs_from_old(&self, other: &Self) -> Option<u64> {
        let differing = |page: &Page| {
            let n = (0..WORDS).find(|n| load(page.host, *n) != page.old[*n])?;
            Some(page.host + 8 * n as u64)
        };
        let pages = self.pages().iter().filter(|p| !other.has(p.host));
        pages.into_iter().find_map(differing)
    }

    /// Returns the words that the run has changed: address, value before, value after.
    pub(crate) fn changes(&self) -> impl Iterator<Item = (u64, u64, u64)> + '_ {
        self.pages().iter().flat_map(|page| {
            let words = page.old.iter().zip(page.new.iter()).enumerate();
            words
                .filter(|(_, (old, new))| old != new)
                .map(|(n, (old, new))| (page.host + 8 * n as u64, *old, *new))
        })
    }
}

pub(crate) fn set_tables<B: JitBus>(cpu: &mut CpuState, bus: &mut B) {
    let tables = match log_of(cpu) {
        Some(log) => {
            // The mapping may have changed, too.
            log.clear_tables();
            log.set_page_guards(bus.mmu().live_tables());
            log.tables()
        }
        None => bus.mmu().live_tables().base(),
    };
    // SAFETY: the tables are those of the log, or those of the live view. The latter stay until a view is selected
    // again, after which this function is called again.
    unsafe { cpu.engine.set_tables(tables) };
}

/// Returns the log in which writes have to be noted, in lock-step.
pub(crate) fn log_of(cpu: &mut CpuState) -> Option<&mut Log> {
    // SAFETY: zero, or what `Jit::stretch` put there, which nothing else uses while translated
    // code runs.
    unsafe { (cpu.engine.log() as *mut Log).as_mut() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[repr(align(4096))]
    struct Aligned([u64; WORDS]);

    #[test]
    fn changed_words_are_undone_and_others_are_left_alone() {
        let mut page = Box::new(Aligned([7; WORDS]));
        let host = page.0.as_mut_ptr() as u64;
        let mut log = Log::default();
        log.note(host + 100);
        log.note(host);
        assert_eq!(log.used, 1);
        store(host, 3, 1);
        log.undo();
        assert_eq!(load(host, 3), 7);
        assert_eq!(log.changes().collect::<Vec<_>>(), [(host + 24, 7, 1)]);
        assert_eq!(log.differs_from_new(), Some(host + 24));
        store(host, 3, 1);
        assert_eq!(log.differs_from_new(), None);
        let mut other = Log::default();
        other.note(host);
        store(host, 9, 1);
        assert_eq!(other.differs_from_old(&Log::default()), Some(host + 72));
        assert_eq!(other.differs_from_old(&log), None);
        drop(page);
    }
}
