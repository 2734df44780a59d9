//! [`RunDelay`]: how long a thread has waited for a processor, as the host's scheduler counts it.
//!
//! The figure is in /proc/self/task/TID/schedstat. Threads that execute guests can open no file, so a
//! [`crate::ServiceThread`] reads it. One thread at a time asks.

use std::{
    fs,
    io::Read,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use crate::{
    futex,
    service_thread::{Bell, FILES},
    thread,
};

const UNKNOWN: u64 = u64::MAX;

/// A request and its answer.
#[derive(Debug)]
pub struct RunDelay {
    bell: Option<Arc<Bell>>,
    thread: AtomicI32,
    /// Numbers of the last request and of the last answer.
    asked: AtomicU32,
    answered: AtomicU32,
    ns: AtomicU64,
}

/// The host's figure of a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Waited {
    /// The thread that asked.
    pub thread: i32,
    /// How long the thread had waited in its life when the service thread read the figure; `None` if the host does not
    /// tell.
    pub ns: Option<u64>,
}

impl RunDelay {
    pub(crate) fn new(bell: Option<Arc<Bell>>) -> Self {
        Self {
            bell,
            thread: AtomicI32::new(0),
            asked: AtomicU32::new(0),
            answered: AtomicU32::new(0),
            ns: AtomicU64::new(UNKNOWN),
        }
    }

    /// Requests the calling thread's figure, and drops earlier requests. The only system call is futex(2).
    pub fn ask(&self) {
        let asked = self.asked.load(Ordering::Relaxed).wrapping_add(1);
        self.thread
            .store(thread::known_tid().unwrap_or(0), Ordering::Relaxed);
        self.asked.store(asked, Ordering::Release);
        if let Some(bell) = &self.bell {
            bell.ring();
        } else {
            self.answered.store(asked, Ordering::Release);
        }
    }

    /// Returns the answer to the last request, if it is there.
    pub fn answer(&self) -> Option<Waited> {
        if self.answered.load(Ordering::Acquire) != self.asked.load(Ordering::Relaxed) {
            return None;
        }
        let ns = self.ns.load(Ordering::Relaxed);
        Some(Waited {
            thread: self.thread.load(Ordering::Relaxed),
            ns: (ns != UNKNOWN).then_some(ns),
        })
    }

    /// Waits for the answer, at most for `limit` and until a signal comes.
    pub fn wait(&self, limit: Duration) {
        let end = Instant::now() + limit;
        loop {
            let answered = self.answered.load(Ordering::Acquire);
            let left = end.saturating_duration_since(Instant::now());
            if answered == self.asked.load(Ordering::Relaxed) || left.is_zero() {
                return;
            }
            if futex::wait(&self.answered, answered, Some(left)) == futex::Wait::Interrupted {
                return;
            }
        }
    }

    /// Answers the last request. Called on the service thread.
    pub(crate) fn serve(&self) {
        let asked = self.asked.load(Ordering::Acquire);
        if asked == self.answered.load(Ordering::Relaxed) {
            return;
        }
        let thread = self.thread.load(Ordering::Relaxed);
        let ns = FILES.pass(|| read(thread)).flatten();
        self.ns.store(ns.unwrap_or(UNKNOWN), Ordering::Relaxed);
        self.answered.store(asked, Ordering::Release);
        futex::wake(&self.answered, 1);
    }
}

fn read(thread: i32) -> Option<u64> {
    static ARE_OURS: OnceLock<bool> = OnceLock::new();
    // /proc may be that of another PID namespace, where the same numbers are other threads.
    let are_ours = *ARE_OURS.get_or_init(|| {
        let path = format!("{}/task/{}", std::process::id(), thread::tid());
        fs::read_link("/proc/thread-self").is_ok_and(|link| link.as_os_str() == path.as_str())
    });
    if !are_ours {
        return None;
    }
    let mut file = fs::File::open(format!("/proc/self/task/{thread}/schedstat")).ok()?;
    let mut line = [0; 128];
    let len = file.read(&mut line).ok()?;
    parse(std::str::from_utf8(line.get(..len)?).ok()?)
}

/// Parses a line with the time on processors, the time waited for one, and a count. All are zero if the kernel does not
/// keep them.
fn parse(line: &str) -> Option<u64> {
    let mut words = line.split_ascii_whitespace();
    let is_kept = words.next()? != "0";
    let waited = words.next()?.parse().ok()?;
    is_kept.then_some(waited)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ServiceThread;

    #[test]
    fn kernels_that_keep_nothing_say_nothing() {
        assert_eq!(parse("123 456 7\n"), Some(456));
        assert_eq!(parse("123 0 7\n"), Some(0));
        for bad in ["0 0 0\n", "", "12", "12 x 3"] {
            assert_eq!(parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn the_answer_is_what_the_kernel_says() {
        let service_thread = Arc::<ServiceThread>::default();
        let delay = service_thread.run_delay();
        // A kernel without the figure, or another namespace's /proc, gives nothing to both.
        let here = || read(thread::tid());
        for _ in 0..3 {
            let before = here();
            delay.ask();
            while delay.answer().is_none() {
                delay.wait(Duration::from_secs(1));
            }
            let got = delay.answer().unwrap();
            assert_eq!(got.thread, thread::tid());
            assert!(before <= got.ns && got.ns <= here(), "{before:?} {got:?}");
        }
    }

    #[test]
    fn without_a_service_thread_the_answer_is_there_at_once() {
        let delay = RunDelay::new(None);
        delay.ask();
        assert_eq!(delay.answer().map(|waited| waited.ns), Some(None));
    }

    #[test]
    fn nothing_is_known_of_what_is_no_thread_of_this_process() {
        assert_eq!([0, i32::MAX].map(read), [None, None]);
    }
}
