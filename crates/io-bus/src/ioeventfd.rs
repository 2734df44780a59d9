//! Doorbells: writes that signal an eventfd instead of leaving the vCPU
//! (KVM API document, KVM_IOEVENTFD).
//!
//! Invariant: at most one doorbell matches any write, because assigning a second one that could match the same write is
//! refused. A lookup is one probe of a hash table by address and, with datamatch, another one by value. So thousands of
//! doorbells, even at one address, cost no more than one.

use std::sync::Arc;

use crate::{
    Space,
    index::{Index, IndexKey},
};

/// What a doorbell listens to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DoorbellSpec {
    /// Ports or MMIO.
    pub space: Space,
    /// Address, matched exactly.
    pub address: u64,
    /// Length of the write in bytes: 1, 2, 4 or 8; 0 matches any.
    pub len: u32,
    /// The value that must be written; `None` matches any.
    pub datamatch: Option<u64>,
}

/// Why a doorbell was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DoorbellError {
    /// EINVAL: an invalid length, an address that wraps, or datamatch without a length.
    #[error("no doorbell can be like that")]
    Invalid,
    /// EEXIST: some write would ring both doorbells.
    #[error("another doorbell listens to the same write")]
    Exists,
    /// ENOENT: there is no such doorbell with this target.
    #[error("there is no such doorbell")]
    NotFound,
}

/// All doorbells of one address.
#[derive(Clone, Debug)]
struct DoorbellsAt<T> {
    /// The doorbell for any length, which is then the only one at the address.
    any_len: Option<T>,
    /// The doorbells for any value, for lengths 1, 2, 4 and 8.
    any_value: [Option<T>; 4],
    /// The doorbells for one value, by length and value.
    by_value: Index<T>,
    /// Number of doorbells in `by_value` for lengths 1, 2, 4 and 8.
    values: [u32; 4],
}

impl<T> DoorbellsAt<T> {
    fn new() -> Self {
        Self {
            any_len: None,
            any_value: [const { None }; 4],
            by_value: Index::default(),
            values: [0; 4],
        }
    }
    fn is_empty(&self) -> bool {
        self.any_len.is_none()
            && self.any_value.iter().all(Option::is_none)
            && self.by_value.is_empty()
    }
}

/// The doorbells of a VM; a doorbell signals a `T`.
#[derive(Clone, Debug)]
pub struct Doorbells<T> {
    // Earlier versions of the table share these until they change.
    ports: Index<Arc<DoorbellsAt<T>>>,
    mmio: Index<Arc<DoorbellsAt<T>>>,
}

impl<T> Default for Doorbells<T> {
    fn default() -> Self {
        Self {
            ports: Index::default(),
            mmio: Index::default(),
        }
    }
}

/// Returns the index of a length in `any_value`.
const fn len_index(len: u32) -> Option<usize> {
    match len {
        1 => Some(0),
        2 => Some(1),
        4 => Some(2),
        8 => Some(3),
        _ => None,
    }
}

impl DoorbellSpec {
    /// Checks whether such a doorbell can exist.
    ///
    /// # Errors
    /// [`DoorbellError::Invalid`].
    pub fn check(&self) -> Result<(), DoorbellError> {
        let len_ok = self.len == 0 || len_index(self.len).is_some();
        let wraps = self.address.checked_add(u64::from(self.len)).is_none();
        if !len_ok || wraps || self.len == 0 && self.datamatch.is_some() {
            return Err(DoorbellError::Invalid);
        }
        Ok(())
    }
    /// Returns the address as a key.
    const fn site(&self) -> IndexKey {
        (self.address, 0)
    }
}

impl<T: Clone> Doorbells<T> {
    /// KVM_IOEVENTFD.
    pub fn assign(&mut self, spec: DoorbellSpec, target: T) -> Result<(), DoorbellError> {
        spec.check()?;
        let table = self.table_mut(spec.space);
        if let Some(site) = table.find(spec.site()) {
            let taken = site.any_len.is_some()
                || match (len_index(spec.len), spec.datamatch) {
                    // An address without doorbells has no entry.
                    (None, _) => true,
                    (Some(i), None) => site.any_value[i].is_some() || site.values[i] != 0,
                    (Some(i), Some(value)) => {
                        site.any_value[i].is_some()
                            || site.by_value.find((value, spec.len)).is_some()
                    }
                };
            if taken {
                return Err(DoorbellError::Exists);
            }
        }
        let site = Arc::make_mut(table.entry(spec.site(), || Arc::new(DoorbellsAt::new())));
        match (len_index(spec.len), spec.datamatch) {
            (None, _) => site.any_len = Some(target),
            (Some(i), None) => site.any_value[i] = Some(target),
            (Some(i), Some(value)) => {
                site.by_value.entry((value, spec.len), || target);
                site.values[i] += 1;
            }
        }
        Ok(())
    }

    /// KVM_IOEVENTFD with KVM_IOEVENTFD_FLAG_DEASSIGN: `is_target` says whether a doorbell signals the eventfd that was
    /// named.
    ///
    /// # Errors
    /// [`DoorbellError::NotFound`], also for a doorbell that cannot exist, as in KVM.
    pub fn deassign(
        &mut self,
        spec: DoorbellSpec,
        is_target: impl FnOnce(&T) -> bool,
    ) -> Result<T, DoorbellError> {
        let table = self.table_mut(spec.space);
        let site = table.find_mut(spec.site()).ok_or(DoorbellError::NotFound)?;
        let site = Arc::make_mut(site);
        let target = match (len_index(spec.len), spec.datamatch) {
            (None, None) if spec.len == 0 => site.any_len.take_if(|t| is_target(t)),
            (None, _) => None,
            (Some(i), None) => site.any_value[i].take_if(|t| is_target(t)),
            (Some(i), Some(value)) => {
                let key = (value, spec.len);
                let found = site.by_value.find(key).is_some_and(is_target);
                let target = found.then(|| site.by_value.remove(key)).flatten();
                site.values[i] -= u32::from(target.is_some());
                target
            }
        };
        if site.is_empty() {
            table.remove(spec.site());
        }
        target.ok_or(DoorbellError::NotFound)
    }

    /// Removes all doorbells whose target satisfies `which`.
    pub fn remove(&mut self, mut which: impl FnMut(&T) -> bool) {
        for table in [&mut self.ports, &mut self.mmio] {
            for key in table.keys() {
                let Some(site) = table.find_mut(key).map(Arc::make_mut) else {
                    continue;
                };
                site.any_len.take_if(|t| which(t));
                for i in 0..4 {
                    site.any_value[i].take_if(|t| which(t));
                }
                for (value, len) in site.by_value.keys() {
                    let found = site.by_value.find((value, len)).is_some_and(&mut which);
                    if found && site.by_value.remove((value, len)).is_some() {
                        site.values[len_index(len).unwrap_or(0)] -= 1;
                    }
                }
                if site.is_empty() {
                    table.remove(key);
                }
            }
        }
    }

    const fn table_mut(&mut self, space: Space) -> &mut Index<Arc<DoorbellsAt<T>>> {
        match space {
            Space::Pio => &mut self.ports,
            Space::Mmio => &mut self.mmio,
        }
    }
}

impl<T> Doorbells<T> {
    /// Returns the doorbell that a write of the low `len` bytes of `value` rings.
    #[inline]
    pub fn find(&self, space: Space, address: u64, len: u32, value: u64) -> Option<&T> {
        let table = match space {
            Space::Pio => &self.ports,
            Space::Mmio => &self.mmio,
        };
        let site = table.find((address, 0))?;
        if site.any_len.is_some() {
            return site.any_len.as_ref();
        }
        let any = &site.any_value[len_index(len)?];
        if any.is_some() {
            return any.as_ref();
        }
        let value = value & (u64::MAX >> (64 - 8 * len.clamp(1, 8)));
        site.by_value.find((value, len))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn spec(address: u64, len: u32, datamatch: Option<u64>) -> DoorbellSpec {
        DoorbellSpec {
            space: Space::Mmio,
            address,
            len,
            datamatch,
        }
    }

    #[test]
    fn refusals() {
        let mut d = Doorbells::default();
        for bad in [
            spec(0, 3, None),
            spec(0, 16, None),
            spec(0, 0, Some(1)),
            spec(u64::MAX, 2, None),
        ] {
            assert_eq!(d.assign(bad, ()), Err(DoorbellError::Invalid), "{bad:?}");
        }
        let pio = DoorbellSpec {
            space: Space::Pio,
            ..spec(8, 4, None)
        };
        d.assign(pio, ()).unwrap();
        d.assign(spec(8, 4, None), ()).unwrap();
        assert_eq!(
            d.deassign(spec(8, 2, None), |()| true),
            Err(DoorbellError::NotFound)
        );
        assert_eq!(d.deassign(pio, |()| false), Err(DoorbellError::NotFound));
        d.deassign(pio, |()| true).unwrap();
        assert_eq!(d.deassign(pio, |()| true), Err(DoorbellError::NotFound));
        // A doorbell that cannot exist is not found.
        for bad in [spec(8, 3, None), spec(8, 0, Some(0)), spec(8, 16, None)] {
            assert_eq!(d.deassign(bad, |()| true), Err(DoorbellError::NotFound));
        }
        assert!(d.find(Space::Mmio, 8, 4, 0).is_some() && d.find(Space::Pio, 8, 4, 0).is_none());
    }

    /// Rows: the first doorbell, the second one, and whether the second is refused.
    #[test]
    fn collisions() {
        let n = None;
        for (a, b, collides) in [
            ((4, n), (4, n), true),
            ((4, n), (4, Some(1)), true),
            ((4, Some(1)), (4, n), true),
            ((4, Some(1)), (4, Some(1)), true),
            ((4, Some(1)), (4, Some(2)), false),
            ((4, n), (2, n), false),
            ((4, Some(1)), (2, Some(1)), false),
            ((0, n), (4, n), true),
            ((4, Some(1)), (0, n), true),
            ((0, n), (0, n), true),
        ] {
            let mut d = Doorbells::default();
            d.assign(spec(8, a.0, a.1), ()).unwrap();
            let result = d.assign(spec(8, b.0, b.1), ());
            assert_eq!(
                result == Err(DoorbellError::Exists),
                collides,
                "{a:?} {b:?}"
            );
        }
    }

    #[test]
    fn values_are_compared_at_the_length_of_the_write() {
        let mut d = Doorbells::default();
        d.assign(spec(8, 2, Some(0x1234)), 'a').unwrap();
        d.assign(spec(8, 1, Some(0x1234)), 'b').unwrap();
        assert_eq!(d.find(Space::Mmio, 8, 2, 0xffff_1234), Some(&'a'));
        assert_eq!(d.find(Space::Mmio, 8, 1, 0x1234), None, "can never match");
        assert_eq!(d.find(Space::Mmio, 9, 2, 0x1234), None);
    }

    #[test]
    fn removal_by_target() {
        let mut d = Doorbells::default();
        for n in 0..100 {
            d.assign(spec(n % 7 * 8, 4, Some(n)), n % 2).unwrap();
        }
        d.assign(spec(1000, 0, None), 1).unwrap();
        d.remove(|t| *t == 1);
        for n in 0..100 {
            let left = d.find(Space::Mmio, n % 7 * 8, 4, n);
            assert_eq!(left, (n % 2 == 0).then_some(&0), "{n}");
        }
        assert_eq!(d.find(Space::Mmio, 1000, 1, 0), None);
        d.remove(|_| true);
        d.assign(spec(0, 0, None), 5).unwrap();
    }

    proptest! {
        /// KVM's documented rule, applied to a plain list.
        #[test]
        fn same_as_a_list(ops in prop::collection::vec(
            (any::<bool>(), 0u64..3, prop::sample::select(vec![0u32, 1, 2, 4, 8]), prop::option::of(0u64..3)), 0..80)) {
            let mut d = Doorbells::default();
            let mut list: Vec<(DoorbellSpec, usize)> = Vec::new();
            for (n, (add, address, len, datamatch)) in ops.into_iter().enumerate() {
                let s = spec(address, len, if len == 0 { None } else { datamatch });
                if add {
                    let hit = list.iter().any(|(o, _)| o.address == s.address
                        && (o.len == 0 || s.len == 0 || o.len == s.len
                            && (o.datamatch.is_none() || s.datamatch.is_none() || o.datamatch == s.datamatch)));
                    prop_assert_eq!(d.assign(s, n).is_err(), hit);
                    if !hit { list.push((s, n)); }
                } else {
                    let at = list.iter().position(|(o, _)| *o == s);
                    prop_assert_eq!(d.deassign(s, |_| true).ok(), at.map(|i| list.remove(i).1));
                }
                for len in [1, 2, 4, 8] {
                    for value in 0..4 {
                        let want = list.iter().find(|(o, _)| o.address == address
                            && (o.len == 0 || o.len == len && o.datamatch.is_none_or(|v| v == value)));
                        prop_assert_eq!(d.find(Space::Mmio, address, len, value), want.map(|w| &w.1));
                    }
                }
            }
        }
    }
}
