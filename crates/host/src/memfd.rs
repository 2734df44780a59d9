//! [`Memfd`] and its shared mappings: memory with a descriptor, so that it can be mapped several times or by another
//! process.

use std::{
    ffi::CStr,
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    ptr::NonNull,
};

use crate::{HUGE_PAGE, Mapping, PAGE_SIZE, system};

/// Exists since Linux 6.1; the C library's headers may be older.
pub const MADV_COLLAPSE: libc::c_int = 25;

/// An anonymous file in memory.
#[derive(Debug)]
pub struct Memfd {
    fd: OwnedFd,
    len: usize,
}

impl Memfd {
    /// Creates a file of `len` zero bytes, closed on exec.
    ///
    /// # Errors
    /// Those of `memfd_create` and `ftruncate`.
    pub fn new(name: &CStr, len: usize) -> io::Result<Self> {
        // SAFETY: `name` is NUL-terminated and outlives the call.
        let fd = unsafe {
            let flags = libc::MFD_CLOEXEC as usize;
            system::open(libc::SYS_memfd_create, [name.as_ptr() as usize, flags])?
        };
        if libc::off_t::try_from(len).is_err() {
            return Err(io::Error::from_raw_os_error(libc::EFBIG));
        }
        // SAFETY: a plain system call on our own fd.
        unsafe { system::call(libc::SYS_ftruncate, [fd.as_raw_fd() as usize, len])? };
        Ok(Self { fd, len })
    }

    /// Size in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True for a file of no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Maps the whole file, shared, readable and writable.
    ///
    /// # Errors
    /// Those of `mmap`.
    pub fn map(&self) -> io::Result<SharedMapping> {
        SharedMapping::new(self, libc::PROT_READ | libc::PROT_WRITE)
    }

    /// Maps the whole file, shared, readable and executable.
    ///
    /// # Errors
    /// Those of `mmap`; `EACCES` or `EPERM` where the host forbids executable files in memory.
    pub fn map_executable(&self) -> io::Result<SharedMapping> {
        SharedMapping::new(self, libc::PROT_READ | libc::PROT_EXEC)
    }

    /// Gives up the mapping interface and keeps the descriptor.
    pub fn into_fd(self) -> OwnedFd {
        self.fd
    }
}

impl AsFd for Memfd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// A shared mapping of a [`Memfd`], unmapped on drop. A large mapping is aligned to a huge page.
#[derive(Debug)]
pub struct SharedMapping {
    /// The address space that the file is mapped into. It has the pointer.
    _space: Mapping,
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: an address of process-wide memory, which is never dereferenced here.
unsafe impl Send for SharedMapping {}
// SAFETY: an address of process-wide memory, which is never dereferenced here.
unsafe impl Sync for SharedMapping {}

impl SharedMapping {
    fn new(file: &Memfd, prot: libc::c_int) -> io::Result<Self> {
        let no_memory = || io::Error::from_raw_os_error(libc::ENOMEM);
        if file.is_empty() {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        let align = if file.len < HUGE_PAGE {
            PAGE_SIZE
        } else {
            HUGE_PAGE
        };
        let slack = align - PAGE_SIZE;
        let space = Mapping::reserve(file.len.checked_add(slack).ok_or_else(no_memory)?)?;
        let base = space.as_ptr();
        let base = base.wrapping_add(base.align_offset(align));
        // SAFETY: the range is in address space that was taken for it just now.
        let base = unsafe {
            let flags = (libc::MAP_SHARED | libc::MAP_FIXED) as usize;
            let fd = file.fd.as_raw_fd() as usize;
            let arguments = [base.addr(), file.len, prot as usize, flags, fd, 0];
            system::call(libc::SYS_mmap, arguments)?
        };
        let base = std::ptr::with_exposed_provenance_mut(base);
        Ok(Self {
            _space: space,
            base: NonNull::new(base).ok_or_else(no_memory)?,
            len: file.len,
        })
    }

    /// First byte. Other mappings may show the same memory, so it must be accessed by atomics or volatile accesses.
    pub fn as_ptr(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Gives up the pages that this view maps. They belong to the file, and are mapped again when they are touched. May
    /// be called while other threads use them.
    pub fn let_go(&self) {
        // SAFETY: the range is this mapping's own, and as it is shared its contents stay.
        let _ = unsafe {
            let base = self.base.as_ptr().expose_provenance();
            let advice = libc::MADV_DONTNEED as usize;
            system::call(libc::SYS_madvise, [base, self.len, advice])
        };
    }

    /// Replaces small pages by a huge page with the same contents: those in the [`HUGE_PAGE`] bytes at index
    /// `huge_page`. Without pages there, allocates a huge page. May be called while other threads use the pages.
    ///
    /// # Errors
    /// Those of `madvise`; `EINVAL` where the kernel cannot, or for bytes that are not all in the mapping.
    pub fn collapse(&self, huge_page: usize) -> io::Result<()> {
        let begin = huge_page.saturating_mul(HUGE_PAGE);
        if begin >= self.len || self.len - begin < HUGE_PAGE {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        let begin = self.base.as_ptr().expose_provenance() + begin;
        // The kernel collapses nothing where there are no pages yet.
        let advice = [
            (PAGE_SIZE, libc::MADV_POPULATE_READ),
            (HUGE_PAGE, MADV_COLLAPSE),
        ];
        for (len, advice) in advice {
            // SAFETY: the range is in this mapping, and its contents stay.
            unsafe { system::call(libc::SYS_madvise, [begin, len, advice as usize])? };
        }
        Ok(())
    }

    /// Never true: `mmap` refuses empty mappings.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_mappings_share_bytes() {
        let f = Memfd::new(c"test", 8192).unwrap();
        let (a, b) = (f.map().unwrap(), f.map().unwrap());
        assert_ne!(a.as_ptr(), b.as_ptr());
        // SAFETY: both inside their mappings; this thread alone has them.
        unsafe {
            a.as_ptr().add(8191).write_volatile(9);
            assert_eq!(b.as_ptr().add(8191).read_volatile(), 9);
        }
        assert!(Memfd::new(c"empty", 0).unwrap().map().is_err());
    }
}
