//! Which bytes of a page were fetched as code, of pages whose chunks are too coarse.
//!
//! A program may have a variable among its instructions, in the same 64 bytes. Each write of the variable would change
//! the page's code. So the bytes are tracked of a page whose code has changed several times.

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

use crate::byte_map::ByteMap;

/// Number of times that a page's code has changed before its bytes are tracked. Pages of data that were code once reach
/// it rarely.
pub(crate) const CHANGES: u32 = 8;

/// The bytes of a slot's pages that were fetched as code.
#[derive(Debug, Default)]
pub(crate) struct ExactCode(Mutex<HashMap<usize, Box<ByteMap>>>);

impl ExactCode {
    fn pages(&self) -> MutexGuard<'_, HashMap<usize, Box<ByteMap>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tracks bytes of a page. Returns true if any of them was not tracked. Call this *before* reading them.
    #[cold]
    pub(crate) fn track(&self, index: usize, offset: u64, len: u64) -> bool {
        let mut pages = self.pages();
        let page = pages.entry(index);
        let bytes = page.or_insert_with(|| Box::new(ByteMap::EMPTY));
        bytes.insert(offset, len)
    }

    /// Takes the bytes away from `map` that were not fetched.
    #[cold]
    pub(crate) fn narrow(&self, index: usize, map: &mut ByteMap) {
        let pages = self.pages();
        let bytes = pages.get(&index);
        map.intersect(bytes.map_or(&ByteMap::EMPTY, |bytes| bytes));
    }

    /// Returns true if the page's bytes are tracked and none of these was fetched. If one was, nothing of the page is
    /// tracked any more. Call this *after* writing them.
    #[cold]
    pub(crate) fn spares(&self, index: usize, offset: u64, len: u64) -> bool {
        let mut pages = self.pages();
        let Some(bytes) = pages.get(&index) else {
            return false;
        };
        let spares = !bytes.has_any(offset, len);
        if !spares {
            pages.remove(&index);
        }
        spares
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_bytes_that_were_fetched_are_code() {
        let code = ExactCode::default();
        assert!(!code.spares(3, 0, 8));
        assert!(code.track(3, 60, 8) && code.track(3, 61, 8) && !code.track(3, 60, 9));
        let mut map = ByteMap::of_chunks(u64::MAX);
        code.narrow(3, &mut map);
        assert_eq!(map.words()[..3], [0xf << 60, 0x1f, 0]);
        assert!(code.spares(3, 0, 60) && code.spares(3, 69, 100));
        assert!(!code.spares(4, 0, 8));
        assert!(!code.spares(3, 67, 1));
        assert!(!code.spares(3, 0, 1), "forgotten");
    }
}
