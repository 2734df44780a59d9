//! [`ServiceThread`]: a thread beside the vCPUs that makes system calls for them.
//!
//! It manages the pages of translated code ([`CodeViews`]), and reads how long threads have waited for a processor
//! ([`RunDelay`]).

use std::{
    io,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use crate::{CodeViews, RunDelay, futex, thread};

/// Interval at which the service thread checks code that changes.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// The word that the service thread sleeps on.
#[derive(Debug, Default)]
pub(crate) struct Bell {
    word: AtomicU32,
    is_for_views: AtomicBool,
}

impl Bell {
    pub(crate) fn ring(&self) {
        self.word.fetch_add(1, Ordering::Release);
        futex::wake(&self.word, 1);
    }

    pub(crate) fn ring_for_views(&self) {
        self.is_for_views.store(true, Ordering::Relaxed);
        self.ring();
    }
}

/// Serves vCPUs by a thread, which ends with this object.
#[derive(Debug, Default)]
pub struct ServiceThread {
    bell: Arc<Bell>,
    views: Mutex<Vec<Weak<CodeViews>>>,
    delays: Mutex<Vec<Weak<RunDelay>>>,
    has_thread: AtomicBool,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn add_to<T>(list: &Mutex<Vec<Weak<T>>>, new: &Arc<T>) {
    let mut list = locked(list);
    list.retain(|old| old.strong_count() != 0);
    list.push(Arc::downgrade(new));
}

fn all_of<T>(list: &Mutex<Vec<Weak<T>>>) -> Vec<Arc<T>> {
    locked(list).iter().filter_map(Weak::upgrade).collect()
}

impl ServiceThread {
    /// Manages a code buffer's pages from now on.
    ///
    /// # Errors
    /// Those of `pthread_create`, in the first call.
    pub fn add(self: &Arc<Self>, views: &Arc<CodeViews>) -> io::Result<()> {
        add_to(&self.views, views);
        self.start()?;
        views.set_service_thread(&self.bell);
        Ok(())
    }

    /// Returns the object by which a thread asks for its delays.
    pub fn run_delay(self: &Arc<Self>) -> Arc<RunDelay> {
        let bell = self.start().is_ok().then(|| Arc::clone(&self.bell));
        let delay = Arc::new(RunDelay::new(bell));
        add_to(&self.delays, &delay);
        delay
    }

    fn start(self: &Arc<Self>) -> io::Result<()> {
        if !self.has_thread.swap(true, Ordering::Relaxed) {
            let service_thread = Arc::downgrade(self);
            let bell = Arc::clone(&self.bell);
            if let Err(error) = thread::start("anykvm-service", move || {
                keep(&service_thread, &bell);
            }) {
                self.has_thread.store(false, Ordering::Relaxed);
                return Err(error);
            }
        }
        IS_KEPT.store(true, Ordering::Relaxed);
        Ok(())
    }
}

impl Drop for ServiceThread {
    fn drop(&mut self) {
        self.bell.ring();
    }
}

fn keep(service_thread: &Weak<ServiceThread>, bell: &Bell) {
    // When the views are checked next: a second after each change, and every second while work is left.
    let mut due = Some(Instant::now() + LOOK_EVERY);
    loop {
        let rung = bell.word.load(Ordering::Acquire);
        let Some(delays) = service_thread
            .upgrade()
            .map(|service_thread| all_of(&service_thread.delays))
        else {
            return;
        };
        delays.iter().for_each(|delay| delay.serve());
        drop(delays);
        let now = Instant::now();
        let is_changed = bell.is_for_views.swap(false, Ordering::Relaxed);
        let is_due = due.is_some_and(|due| now >= due);
        if is_changed || is_due {
            let Some(views) = service_thread
                .upgrade()
                .map(|service_thread| all_of(&service_thread.views))
            else {
                return;
            };
            let mut rest = views.iter().filter(|views| views.ask()).count();
            if !is_changed {
                rest += views.iter().filter(|views| !views.trim()).count();
            }
            due = (is_changed || rest != 0).then(|| now + LOOK_EVERY);
        }
        let pause = due.map(|due| due.saturating_duration_since(now));
        futex::wait(&bell.word, rung, pause);
    }
}

/// Counts anykvm's threads that are in a system call of one kind, beside the [`FORBIDDEN`] bit.
#[derive(Debug)]
pub(crate) struct Gate(AtomicU32);

/// System calls about pages of code.
pub(crate) static PAGES: Gate = Gate(AtomicU32::new(0));
/// System calls that open files.
pub(crate) static FILES: Gate = Gate(AtomicU32::new(0));
const FORBIDDEN: u32 = 1 << 31;
static IS_KEPT: AtomicBool = AtomicBool::new(false);

impl Gate {
    /// Makes system calls and returns their result, if they are allowed.
    pub(crate) fn pass<R>(&self, call: impl FnOnce() -> R) -> Option<R> {
        let is_allowed = self.0.fetch_add(1, Ordering::AcqRel) & FORBIDDEN == 0;
        let result = is_allowed.then(call);
        self.0.fetch_sub(1, Ordering::AcqRel);
        result
    }

    fn close(&self) {
        self.0.fetch_or(FORBIDDEN, Ordering::AcqRel);
        // Each call takes a millisecond at most. In a forked child the count may include a thread of the parent, so the
        // wait is limited.
        for _ in 0..1_000 {
            if self.0.load(Ordering::Acquire) == FORBIDDEN {
                return;
            }
            std::thread::sleep(Duration::from_micros(100));
        }
    }
}

/// True if there is, or was, a service thread.
pub fn is_served() -> bool {
    IS_KEPT.load(Ordering::Relaxed)
}

/// Stops service threads from opening files, because a filter that forbids this will hold for all threads.
pub fn forbid_files() {
    FILES.close();
}

/// Stops service threads from making system calls other than futex(2), because a filter will hold for all threads.
pub fn forbid_calls() {
    forbid_files();
    PAGES.close();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gate_that_is_closed_lets_nothing_pass() {
        static GATE: Gate = Gate(AtomicU32::new(0));
        assert_eq!(GATE.pass(|| 1), Some(1));
        GATE.close();
        assert_eq!(GATE.pass(|| 1), None);
    }

    #[test]
    fn the_thread_ends_with_its_keeper() {
        let service_thread = Arc::<ServiceThread>::default();
        let delay = service_thread.run_delay();
        let bell = Arc::downgrade(&service_thread.bell);
        drop((delay, service_thread));
        // The service thread had a reference to it as well.
        let ends = (0..1000).any(|_| {
            std::thread::sleep(Duration::from_millis(10));
            bell.strong_count() == 0
        });
        assert!(ends);
    }
}
