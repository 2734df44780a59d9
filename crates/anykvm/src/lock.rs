//! [`lock`]: a device's lock, also after one of its users has panicked.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// A device whose last user panicked still has whole registers.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
