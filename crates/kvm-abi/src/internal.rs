//! [`Internal`]: descriptors of objects' files that are ours and not the VMM's.

use std::collections::BTreeSet;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::{PoisonError, RwLock, RwLockReadGuard};

/// Numbers of our own descriptors of objects' files, through which nobody reaches the objects.
static INTERNAL: RwLock<BTreeSet<RawFd>> = RwLock::new(BTreeSet::new());

/// A descriptor for ourselves: a VMM that still uses a number which it has closed gets what it would
/// get from a kernel, where we have none.
///
/// It comes and goes under the lock of [`INTERNAL`]: a number that is open and none of them is the VMM's.
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
        // SAFETY: nobody uses it afterwards: `self` ends.
        unsafe { ManuallyDrop::drop(&mut self.0) };
    }
}

/// The numbers, which do not change while this is held.
pub(crate) fn numbers() -> RwLockReadGuard<'static, BTreeSet<RawFd>> {
    INTERNAL.read().unwrap_or_else(PoisonError::into_inner)
}
