//! [`CodeBuffer`]: memory for generated code, mapped twice.
//!
//! W^X without `mprotect`: the writable view is never executable and the
//! executable one never writable, both are the same memfd. All mapping happens
//! in [`CodeBuffer::new`], at VM creation, before a VMM's seccomp filters.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use crate::memfd::{Memfd, SharedMapping};

/// Writes since the last look that are too many to let the view go: each page that is touched again
/// costs a fault.
const BUSY: u64 = 1000;

/// A dual-mapped code buffer.
#[derive(Debug)]
pub struct CodeBuffer {
    rw: Arc<WritableView>,
    rx: SharedMapping,
}

/// The view through which code is written. Its pages count as memory of the process a second time.
#[derive(Debug)]
pub struct WritableView {
    mapping: SharedMapping,
    /// Ever made.
    writes: AtomicU64,
    /// At the last look, and when the pages were let go of.
    seen: AtomicU64,
    gone: AtomicU64,
}

impl WritableView {
    /// Lets go of the view's pages if little code was written since the last call; the code stays. For
    /// a thread of the VMM's that looks from time to time.
    pub fn trim(&self) {
        let writes = self.writes.load(Ordering::Relaxed);
        let since = writes.wrapping_sub(self.seen.swap(writes, Ordering::Relaxed));
        if since < BUSY && self.gone.swap(writes, Ordering::Relaxed) != writes {
            self.mapping.let_go();
        }
    }
}

impl CodeBuffer {
    /// Creates a buffer of `len` bytes (rounded up to pages).
    ///
    /// # Errors
    /// Those of `memfd_create` and `mmap`.
    pub fn new(len: usize) -> io::Result<Self> {
        let len = len
            .checked_next_multiple_of(crate::PAGE_SIZE)
            .ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))?;
        let file = Memfd::new(c"anykvm-code", len)?;
        Ok(Self {
            rw: Arc::new(WritableView {
                mapping: file.map()?,
                writes: AtomicU64::new(0),
                seen: AtomicU64::new(0),
                gone: AtomicU64::new(0),
            }),
            rx: file.map_executable()?,
        })
    }

    /// Size in bytes.
    pub fn len(&self) -> usize {
        self.rw.mapping.len()
    }

    /// Never true.
    pub fn is_empty(&self) -> bool {
        self.rw.mapping.is_empty()
    }

    /// Copies code in. Returns false, and copies nothing, if it does not fit.
    ///
    /// Exclusive access orders writers; making sure that nobody executes the
    /// overwritten bytes is up to whoever executes any.
    pub fn write(&mut self, offset: usize, code: &[u8]) -> bool {
        if offset > self.len() || code.len() > self.len() - offset {
            return false;
        }
        let writes = &self.rw.writes;
        writes.store(
            writes.load(Ordering::Relaxed).wrapping_add(1),
            Ordering::Relaxed,
        );
        // SAFETY: the destination is inside the writable view (checked above),
        // which only `&mut self` writes and no reference points into; `code`
        // cannot overlap it for the same reason.
        unsafe {
            core::ptr::copy_nonoverlapping(
                code.as_ptr(),
                self.rw.mapping.as_ptr().add(offset),
                code.len(),
            );
        }
        true
    }

    /// A copy of code; empty if the range is not in the buffer.
    pub fn read(&self, offset: usize, len: usize) -> Vec<u8> {
        if offset > self.len() || len > self.len() - offset {
            return Vec::new();
        }
        let mut code = vec![0; len];
        // SAFETY: inside the view (checked above); writers need `&mut self`.
        unsafe {
            core::ptr::copy_nonoverlapping(
                self.rw.mapping.as_ptr().add(offset),
                code.as_mut_ptr(),
                len,
            );
        }
        code
    }

    /// First byte of the executable view.
    pub fn rx(&self) -> *const u8 {
        self.rx.as_ptr()
    }

    /// The view through which code is written.
    pub fn writable_view(&self) -> &Arc<WritableView> {
        &self.rw
    }

    /// First byte of the writable view.
    pub fn rw(&self) -> *mut u8 {
        self.rw.mapping.as_ptr()
    }
}

/// Maps the start of a file executable, for good: that is how `perf record` learns of a jitdump.
pub fn mark_for_profiler(file: &std::fs::File) {
    use std::os::fd::AsRawFd;
    // SAFETY: a new mapping at an address of the kernel's choice, which nothing uses. Without it
    // the profiler sees no dump; nothing else depends on it.
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
    fn code_stays_when_the_view_goes() {
        const LEN: usize = 8 << 20;
        let mut b = CodeBuffer::new(LEN).unwrap();
        assert!(b.write(0, &vec![0x90; LEN]));
        assert!(b.write(LEN - 1, &[0xc3]));
        // Pages of the view that are present: one of them to begin with, in each of its KiB.
        let present = |b: &CodeBuffer| {
            let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
            let begin = format!("{:x}-", b.rw() as usize);
            let lines = maps.lines().skip_while(|l| !l.starts_with(&begin));
            let rss = lines.skip(1).find_map(|l| l.strip_prefix("Rss:"));
            rss.unwrap()
                .trim()
                .trim_end_matches(" kB")
                .parse::<usize>()
                .unwrap()
        };
        assert_eq!(present(&b), LEN >> 10);
        let view = Arc::clone(b.writable_view());
        view.trim();
        assert_eq!(present(&b), 0);
        // SAFETY: NOPs and a RET: an `extern "C" fn()`.
        let f: extern "C" fn() = unsafe { core::mem::transmute(b.rx()) };
        f();
        assert_eq!(b.read(LEN - 2, 2), [0x90, 0xc3]);
        let some = present(&b);
        assert!(some > 0 && some < 1024);
        for n in 0..2 * BUSY as usize {
            assert!(b.write(n * 4096 % (LEN - 1), &[0x90]));
        }
        let many = present(&b);
        view.trim();
        assert_eq!(present(&b), many, "busy");
        view.trim();
        assert_eq!(present(&b), 0, "at rest");
        f();
    }

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
