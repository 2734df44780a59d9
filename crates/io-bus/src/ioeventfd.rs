//! Doorbells: writes that signal an eventfd instead of leaving the vCPU
//! (KVM API document, KVM_IOEVENTFD).
//!
//! Invariant: at most one doorbell matches any one write, because assigning a
//! second one that could match the same write is refused. Lookup is a binary
//! search by address and another by datamatch, so thousands of doorbells, also
//! at one address, cost about as much as ten.

use crate::Space;

/// What a doorbell listens to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DoorbellSpec {
    /// Ports or MMIO.
    pub space: Space,
    /// Address, matched exactly.
    pub address: u64,
    /// Length of the write: 1, 2, 4 or 8; 0 is any.
    pub len: u32,
    /// The value that has to be written; `None` is any.
    pub datamatch: Option<u64>,
}

/// Why a doorbell was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DoorbellError {
    /// EINVAL: the length, an address that wraps, or datamatch without a length.
    #[error("no doorbell can be like that")]
    Invalid,
    /// EEXIST: some write would ring both.
    #[error("another doorbell listens to the same write")]
    Exists,
    /// ENOENT: there is no such doorbell with this target.
    #[error("there is no such doorbell")]
    NotFound,
}

/// All doorbells of one address.
#[derive(Clone, Debug)]
struct Site<T> {
    /// Length 0: then it is the only one here.
    any_len: Option<T>,
    /// Any value, for lengths 1, 2, 4 and 8.
    any_value: [Option<T>; 4],
    /// By length and value, sorted.
    by_value: Vec<((u32, u64), T)>,
}

impl<T> Site<T> {
    const fn new() -> Self {
        Self {
            any_len: None,
            any_value: [const { None }; 4],
            by_value: Vec::new(),
        }
    }
    fn is_empty(&self) -> bool {
        self.any_len.is_none()
            && self.any_value.iter().all(Option::is_none)
            && self.by_value.is_empty()
    }
    fn has_len(&self, len: u32) -> bool {
        let at = self.by_value.partition_point(|(k, _)| k.0 < len);
        self.by_value.get(at).is_some_and(|(k, _)| k.0 == len)
    }
}

/// The doorbells of one space. The addresses are kept apart from what is there,
/// so that a search touches few cache lines.
#[derive(Clone, Debug)]
struct Table<T> {
    /// Sorted.
    addresses: Vec<u64>,
    /// What is at each address.
    sites: Vec<Site<T>>,
}

/// The doorbells of a VM; `T` is what one signals.
#[derive(Clone, Debug)]
pub struct Doorbells<T> {
    ports: Table<T>,
    mmio: Table<T>,
}

impl<T> Default for Doorbells<T> {
    fn default() -> Self {
        let table = || Table {
            addresses: Vec::new(),
            sites: Vec::new(),
        };
        Self {
            ports: table(),
            mmio: table(),
        }
    }
}

/// Index of a length in `any_value`.
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
    fn check(&self) -> Result<(), DoorbellError> {
        let len_ok = self.len == 0 || len_index(self.len).is_some();
        let wraps = self.address.checked_add(u64::from(self.len)).is_none();
        if !len_ok || wraps || self.len == 0 && self.datamatch.is_some() {
            return Err(DoorbellError::Invalid);
        }
        Ok(())
    }
}

impl<T> Doorbells<T> {
    /// KVM_IOEVENTFD.
    pub fn assign(&mut self, spec: DoorbellSpec, target: T) -> Result<(), DoorbellError> {
        spec.check()?;
        let table = self.table_mut(spec.space);
        let found = table.addresses.binary_search(&spec.address);
        if let Ok(at) = found {
            let site = &table.sites[at];
            let taken = site.any_len.is_some()
                || match (len_index(spec.len), spec.datamatch) {
                    // There are no empty sites.
                    (None, _) => true,
                    (Some(i), None) => site.any_value[i].is_some() || site.has_len(spec.len),
                    (Some(i), Some(value)) => {
                        site.any_value[i].is_some()
                            || site
                                .by_value
                                .binary_search_by_key(&(spec.len, value), |e| e.0)
                                .is_ok()
                    }
                };
            if taken {
                return Err(DoorbellError::Exists);
            }
        }
        let at = found.unwrap_or_else(|at| {
            table.addresses.insert(at, spec.address);
            table.sites.insert(at, Site::new());
            at
        });
        let site = &mut table.sites[at];
        match (len_index(spec.len), spec.datamatch) {
            (None, _) => site.any_len = Some(target),
            (Some(i), None) => site.any_value[i] = Some(target),
            (Some(_), Some(value)) => {
                let entry = (spec.len, value);
                let at = site.by_value.partition_point(|e| e.0 < entry);
                site.by_value.insert(at, (entry, target));
            }
        }
        Ok(())
    }

    /// KVM_IOEVENTFD with KVM_IOEVENTFD_FLAG_DEASSIGN: `is_target` tells whether
    /// the doorbell signals the eventfd that was named.
    pub fn deassign(
        &mut self,
        spec: DoorbellSpec,
        is_target: impl FnOnce(&T) -> bool,
    ) -> Result<T, DoorbellError> {
        spec.check()?;
        let table = self.table_mut(spec.space);
        let at = table
            .addresses
            .binary_search(&spec.address)
            .map_err(|_| DoorbellError::NotFound)?;
        let site = &mut table.sites[at];
        let slot = match (len_index(spec.len), spec.datamatch) {
            (None, _) => Some(&mut site.any_len),
            (Some(i), None) => Some(&mut site.any_value[i]),
            (Some(_), Some(_)) => None,
        };
        let target = if let Some(slot) = slot {
            slot.take_if(|t| is_target(t))
        } else {
            let entry = (spec.len, spec.datamatch.unwrap_or(0));
            match site.by_value.binary_search_by_key(&entry, |e| e.0) {
                Ok(i) if is_target(&site.by_value[i].1) => Some(site.by_value.remove(i).1),
                _ => None,
            }
        };
        if site.is_empty() {
            table.addresses.remove(at);
            table.sites.remove(at);
        }
        target.ok_or(DoorbellError::NotFound)
    }

    /// The doorbell that a write of the low `len` bytes of `value` rings.
    #[inline]
    pub fn find(&self, space: Space, address: u64, len: u32, value: u64) -> Option<&T> {
        let table = match space {
            Space::Pio => &self.ports,
            Space::Mmio => &self.mmio,
        };
        let at = table.addresses.binary_search(&address).ok()?;
        let site = &table.sites[at];
        if site.any_len.is_some() {
            return site.any_len.as_ref();
        }
        let any = &site.any_value[len_index(len)?];
        if any.is_some() {
            return any.as_ref();
        }
        let value = value & (u64::MAX >> (64 - 8 * len.clamp(1, 8)));
        let i = site
            .by_value
            .binary_search_by_key(&(len, value), |e| e.0)
            .ok()?;
        Some(&site.by_value[i].1)
    }

    const fn table_mut(&mut self, space: Space) -> &mut Table<T> {
        match space {
            Space::Pio => &mut self.ports,
            Space::Mmio => &mut self.mmio,
        }
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
        assert!(d.find(Space::Mmio, 8, 4, 0).is_some() && d.find(Space::Pio, 8, 4, 0).is_none());
    }

    /// First assigned, then assigned: does the second collide?
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

    proptest! {
        /// KVM's documented rule, applied to a list.
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
