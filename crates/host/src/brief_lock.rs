//! [`BriefLock`]: a lock that costs its usual owner one exchange.
//!
//! A mutex needs two: its release must find out whether a thread sleeps. Here the release checks that without
//! certainty. A waiter that it misses checks the lock again after a millisecond, so the lock suits waiters that come
//! rarely and can wait.

use std::{
    cell::UnsafeCell,
    marker::PhantomData,
    ops::{Deref, DerefMut},
    sync::atomic::{AtomicU32, Ordering},
    time::Duration,
};

use crate::futex;

/// Checks of the lock before the thread sleeps. It sleeps by futex(2), which filters of VMMs' threads allow.
const SPINS: u32 = 100;
/// Longest sleep between two checks.
const SLEEP: Duration = Duration::from_millis(1);

/// A value that one thread at a time may access.
#[derive(Debug, Default)]
pub struct BriefLock<T> {
    /// 1 while a thread holds the lock.
    held: AtomicU32,
    sleepers: AtomicU32,
    value: UnsafeCell<T>,
}

// SAFETY: only the thread that holds the lock accesses the value, so one thread at a time.
unsafe impl<T: Send> Sync for BriefLock<T> {}

/// Access to the value. The lock is released when this is dropped.
#[derive(Debug)]
pub struct Held<'a, T> {
    lock: &'a BriefLock<T>,
    /// Makes `Held` shareable between threads only if the value is.
    value: PhantomData<&'a mut T>,
}

impl<T> BriefLock<T> {
    /// Makes a lock that is not held.
    pub const fn new(value: T) -> Self {
        Self {
            held: AtomicU32::new(0),
            sleepers: AtomicU32::new(0),
            value: UnsafeCell::new(value),
        }
    }

    /// Waits for the lock. A thread that holds the lock already waits for ever.
    #[inline]
    pub fn lock(&self) -> Held<'_, T> {
        self.try_lock().unwrap_or_else(|| self.wait())
    }

    /// Takes the lock, if no thread holds it.
    #[inline]
    pub fn try_lock(&self) -> Option<Held<'_, T>> {
        let is_held = self.held.swap(1, Ordering::Acquire) != 0;
        // `Held` is made only if the lock was free, because dropping it releases the lock.
        (!is_held).then(|| Held {
            lock: self,
            value: PhantomData,
        })
    }

    #[cold]
    fn wait(&self) -> Held<'_, T> {
        let mut looks = 0;
        loop {
            if self.held.load(Ordering::Relaxed) == 0
                && let Some(held) = self.try_lock()
            {
                return held;
            }
            looks += 1;
            if looks < SPINS {
                core::hint::spin_loop();
            } else {
                self.sleepers.fetch_add(1, Ordering::SeqCst);
                futex::wait(&self.held, 1, Some(SLEEP));
                self.sleepers.fetch_sub(1, Ordering::Relaxed);
            }
        }
    }

    #[cold]
    fn wake(&self) {
        futex::wake(&self.held, 1);
    }
}

impl<T> Deref for Held<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        // SAFETY: this thread holds the lock.
        unsafe { &*self.lock.value.get() }
    }
}

impl<T> DerefMut for Held<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: this thread holds the lock, and `self` is the only way to the value.
        unsafe { &mut *self.lock.value.get() }
    }
}

impl<T> Drop for Held<'_, T> {
    #[inline]
    fn drop(&mut self) {
        self.lock.held.store(0, Ordering::Release);
        if self.lock.sleepers.load(Ordering::Relaxed) != 0 {
            self.lock.wake();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_thread_at_a_time() {
        let lock = BriefLock::new((0u64, 0u64));
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..20_000 {
                        let mut pair = lock.lock();
                        assert_eq!(pair.0, pair.1);
                        pair.0 += 1;
                        pair.1 += 1;
                    }
                });
            }
        });
        assert_eq!(*lock.lock(), (80_000, 80_000));
    }

    #[test]
    fn who_comes_late_sleeps() {
        let lock = BriefLock::new(0);
        std::thread::scope(|scope| {
            let held = lock.lock();
            assert!(lock.try_lock().is_none());
            for _ in 0..3 {
                scope.spawn(|| *lock.lock() += 1);
            }
            while lock.sleepers.load(Ordering::Relaxed) == 0 {
                std::thread::yield_now();
            }
            drop(held);
        });
        assert_eq!(*lock.lock(), 3);
    }

    #[test]
    fn a_panic_gives_it_back() {
        let lock = BriefLock::new(1);
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let _held = lock.lock();
            panic!("in the middle");
        }));
        assert!(result.is_err());
        assert_eq!(*lock.lock(), 1);
    }
}
