//! A value that is read often and replaced rarely.
//!
//! Each reader keeps the version that it saw last, and checks by one atomic load whether there is a newer one; only if
//! so, it takes the writers' lock. A reader in the middle of an access may still use the old version, so whatever that
//! refers to lives until the reader has moved on.

use std::sync::{
    Arc, Mutex, MutexGuard, PoisonError,
    atomic::{AtomicU64, Ordering},
};

/// The current version.
#[derive(Debug, Default)]
pub struct Published<T> {
    generation: AtomicU64,
    current: Mutex<Arc<T>>,
}

impl<T> Published<T> {
    /// Makes the value with its first version.
    pub fn new(value: T) -> Self {
        Self {
            generation: AtomicU64::new(0),
            current: Mutex::new(Arc::new(value)),
        }
    }

    /// Returns the current version.
    pub fn load(&self) -> Arc<T> {
        Arc::clone(&self.lock())
    }

    /// Replaces the value by a changed copy, unless `change` fails.
    pub fn update<R, E>(&self, change: impl FnOnce(&mut T) -> Result<R, E>) -> Result<R, E>
    where
        T: Clone,
    {
        let mut current = self.lock();
        let mut copy = T::clone(&current);
        let result = change(&mut copy)?;
        *current = Arc::new(copy);
        // After the store above, which the lock orders for readers who take it: a reader that sees the new number finds
        // the new version.
        self.generation.fetch_add(1, Ordering::Release);
        Ok(result)
    }

    fn lock(&self) -> MutexGuard<'_, Arc<T>> {
        // A panic in `change` leaves the old version intact.
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One thread's view of a [`Published`] value.
#[derive(Debug)]
pub struct Reader<T> {
    source: Arc<Published<T>>,
    generation: u64,
    seen: Arc<T>,
}

impl<T> Reader<T> {
    /// Makes a reader of `source`.
    pub fn new(source: Arc<Published<T>>) -> Self {
        // The number is read first: if the version is newer than its number, it is only loaded once more.
        let generation = source.generation.load(Ordering::Acquire);
        let seen = source.load();
        Self {
            source,
            generation,
            seen,
        }
    }

    /// Returns the current version.
    #[inline]
    pub fn get(&mut self) -> &T {
        let generation = self.source.generation.load(Ordering::Acquire);
        if generation != self.generation {
            self.seen = self.source.load();
            self.generation = generation;
        }
        &self.seen
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readers_follow_and_failures_change_nothing() {
        let source = Arc::new(Published::new(1));
        let mut reader = Reader::new(Arc::clone(&source));
        assert_eq!(*reader.get(), 1);
        source
            .update(|v| {
                *v = 2;
                Ok::<_, ()>(())
            })
            .unwrap();
        assert_eq!(*reader.get(), 2);
        let failed = source.update(|v| {
            *v = 3;
            Err::<(), _>("no")
        });
        assert_eq!(failed, Err("no"));
        assert_eq!((*reader.get(), *source.load()), (2, 2));
    }

    #[test]
    fn versions_never_go_back() {
        let source = Arc::new(Published::new(0u32));
        std::thread::scope(|s| {
            for _ in 0..2 {
                let mut reader = Reader::new(Arc::clone(&source));
                s.spawn(move || {
                    let mut last = 0;
                    while last < 1000 {
                        let now = *reader.get();
                        assert!(now >= last);
                        last = now;
                        std::thread::yield_now();
                    }
                });
            }
            for n in 1..=1000 {
                source
                    .update(|v| {
                        *v = n;
                        Ok::<_, ()>(())
                    })
                    .unwrap();
            }
        });
    }
}
