//! The DSDT: PCI host bridge, serial ports, RTC, and the sleep state that powers off.

use acpi_tables::Aml;
use acpi_tables::aml::{
    AddressSpace, AddressSpaceCacheable, Device, EISAName, IO, Interrupt, Memory32Fixed, Name,
    Package, ResourceTemplate, Scope,
};

use super::table::Table;
use crate::devices::{SERIAL_IRQS, SERIAL_PORTS, SLEEP_TYPE_S5};
use crate::layout::{PCI_ECAM, PCI_ECAM_LEN, PCI_WINDOW, PCI_WINDOW_LAST};
use crate::pci::SLOTS;
use crate::pci::routes::gsi_of_slot;

/// Returns the whole table.
pub(super) fn dsdt() -> Vec<u8> {
    let mut aml = Vec::new();
    let zero = 0u8;
    let s5 = Package::new(vec![&SLEEP_TYPE_S5, &SLEEP_TYPE_S5, &zero, &zero]);
    Name::new("_S5_".into(), &s5).to_aml_bytes(&mut aml);
    for (i, (port, irq)) in SERIAL_PORTS.into_iter().zip(SERIAL_IRQS).enumerate() {
        let name = format!("COM{}", i + 1);
        let uid = u8::try_from(i).unwrap_or(0);
        device(&mut aml, &name, "PNP0501", uid, port, 8, irq);
    }
    device(&mut aml, "RTC_", "PNP0B00", 0, 0x70, 2, 8);
    pci(&mut aml);
    let mut table = Table::new(b"DSDT", 2);
    table.bytes(&aml);
    table.finish()
}

fn device(aml: &mut Vec<u8>, name: &str, hid: &str, uid: u8, port: u16, len: u8, irq: u32) {
    let hid = Name::new("_HID".into(), &EISAName::new(hid));
    let uid = Name::new("_UID".into(), &uid);
    let io = IO::new(port, port, 1, len);
    let irq = Interrupt::new(true, true, false, true, irq);
    let resources = ResourceTemplate::new(vec![&io, &irq]);
    let crs = Name::new("_CRS".into(), &resources);
    let device = Device::new(name.into(), vec![&hid, &uid, &crs]);
    Scope::new("_SB_".into(), vec![&device]).to_aml_bytes(aml);
}

/// Adds the host bridge: the address ranges that it forwards, and the interrupt of each slot's INTA. ECAM is a resource
/// of the mainboard, without which Linux does not use it.
fn pci(aml: &mut Vec<u8>) {
    let hid = Name::new("_HID".into(), &EISAName::new("PNP0A03"));
    let (zero, pin_a) = (0u8, 0u8);
    let numbers = ["_UID", "_ADR", "_BBN", "_SEG"].map(|name| Name::new(name.into(), &zero));
    let buses = AddressSpace::<u16>::new_bus_number(0, 0);
    let config = IO::new(0xcf8, 0xcf8, 1, 8);
    let io_low = AddressSpace::<u16>::new_io(0, 0xcf7, None);
    let io_high = AddressSpace::<u16>::new_io(0xd00, 0xffff, None);
    let memory = AddressSpace::<u32>::new_memory(
        AddressSpaceCacheable::NotCacheable,
        true,
        PCI_WINDOW,
        PCI_WINDOW_LAST,
        None,
    );
    let windows = ResourceTemplate::new(vec![&buses, &config, &io_low, &io_high, &memory]);
    let crs = Name::new("_CRS".into(), &windows);
    // Each route has an address (slot and "all functions"), a pin, no link device, and a GSI.
    let routes: Vec<(u32, u8)> = (1u8..)
        .take(SLOTS - 1)
        .map(|slot| ((u32::from(slot) << 16) | 0xffff, gsi_of_slot(slot)))
        .collect();
    let routes: Vec<Package<'_>> = routes
        .iter()
        .map(|(address, gsi)| Package::new(vec![address, &pin_a, &zero, gsi]))
        .collect();
    let routes = Package::new(routes.iter().map(|route| route as &dyn Aml).collect());
    let prt = Name::new("_PRT".into(), &routes);
    let [uid, adr, bbn, seg] = &numbers;
    let bridge = Device::new("PCI0".into(), vec![&hid, uid, adr, bbn, seg, &crs, &prt]);

    let hid = Name::new("_HID".into(), &EISAName::new("PNP0C02"));
    let ecam = Memory32Fixed::new(true, PCI_ECAM, PCI_ECAM_LEN);
    let ecam = ResourceTemplate::new(vec![&ecam]);
    let crs = Name::new("_CRS".into(), &ecam);
    let board = Device::new("MBRD".into(), vec![&hid, uid, &crs]);
    Scope::new("_SB_".into(), vec![&bridge, &board]).to_aml_bytes(aml);
}
