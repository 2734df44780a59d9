//! Coalesced I/O: writes that go into a ring which the VMM drains at its next
//! exit (KVM API document, KVM_REGISTER_COALESCED_MMIO).
//!
//! The ring has one producer side, which the caller serialises, and one consumer, the VMM. It counts as full when one
//! slot is left; a write is then an exit.

use crate::Space;

/// Number of entries in the ring's page (KVM_COALESCED_MMIO_MAX): the page has two indices besides.
pub const RING_ENTRIES: u32 = (4096 - 8) / 24;

/// Content of `struct kvm_coalesced_mmio`, with its layout.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct RingEntry {
    /// gpa or port.
    pub phys_addr: u64,
    /// Length in bytes.
    pub len: u32,
    /// 1 for a port.
    pub pio: u32,
    /// Data, in the low bytes.
    pub data: [u8; 8],
}

impl RingEntry {
    /// The entry of one write.
    pub const fn new(space: Space, address: u64, len: u32, value: u64) -> Self {
        Self {
            phys_addr: address,
            len,
            pio: matches!(space, Space::Pio) as u32,
            data: value.to_le_bytes(),
        }
    }
}

/// The ring's memory. The VMM has mapped it, so its content may be anything.
pub trait RingMemory {
    /// Index of the oldest entry; written by the VMM.
    fn first(&self) -> u32;
    /// Index of the next free entry.
    fn last(&self) -> u32;
    /// Stores an entry; `index` is below [`RING_ENTRIES`].
    fn store(&mut self, index: u32, entry: RingEntry);
    /// Stores `last`, after all earlier stores (release).
    fn publish(&mut self, last: u32);
}

/// Appends a write; false if the ring is full or its indices are invalid.
pub fn push(ring: &mut (impl RingMemory + ?Sized), entry: RingEntry) -> bool {
    let last = ring.last();
    if last >= RING_ENTRIES {
        return false;
    }
    let next = (last + 1) % RING_ENTRIES;
    if next == ring.first() {
        return false;
    }
    ring.store(last, entry);
    ring.publish(next);
    true
}

/// The zones whose writes are coalesced. They may overlap.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Zones {
    zones: Vec<Zone>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Zone {
    space: Space,
    address: u64,
    size: u64,
}

impl Zone {
    fn covers(&self, space: Space, address: u64, size: u64) -> bool {
        let (Some(end), Some(offset)) =
            (address.checked_add(size), address.checked_sub(self.address))
        else {
            return false;
        };
        self.space == space && offset <= self.size && end - self.address <= self.size
    }
}

impl Zones {
    /// KVM_REGISTER_COALESCED_MMIO.
    pub fn register(&mut self, space: Space, address: u64, size: u32) {
        self.zones.push(Zone {
            space,
            address,
            size: size.into(),
        });
    }

    /// KVM_UNREGISTER_COALESCED_MMIO. As in KVM, every zone that contains the given one is removed, and it is no error
    /// if there is none.
    pub fn unregister(&mut self, space: Space, address: u64, size: u32) {
        self.zones
            .retain(|z| !z.covers(space, address, size.into()));
    }

    /// True if a write of `len` bytes lies in one zone.
    #[inline]
    pub fn covers(&self, space: Space, address: u64, len: u32) -> bool {
        self.zones
            .iter()
            .any(|z| z.covers(space, address, len.into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Ring {
        first: u32,
        last: u32,
        entries: Vec<RingEntry>,
    }
    impl RingMemory for Ring {
        fn first(&self) -> u32 {
            self.first
        }
        fn last(&self) -> u32 {
            self.last
        }
        fn store(&mut self, index: u32, entry: RingEntry) {
            self.entries[index as usize] = entry;
        }
        fn publish(&mut self, last: u32) {
            self.last = last;
        }
    }

    fn ring() -> Ring {
        Ring {
            first: 0,
            last: 0,
            entries: vec![RingEntry::default(); RING_ENTRIES as usize],
        }
    }

    #[test]
    fn ring_keeps_order_and_one_slot_free() {
        let mut r = ring();
        let entry = |n| RingEntry::new(Space::Pio, 0x70, 1, n);
        for n in 0..169 {
            assert!(push(&mut r, entry(n)), "{n}");
        }
        assert!(!push(&mut r, entry(0)));
        r.first = 1;
        assert!(push(&mut r, entry(200)));
        assert_eq!((r.last, r.entries[169]), (0, entry(200)));
        assert!(!push(&mut r, entry(0)));
        assert_eq!(r.entries[5], entry(5));
    }

    #[test]
    fn a_ring_full_of_nonsense_is_not_written() {
        for last in [170, u32::MAX] {
            let mut r = ring();
            r.last = last;
            assert!(!push(&mut r, RingEntry::default()));
        }
        let mut r = ring();
        r.first = u32::MAX;
        assert!(push(&mut r, RingEntry::default()));
    }

    #[test]
    fn zones() {
        let mut z = Zones::default();
        z.register(Space::Mmio, 0x1000, 0x100);
        z.register(Space::Mmio, 0x1080, 0x100);
        for (address, len, want) in [
            (0xfff, 1, false),
            (0x1000, 8, true),
            (0x10ff, 1, true),
            (0x117c, 4, true),
            (0x117d, 4, false),
            (u64::MAX, 4, false),
        ] {
            assert_eq!(z.covers(Space::Mmio, address, len), want, "{address:#x}");
        }
        assert!(!z.covers(Space::Pio, 0x1000, 1));
        z.unregister(Space::Mmio, 0x1000, 0x101);
        assert!(z.covers(Space::Mmio, 0x1000, 1), "no zone contains that");
        z.unregister(Space::Mmio, 0x1010, 4);
        assert!(!z.covers(Space::Mmio, 0x1000, 1) && z.covers(Space::Mmio, 0x1080, 1));
    }

    #[test]
    fn entry_has_the_abi_layout() {
        use kvm_bindings::kvm_coalesced_mmio as abi;
        assert_eq!(size_of::<RingEntry>(), size_of::<abi>());
        assert_eq!(
            core::mem::offset_of!(RingEntry, data),
            core::mem::offset_of!(abi, data)
        );
        assert_eq!(RING_ENTRIES, 170);
    }
}
