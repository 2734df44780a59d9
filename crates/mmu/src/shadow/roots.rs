//! [`Roots`]: which roots come back and so get contexts of their own.

use std::collections::HashMap;

use crate::hash::ByIdentity;

/// How translations are kept when CR3 changes (`ANYKVM_MMU`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Policy {
    /// Translations belong to PCIDs alone, as in processors.
    Tdp,
    /// The context of every root is tracked.
    Shadow,
    /// The context of each root that comes back is tracked.
    #[default]
    Auto,
}

/// Number of roots whose loads are counted.
const COUNTED: usize = 4096;
/// Number of loads at which a root gets a context of its own.
const LOADS: u8 = 3;
/// If all contexts are taken, only one in this many loads of roots without a context takes another root's. So most
/// roots keep theirs when more roots than contexts take turns.
const PATIENCE: u8 = 16;

/// Places of the contexts, by their identity ([`crate::context::ContextKey::id`]).
#[derive(Debug, Default)]
pub(crate) struct Roots {
    pub(crate) policy: Policy,
    places: HashMap<u64, usize, ByIdentity>,
    /// Flushing loads of roots that have no context. Direct-mapped.
    loads: Vec<(u64, u8)>,
    patience: u8,
}

impl Roots {
    /// Returns a tracked root's identity. Bits 11:5 of `root` are zero, or in PAE mode part of the root.
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

    /// Counts a flushing load of a root without a context. Returns true if the root gets one. `is_full` says that
    /// another root would lose its context.
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
