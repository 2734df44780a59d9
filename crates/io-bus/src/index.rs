//! [`Index`]: a hash table that is read often and changed rarely.
//!
//! Open addressing with linear probing, at most half full, so a lookup touches one or two cache lines. The VMM chooses
//! the keys, and can make only few of them collide, because the multiplier is odd and all bits of a key are used.

/// An address or value, and a number that distinguishes equal ones.
pub(crate) type IndexKey = (u64, u32);

/// A hash table, see the module's documentation.
#[derive(Clone, Debug)]
pub(crate) struct Index<V> {
    /// The slots: a power of two, or none.
    slots: Vec<Option<(IndexKey, V)>>,
    len: usize,
}

impl<V> Default for Index<V> {
    fn default() -> Self {
        Self {
            slots: Vec::new(),
            len: 0,
        }
    }
}

#[inline]
const fn hash((a, b): IndexKey) -> u64 {
    let h = (a ^ (b as u64).rotate_left(56)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    h ^ h >> 32
}

impl<V> Index<V> {
    /// True without entries.
    pub(crate) const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// All keys.
    pub(crate) fn keys(&self) -> Vec<IndexKey> {
        self.slots.iter().flatten().map(|(key, _)| *key).collect()
    }

    /// Returns the slot of a key, or the empty slot where it would be; `None` without slots.
    #[inline]
    fn place(&self, key: IndexKey) -> Option<usize> {
        let mask = self.slots.len().wrapping_sub(1);
        let mut at = hash(key) as usize & mask;
        loop {
            match self.slots.get(at)? {
                Some((k, _)) if *k != key => at = (at + 1) & mask,
                _ => return Some(at),
            }
        }
    }

    /// Returns the value of a key.
    #[inline]
    pub(crate) fn find(&self, key: IndexKey) -> Option<&V> {
        let (_, value) = self.slots.get(self.place(key)?)?.as_ref()?;
        Some(value)
    }

    /// Returns the value of a key, to be changed.
    pub(crate) fn find_mut(&mut self, key: IndexKey) -> Option<&mut V> {
        let at = self.place(key)?;
        let (_, value) = self.slots.get_mut(at)?.as_mut()?;
        Some(value)
    }

    /// Returns the value of a key; `make` makes it if there is none.
    pub(crate) fn entry(&mut self, key: IndexKey, make: impl FnOnce() -> V) -> &mut V {
        if self.find(key).is_none() {
            if 2 * (self.len + 1) > self.slots.len() {
                self.rebuild((2 * self.slots.len()).max(4));
            }
            self.len += 1;
        }
        // There is room: less than half of the slots are in use.
        let at = self.place(key).unwrap_or(0);
        &mut self.slots[at].get_or_insert_with(|| (key, make())).1
    }

    /// Removes a key.
    pub(crate) fn remove(&mut self, key: IndexKey) -> Option<V> {
        let at = self.place(key)?;
        let (_, value) = self.slots.get_mut(at)?.take()?;
        self.len -= 1;
        // Entries that were displaced by the removed one move to their proper slots.
        self.rebuild(self.slots.len());
        Some(value)
    }

    fn rebuild(&mut self, slots: usize) {
        let old = std::mem::take(&mut self.slots);
        self.slots.resize_with(slots, || None);
        for entry in old.into_iter().flatten() {
            let at = self.place(entry.0).unwrap_or(0);
            self.slots[at] = Some(entry);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    proptest! {
        #[test]
        fn same_as_a_map(ops in prop::collection::vec((any::<bool>(), 0u64..40, 0u32..2), 0..300)) {
            let (mut index, mut map) = (Index::default(), BTreeMap::new());
            for (n, (add, a, b)) in ops.into_iter().enumerate() {
                let key = (a << 32, b);
                if add {
                    let left = *index.entry(key, || n);
                    prop_assert_eq!(left, *map.entry(key).or_insert(n));
                } else {
                    prop_assert_eq!(index.remove(key), map.remove(&key));
                }
                prop_assert_eq!(index.is_empty(), map.is_empty());
                for a in 0..40 {
                    prop_assert_eq!(index.find((a << 32, b)), map.get(&(a << 32, b)));
                }
            }
            let mut keys = index.keys();
            keys.sort_unstable();
            prop_assert!(keys.iter().eq(map.keys()));
        }
    }
}
