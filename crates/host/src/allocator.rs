//! [`Allocator`]: memory for anykvm's own data, by `mmap` and `munmap` alone.
//!
//! A VMM's system call filter allows what *its* allocator needs. The C library's allocator would make an arena for each
//! thread by mprotect(2), and that call ends a filtered process. Here all calls are private-anonymous mmap(2) with no
//! other flags, munmap(2), and futex(2) for the lock. After [`reserve`] only futex(2) is used.

use core::{
    alloc::{GlobalAlloc, Layout},
    cell::UnsafeCell,
    ptr,
    sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering},
};
use std::io;

use dlmalloc::Dlmalloc;

use crate::{PAGE_SIZE, futex, system};

/// The heap gets memory from the kernel in pieces of at least this size.
const PIECE: usize = 1 << 20;
/// Attempts to take the lock before a thread sleeps.
const SPINS: u32 = 100;

/// The global allocator of the program and of the library.
#[derive(Clone, Copy, Debug, Default)]
pub struct Allocator;

/// The heap's source of memory.
struct Pages;

/// Address space that [`reserve`] has taken: start of the next piece, and end. Zero: none.
static NEXT: AtomicUsize = AtomicUsize::new(0);
static END: AtomicUsize = AtomicUsize::new(0);

/// Takes address space for all future allocations of the process, so that allocating needs no system calls, not even in
/// a thread that may make none. Freed memory stays in the heap. What does not fit comes from the kernel again.
///
/// # Errors
/// Those of `mmap`.
pub fn reserve(len: usize) -> io::Result<()> {
    // The space belongs to the heap for good.
    let space = core::mem::ManuallyDrop::new(crate::Mapping::anonymous(len)?);
    let begin = space.as_ptr().expose_provenance();
    hold();
    END.store(begin + space.len(), Ordering::Relaxed);
    NEXT.store(begin, Ordering::Relaxed);
    let_go();
    Ok(())
}

/// Asks whether the process can have `len` bytes more, and takes nothing.
///
/// An allocation that fails ends the process. This question lets a caller refuse what needs many allocations instead.
/// Another thread may take the memory after the answer.
///
/// # Errors
/// Those of `mmap`.
pub fn can_have(len: usize) -> io::Result<()> {
    if !has_reserved() {
        crate::Mapping::anonymous(len)?;
    }
    Ok(())
}

/// Returns a piece of the reserved space. The caller holds the heap's lock.
fn reserved(size: usize) -> Option<*mut u8> {
    let at = NEXT.load(Ordering::Relaxed);
    let end = at.checked_add(size)?;
    if at == 0 || end > END.load(Ordering::Relaxed) {
        return None;
    }
    NEXT.store(end, Ordering::Relaxed);
    Some(ptr::with_exposed_provenance_mut(at))
}

/// Returns zeroed words from the reserved space, for good: a thread that may make no system calls cannot give memory
/// back. `None` if nothing is reserved, or not enough is left.
pub(crate) fn reserved_words(words: usize) -> Option<&'static [AtomicU64]> {
    let size = words
        .checked_mul(size_of::<u64>())?
        .checked_next_multiple_of(PAGE_SIZE)?;
    hold();
    let start = reserved(size);
    let_go();
    // SAFETY: `reserved` gives each part of the space out once and nothing unmaps it; a part that has not been given
    // out is zero, which is a value of atomic integers, is aligned to a page, and is changed through shared references
    // alone.
    start.map(|start| unsafe { core::slice::from_raw_parts(start.cast_const().cast(), words) })
}

fn has_reserved() -> bool {
    END.load(Ordering::Relaxed) != 0
}

// SAFETY: `alloc` gives new memory of at least that size or null, `free` unmaps what the heap no
// longer uses, and nothing else is promised.
unsafe impl dlmalloc::Allocator for Pages {
    fn alloc(&self, size: usize) -> (*mut u8, usize, u32) {
        let Some(size) = size.checked_next_multiple_of(PIECE) else {
            return (ptr::null_mut(), 0, 0);
        };
        if let Some(base) = reserved(size) {
            return (base, size, 0);
        }
        // SAFETY: a new private anonymous mapping touches no existing memory.
        let base = unsafe {
            let protection = (libc::PROT_READ | libc::PROT_WRITE) as usize;
            let flags = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS) as usize;
            system::call(libc::SYS_mmap, [0, size, protection, flags, usize::MAX, 0])
        };
        match base {
            Ok(base) => (ptr::with_exposed_provenance_mut(base), size, 0),
            Err(_) => (ptr::null_mut(), 0, 0),
        }
    }
    fn remap(&self, _: *mut u8, _: usize, _: usize, _: bool) -> *mut u8 {
        ptr::null_mut()
    }
    fn free_part(&self, base: *mut u8, old: usize, new: usize) -> bool {
        // SAFETY: this is the end of one of the heap's mappings, which the heap has given up.
        !has_reserved() && unsafe { unmap(base.wrapping_add(new), old - new) }
    }
    fn free(&self, base: *mut u8, size: usize) -> bool {
        // SAFETY: this is one of the heap's mappings, which the heap has given up.
        !has_reserved() && unsafe { unmap(base, size) }
    }
    fn can_release_part(&self, _: u32) -> bool {
        true
    }
    fn allocates_zeros(&self) -> bool {
        true
    }
    fn page_size(&self) -> usize {
        PAGE_SIZE
    }
}

/// munmap(2); returns true if it succeeds.
///
/// # Safety
///
/// As for munmap(2).
unsafe fn unmap(base: *mut u8, len: usize) -> bool {
    // SAFETY: the caller's.
    unsafe { system::call(libc::SYS_munmap, [base.expose_provenance(), len]).is_ok() }
}

/// The heap and its lock. Lock values: 0 free, 1 held, 2 held with waiters.
struct Heap {
    lock: AtomicU32,
    heap: UnsafeCell<Dlmalloc<Pages>>,
}

// SAFETY: only the thread that holds the lock reaches the heap, and the heap is tied to no thread.
unsafe impl Sync for Heap {}

static HEAP: Heap = Heap {
    lock: AtomicU32::new(0),
    heap: UnsafeCell::new(Dlmalloc::new_with_allocator(Pages)),
};

/// Takes the lock before a fork, so that the child has a consistent heap.
pub(crate) fn hold() {
    let lock = &HEAP.lock;
    for _ in 0..SPINS {
        if lock
            .compare_exchange_weak(0, 1, Ordering::Acquire, Ordering::Relaxed)
            .is_ok()
        {
            return;
        }
        core::hint::spin_loop();
    }
    while lock.swap(2, Ordering::Acquire) != 0 {
        futex::wait(lock, 2, None);
    }
}

/// Releases the lock.
pub(crate) fn let_go() {
    if HEAP.lock.swap(0, Ordering::Release) == 2 {
        futex::wake(&HEAP.lock, 1);
    }
}

fn with<T>(what: impl FnOnce(&mut Dlmalloc<Pages>) -> T) -> T {
    hold();
    // SAFETY: the lock is held, and neither the heap nor `Pages` calls the allocator.
    let result = what(unsafe { &mut *HEAP.heap.get() });
    let_go();
    result
}

// SAFETY: the heap's own functions, with the layout's size and alignment; they neither unwind nor
// give memory out twice.
unsafe impl GlobalAlloc for Allocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: sizes and alignments of a layout.
        with(|heap| unsafe { heap.malloc(layout.size(), layout.align()) })
    }
    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: memory of this heap, by the caller's contract.
        with(|heap| unsafe { heap.free(memory, layout.size(), layout.align()) });
    }
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: sizes and alignments of a layout.
        with(|heap| unsafe { heap.calloc(layout.size(), layout.align()) })
    }
    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: memory of this heap, by the caller's contract.
        with(|heap| unsafe { heap.realloc(memory, layout.size(), layout.align(), size) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_of_many_sizes_from_many_threads() {
        std::thread::scope(|scope| {
            for thread in 1..=4u8 {
                scope.spawn(move || {
                    let mut held = Vec::new();
                    for n in 0..2000usize {
                        let size = 1 + n * 7919 % (if n % 100 == 0 { 3 << 20 } else { 5000 });
                        let layout = Layout::from_size_align(size, 1 << (n % 7)).unwrap();
                        // SAFETY: a layout of some size; the memory is filled and compared
                        // within its bounds, and freed once with the layout that it has then.
                        unsafe {
                            let p = Allocator.alloc_zeroed(layout);
                            assert_eq!(p as usize % layout.align(), 0);
                            assert!(core::slice::from_raw_parts(p, size).iter().all(|b| *b == 0));
                            p.write_bytes(thread, size);
                            let p = Allocator.realloc(p, layout, size + 100);
                            let layout =
                                Layout::from_size_align(size + 100, layout.align()).unwrap();
                            held.push((p, layout));
                            if n % 3 != 0 {
                                let (p, layout) = held.swap_remove(n % held.len());
                                let filled = layout.size() - 100;
                                let bytes = core::slice::from_raw_parts(p, filled);
                                assert!(bytes.iter().all(|b| *b == thread));
                                Allocator.dealloc(p, layout);
                            }
                        }
                    }
                    for (p, layout) in held {
                        // SAFETY: allocated above with this layout, and freed once.
                        unsafe { Allocator.dealloc(p, layout) };
                    }
                });
            }
        });
    }

    #[test]
    fn what_cannot_be_is_null() {
        let layout = Layout::from_size_align(isize::MAX as usize - 4096, 8).unwrap();
        // SAFETY: a layout of some size.
        assert!(unsafe { Allocator.alloc(layout) }.is_null());
    }
}
