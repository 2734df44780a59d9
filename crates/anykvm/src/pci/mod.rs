//! PCI: one bus behind a host bridge, and the memory windows of its devices. Its configuration space is reached by
//! configuration mechanism #1 (ports 0xcf8, 0xcfc) and by ECAM.
//!
//! PCI Local Bus 3.0, 3.2.2.3.2; PCI Express Base, 7.2.2. Device `n` is in slot `n`, function 0;
//! slot 0 is the host bridge.

pub(crate) mod config;
pub(crate) mod msix;
pub(crate) mod routes;

use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::error::BootError;
use crate::fields::{Malformed, Reader, Writer};
use crate::layout::{PCI_ECAM, PCI_ECAM_LEN};
use crate::lock::lock;
use config::{ConfigSpace, Identity};

/// Number of a bus's slots.
pub(crate) const SLOTS: usize = 32;
/// First port of configuration mechanism #1; the data is four ports further.
const ADDRESS_PORT: u16 = 0xcf8;
const DATA_PORT: u16 = 0xcfc;
/// Bit of the address port that connects the data port.
const ADDRESS_ENABLE: u32 = 1 << 31;
/// The writable bits of the address port.
const ADDRESS_BITS: u32 = 0x80ff_fffc;

/// A host bridge, with an id that no driver looks for.
const HOST_BRIDGE: Identity = Identity {
    // Red Hat's vendor id and their generic PCI Express host bridge.
    vendor: 0x1b36,
    device: 0x0008,
    class: 0x06_00_00,
    revision: 0,
};

/// The device in a slot. All vCPU threads call it.
pub(crate) trait Function: Send + Sync {
    /// Reads the configuration space.
    fn read_config(&self, at: u16, data: &mut [u8]);
    /// Writes the configuration space.
    fn write_config(&self, at: u16, data: &[u8]);
    /// Returns the current begin and length of the memory BAR.
    fn window(&self) -> Option<(u64, u64)>;
    /// Reads from the BAR.
    fn read(&self, at: u64, data: &mut [u8]);
    /// Writes to the BAR.
    fn write(&self, at: u64, data: &[u8]);
    /// Stops everything that the device does beside the vCPUs.
    fn pause(&self) {}
    /// Makes the device go on.
    fn resume(&self) {}
    /// Saves the state of the device, which stands still.
    fn save(&self, w: &mut Writer);
    /// Loads a saved state.
    fn load(&self, r: &mut Reader<'_>) -> Result<(), Malformed>;
}

/// The host bridge and its bus.
pub(crate) struct Root {
    address: AtomicU32,
    slots: Vec<Box<dyn Function>>,
}

impl Root {
    /// Makes a bus with nothing but the bridge.
    pub(crate) fn new() -> Self {
        Self {
            address: AtomicU32::new(0),
            slots: vec![Box::new(HostBridge(Mutex::new(ConfigSpace::new(
                HOST_BRIDGE,
            ))))],
        }
    }

    /// Returns the slot that [`Self::add`] will use.
    pub(crate) fn next_slot(&self) -> Result<u8, BootError> {
        u8::try_from(self.slots.len())
            .ok()
            .filter(|slot| usize::from(*slot) < SLOTS)
            .ok_or_else(|| {
                BootError::Usage(format!("there is room for {} PCI devices only", SLOTS - 1))
            })
    }

    /// Puts a device into the next slot.
    pub(crate) fn add(&mut self, function: Box<dyn Function>) {
        self.slots.push(function);
    }

    /// Handles IN. Returns false if the port is not PCI's.
    pub(crate) fn port_read(&self, port: u16, data: &mut [u8]) -> bool {
        match port {
            // The address port is 32 bits wide; the byte at 0xcf9 is the reset port.
            ADDRESS_PORT if data.len() == 4 => {
                data.copy_from_slice(&self.address.load(Ordering::Relaxed).to_le_bytes());
                true
            }
            DATA_PORT..=0xcff => {
                self.read_slot(self.address.load(Ordering::Relaxed), port, data);
                true
            }
            _ => false,
        }
    }

    /// Handles OUT. Returns false if the port is not PCI's.
    pub(crate) fn port_write(&self, port: u16, data: &[u8]) -> bool {
        match (port, data) {
            (ADDRESS_PORT, [a, b, c, d]) => {
                let address = u32::from_le_bytes([*a, *b, *c, *d]) & ADDRESS_BITS;
                self.address.store(address, Ordering::Relaxed);
                true
            }
            (DATA_PORT..=0xcff, _) => {
                let address = self.address.load(Ordering::Relaxed);
                if let Some((slot, at)) = self.selected(address, port) {
                    slot.write_config(at, data);
                }
                true
            }
            _ => false,
        }
    }

    /// Handles a load from the configuration space or a BAR. Elsewhere `data` stays as it is.
    pub(crate) fn mmio_read(&self, gpa: u64, data: &mut [u8]) {
        if let Some(at) = in_ecam(gpa) {
            if let Some((slot, at)) = self.in_slot(at) {
                slot.read_config(at, data);
            }
        } else if let Some((slot, at)) = self.at(gpa) {
            slot.read(at, data);
        }
    }

    /// Handles a store to the configuration space or a BAR. Elsewhere nothing happens.
    pub(crate) fn mmio_write(&self, gpa: u64, data: &[u8]) {
        if let Some(at) = in_ecam(gpa) {
            if let Some((slot, at)) = self.in_slot(at) {
                slot.write_config(at, data);
            }
        } else if let Some((slot, at)) = self.at(gpa) {
            slot.write(at, data);
        }
    }

    /// Makes all devices stand still.
    pub(crate) fn pause(&self) {
        self.slots.iter().for_each(|slot| slot.pause());
    }

    /// Makes all devices go on.
    pub(crate) fn resume(&self) {
        self.slots.iter().for_each(|slot| slot.resume());
    }

    /// Saves the state of the bus and of all devices.
    pub(crate) fn save(&self, w: &mut Writer) {
        w.put(&self.address.load(Ordering::Relaxed));
        w.count(self.slots.len());
        self.slots.iter().for_each(|slot| slot.save(w));
    }

    /// Loads a saved state into a bus with devices of the same kinds.
    pub(crate) fn load(&self, r: &mut Reader<'_>) -> Result<(), Malformed> {
        let address = r.part("the PCI bus").get::<u32>()? & ADDRESS_BITS;
        self.address.store(address, Ordering::Relaxed);
        r.expect(self.slots.len())?;
        self.slots.iter().try_for_each(|slot| slot.load(r))
    }

    fn read_slot(&self, address: u32, port: u16, data: &mut [u8]) {
        if let Some((slot, at)) = self.selected(address, port) {
            slot.read_config(at, data);
        }
    }

    /// Returns the device and register that mechanism #1 selects: bus 23:16, device 15:11, function 10:8, register 7:2.
    fn selected(&self, address: u32, port: u16) -> Option<(&dyn Function, u16)> {
        if address & ADDRESS_ENABLE == 0 || address & 0x00ff_0700 != 0 {
            return None;
        }
        let slot = self.slots.get((address >> 11) as usize & 0x1f)?;
        let register = u16::try_from(address & 0xfc).ok()?;
        Some((slot.as_ref(), register + (port - DATA_PORT)))
    }

    /// Returns the device and register at an offset in ECAM: device 19:15, function 14:12, register 11:0.
    fn in_slot(&self, at: u32) -> Option<(&dyn Function, u16)> {
        if at & 0x7000 != 0 {
            return None;
        }
        let slot = self.slots.get((at >> 15) as usize)?;
        Some((slot.as_ref(), u16::try_from(at & 0xfff).ok()?))
    }

    fn at(&self, gpa: u64) -> Option<(&dyn Function, u64)> {
        self.slots.iter().find_map(|slot| {
            let (base, len) = slot.window()?;
            let at = gpa.checked_sub(base).filter(|at| *at < len)?;
            Some((slot.as_ref(), at))
        })
    }
}

fn in_ecam(gpa: u64) -> Option<u32> {
    let at = gpa.checked_sub(u64::from(PCI_ECAM))?;
    u32::try_from(at).ok().filter(|at| *at < PCI_ECAM_LEN)
}

struct HostBridge(Mutex<ConfigSpace>);

impl Function for HostBridge {
    fn read_config(&self, at: u16, data: &mut [u8]) {
        lock(&self.0).read(at, data);
    }

    fn write_config(&self, at: u16, data: &[u8]) {
        lock(&self.0).write(at, data);
    }

    fn window(&self) -> Option<(u64, u64)> {
        None
    }

    fn read(&self, _at: u64, _data: &mut [u8]) {}

    fn write(&self, _at: u64, _data: &[u8]) {}

    fn save(&self, w: &mut Writer) {
        lock(&self.0).save(w);
    }

    fn load(&self, r: &mut Reader<'_>) -> Result<(), Malformed> {
        lock(&self.0).load(r.part("the host bridge"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_port(root: &Root, address: u32, port: u16, len: usize) -> Vec<u8> {
        assert!(root.port_write(ADDRESS_PORT, &address.to_le_bytes()));
        let mut data = vec![0xff; len];
        assert!(root.port_read(port, &mut data));
        data
    }

    #[test]
    fn mechanism_1_finds_the_bridge_and_nothing_else() {
        let root = Root::new();
        let rows: [(u32, u16, &[u8]); 8] = [
            (0x8000_0000, 0xcfc, &[0x36, 0x1b, 8, 0]),
            (0x8000_0000, 0xcfe, &[8, 0]),
            (0x8000_0000, 0xcfd, &[0x1b]),
            (0x8000_0008, 0xcfc, &[0, 0, 0, 6]),
            (0x0000_0000, 0xcfc, &[0xff; 4]), // not enabled
            (0x8000_0800, 0xcfc, &[0xff; 4]), // slot 1
            (0x8000_0100, 0xcfc, &[0xff; 4]), // function 1
            (0x8001_0000, 0xcfc, &[0xff; 4]), // bus 1
        ];
        for (address, port, want) in rows {
            assert_eq!(
                read_port(&root, address, port, want.len()),
                want,
                "{address:#x} {port:#x}"
            );
        }
    }

    #[test]
    fn the_address_port_reads_back_and_is_32_bits_wide() {
        let root = Root::new();
        assert!(root.port_write(0xcf8, &[0xff; 4]));
        assert!(!root.port_write(0xcf9, &[6]), "the reset port");
        assert!(!root.port_write(0xcf8, &[0]));
        let mut data = [0; 4];
        assert!(root.port_read(0xcf8, &mut data));
        assert_eq!(u32::from_le_bytes(data), ADDRESS_BITS);
    }

    #[test]
    fn ecam_shows_the_same_and_ones_where_nothing_is() {
        let root = Root::new();
        let base = u64::from(PCI_ECAM);
        for (at, want) in [
            (0, 0x0008_1b36),
            (0x100, 0),
            (0xffc, 0),
            (0x1000, u32::MAX),
            (0x8000, u32::MAX),
            (0xf_fffc, u32::MAX),
            (0x10_0000, u32::MAX),
        ] {
            let mut data = [0xff; 4];
            root.mmio_read(base + at, &mut data);
            assert_eq!(u32::from_le_bytes(data), want, "{at:#x}");
            root.mmio_write(base + at, &[0; 8]);
        }
    }
}
