//! Tables that firmware would make: ACPI (RSDP, XSDT, FADT, MADT, MCFG, DSDT) and an MP table.
//!
//! ACPI 6.5, chapter 5. The machine is not hardware-reduced, so stock kernels use PIT, PIC and RTC as usual.

mod dsdt;
mod mptable;
mod table;

use vm_memory::{Bytes, GuestAddress};

use crate::error::BootError;
use crate::layout::{IOAPIC, LAPIC, PCI_ECAM, PCI_GSIS, PM_BASE, RSDP, SCI_GSI, ioapic_id};
use crate::memory::GuestMemory;
use table::{Table, checksum};

/// Fixed fields of the tables.
mod spec {
    /// FADT flags: WBINVD, C1 works, no fixed power or sleep button, reset register.
    pub(super) const FADT_FLAGS: u32 = 1 | (1 << 2) | (1 << 4) | (1 << 5) | (1 << 10);
    /// There are legacy devices, and no VGA to probe. There is no 8042 but its reset line.
    pub(super) const BOOT_ARCH: u16 = 1 | (1 << 2);
    /// Address space of a generic address.
    pub(super) const SYSTEM_IO: u8 = 1;
    pub(super) const RESET_PORT: u16 = 0xcf9;
    pub(super) const RESET_VALUE: u8 = 6;
    /// MADT flag: there is also a PIC.
    pub(super) const PCAT_COMPAT: u32 = 1;
}

/// Writes all tables for `cpus` vCPUs. Returns the address of the RSDP.
pub(crate) fn write(memory: &GuestMemory, cpus: u8) -> Result<u64, BootError> {
    let what = "the ACPI tables";
    let mut at = RSDP + 64;
    let mut put = |bytes: &[u8]| -> Result<u64, BootError> {
        let here = at;
        memory
            .write_slice(bytes, GuestAddress(here))
            .map_err(BootError::guest(what))?;
        // The FACS needs an alignment of 64 bytes, which does no harm to the others.
        at += (bytes.len() as u64).next_multiple_of(64);
        Ok(here)
    };
    let facs = put(&facs())?;
    let dsdt = put(&dsdt::dsdt())?;
    let tables = [put(&fadt(facs, dsdt))?, put(&madt(cpus))?, put(&mcfg())?];
    let mut xsdt = Table::new(b"XSDT", 1);
    for table in tables {
        xsdt.u64(table);
    }
    let xsdt = put(&xsdt.finish())?;
    memory
        .write_slice(&rsdp(xsdt), GuestAddress(RSDP))
        .map_err(BootError::guest(what))?;
    mptable::write(memory, cpus)?;
    Ok(RSDP)
}

fn rsdp(xsdt: u64) -> [u8; 36] {
    let mut rsdp = [0; 36];
    rsdp[..8].copy_from_slice(b"RSD PTR ");
    rsdp[9..15].copy_from_slice(table::OEM_ID);
    rsdp[15] = 2;
    rsdp[20..24].copy_from_slice(&36u32.to_le_bytes());
    rsdp[24..32].copy_from_slice(&xsdt.to_le_bytes());
    // The first checksum covers ACPI 1.0's 20 bytes, the second all bytes.
    rsdp[8] = checksum(&rsdp[..20]);
    rsdp[32] = checksum(&rsdp);
    rsdp
}

fn facs() -> [u8; 64] {
    let mut facs = [0; 64];
    facs[..4].copy_from_slice(b"FACS");
    facs[4] = 64;
    facs[32] = 2;
    facs
}

fn fadt(facs: u64, dsdt: u64) -> Vec<u8> {
    let mut t = Table::new(b"FACP", 6);
    let pm = u32::from(PM_BASE);
    t.u32(low32(facs)).u32(low32(dsdt));
    t.u8(0).u8(0); // reserved, profile unspecified
    t.u16(u16::from(SCI_GSI));
    t.u32(0).u8(0).u8(0).u8(0).u8(0); // no SMI command: always in ACPI mode
    t.u32(pm).u32(0).u32(pm + 4).u32(0).u32(0).u32(pm + 8); // PM1a_EVT, PM1b, PM1a_CNT, PM1b, PM2, PM_TMR
    t.u32(0).u32(0); // no GPE blocks
    t.u8(4).u8(2).u8(0).u8(4); // lengths of PM1_EVT, PM1_CNT, PM2_CNT, PM_TMR
    t.u8(0).u8(0).u8(0).u8(0); // GPE lengths and base, CST_CNT
    t.u16(0xfff).u16(0xfff); // no C2, no C3
    t.u16(0).u16(0).u8(0).u8(0).u8(0).u8(0); // flush, duty cycle, RTC alarms
    t.u8(0x32); // the RTC's century register
    t.u16(spec::BOOT_ARCH).u8(0);
    t.u32(spec::FADT_FLAGS);
    io_address(&mut t, 8, spec::RESET_PORT);
    t.u8(spec::RESET_VALUE);
    t.u16(0).u8(5); // ARM flags, minor version
    t.u64(0).u64(dsdt); // X_FACS stays 0 when FIRMWARE_CTRL is set
    io_address(&mut t, 32, PM_BASE);
    no_address(&mut t);
    io_address(&mut t, 16, PM_BASE + 4);
    no_address(&mut t);
    no_address(&mut t);
    io_address(&mut t, 32, PM_BASE + 8);
    for _ in 0..4 {
        no_address(&mut t); // GPE0, GPE1, sleep control, sleep status
    }
    t.u64(0); // hypervisor vendor
    t.finish()
}

fn io_address(t: &mut Table, bits: u8, port: u16) {
    let access = match bits {
        8 => 1,
        16 => 2,
        _ => 3,
    };
    t.u8(spec::SYSTEM_IO).u8(bits).u8(0).u8(access);
    t.u64(u64::from(port));
}

fn no_address(t: &mut Table) {
    t.u32(0).u64(0);
}

fn madt(cpus: u8) -> Vec<u8> {
    let mut t = Table::new(b"APIC", 5);
    t.u32(LAPIC).u32(spec::PCAT_COMPAT);
    for id in 0..cpus {
        t.u8(0).u8(8).u8(id).u8(id).u32(1); // processor LAPIC, enabled
    }
    t.u8(1).u8(12).u8(ioapic_id(cpus)).u8(0).u32(IOAPIC).u32(0);
    // ISA IRQ 0 (PIT) is on pin 2. The SCI and PCI's lines are level-triggered, and active high as KVM's lines are.
    t.u8(2).u8(10).u8(0).u8(0).u32(2).u16(0);
    for gsi in [SCI_GSI].into_iter().chain(PCI_GSIS) {
        t.u8(2).u8(10).u8(0).u8(gsi).u32(u32::from(gsi)).u16(0xd);
    }
    t.u8(4).u8(6).u8(0xff).u16(0).u8(1); // NMI on LINT1 of all
    t.finish()
}

/// Returns the table that says where the configuration space of which buses is (PCI Firmware 3.3, 4.1.2).
fn mcfg() -> Vec<u8> {
    let mut t = Table::new(b"MCFG", 1);
    t.u64(0); // reserved
    t.u64(u64::from(PCI_ECAM)).u16(0).u8(0).u8(0); // segment 0, buses 0 to 0
    t.u32(0); // reserved
    t.finish()
}

fn low32(value: u64) -> u32 {
    u32::try_from(value).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sum(bytes: &[u8]) -> u8 {
        bytes.iter().fold(0, |sum, b| sum.wrapping_add(*b))
    }

    #[test]
    fn tables_have_the_lengths_and_checksums_of_the_specification() {
        let rows = [
            ("FACP", fadt(0x1000, 0x2000), 276),
            ("APIC", madt(4), 44 + 4 * 8 + 12 + 10 + 4 * 10 + 6),
            ("MCFG", mcfg(), 44 + 16),
        ];
        for (name, table, len) in rows {
            assert_eq!(&table[..4], name.as_bytes());
            assert_eq!(table.len(), len, "{name}");
            assert_eq!(table[4..8], u32::try_from(len).unwrap().to_le_bytes());
            assert_eq!(sum(&table), 0, "{name}");
        }
    }

    #[test]
    fn fadt_fields_are_where_acpi_puts_them() {
        let t = fadt(0x1000, 0x2000);
        assert_eq!(t[46], 9, "SCI_INT");
        assert_eq!(t[56..60], 0x600u32.to_le_bytes(), "PM1a_EVT_BLK");
        assert_eq!(t[76..80], 0x608u32.to_le_bytes(), "PM_TMR_BLK");
        assert_eq!((t[88], t[89], t[91]), (4, 2, 4), "lengths");
        assert_eq!(t[116], 1, "RESET_REG in I/O space");
        assert_eq!(t[120..122], 0xcf9u16.to_le_bytes());
        assert_eq!(t[128], 6, "RESET_VALUE");
        assert_eq!(t[140..148], 0x2000u64.to_le_bytes(), "X_DSDT");
    }

    #[test]
    fn rsdp_has_both_checksums() {
        let rsdp = rsdp(0xe0040);
        assert_eq!(sum(&rsdp[..20]), 0);
        assert_eq!(sum(&rsdp), 0);
    }

    #[test]
    fn the_largest_machine_fits_below_1_mib() {
        let memory = crate::memory::allocate(4 << 20).unwrap();
        assert_eq!(write(&memory, 254).unwrap(), RSDP);
        let end: [u8; 16] = memory.read_obj(GuestAddress(0xf_fff0)).unwrap();
        assert_eq!(end, [0; 16]);
    }
}
