//! [`IoBus`]: the doorbells, chips and coalesced zones of a VM, asked in that order.
//!
//! A doorbell is asked first: it matches one address exactly and the VMM put it
//! there on purpose. Reads of a doorbell's address go to the VMM, as in KVM.

use core::ops::Range;

use crate::{Doorbells, Overlap, Ranges, Space, Zones};

/// What handles a write.
#[derive(Debug, PartialEq, Eq)]
pub enum WriteAnswer<'a, H, T> {
    /// A doorbell: signal this target. The write is then done.
    Doorbell(&'a T),
    /// This chip, at this offset in its range.
    Chip(H, u64),
    /// A coalesced zone: append the write to the ring; if that is full, exit.
    Coalesce,
    /// The VMM.
    Exit,
}

/// What handles a read.
#[derive(Debug, PartialEq, Eq)]
pub enum ReadAnswer<H> {
    /// This chip, at this offset in its range.
    Chip(H, u64),
    /// The VMM.
    Exit,
}

/// The table. `H` names a chip, `T` is what a doorbell signals.
#[derive(Clone, Debug)]
pub struct IoBus<H, T> {
    ports: Ranges<H>,
    mmio: Ranges<H>,
    /// Ioeventfds.
    pub doorbells: Doorbells<T>,
    /// Coalesced zones.
    pub zones: Zones,
}

impl<H, T> Default for IoBus<H, T> {
    fn default() -> Self {
        Self {
            ports: Ranges::default(),
            mmio: Ranges::default(),
            doorbells: Doorbells::default(),
            zones: Zones::default(),
        }
    }
}

impl<H: Copy, T> IoBus<H, T> {
    /// Registers a chip's range.
    pub fn insert(&mut self, space: Space, range: Range<u64>, chip: H) -> Result<(), Overlap> {
        self.ranges_mut(space).insert(range, chip)
    }

    /// Removes a chip's ranges.
    pub fn remove(&mut self, space: Space, which: impl FnMut(H) -> bool) {
        self.ranges_mut(space).remove(which);
    }

    /// Returns what handles a write of the low `len` bytes of `value`.
    #[inline]
    pub fn write(&self, space: Space, address: u64, len: u32, value: u64) -> WriteAnswer<'_, H, T> {
        if let Some(target) = self.doorbells.find(space, address, len, value) {
            WriteAnswer::Doorbell(target)
        } else if let Some((chip, offset)) = self.ranges(space).find(address, len.into()) {
            WriteAnswer::Chip(chip, offset)
        } else if self.zones.covers(space, address, len) {
            WriteAnswer::Coalesce
        } else {
            WriteAnswer::Exit
        }
    }

    /// Returns what handles a read.
    #[inline]
    pub fn read(&self, space: Space, address: u64, len: u32) -> ReadAnswer<H> {
        match self.ranges(space).find(address, len.into()) {
            Some((chip, offset)) => ReadAnswer::Chip(chip, offset),
            None => ReadAnswer::Exit,
        }
    }

    const fn ranges(&self, space: Space) -> &Ranges<H> {
        match space {
            Space::Pio => &self.ports,
            Space::Mmio => &self.mmio,
        }
    }
    const fn ranges_mut(&mut self, space: Space) -> &mut Ranges<H> {
        match space {
            Space::Pio => &mut self.ports,
            Space::Mmio => &mut self.mmio,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DoorbellSpec;

    #[test]
    fn order_of_answers() {
        let mut bus = IoBus::default();
        bus.insert(Space::Pio, 0x20..0x22, "pic").unwrap();
        bus.zones.register(Space::Pio, 0x20, 0x20);
        let spec = DoorbellSpec {
            space: Space::Pio,
            address: 0x21,
            len: 1,
            datamatch: Some(7),
        };
        bus.doorbells.assign(spec, 'd').unwrap();
        for (address, value, want) in [
            (0x21, 7, WriteAnswer::Doorbell(&'d')),
            (0x21, 8, WriteAnswer::Chip("pic", 1)),
            (0x22, 0, WriteAnswer::Coalesce),
            (0x40, 0, WriteAnswer::Exit),
        ] {
            assert_eq!(bus.write(Space::Pio, address, 1, value), want);
        }
        assert_eq!(bus.write(Space::Mmio, 0x21, 1, 7), WriteAnswer::Exit);
        assert_eq!(bus.read(Space::Pio, 0x21, 1), ReadAnswer::Chip("pic", 1));
        assert_eq!(bus.read(Space::Pio, 0x22, 1), ReadAnswer::Exit);
    }
}
