//! [`Mapping`]: private anonymous memory, unmapped on drop.
//!
//! Only private-anonymous `mmap` is used, so that a VMM's seccomp filter on vCPU threads allows it. Some filters
//! compare all flags, so mappings of ordinary sizes use no others.

use std::{io, ptr, ptr::NonNull};

use crate::{PAGE_SIZE, system};

/// Private anonymous memory.
///
/// The bytes are reachable only through the raw pointer: the code that maps memory also decides how it may be aliased.
#[derive(Debug)]
pub struct Mapping {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: a mapping belongs to the process, not to a thread; `Mapping` itself
// never dereferences the pointer.
unsafe impl Send for Mapping {}
// SAFETY: a mapping belongs to the process; shared references give out only its address.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Reserves address space without memory behind it (`PROT_NONE`).
    ///
    /// # Errors
    /// Those of `mmap`; `EINVAL` if `len` is zero.
    pub fn reserve(len: usize) -> io::Result<Self> {
        Self::map(len, libc::PROT_NONE)
    }

    /// Maps zeroed readable and writable memory. Pages are allocated when first touched; a large mapping is not counted
    /// against overcommit before that.
    ///
    /// # Errors
    /// Those of `mmap`; `EINVAL` if `len` is zero.
    pub fn anonymous(len: usize) -> io::Result<Self> {
        Self::map(len, libc::PROT_READ | libc::PROT_WRITE)
    }

    fn map(len: usize, prot: libc::c_int) -> io::Result<Self> {
        /// Mappings smaller than this are counted against overcommit.
        const LARGE: usize = 64 << 20;
        let len = len
            .checked_next_multiple_of(PAGE_SIZE)
            .ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))?;
        let reserve = if len < LARGE && prot != libc::PROT_NONE {
            0
        } else {
            libc::MAP_NORESERVE
        };
        // SAFETY: a new private anonymous mapping at an address of the kernel's
        // choice touches no existing memory.
        let base = unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | reserve;
            let arguments = [0, len, prot as usize, flags as usize, usize::MAX, 0];
            system::call(libc::SYS_mmap, arguments)?
        };
        match NonNull::new(ptr::with_exposed_provenance_mut(base)) {
            Some(base) => Ok(Self { base, len }),
            None => Err(io::Error::from_raw_os_error(libc::ENOMEM)),
        }
    }

    /// First byte.
    pub fn as_ptr(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// Length in bytes, a multiple of the page size.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Never true: an empty mapping cannot be made.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Asks for huge pages. This is a hint: a host without them causes no error.
    pub fn advise_huge(&self) {
        self.advise(libc::MADV_HUGEPAGE);
    }

    /// Asks for no huge pages. A hint as well.
    pub fn advise_small(&self) {
        self.advise(libc::MADV_NOHUGEPAGE);
    }

    /// Asks the kernel not to give the range to children of `fork`.
    pub fn advise_dontfork(&self) {
        self.advise(libc::MADV_DONTFORK);
    }

    fn advise(&self, advice: libc::c_int) {
        // SAFETY: the range is this mapping's, and no such advice changes its contents.
        let _ = unsafe {
            let base = self.base.as_ptr().expose_provenance();
            system::call(libc::SYS_madvise, [base, self.len, advice as usize])
        };
    }
}

/// Asks for huge pages in a range of this process, whatever code has mapped it. This is a hint: in any case the range
/// keeps its contents.
pub fn advise_huge(address: usize, len: usize) {
    // SAFETY: MADV_HUGEPAGE changes neither contents nor protection of any memory.
    let _ = unsafe {
        system::call(
            libc::SYS_madvise,
            [address, len, libc::MADV_HUGEPAGE as usize],
        )
    };
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range is this mapping's own; whoever kept a pointer into it
        // had to keep the mapping too.
        let _ = unsafe {
            let base = self.base.as_ptr().expose_provenance();
            system::call(libc::SYS_munmap, [base, self.len])
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn anonymous_memory_is_zero_and_writable() {
        let m = Mapping::anonymous(10_000).unwrap();
        assert_eq!(m.len(), 12288);
        m.advise_huge();
        // SAFETY: inside the mapping, and nobody else has the pointer.
        unsafe {
            assert_eq!(m.as_ptr().add(9_999).read(), 0);
            m.as_ptr().add(9_999).write(7);
            assert_eq!(m.as_ptr().add(9_999).read(), 7);
        }
    }

    #[test]
    fn nothing_of_no_size_or_of_absurd_size() {
        assert!(Mapping::anonymous(0).is_err());
        assert!(Mapping::anonymous(usize::MAX).is_err());
        assert!(Mapping::reserve(1 << 40).is_ok());
    }
}
