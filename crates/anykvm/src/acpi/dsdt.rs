//! The DSDT: serial ports, RTC, and the sleep state that powers off.
//!
//! DEVIATION: no PCI host bridge is described while this machine has no PCI devices.

use acpi_tables::Aml;
use acpi_tables::aml::{Device, EISAName, IO, Interrupt, Name, Package, ResourceTemplate, Scope};

use super::table::Table;
use crate::devices::{SERIAL_IRQS, SERIAL_PORTS, SLEEP_TYPE_S5};

/// The whole table.
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
