//! [`LazyArray`]: a zeroed array whose pages cost memory only once touched.
//!
//! State per page of guest RAM grows with the guest's size, but most guests touch little of their RAM.

use std::{
    fmt, io, ops,
    sync::atomic::{AtomicU8, AtomicU32, AtomicU64},
};

use crate::Mapping;

mod sealed {
    /// Types of which all-zero bytes are a valid value and which need no drop.
    ///
    /// # Safety
    /// Both must be true of the type.
    pub unsafe trait Zeroed: Sync + Send {}
}

/// Element types for which all-zero bytes are a value.
pub trait Element: sealed::Zeroed {}
impl<T: sealed::Zeroed> Element for T {}

// SAFETY: atomic integers have the representation of their integer, need no
// drop, and zero is a value of every integer.
unsafe impl sealed::Zeroed for AtomicU8 {}
// SAFETY: an atomic integer: zero is a value, and nothing needs a drop.
unsafe impl sealed::Zeroed for AtomicU32 {}
// SAFETY: an atomic integer: zero is a value, and nothing needs a drop.
unsafe impl sealed::Zeroed for AtomicU64 {}

/// Arrays up to this many bytes are on the heap: a process has at most 65530 mappings by default, and a VM has up to
/// twice 32764 slots.
const SMALL: usize = 4096;

/// Where the elements are stored.
enum Storage {
    Mapped(Mapping),
    Small(Box<[AtomicU64]>),
    /// In the address space that [`crate::allocator::reserve`] took, because the thread may not be allowed to map
    /// memory.
    Reserved(&'static [AtomicU64]),
}

/// A zero-initialised array of atomics; a large one is in its own anonymous mapping.
pub struct LazyArray<T: Element> {
    storage: Storage,
    len: usize,
    marker: core::marker::PhantomData<T>,
}

impl<T: Element> LazyArray<T> {
    /// An array of `len` zeros.
    ///
    /// # Errors
    /// Those of `mmap`.
    pub fn new(len: usize) -> io::Result<Self> {
        let bytes = len
            .checked_mul(size_of::<T>())
            .ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))?;
        let storage = if bytes <= SMALL {
            Storage::Small((0..bytes.div_ceil(8)).map(|_| AtomicU64::new(0)).collect())
        } else if let Some(words) = crate::allocator::reserved_words(bytes.div_ceil(8)) {
            Storage::Reserved(words)
        } else {
            Storage::Mapped(Mapping::anonymous(bytes)?)
        };
        Ok(Self {
            storage,
            len,
            marker: core::marker::PhantomData,
        })
    }
}

impl<T: Element> LazyArray<T> {
    /// Asks for huge pages. A hint.
    pub fn advise_huge(&self) {
        if let Storage::Mapped(mapping) = &self.storage {
            mapping.advise_huge();
        }
    }

    /// Asks for no huge pages. A hint.
    pub fn advise_small(&self) {
        if let Storage::Mapped(mapping) = &self.storage {
            mapping.advise_small();
        }
    }
}

impl<T: Element> Default for LazyArray<T> {
    /// An array without elements.
    fn default() -> Self {
        Self {
            storage: Storage::Small(Box::default()),
            len: 0,
            marker: core::marker::PhantomData,
        }
    }
}

impl<T: Element> ops::Deref for LazyArray<T> {
    type Target = [T];
    #[inline]
    fn deref(&self) -> &[T] {
        let start: *const T = match &self.storage {
            Storage::Mapped(mapping) => mapping.as_ptr().cast(),
            Storage::Small(words) => words.as_ptr().cast(),
            Storage::Reserved(words) => words.as_ptr().cast(),
        };
        // SAFETY: the storage is aligned to 8 at least, holds `len` elements, began as zeros,
        // zero is a valid `T` (`Zeroed`), only shared references are given out, all of it may
        // be changed through those, and it lives as long as `self`.
        unsafe { core::slice::from_raw_parts(start, self.len) }
    }
}

impl<T: Element> fmt::Debug for LazyArray<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LazyArray[{}]", self.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::Ordering;

    #[test]
    fn starts_zero_and_keeps_values() {
        let a = LazyArray::<AtomicU32>::new(1 << 28).unwrap();
        assert_eq!(a.len(), 1 << 28);
        a[(1 << 28) - 1].store(5, Ordering::Relaxed);
        assert_eq!(a[(1 << 28) - 1].load(Ordering::Relaxed), 5);
        assert_eq!(a[0].load(Ordering::Relaxed), 0);
        for len in [1, 511, 512, 513] {
            let small = LazyArray::<AtomicU8>::new(8 * len).unwrap();
            assert!(small.iter().all(|v| v.load(Ordering::Relaxed) == 0));
            small[8 * len - 1].store(7, Ordering::Relaxed);
            assert_eq!(small[8 * len - 1].load(Ordering::Relaxed), 7);
            assert_eq!(small.len(), 8 * len);
        }
        assert!(LazyArray::<AtomicU64>::new(0).unwrap().is_empty());
        assert!(LazyArray::<AtomicU64>::new(usize::MAX).is_err());
    }
}
