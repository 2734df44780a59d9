//! [`BriefLock`]: a lock that costs its usual owner one exchange.
//!
//! A mutex needs two: giving it back has to find out whether somebody sleeps. Here nobody does; whoever
//! comes too late looks again until it is free, which is for who comes rarely and can wait.

use std::{
    cell::UnsafeCell,
    ops::{Deref, DerefMut},
    sync::atomic::{AtomicBool, Ordering},
};

/// Looks at the lock before the core is given to others.
const SPINS: u32 = 100;

/// A value that one thread at a time reaches.
#[derive(Debug, Default)]
pub struct BriefLock<T> {
    held: AtomicBool,
    value: UnsafeCell<T>,
}

// SAFETY: the value is reached by whoever holds the lock, one thread at a time.
unsafe impl<T: Send> Sync for BriefLock<T> {}

/// Access to the value, until it is dropped.
#[derive(Debug)]
pub struct Held<'a, T> {
    lock: &'a BriefLock<T>,
}

impl<T> BriefLock<T> {
    /// Not held.
    pub fn new(value: T) -> Self {
        Self {
            held: AtomicBool::new(false),
            value: UnsafeCell::new(value),
        }
    }

    /// Waits for the lock. A thread that has it already waits for ever.
    #[inline]
    pub fn lock(&self) -> Held<'_, T> {
        if self.held.swap(true, Ordering::Acquire) {
            self.wait();
        }
        Held { lock: self }
    }

    #[cold]
    fn wait(&self) {
        let mut looks = 0;
        while self.held.load(Ordering::Relaxed) || self.held.swap(true, Ordering::Acquire) {
            looks += 1;
            if looks < SPINS {
                core::hint::spin_loop();
            } else {
                crate::thread::yield_now();
            }
        }
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
        // SAFETY: as above, and `self` is the only way to the value.
        unsafe { &mut *self.lock.value.get() }
    }
}

impl<T> Drop for Held<'_, T> {
    #[inline]
    fn drop(&mut self) {
        self.lock.held.store(false, Ordering::Release);
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
