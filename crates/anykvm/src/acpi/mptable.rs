//! The MP table (Intel MultiProcessor Specification 1.4), for kernels that run with `acpi=off`.

use vm_memory::{Bytes, GuestAddress};

use super::table::checksum;
use crate::error::BootError;
use crate::layout::{EBDA, IOAPIC, LAPIC, RSDP, ioapic_id};
use crate::memory::GuestMemory;
use crate::pci::SLOTS;
use crate::pci::routes::gsi_of_slot;

/// Version of the LAPIC and IOAPIC entries: an integrated APIC.
const APIC_VERSION: u8 = 0x14;
/// Linux expects PCI buses to have their PCI number.
const PCI_BUS: u8 = 0;
const ISA_BUS: u8 = 1;
/// Interrupt flags for active high, level-triggered.
const LEVEL: u8 = 0xd;
/// Address of the table. With many vCPUs it is too large for the EBDA, but it may be anywhere below 1 MiB.
const TABLE: u64 = RSDP + 0x1_0000;

/// Writes the floating pointer into the EBDA and the table below 1 MiB.
pub(super) fn write(memory: &GuestMemory, cpus: u8) -> Result<(), BootError> {
    let what = "the MP table";
    let table = table(cpus);
    let mut pointer = [0u8; 16];
    pointer[..4].copy_from_slice(b"_MP_");
    pointer[4..8].copy_from_slice(&u32::try_from(TABLE).unwrap_or(0).to_le_bytes());
    pointer[8] = 1; // length in 16-byte units
    pointer[9] = 4; // specification 1.4
    pointer[10] = checksum(&pointer);
    memory
        .write_slice(&pointer, GuestAddress(EBDA))
        .map_err(BootError::guest(what))?;
    memory
        .write_slice(&table, GuestAddress(TABLE))
        .map_err(BootError::guest(what))
}

fn table(cpus: u8) -> Vec<u8> {
    let mut entries: Vec<u8> = Vec::new();
    let mut count = 0u16;
    let mut entry = |bytes: &[u8]| {
        entries.extend(bytes);
        count += 1;
    };
    for id in 0..cpus {
        // The CPU is enabled, and the first is the boot processor. Signature: family 6; features: FPU, APIC.
        let flags = 1 | (u8::from(id == 0) << 1);
        let cpu = [
            0,
            id,
            APIC_VERSION,
            flags,
            0,
            6,
            0,
            0,
            1,
            2,
            0,
            0,
            0,
            0,
            0,
            0,
            0,
            0,
            0,
            0,
        ];
        entry(&cpu);
    }
    entry(&[1, PCI_BUS, b'P', b'C', b'I', b' ', b' ', b' ']);
    entry(&[1, ISA_BUS, b'I', b'S', b'A', b' ', b' ', b' ']);
    let [a, b, c, d] = IOAPIC.to_le_bytes();
    let ioapic = ioapic_id(cpus);
    entry(&[2, ioapic, APIC_VERSION, 1, a, b, c, d]);
    for irq in 0..16u8 {
        // The interrupts have ISA's defaults. The PIT is on pin 2, and nothing on the cascade.
        let pin = match irq {
            0 => 2,
            2 => continue,
            other => other,
        };
        entry(&[3, 0, 0, 0, ISA_BUS, irq, ioapic, pin]);
    }
    for slot in (1u8..).take(SLOTS - 1) {
        // The source is the slot and pin INTA.
        let gsi = gsi_of_slot(slot);
        entry(&[3, 0, LEVEL, 0, PCI_BUS, slot << 2, ioapic, gsi]);
    }
    // LINT0 of the boot processor has ExtINT, LINT1 of all processors NMI.
    entry(&[4, 3, 0, 0, ISA_BUS, 0, 0, 0]);
    entry(&[4, 1, 0, 0, ISA_BUS, 0, 0xff, 1]);

    let len = u16::try_from(44 + entries.len()).unwrap_or(u16::MAX);
    let mut table = b"PCMP".to_vec();
    table.extend(len.to_le_bytes());
    table.extend([4, 0]); // 1.4, checksum
    table.extend(b"ANYKVM  ANYKVMVM    ");
    table.extend([0; 6]); // no OEM table
    table.extend(count.to_le_bytes());
    table.extend(LAPIC.to_le_bytes());
    table.extend([0; 4]); // no extended table
    table.extend(entries);
    let sum = checksum(&table);
    if let Some(byte) = table.get_mut(7) {
        *byte = sum;
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn header_counts_and_checksum_agree() {
        for cpus in [1u8, 4, 254] {
            let table = table(cpus);
            let len = u16::from_le_bytes([table[4], table[5]]);
            assert_eq!(usize::from(len), table.len());
            let count = u16::from_le_bytes([table[34], table[35]]);
            assert_eq!(count, u16::from(cpus) + 2 + 1 + 15 + 31 + 2);
            let sum = table.iter().fold(0u8, |sum, b| sum.wrapping_add(*b));
            assert_eq!(sum, 0);
            assert_eq!(table.len(), 44 + usize::from(cpus) * 20 + 51 * 8);
        }
    }
}
