//! [`CodeBuffer`]: memory that generated code is written to and executed from.
//!
//! The memory is mapped twice, once writable and once executable, so no page is ever both. No system call is needed
//! after creation: by then a VMM's seccomp filter may forbid mprotect. Bytes are appended; written code never changes
//! until [`CodeBuffer::clear`].

use std::{io, mem::ManuallyDrop, ptr};

use host::{SharedMapping, memfd};

/// Alignment of each piece of code.
const ALIGN: usize = 16;

/// An append-only code buffer.
#[derive(Debug)]
pub(crate) struct CodeBuffer {
    /// Not there in a forked child, which must not unmap what it may have at these addresses.
    writable: ManuallyDrop<SharedMapping>,
    executable: ManuallyDrop<SharedMapping>,
    used: usize,
    recycled: bool,
    /// [`host::fork::generation`] of the process that mapped the buffer.
    owner: u32,
}

impl CodeBuffer {
    /// Maps `size` bytes.
    pub(crate) fn new(size: usize) -> io::Result<Self> {
        let [writable, executable] = memfd::map_code(size)?;
        // A forked child must not write into its parent's code.
        writable.advise_dontfork();
        executable.advise_dontfork();
        Ok(Self {
            writable: ManuallyDrop::new(writable),
            executable: ManuallyDrop::new(executable),
            used: 0,
            recycled: false,
            owner: host::fork::generation(),
        })
    }

    /// Appends code and returns its offset. `None` if there is no room.
    pub(crate) fn append(&mut self, code: &[u8]) -> Option<u32> {
        let at = self.used;
        let end = at.checked_add(code.len())?;
        if end > self.writable.len() {
            return None;
        }
        // SAFETY: `at..end` lies in the writable mapping (checked above), which
        // `code`, a Rust slice, cannot overlap.
        unsafe {
            ptr::copy_nonoverlapping(code.as_ptr(), self.writable.as_ptr().add(at), code.len());
        };
        self.used = end.next_multiple_of(ALIGN).min(self.writable.len());
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
        self.executable.as_ptr().wrapping_add(offset as usize)
    }
}

impl Drop for CodeBuffer {
    fn drop(&mut self) {
        if self.owner == host::fork::generation() {
            // SAFETY: neither is used again. No code in them runs, as running code borrows the buffer.
            unsafe {
                ManuallyDrop::drop(&mut self.writable);
                ManuallyDrop::drop(&mut self.executable);
            }
        }
    }
}
