//! Atomics and locks of the lock-free parts: the processor's, or loom's in a model.

#[cfg(not(loom))]
mod real {
    pub(crate) use std::sync::{
        Mutex, MutexGuard, RwLock, RwLockReadGuard,
        atomic::{AtomicBool, AtomicU32, AtomicU64, compiler_fence},
    };

    /// A full barrier: stores before it are visible before loads after it are made.
    pub(crate) use host::cpu::barrier;

    /// A full barrier after a locked instruction, which has ordered memory already: only the compiler is held back.
    #[inline(always)]
    pub(crate) fn barrier_after_locked() {
        compiler_fence(std::sync::atomic::Ordering::SeqCst);
    }

    /// Zeroed words whose pages take memory once they are written.
    pub(crate) type Words = host::LazyArray<AtomicU64>;
}

#[cfg(loom)]
mod model {
    use loom::sync::atomic::Ordering;
    pub(crate) use loom::sync::{
        Mutex, MutexGuard, RwLock, RwLockReadGuard,
        atomic::{AtomicBool, fence},
    };

    pub(crate) fn barrier() {
        fence(Ordering::SeqCst);
    }
    pub(crate) use barrier as barrier_after_locked;

    /// An integer as x86 has it where all changes are locked instructions: a load sees the newest value. So a load here
    /// is a locked operation that changes nothing. Loom needs this to explore all orders, because its plain load does
    /// not see another thread's store that came before.
    macro_rules! locked {
        ($name:ident, $int:ident) => {
            #[derive(Debug, Default)]
            pub(crate) struct $name(loom::sync::atomic::$name);

            #[allow(dead_code, reason = "not each type has all of them called")]
            impl $name {
                pub(crate) fn new(n: $int) -> Self {
                    Self(loom::sync::atomic::$name::new(n))
                }
                pub(crate) fn load(&self, _: Ordering) -> $int {
                    self.0.fetch_or(0, Ordering::AcqRel)
                }
                pub(crate) fn store(&self, n: $int, _: Ordering) {
                    self.0.swap(n, Ordering::AcqRel);
                }
                pub(crate) fn swap(&self, n: $int, _: Ordering) -> $int {
                    self.0.swap(n, Ordering::AcqRel)
                }
                pub(crate) fn fetch_or(&self, n: $int, _: Ordering) -> $int {
                    self.0.fetch_or(n, Ordering::AcqRel)
                }
                pub(crate) fn fetch_and(&self, n: $int, _: Ordering) -> $int {
                    self.0.fetch_and(n, Ordering::AcqRel)
                }
                pub(crate) fn fetch_add(&self, n: $int, _: Ordering) -> $int {
                    self.0.fetch_add(n, Ordering::AcqRel)
                }
                pub(crate) fn compare_exchange(
                    &self,
                    old: $int,
                    new: $int,
                    _: Ordering,
                    _: Ordering,
                ) -> Result<$int, $int> {
                    self.0
                        .compare_exchange(old, new, Ordering::AcqRel, Ordering::Acquire)
                }
            }
        };
    }
    locked!(AtomicU32, u32);
    locked!(AtomicU64, u64);

    /// Zeroed words.
    #[derive(Debug)]
    pub(crate) struct Words(Vec<AtomicU64>);

    impl Words {
        pub(crate) fn new(len: usize) -> std::io::Result<Self> {
            Ok(Self((0..len).map(|_| AtomicU64::new(0)).collect()))
        }
    }

    impl core::ops::Deref for Words {
        type Target = [AtomicU64];
        fn deref(&self) -> &[AtomicU64] {
            &self.0
        }
    }
}

#[cfg(loom)]
pub(crate) use model::*;
#[cfg(not(loom))]
pub(crate) use real::*;
