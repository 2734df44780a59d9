//! Address ranges and their handlers.

use core::ops::Range;

/// The range overlaps an existing one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the range from {start:#x} to {end:#x} overlaps another")]
pub struct Overlap {
    /// First address.
    pub start: u64,
    /// Address after the last.
    pub end: u64,
}

/// Disjoint ranges of one space, sorted by address. `H` names a handler.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ranges<H> {
    entries: Vec<(Range<u64>, H)>,
}

impl<H> Default for Ranges<H> {
    fn default() -> Self {
        Self {
            entries: Vec::new(),
        }
    }
}

impl<H: Copy> Ranges<H> {
    /// Adds a range. An empty range has no effect.
    pub fn insert(&mut self, range: Range<u64>, handler: H) -> Result<(), Overlap> {
        if range.is_empty() {
            return Ok(());
        }
        let at = self.entries.partition_point(|(r, _)| r.end <= range.start);
        if self
            .entries
            .get(at)
            .is_some_and(|(r, _)| r.start < range.end)
        {
            let Range { start, end } = range;
            return Err(Overlap { start, end });
        }
        self.entries.insert(at, (range, handler));
        Ok(())
    }

    /// Removes the ranges whose handler satisfies `which`.
    pub fn remove(&mut self, mut which: impl FnMut(H) -> bool) {
        self.entries.retain(|(_, h)| !which(*h));
    }

    /// Returns the handler of all `len` bytes at `address`, and the offset in its range.
    #[inline]
    pub fn find(&self, address: u64, len: u64) -> Option<(H, u64)> {
        let at = self.entries.partition_point(|(r, _)| r.end <= address);
        let (range, handler) = self.entries.get(at)?;
        let offset = address.checked_sub(range.start)?;
        (address.checked_add(len)? <= range.end).then_some((*handler, offset))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn finds_whole_accesses_only() {
        let mut r = Ranges::default();
        r.insert(0x40..0x44, 'p').unwrap();
        r.insert(0x20..0x22, 'i').unwrap();
        r.insert(u64::MAX - 4..u64::MAX, 'e').unwrap();
        for (address, len, want) in [
            (0x1f, 1, None),
            (0x20, 1, Some(('i', 0))),
            (0x21, 1, Some(('i', 1))),
            (0x21, 2, None),
            (0x1f, 2, None),
            (0x22, 1, None),
            (0x42, 2, Some(('p', 2))),
            (0x43, 2, None),
            (u64::MAX - 4, 4, Some(('e', 0))),
            (u64::MAX - 1, 8, None),
        ] {
            assert_eq!(r.find(address, len), want, "{address:#x}+{len}");
        }
    }

    #[test]
    fn overlaps_are_refused() {
        let mut r = Ranges::default();
        r.insert(10..20, 0).unwrap();
        for range in [9..11, 19..21, 12..13, 5..25, 10..20] {
            assert!(r.insert(range.clone(), 1).is_err(), "{range:?}");
        }
        r.insert(20..21, 2).unwrap();
        r.insert(9..10, 3).unwrap();
        r.remove(|h| h == 0);
        r.insert(10..20, 4).unwrap();
        assert_eq!(r.find(15, 1), Some((4, 5)));
    }

    proptest! {
        #[test]
        fn same_as_a_linear_search(
            ranges in prop::collection::vec((0u64..200, 1u64..20), 0..20),
            accesses in prop::collection::vec((0u64..220, 1u64..9), 0..50),
        ) {
            let (mut table, mut list) = (Ranges::default(), Vec::<(u64, u64, usize)>::new());
            for (i, (start, len)) in ranges.into_iter().enumerate() {
                let free = list.iter().all(|&(s, e, _)| e <= start || start + len <= s);
                prop_assert_eq!(table.insert(start..start + len, i).is_ok(), free);
                if free {
                    list.push((start, start + len, i));
                }
            }
            for (a, n) in accesses {
                let want = list.iter().find(|&&(s, e, _)| s <= a && a + n <= e);
                prop_assert_eq!(table.find(a, n), want.map(|&(s, _, i)| (i, a - s)));
            }
        }
    }
}
