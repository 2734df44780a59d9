//! Limits of the lists that calls take.

use crate::errno::{Errno, Result};

/// Entries that KVM accepts in one KVM_GET_MSRS or KVM_SET_MSRS call, less one
/// (its MAX_IO_MSRS is exclusive).
pub const MAX_IO_MSRS: usize = 256;

/// Returns `list` if it fits into `capacity` elements, E2BIG otherwise.
pub(crate) fn fit<T>(list: Vec<T>, capacity: usize) -> Result<Vec<T>> {
    if list.len() > capacity {
        Err(Errno::new(libc::E2BIG))
    } else {
        Ok(list)
    }
}

/// E2BIG for more MSRs than KVM takes in one call.
pub(crate) fn check_msr_count(count: usize) -> Result<()> {
    if count >= MAX_IO_MSRS {
        Err(Errno::new(libc::E2BIG))
    } else {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_fit_or_are_too_big() {
        assert_eq!(fit(vec![1, 2], 2), Ok(vec![1, 2]));
        assert_eq!(fit(vec![1, 2], 1), Err(Errno::new(libc::E2BIG)));
        assert_eq!(check_msr_count(255), Ok(()));
        assert_eq!(check_msr_count(256), Err(Errno::new(libc::E2BIG)));
    }
}
