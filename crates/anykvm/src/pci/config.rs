//! The 256 bytes of one function's configuration space: the values, the bits that the guest may change, and the list of
//! capabilities (PCI Local Bus 3.0, chapter 6).

use crate::fields::{Malformed, Reader, Writer};

/// Offsets and bits of the header of type 0.
pub(crate) mod spec {
    pub(crate) const COMMAND: u16 = 0x04;
    pub(crate) const COMMAND_MEMORY: u16 = 1 << 1;
    pub(crate) const COMMAND_MASTER: u16 = 1 << 2;
    pub(crate) const COMMAND_INTX_OFF: u16 = 1 << 10;
    pub(crate) const STATUS: u16 = 0x06;
    pub(crate) const STATUS_INTX: u8 = 1 << 3;
    pub(crate) const STATUS_CAPABILITIES: u8 = 1 << 4;
    pub(crate) const BAR0: u16 = 0x10;
    pub(crate) const SUBSYSTEM: u16 = 0x2c;
    pub(crate) const CAPABILITIES: u16 = 0x34;
    pub(crate) const INTERRUPT_LINE: u16 = 0x3c;
    pub(crate) const INTERRUPT_PIN: u16 = 0x3d;
    pub(crate) const FIRST_CAPABILITY: u8 = 0x40;
}

/// The identity of a function.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Identity {
    /// Vendor.
    pub(crate) vendor: u16,
    /// Device.
    pub(crate) device: u16,
    /// Base class, sub-class and programming interface, 24 bits.
    pub(crate) class: u32,
    /// Revision.
    pub(crate) revision: u8,
}

/// Values, and the bits that the guest may change.
#[derive(Debug)]
pub(crate) struct ConfigSpace {
    bytes: [u8; 256],
    writable: [u8; 256],
    next_capability: u8,
    /// Offset of the byte that links to the next capability.
    link: u16,
}

impl ConfigSpace {
    /// Makes a header of type 0 without BARs and capabilities.
    pub(crate) fn new(identity: Identity) -> Self {
        let mut space = Self {
            bytes: [0; 256],
            writable: [0; 256],
            next_capability: spec::FIRST_CAPABILITY,
            link: spec::CAPABILITIES,
        };
        space.set(0, &identity.vendor.to_le_bytes());
        space.set(2, &identity.device.to_le_bytes());
        space.set(8, &[identity.revision]);
        let [interface, sub_class, class, _] = identity.class.to_le_bytes();
        space.set(9, &[interface, sub_class, class]);
        let command = spec::COMMAND_MEMORY | spec::COMMAND_MASTER | spec::COMMAND_INTX_OFF;
        space.allow(spec::COMMAND, &command.to_le_bytes());
        space.allow(spec::INTERRUPT_LINE, &[0xff]);
        space
    }

    /// Stores bytes, whatever the guest may change.
    pub(crate) fn set(&mut self, at: u16, bytes: &[u8]) {
        for (to, from) in self.bytes.iter_mut().skip(usize::from(at)).zip(bytes) {
            *to = *from;
        }
    }

    /// Lets the guest change the bits of `mask`.
    pub(crate) fn allow(&mut self, at: u16, mask: &[u8]) {
        for (to, from) in self.writable.iter_mut().skip(usize::from(at)).zip(mask) {
            *to = *from;
        }
    }

    /// Adds a 32-bit memory BAR 0 of `len` bytes (a power of two), at `base` as firmware would put it.
    pub(crate) fn set_bar0(&mut self, base: u32, len: u32) {
        self.set(spec::BAR0, &base.to_le_bytes());
        self.allow(spec::BAR0, &(!len.wrapping_sub(1)).to_le_bytes());
        self.set(
            spec::COMMAND,
            &(spec::COMMAND_MEMORY | spec::COMMAND_MASTER).to_le_bytes(),
        );
    }

    /// Adds a capability: its id, and the bytes behind the link. Returns its offset.
    pub(crate) fn add_capability(&mut self, id: u8, body: &[u8]) -> u16 {
        let at = u16::from(self.next_capability);
        self.set(at, &[id, 0]);
        self.set(at + 2, body);
        self.set(self.link, &[self.next_capability]);
        self.set(spec::STATUS, &[spec::STATUS_CAPABILITIES]);
        self.link = at + 1;
        // Capabilities begin at double words. There are so few that they fit.
        let len = u8::try_from((body.len() + 2).next_multiple_of(4)).unwrap_or(u8::MAX);
        self.next_capability = self.next_capability.saturating_add(len);
        at
    }

    /// Reads bytes for the guest; behind the end there are zeros.
    pub(crate) fn read(&self, at: u16, data: &mut [u8]) {
        for (i, to) in data.iter_mut().enumerate() {
            *to = self.byte(usize::from(at).saturating_add(i));
        }
    }

    /// Writes the guest's bytes, as far as it may change them.
    pub(crate) fn write(&mut self, at: u16, data: &[u8]) {
        let places = self.bytes.iter_mut().zip(&self.writable);
        for ((to, mask), from) in places.skip(usize::from(at)).zip(data) {
            *to = (*to & !mask) | (from & mask);
        }
    }

    /// Saves all that the guest may have changed.
    pub(crate) fn save(&self, w: &mut Writer) {
        w.put(&self.bytes);
    }

    /// Loads what the guest had changed.
    pub(crate) fn load(&mut self, r: &mut Reader<'_>) -> Result<(), Malformed> {
        let bytes: [u8; 256] = r.get()?;
        let fixed = self.bytes.iter().zip(&bytes).zip(&self.writable);
        if fixed
            .into_iter()
            .any(|((own, other), mask)| (own ^ other) & !mask != 0)
        {
            return Err(r.wrong("a device of another kind"));
        }
        self.bytes = bytes;
        Ok(())
    }

    /// Returns the command register.
    pub(crate) fn command(&self) -> u16 {
        self.u16_at(spec::COMMAND)
    }

    /// Returns the address of BAR 0, if the guest has enabled memory decoding.
    pub(crate) fn bar0(&self) -> Option<u32> {
        let base = self.u32_at(spec::BAR0) & !0xf;
        (self.command() & spec::COMMAND_MEMORY != 0).then_some(base)
    }

    /// Returns two bytes.
    pub(crate) fn u16_at(&self, at: u16) -> u16 {
        let mut bytes = [0; 2];
        self.read(at, &mut bytes);
        u16::from_le_bytes(bytes)
    }

    /// Returns four bytes.
    pub(crate) fn u32_at(&self, at: u16) -> u32 {
        let mut bytes = [0; 4];
        self.read(at, &mut bytes);
        u32::from_le_bytes(bytes)
    }

    fn byte(&self, at: usize) -> u8 {
        self.bytes.get(at).copied().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const IDENTITY: Identity = Identity {
        vendor: 0x1af4,
        device: 0x1042,
        class: 0x01_80_00,
        revision: 1,
    };

    #[test]
    fn only_what_may_change_changes() {
        let mut space = ConfigSpace::new(IDENTITY);
        for at in (0..256).step_by(4) {
            space.write(at, &[0xff; 4]);
        }
        assert_eq!(space.u32_at(0), 0x1042_1af4);
        assert_eq!(space.u32_at(8), 0x0180_0001);
        assert_eq!(space.command(), 0x406);
        assert_eq!(space.u32_at(spec::BAR0), 0, "no BAR");
        assert_eq!(space.u32_at(0x3c), 0xff);
    }

    #[test]
    fn a_bar_tells_its_size_and_moves() {
        let mut space = ConfigSpace::new(IDENTITY);
        space.set_bar0(0xc001_0000, 0x1_0000);
        assert_eq!(space.bar0(), Some(0xc001_0000));
        space.write(spec::COMMAND, &[0, 0]);
        assert_eq!(space.bar0(), None);
        space.write(spec::BAR0, &[0xff; 4]);
        assert_eq!(space.u32_at(spec::BAR0), 0xffff_0000);
        space.write(spec::BAR0, &0xd00f_1234u32.to_le_bytes());
        space.write(spec::COMMAND, &[2]);
        assert_eq!(space.bar0(), Some(0xd00f_0000));
    }

    #[test]
    fn capabilities_are_linked() {
        let mut space = ConfigSpace::new(IDENTITY);
        let first = space.add_capability(0x11, &[1; 10]);
        let second = space.add_capability(9, &[2; 13]);
        let third = space.add_capability(9, &[3; 2]);
        assert_eq!((first, second, third), (0x40, 0x4c, 0x5c));
        assert_eq!(space.byte(0x34), 0x40);
        assert_eq!(space.u16_at(0x40), 0x4c11);
        assert_eq!(space.u16_at(0x4c), 0x5c09);
        assert_eq!(space.u16_at(0x5c), 0x0009);
        assert_eq!(space.u16_at(spec::STATUS), 0x10);
    }

    #[test]
    fn accesses_across_the_end_do_no_harm() {
        let mut space = ConfigSpace::new(IDENTITY);
        space.write(254, &[1; 8]);
        space.write(u16::MAX, &[1; 8]);
        let mut data = [0xff; 8];
        space.read(252, &mut data);
        assert_eq!(data, [0; 8]);
    }
}
