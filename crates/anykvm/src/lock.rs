//! [`lock`]: locks a device even after one of its users has panicked.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks a device. If its last user has panicked, its registers are still whole.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
