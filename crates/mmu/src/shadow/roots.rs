//! [`Roots`]: which roots come back.

use std::collections::HashMap;

use crate::hash::ByIdentity;

/// How translations are kept when CR3 changes (`ANYKVM_MMU`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Policy {
    /// By PCID alone, as processors do.
    #[default]
    Tdp,
    /// Of every root.
    Shadow,
    /// Of roots that come back.
    Auto,
}

/// Roots whose loads are counted.
const COUNTED: usize = 4096;
/// Loads after which a root gets a context of its own.
const LOADS: u8 = 3;
/// Loads of a root without one for each that takes another root's: where more roots than contexts
/// take turns, most of those that have one keep it.
const PATIENCE: u8 = 16;

/// Contexts by what finds them ([`crate::context::ContextKey::id`]).
#[derive(Debug, Default)]
pub(crate) struct Roots {
    pub(crate) policy: Policy,
    places: HashMap<u64, usize, ByIdentity>,
    /// Loads that flush, of roots without a context. Direct-mapped.
    loads: Vec<(u64, u8)>,
    patience: u8,
}

impl Roots {
    /// A tracked root's identity: its bits 11:5 are zero, or in PAE mode part of it.
    pub(crate) fn id(world: u8, root: u64) -> u64 {
        u64::from(world) << 52 | root
    }

    pub(crate) fn find(&self, id: u64) -> Option<usize> {
        self.places.get(&id).copied()
    }

    pub(crate) fn insert(&mut self, id: u64, place: usize) {
        self.places.insert(id, place);
    }

    pub(crate) fn remove(&mut self, id: u64) {
        self.places.remove(&id);
    }

    pub(crate) fn clear(&mut self) {
        self.places.clear();
        self.loads.clear();
    }

    /// A root without a context is loaded, and the load flushes. Does it deserve one? `is_full`:
    /// another's would have to go.
    pub(crate) fn comes_back(&mut self, id: u64, is_full: bool) -> bool {
        match self.policy {
            Policy::Tdp => return false,
            Policy::Shadow => return true,
            Policy::Auto => {}
        }
        if self.loads.is_empty() {
            self.loads = vec![(0, 0); COUNTED];
        }
        let place = (id >> 12).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
        let Some((root, loads)) = self.loads.get_mut(place as usize % COUNTED) else {
            return false;
        };
        if *root != id {
            (*root, *loads) = (id, 0);
        }
        *loads = loads.saturating_add(1);
        if *loads < LOADS {
            return false;
        }
        if is_full {
            self.patience += 1;
            if self.patience < PATIENCE {
                return false;
            }
            self.patience = 0;
        }
        true
    }
}
