//! [`CodeBuffer`]: memory for generated code, mapped twice.
//!
//! W^X without `mprotect`: the writable view is never executable and the executable view never writable; both map the
//! same memory. All mapping happens in [`CodeBuffer::new`], at VM creation, before a VMM's seccomp filters exist.

use std::{io, sync::Arc};

use crate::code_views::CodeViews;

/// A dual-mapped code buffer.
#[derive(Debug)]
pub struct CodeBuffer {
    views: Arc<CodeViews>,
}

impl CodeBuffer {
    /// Creates a buffer of `len` bytes (rounded up to pages).
    ///
    /// # Errors
    /// Those of [`crate::memfd::map_code`].
    pub fn new(len: usize) -> io::Result<Self> {
        let len = len
            .checked_next_multiple_of(crate::PAGE_SIZE)
            .ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))?;
        let views = CodeViews::new(len)?;
        Ok(Self {
            views: Arc::new(views),
        })
    }

    /// Size in bytes.
    pub fn len(&self) -> usize {
        self.views.rw().len()
    }

    /// Never true.
    pub fn is_empty(&self) -> bool {
        self.views.rw().is_empty()
    }

    /// Copies code into the buffer. Returns false, and copies nothing, if it does not fit.
    ///
    /// Exclusive access orders writers. The caller makes sure that no thread executes the overwritten bytes.
    pub fn write(&mut self, offset: usize, code: &[u8]) -> bool {
        if offset > self.len() || code.len() > self.len() - offset {
            return false;
        }
        self.views.note_write();
        // SAFETY: the destination is inside the writable view (checked above),
        // which only `&mut self` writes and no reference points into; `code`
        // cannot overlap it for the same reason.
        unsafe {
            core::ptr::copy_nonoverlapping(
                code.as_ptr(),
                self.views.rw().as_ptr().add(offset),
                code.len(),
            );
        }
        true
    }

    /// Returns a copy of code; empty if the range is not in the buffer.
    pub fn read(&self, offset: usize, len: usize) -> Vec<u8> {
        if offset > self.len() || len > self.len() - offset {
            return Vec::new();
        }
        let mut code = vec![0; len];
        // SAFETY: inside the view (checked above); writers need `&mut self`.
        unsafe {
            core::ptr::copy_nonoverlapping(
                self.views.rw().as_ptr().add(offset),
                code.as_mut_ptr(),
                len,
            );
        }
        code
    }

    /// First byte of the executable view.
    pub fn rx(&self) -> *const u8 {
        self.views.rx().as_ptr()
    }

    /// The buffer's views, for a [`crate::ServiceThread`].
    pub fn views(&self) -> &Arc<CodeViews> {
        &self.views
    }

    /// First byte of the writable view.
    pub fn rw(&self) -> *mut u8 {
        self.views.rw().as_ptr()
    }
}

/// Maps the start of a file as executable, for good: from this mapping `perf record` learns of a jitdump.
pub fn mark_for_profiler(file: &std::fs::File) {
    use std::os::fd::AsRawFd;
    // SAFETY: a new mapping at an address of the kernel's choice, which nothing uses. If it fails, the profiler does
    // not find the dump; nothing else depends on it.
    unsafe {
        libc::mmap(
            core::ptr::null_mut(),
            crate::PAGE_SIZE,
            libc::PROT_READ | libc::PROT_EXEC,
            libc::MAP_PRIVATE,
            file.as_raw_fd(),
            0,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn written_code_runs() {
        let mut b = CodeBuffer::new(1).unwrap();
        assert!(b.write(16, &[0xb8, 42, 0, 0, 0, 0xc3]));
        assert!(!b.write(4095, &[0, 0]));
        assert!(!b.write(usize::MAX, &[0]));
        // SAFETY: the bytes are `mov eax, 42; ret`, an `extern "C" fn() -> i32`.
        let f: extern "C" fn() -> i32 = unsafe { core::mem::transmute(b.rx().add(16)) };
        assert_eq!(f(), 42);
    }
}
