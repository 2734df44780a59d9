//! [`Internal`]: descriptors of objects' files that belong to anykvm and not to the VMM.

use std::collections::BTreeSet;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::{PoisonError, RwLock, RwLockReadGuard};

/// Numbers of anykvm's own descriptors of objects' files. No object can be reached through them.
static INTERNAL: RwLock<BTreeSet<RawFd>> = RwLock::new(BTreeSet::new());

/// A descriptor that anykvm uses itself. If a VMM still uses a number that it has closed, and the number is one of
/// these, it gets what a kernel would answer.
///
/// Such descriptors are opened and closed under the lock of [`INTERNAL`], so an open number that is not in the set is
/// the VMM's.
#[derive(Debug)]
pub(crate) struct Internal(ManuallyDrop<OwnedFd>);

impl Internal {
    pub(crate) fn duplicate(fd: &OwnedFd) -> std::io::Result<Self> {
        let mut internal = INTERNAL.write().unwrap_or_else(PoisonError::into_inner);
        let fd = fd.try_clone()?;
        internal.insert(fd.as_raw_fd());
        Ok(Self(ManuallyDrop::new(fd)))
    }
}

impl AsFd for Internal {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Drop for Internal {
    fn drop(&mut self) {
        let mut internal = INTERNAL.write().unwrap_or_else(PoisonError::into_inner);
        internal.remove(&self.0.as_raw_fd());
        // SAFETY: the field is not used afterwards, because `self` ends.
        unsafe { ManuallyDrop::drop(&mut self.0) };
    }
}

/// Returns the numbers, which do not change while the guard is held.
pub(crate) fn numbers() -> RwLockReadGuard<'static, BTreeSet<RawFd>> {
    INTERNAL.read().unwrap_or_else(PoisonError::into_inner)
}
