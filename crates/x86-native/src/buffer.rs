//! [`CodeBuffer`]: memory that generated code is written to and executed from.
//!
//! One memfd is mapped twice, once writable and once executable, so no page is ever both. No system call is needed
//! after creation: by then a VMM's seccomp filter may forbid mprotect. Bytes are appended; written code never changes
//! until [`CodeBuffer::clear`].

use std::{
    io,
    os::fd::{AsFd, AsRawFd},
    ptr,
};

use host::system;

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
    /// [`host::fork::generation`] of the process that mapped the buffer.
    owner: u32,
}

// SAFETY: the two mappings belong to this value alone, and do not depend on the thread that created them.
unsafe impl Send for CodeBuffer {}

impl CodeBuffer {
    /// Maps `size` bytes (a multiple of the page size).
    pub(crate) fn new(size: usize) -> io::Result<Self> {
        let file = host::Memfd::new(c"anykvm-code", size)?;
        let number = file.as_fd().as_raw_fd() as usize;
        let view = |protection: libc::c_int| -> io::Result<usize> {
            let (protection, flags) = (protection as usize, libc::MAP_SHARED as usize);
            // SAFETY: a new mapping at an address of the kernel's choice.
            let at = unsafe {
                let arguments = [0, size, protection, flags, number, 0];
                system::call(libc::SYS_mmap, arguments)?
            };
            // A forked child must not write into its parent's code.
            // SAFETY: the range is the mapping made above.
            let _ = unsafe {
                let advice = libc::MADV_DONTFORK as usize;
                system::call(libc::SYS_madvise, [at, size, advice])
            };
            Ok(at)
        };
        let writable = view(libc::PROT_READ | libc::PROT_WRITE)?;
        let executable = view(libc::PROT_READ | libc::PROT_EXEC).inspect_err(|_| {
            unmap(writable, size);
        })?;
        Ok(Self {
            writable: ptr::with_exposed_provenance_mut(writable),
            executable: ptr::with_exposed_provenance_mut(executable),
            size,
            used: 0,
            recycled: false,
            owner: host::fork::generation(),
        })
    }

    /// Appends code and returns its offset. `None` if there is no room.
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
            // Code at these addresses may have been executed before, and was written through another linear address.
            // SDM vol. 3, 9.1.3 requires a serializing instruction then.
            core::arch::x86_64::__cpuid(0);
        }
        Some(at as u32)
    }

    /// Forgets all code.
    pub(crate) fn clear(&mut self) {
        self.used = 0;
        self.recycled = true;
    }

    /// Returns the address of the code at an offset that [`Self::append`] returned.
    #[inline(always)]
    pub(crate) fn entry(&self, offset: u32) -> *const u8 {
        self.executable.wrapping_add(offset as usize)
    }
}

impl Drop for CodeBuffer {
    fn drop(&mut self) {
        // A forked child does not have the mappings, and may have something else there.
        if self.owner != host::fork::generation() {
            return;
        }
        unmap(self.writable.expose_provenance(), self.size);
        unmap(self.executable.expose_provenance(), self.size);
    }
}

/// Unmaps one of a buffer's mappings. No code in it runs, as running code borrows the buffer.
fn unmap(at: usize, size: usize) {
    // SAFETY: `CodeBuffer::new` made the mapping, with this size, and nobody uses it any more.
    let _ = unsafe { system::call(libc::SYS_munmap, [at, size]) };
}
