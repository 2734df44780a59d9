//! [`CodeViews`]: the two views of a [`crate::CodeBuffer`], whose pages a [`crate::ServiceThread`] manages.
//!
//! Code of large guest programs exceeds what the processor's instruction TLB covers with small pages, so huge pages
//! matter. Files in memory get a huge page only by a system call for each, and unneeded pages are also given up by a
//! system call. Threads that execute the code may make none, so they only notify the service thread.

use std::{
    io,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
    },
};

use crate::{
    HUGE_PAGE,
    memfd::{self, SharedMapping},
    service_thread::{Bell, PAGES},
};

/// Number of writes since the last check from which on the writable view keeps its pages: each page that is written
/// again after it was given up costs a fault.
const BUSY: u64 = 1000;
/// Largest number of huge pages that can be requested.
const MOST: usize = 64;
/// How many times requests that the kernel refused may be repeated: pages that something else holds for a moment cannot
/// become a huge page.
const MOST_AGAIN: u32 = 64;

/// The views of a code buffer: one for writing, one for executing.
#[derive(Debug)]
pub struct CodeViews {
    /// The writable view. Its pages count as memory of the process a second time.
    rw: SharedMapping,
    rx: SharedMapping,
    /// Number of writes, and what it was at the service thread's last check.
    writes: AtomicU64,
    seen: AtomicU64,
    /// The writable view's pages were given up, and none was written since.
    is_gone: AtomicBool,
    /// Huge pages that code has reached, and those that were requested.
    begun: AtomicU64,
    asked: AtomicU64,
    refused: AtomicU32,
    service_thread: OnceLock<Arc<Bell>>,
}

impl CodeViews {
    pub(crate) fn new(len: usize) -> io::Result<Self> {
        let [rw, rx] = memfd::map_code(len)?;
        Ok(Self {
            rw,
            rx,
            writes: AtomicU64::new(0),
            seen: AtomicU64::new(0),
            is_gone: AtomicBool::new(false),
            begun: AtomicU64::new(0),
            asked: AtomicU64::new(0),
            refused: AtomicU32::new(0),
            service_thread: OnceLock::new(),
        })
    }

    pub(crate) fn rw(&self) -> &SharedMapping {
        &self.rw
    }

    pub(crate) fn rx(&self) -> &SharedMapping {
        &self.rx
    }

    /// Counts a write. Only one thread writes.
    pub(crate) fn note_write(&self) {
        let writes = self.writes.load(Ordering::Relaxed).wrapping_add(1);
        self.writes.store(writes, Ordering::Relaxed);
        // The first write after the pages were given up: with a huge page, the view maps two megabytes again.
        if self.is_gone.load(Ordering::Relaxed) && self.is_gone.swap(false, Ordering::Relaxed) {
            self.tell();
        }
    }

    /// Notes that there is code up to `offset` and more will follow. The only system call is futex(2).
    pub fn grows(&self, offset: usize) {
        // The next huge page is requested early: a thread that writes or executes in a page while it becomes huge has
        // to wait, for milliseconds at times.
        let number = (offset + HUGE_PAGE / 2) / HUGE_PAGE;
        let known = self.begun.load(Ordering::Relaxed);
        let most = MOST.min(self.rx.len() / HUGE_PAGE);
        if number < most && known & 1 << number == 0 {
            // One thread writes; the service thread only reads.
            self.begun.store(known | 1 << number, Ordering::Relaxed);
            self.tell();
        }
    }

    fn tell(&self) {
        if let Some(service_thread) = self.service_thread.get() {
            service_thread.ring_for_views();
        }
    }

    pub(crate) fn set_service_thread(&self, bell: &Arc<Bell>) {
        // Only the first service thread manages the views.
        let _ = self.service_thread.set(Arc::clone(bell));
    }

    /// Requests the huge pages that code has reached. Returns true if some must be requested again.
    pub(crate) fn ask(&self) -> bool {
        let begun = self.begun.load(Ordering::Relaxed);
        let mut asked = self.asked.load(Ordering::Relaxed);
        let mut new = begun & !asked;
        while new != 0 {
            let number = new.trailing_zeros() as usize;
            new &= new - 1;
            // The huge page is made for the executable view; writes find it, too. If there is none, small pages do.
            let refused = matches!(PAGES.pass(|| self.rx.collapse(number)), Some(Err(_)));
            if !refused || self.refused.fetch_add(1, Ordering::Relaxed) >= MOST_AGAIN {
                asked |= 1 << number;
            }
        }
        // Only the service thread writes this.
        self.asked.store(asked, Ordering::Relaxed);
        begun & !asked != 0
    }

    /// Gives up the writable view's pages if little was written since the last call. The code stays in the file.
    /// Returns true if no pages are left to give up.
    pub(crate) fn trim(&self) -> bool {
        let writes = self.writes.load(Ordering::Relaxed);
        let since = writes.wrapping_sub(self.seen.swap(writes, Ordering::Relaxed));
        if since < BUSY && !self.is_gone.swap(true, Ordering::Relaxed) {
            PAGES.pass(|| self.rw.let_go());
        }
        self.is_gone.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{CodeBuffer, ServiceThread};

    const LEN: usize = 8 << 20;

    /// KiB of a mapping by the name of smaps' line.
    fn of_mapping(begin: usize, name: &str) -> usize {
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let begin = format!("{begin:x}-");
        let lines = maps.lines().skip_while(|l| !l.starts_with(&begin));
        let value = lines.skip(1).find_map(|l| l.strip_prefix(name)).unwrap();
        value.trim().trim_end_matches(" kB").parse().unwrap()
    }

    fn present(b: &CodeBuffer) -> usize {
        of_mapping(b.rw() as usize, "Rss:")
    }

    #[test]
    fn code_stays_when_the_view_goes() {
        let mut b = CodeBuffer::new(LEN).unwrap();
        assert!(b.write(0, &vec![0x90; LEN]));
        assert!(b.write(LEN - 1, &[0xc3]));
        assert_eq!(present(&b), LEN >> 10);
        let views = Arc::clone(b.views());
        assert!(views.trim());
        assert_eq!(present(&b), 0);
        // SAFETY: NOPs and a RET: an `extern "C" fn()`.
        let f: extern "C" fn() = unsafe { core::mem::transmute(b.rx()) };
        f();
        assert_eq!(b.read(LEN - 2, 2), [0x90, 0xc3]);
        let some = present(&b);
        assert!(some > 0 && some < 1024);
        for n in 0..2 * BUSY as usize {
            assert!(b.write(n * 4096 % (LEN - 1), &[0x90]));
        }
        let many = present(&b);
        assert!(!views.trim());
        assert_eq!(present(&b), many, "busy");
        assert!(views.trim());
        assert_eq!(present(&b), 0, "at rest");
        f();
    }

    #[test]
    fn the_service_thread_asks_for_huge_pages_while_code_runs_and_changes() {
        let mut b = CodeBuffer::new(LEN).unwrap();
        let service_thread = Arc::<ServiceThread>::default();
        service_thread.add(b.views()).unwrap();
        // MOV EAX, number; RET: an `extern "C" fn() -> u32`.
        let mut check = |at: usize, number: u32| {
            let [a, b1, c, d] = number.to_le_bytes();
            assert!(b.write(at, &[0xb8, a, b1, c, d, 0xc3]));
            b.views().grows(at + 4096);
            // SAFETY: what was written above.
            let f: extern "C" fn() -> u32 = unsafe { core::mem::transmute(b.rx().add(at)) };
            assert_eq!(f(), number);
        };
        for round in 0..20 {
            for at in (0..LEN).step_by(LEN / 1024) {
                check(at, (at + round) as u32);
            }
        }
        let mut other = CodeBuffer::new(LEN).unwrap();
        assert!(other.write(0, &vec![0x90; LEN]));
        let other = other.views().rx();
        if (0..LEN / HUGE_PAGE).all(|n| other.collapse(n).is_ok()) {
            // All of them are requested soon.
            let mut waited = 0;
            while of_mapping(b.rx() as usize, "ShmemPmdMapped:") != LEN >> 10 {
                assert!(waited < 3000, "no huge pages");
                std::thread::sleep(Duration::from_millis(10));
                waited += 1;
            }
        }
    }
}
