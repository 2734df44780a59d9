//! The bytes that this vCPU has fetched from pages whose bytes are tracked one by one (`guest_memory::exact_code`).
//!
//! The checksums of such a page ([`crate::sum`]) change with the data beside the code. These bytes say then whether the
//! code has changed.

use std::collections::HashMap;

use guest_memory::{HostPage, byte_map::ByteMap};

use crate::hash::ByIdentity;

/// Maximum number of pages. Data among the code of other pages counts as code.
const MAX_PAGES: usize = 256;

/// What was fetched from a page.
#[derive(Debug)]
struct Page {
    /// The generation under which it was fetched.
    generation: u32,
    bytes: [u8; 4096],
    /// The bytes that were fetched.
    fetched: ByteMap,
}

/// What was fetched, by the pages' identities.
#[derive(Debug, Default)]
pub(crate) struct Exact(HashMap<u64, Box<Page>, ByIdentity>);

impl Exact {
    /// Notes bytes that were fetched from a page. `is_first`: nothing was fetched from it before under its generation.
    #[cold]
    pub(crate) fn remember(
        &mut self,
        id: u64,
        (generation, is_first): (u32, bool),
        offset: u64,
        bytes: &[u8],
    ) {
        if is_first && (self.0.len() < MAX_PAGES || self.0.contains_key(&id)) {
            let page = Page {
                generation,
                bytes: [0; 4096],
                fetched: ByteMap::EMPTY,
            };
            self.0.insert(id, Box::new(page));
        }
        // A page of which something is missing is not here.
        let Some(page) = self.0.get_mut(&id).filter(|p| p.generation == generation) else {
            return;
        };
        let to = page.bytes.get_mut(offset as usize..);
        if let Some(to) = to.and_then(|to| to.get_mut(..bytes.len())) {
            to.copy_from_slice(bytes);
            page.fetched.insert(offset, bytes.len() as u64);
        }
    }

    /// Forgets a page, nothing of which is valid any more.
    pub(crate) fn forget(&mut self, id: u64) {
        if !self.0.is_empty() {
            self.0.remove(&id);
        }
    }

    /// Forgets all pages, because the slots have changed.
    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }

    /// Returns true if all that was fetched from the page is here, and still in the page.
    #[cold]
    pub(crate) fn is_same(&self, id: u64, generation: u32, host: HostPage) -> bool {
        let Some(page) = self.0.get(&id).filter(|p| p.generation == generation) else {
            return false;
        };
        let mut now = [0; 4096];
        if !host.read_bytes(0, &mut now) {
            return false;
        }
        let chunks = now.chunks(64).zip(page.bytes.chunks(64));
        chunks
            .zip(page.fetched.words())
            .all(|((now, then), fetched)| {
                let mut bytes = now.iter().zip(then).enumerate();
                now == then || bytes.all(|(n, (now, then))| fetched >> n & 1 == 0 || now == then)
            })
    }
}
