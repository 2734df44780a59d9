//! What the lock-free parts are made of: the processor's atomics, or in a model those of loom.

#[cfg(not(loom))]
mod real {
    pub(crate) use std::sync::{
        Mutex,
        atomic::{AtomicBool, AtomicU32, AtomicU64, fence},
    };

    /// Zeroed words whose pages cost memory once they are touched.
    pub(crate) type Words = host::LazyArray<AtomicU64>;
}

#[cfg(loom)]
mod model {
    pub(crate) use loom::sync::atomic::{AtomicBool, AtomicU64, fence};

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
