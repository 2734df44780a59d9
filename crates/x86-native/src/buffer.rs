//! [`CodeBuffer`]: memory that generated code is written to and executed from.
//!
//! One memfd is mapped twice, writable and executable: no page is ever both,
//! and after creation no system call is needed (a VMM's seccomp filter may
//! forbid mprotect by then). Bytes are appended; written code never changes
//! until [`CodeBuffer::clear`].

use std::{io, ptr};

/// Alignment of each piece of code.
const ALIGN: usize = 16;

/// An append-only code buffer.
#[derive(Debug)]
pub(crate) struct CodeBuffer {
    writable: *mut u8,
    executable: *mut u8,
    size: usize,
    used: usize,
    recycled: bool,
    /// [`host::fork::generation`] of the process that mapped it.
    owner: u32,
}

// SAFETY: the two mappings belong to this value alone and have no tie to the
// thread that created them.
unsafe impl Send for CodeBuffer {}

impl CodeBuffer {
    /// Maps `size` bytes (a multiple of the page size).
    pub(crate) fn new(size: usize) -> io::Result<Self> {
        // SAFETY: the name is a NUL-terminated constant.
        let fd = unsafe { libc::memfd_create(c"anykvm-code".as_ptr(), libc::MFD_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        let mapped = Self::map(fd, size);
        // SAFETY: `fd` was opened above and is used nowhere else.
        unsafe { libc::close(fd) };
        mapped
    }

    fn map(fd: libc::c_int, size: usize) -> io::Result<Self> {
        // SAFETY: `fd` is an open memfd.
        if unsafe { libc::ftruncate(fd, size as libc::off_t) } != 0 {
            return Err(io::Error::last_os_error());
        }
        let view = |prot| {
            // SAFETY: a new mapping at an address of the kernel's choice.
            let p = unsafe { libc::mmap(ptr::null_mut(), size, prot, libc::MAP_SHARED, fd, 0) };
            if p == libc::MAP_FAILED {
                return Err(io::Error::last_os_error());
            }
            // A forked child must not write into its parent's code.
            // SAFETY: the range is the mapping made above.
            unsafe { libc::madvise(p, size, libc::MADV_DONTFORK) };
            Ok(p.cast::<u8>())
        };
        let writable = view(libc::PROT_READ | libc::PROT_WRITE)?;
        let executable = match view(libc::PROT_READ | libc::PROT_EXEC) {
            Ok(p) => p,
            Err(e) => {
                // SAFETY: the mapping made above, not used by anyone.
                unsafe { libc::munmap(writable.cast(), size) };
                return Err(e);
            }
        };
        Ok(Self {
            writable,
            executable,
            size,
            used: 0,
            recycled: false,
            owner: host::fork::generation(),
        })
    }

    /// Appends code and returns its offset, or `None` if there is no room.
    pub(crate) fn append(&mut self, code: &[u8]) -> Option<u32> {
        let at = self.used;
        let end = at.checked_add(code.len())?;
        if end > self.size {
            return None;
        }
        // SAFETY: `at..end` lies in the writable mapping (checked above), which
        // `code`, a Rust slice, cannot overlap.
        unsafe { ptr::copy_nonoverlapping(code.as_ptr(), self.writable.add(at), code.len()) };
        self.used = end.next_multiple_of(ALIGN).min(self.size);
        if self.recycled {
            // Code at these addresses may have been executed before and was
            // written through another linear address: SDM vol. 3, 9.1.3 asks
            // for a serializing instruction.
            core::arch::x86_64::__cpuid(0);
        }
        Some(at as u32)
    }

    /// Forgets all code.
    pub(crate) fn clear(&mut self) {
        self.used = 0;
        self.recycled = true;
    }

    /// Address of the code at an offset that [`Self::append`] returned.
    #[inline(always)]
    pub(crate) fn entry(&self, offset: u32) -> *const u8 {
        self.executable.wrapping_add(offset as usize)
    }
}

impl Drop for CodeBuffer {
    fn drop(&mut self) {
        // In a forked child the mappings do not exist, and something else may be there.
        if self.owner != host::fork::generation() {
            return;
        }
        // SAFETY: both were mapped by `map` with this size, and no code runs in
        // them: running borrows the buffer.
        unsafe {
            libc::munmap(self.writable.cast(), self.size);
            libc::munmap(self.executable.cast(), self.size);
        }
    }
}
