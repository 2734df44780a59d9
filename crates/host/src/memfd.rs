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
    /// Those of [`Self::with_flags`].
    pub fn new(name: &CStr, len: usize) -> io::Result<Self> {
        Self::with_flags(name, len, libc::MFD_CLOEXEC)
    }

    /// Creates a file of `len` zero bytes, with these flags of `memfd_create`.
    ///
    /// # Errors
    /// Those of `memfd_create` and `ftruncate`; `EFBIG` if the process may not have a file of that length (`ulimit -f`),
    /// for which the kernel would also raise SIGXFSZ.
    pub fn with_flags(name: &CStr, len: usize, flags: libc::c_uint) -> io::Result<Self> {
        if len as u64 > longest_file().min(libc::off_t::MAX as u64) {
            return Err(io::Error::from_raw_os_error(libc::EFBIG));
        }
        let open = |flags: libc::c_uint| {
            let arguments = [name.as_ptr() as usize, flags as usize];
            // SAFETY: `name` is NUL-terminated and outlives the call.
            unsafe { system::open(libc::SYS_memfd_create, arguments) }
        };
        // Hosts with sysctl vm.memfd_noexec = 2 want the flag, which forbids execve(2) and no mapping. Kernels before 6.3
        // refuse it.
        let fd = open(flags | libc::MFD_NOEXEC_SEAL).or_else(|_| open(flags))?;
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

/// Returns the largest length of a file that the process may make (RLIMIT_FSIZE).
fn longest_file() -> u64 {
    let mut limit = libc::rlimit {
        rlim_cur: libc::RLIM_INFINITY,
        rlim_max: libc::RLIM_INFINITY,
    };
    // If the call fails, the limit stays that of a process without one.
    // SAFETY: the kernel writes one structure.
    let _ = unsafe {
        let arguments = [libc::RLIMIT_FSIZE as usize, &raw mut limit as usize];
        system::call(libc::SYS_getrlimit, arguments)
    };
    limit.rlim_cur
}

/// Maps new memory of `len` bytes twice: writable, and executable.
///
/// # Errors
/// Those of `memfd_create`, `mmap` and `mremap`; `EACCES` or `EPERM` where the host forbids executable memory.
pub fn map_code(len: usize) -> io::Result<[SharedMapping; 2]> {
    match Memfd::new(c"anykvm-code", len) {
        Ok(file) => Ok([file.map()?, file.map_executable()?]),
        // No file can be that long, or there are no more descriptors.
        Err(_) => SharedMapping::anonymous_twice(len),
    }
}

/// A shared mapping, of a [`Memfd`] as a rule, unmapped on drop. A large mapping is aligned to a huge page.
#[derive(Debug)]
pub struct SharedMapping {
    /// The address space that the memory is mapped into. It has the pointer.
    space: Mapping,
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: an address of process-wide memory, which is never dereferenced here.
unsafe impl Send for SharedMapping {}
// SAFETY: an address of process-wide memory, which is never dereferenced here.
unsafe impl Sync for SharedMapping {}

impl SharedMapping {
    fn new(file: &Memfd, prot: libc::c_int) -> io::Result<Self> {
        Self::place(file.len, |base| {
            let flags = libc::MAP_SHARED | libc::MAP_FIXED;
            let fd = file.fd.as_raw_fd() as usize;
            let arguments = [base, file.len, prot as usize, flags as usize, fd, 0];
            // SAFETY: the range is in address space that was taken for this mapping.
            unsafe { system::call(libc::SYS_mmap, arguments) }
        })
    }

    /// Maps memory without a file, writable, and a second time executable.
    fn anonymous_twice(len: usize) -> io::Result<[Self; 2]> {
        let writable = Self::place(len, |base| {
            let prot = libc::PROT_READ | libc::PROT_WRITE;
            let flags =
                libc::MAP_SHARED | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
            let arguments = [base, len, prot as usize, flags as usize, usize::MAX, 0];
            // SAFETY: the range is in address space that was taken for this mapping.
            unsafe { system::call(libc::SYS_mmap, arguments) }
        })?;
        let first = writable.as_ptr().expose_provenance();
        let executable = Self::place(len, |base| {
            let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
            let prot = libc::PROT_READ | libc::PROT_EXEC;
            // With an old size of zero, mremap maps shared memory once more.
            // SAFETY: the range is in address space that was taken for this mapping; the first mapping stays.
            unsafe {
                system::call(libc::SYS_mremap, [first, 0, len, flags as usize, base])?;
                system::call(libc::SYS_mprotect, [base, len, prot as usize])?;
            }
            Ok(base)
        })?;
        Ok([writable, executable])
    }

    /// Takes address space for `len` bytes and has `map` put a mapping at an address in it.
    fn place(len: usize, map: impl FnOnce(usize) -> io::Result<usize>) -> io::Result<Self> {
        let no_memory = || io::Error::from_raw_os_error(libc::ENOMEM);
        if len == 0 {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        let align = if len < HUGE_PAGE {
            PAGE_SIZE
        } else {
            HUGE_PAGE
        };
        let slack = align - PAGE_SIZE;
        let space = Mapping::reserve(len.checked_add(slack).ok_or_else(no_memory)?)?;
        let base = space.as_ptr();
        let base = base.wrapping_add(base.align_offset(align));
        let base = std::ptr::with_exposed_provenance_mut(map(base.addr())?);
        Ok(Self {
            space,
            base: NonNull::new(base).ok_or_else(no_memory)?,
            len,
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

    /// Asks the kernel not to give the mapping to children of `fork`.
    pub fn advise_dontfork(&self) {
        self.space.advise_dontfork();
    }

    /// Gives up the pages that this view maps. They belong to the memory behind it, and are mapped again when they are touched. May
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
        assert!(Memfd::new(c"endless", usize::MAX).is_err());
    }

    #[test]
    fn code_runs_that_no_file_holds() {
        let [writable, executable] = SharedMapping::anonymous_twice(3 * HUGE_PAGE).unwrap();
        let at = 2 * HUGE_PAGE + 5;
        // SAFETY: the six bytes are in the mapping, which this thread alone has. They are `mov eax, 42; ret`.
        let run: extern "C" fn() -> i32 = unsafe {
            let code = [0xb8, 42, 0, 0, 0, 0xc3];
            writable.as_ptr().add(at).cast::<[u8; 6]>().write(code);
            std::mem::transmute(executable.as_ptr().add(at).cast_const())
        };
        assert_eq!(run(), 42);
        assert!(SharedMapping::anonymous_twice(0).is_err());
    }
}
