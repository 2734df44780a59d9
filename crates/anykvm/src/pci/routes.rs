//! Interrupts from devices to the hypervisor: the GSI routing table, to which MSIs are added, and PCI's shared,
//! level-triggered INTx lines.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use anykvm_ioctls::{IrqTrigger, VmFd};
use kvm_bindings::{
    KVM_IRQ_ROUTING_IRQCHIP, KVM_IRQ_ROUTING_MSI, KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER,
    KVM_IRQCHIP_PIC_SLAVE, KvmIrqRouting, kvm_irq_routing_entry,
};

use crate::error::BootError;
use crate::layout::PCI_GSIS;
use crate::lock::lock;

/// First GSI of messages. The GSIs of the chips' pins come before.
const FIRST_MESSAGE_GSI: u32 = 24;

/// A message as a device would write it to memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Message {
    /// The address, which selects the processor.
    pub(crate) address: u64,
    /// The data, which has the vector.
    pub(crate) data: u32,
}

#[derive(Debug, Default)]
struct Table {
    /// The message of each GSI that was given out; `None` if there is nothing to send yet.
    messages: BTreeMap<u32, Option<Message>>,
    /// For each of `PCI_GSIS`, a bit per function that raises the line.
    lines: [u32; PCI_GSIS.len()],
}

/// The machine's routing table and interrupt lines.
#[derive(Debug)]
pub(crate) struct Routes {
    vm: Arc<VmFd>,
    table: Mutex<Table>,
}

impl Routes {
    /// Installs a PC's routes: ISA IRQ 0 is on pin 2 of the IOAPIC.
    pub(crate) fn new(vm: Arc<VmFd>) -> Result<Arc<Self>, BootError> {
        let routes = Self {
            vm,
            table: Mutex::default(),
        };
        routes.install(&lock(&routes.table))?;
        Ok(Arc::new(routes))
    }

    /// Returns a GSI for a message, and the trigger that sends it.
    pub(crate) fn new_message(&self) -> Result<(u32, IrqTrigger), BootError> {
        let mut table = lock(&self.table);
        let last = table.messages.last_key_value();
        let gsi = last.map_or(FIRST_MESSAGE_GSI, |(gsi, _)| gsi.saturating_add(1));
        let irq = self
            .vm
            .irq_trigger(gsi)
            .map_err(BootError::kvm("an interrupt"))?;
        table.messages.insert(gsi, None);
        Ok((gsi, irq))
    }

    /// Makes `gsi` send the message from now on. A message that the hypervisor refuses (reserved bits in the address)
    /// is not sent; on hardware nothing would take it either.
    pub(crate) fn set_message(&self, gsi: u32, message: Message) {
        let mut table = lock(&self.table);
        let earlier = table.messages.insert(gsi, Some(message));
        if earlier != Some(Some(message)) && self.install(&table).is_err() {
            table.messages.insert(gsi, None);
            // The table without the refused entry was accepted before.
            let _ = self.install(&table);
        }
    }

    /// Returns the line of the PCI device in `slot`.
    pub(crate) fn line(self: &Arc<Self>, slot: u8) -> Line {
        Line {
            routes: Arc::clone(self),
            slot,
        }
    }

    fn install(&self, table: &Table) -> Result<(), BootError> {
        let mut entries: Vec<kvm_irq_routing_entry> = Vec::new();
        for irq in 0..16 {
            let chip = [KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE];
            let chip = if irq < 8 { chip[0] } else { chip[1] };
            entries.push(to_pin(irq, chip, irq % 8));
        }
        for pin in 0..FIRST_MESSAGE_GSI {
            match pin {
                0 => entries.push(to_pin(0, KVM_IRQCHIP_IOAPIC, 2)),
                2 => {}
                pin => entries.push(to_pin(pin, KVM_IRQCHIP_IOAPIC, pin)),
            }
        }
        for (gsi, message) in &table.messages {
            entries.extend(message.map(|message| to_message(*gsi, message)));
        }
        let routing = KvmIrqRouting::from_entries(&entries)
            .map_err(|e| BootError::Usage(format!("interrupt routing: {e:?}")))?;
        self.vm
            .set_gsi_routing(&routing)
            .map_err(BootError::kvm("KVM_SET_GSI_ROUTING"))
    }
}

fn to_pin(gsi: u32, irqchip: u32, pin: u32) -> kvm_irq_routing_entry {
    let mut entry = kvm_irq_routing_entry {
        gsi,
        type_: KVM_IRQ_ROUTING_IRQCHIP,
        ..Default::default()
    };
    entry.u.irqchip.irqchip = irqchip;
    entry.u.irqchip.pin = pin;
    entry
}

fn to_message(gsi: u32, message: Message) -> kvm_irq_routing_entry {
    let mut entry = kvm_irq_routing_entry {
        gsi,
        type_: KVM_IRQ_ROUTING_MSI,
        ..Default::default()
    };
    let [a, b, c, d, e, f, g, h] = message.address.to_le_bytes();
    entry.u.msi.address_lo = u32::from_le_bytes([a, b, c, d]);
    entry.u.msi.address_hi = u32::from_le_bytes([e, f, g, h]);
    entry.u.msi.data = message.data;
    entry
}

/// Returns the GSI on which the device in `slot` interrupts with INTA.
pub(crate) fn gsi_of_slot(slot: u8) -> u8 {
    let [a, b, c] = PCI_GSIS;
    match slot % 3 {
        0 => a,
        1 => b,
        _ => c,
    }
}

/// One device's share in an INTx line.
#[derive(Debug, Clone)]
pub(crate) struct Line {
    routes: Arc<Routes>,
    slot: u8,
}

impl Line {
    /// Raises or lowers the device's share. The line is up while any device raises it.
    pub(crate) fn set(&self, is_up: bool) {
        let gsi = gsi_of_slot(self.slot);
        let bit = 1u32 << (self.slot % 32);
        let mut table = lock(&self.routes.table);
        for (line, line_gsi) in table.lines.iter_mut().zip(PCI_GSIS) {
            if line_gsi != gsi {
                continue;
            }
            let holders = if is_up { *line | bit } else { *line & !bit };
            if (holders == 0) != (*line == 0) {
                // The call fails only without chips, and ours are there from the start.
                let _ = self.routes.vm.set_irq_line(u32::from(gsi), holders != 0);
            }
            *line = holders;
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use anykvm_ioctls::Kvm;

    pub(crate) fn vm() -> Arc<VmFd> {
        let vm = Kvm::new().unwrap().create_vm().unwrap();
        vm.create_irq_chip().unwrap();
        Arc::new(vm)
    }

    #[test]
    fn a_line_is_up_while_anybody_holds_it() {
        let routes = Routes::new(vm()).unwrap();
        // Slots 1 and 4 share a line, slot 2 has another.
        let [one, two, four] = [1, 2, 4].map(|slot| routes.line(slot));
        let lines = || lock(&routes.table).lines.map(|holders| holders != 0);
        one.set(true);
        four.set(true);
        one.set(false);
        assert_eq!(lines(), [false, true, false]);
        four.set(false);
        two.set(true);
        two.set(true);
        assert_eq!(lines(), [false, false, true]);
        two.set(false);
        assert_eq!(lines(), [false; 3]);
    }

    #[test]
    fn messages_get_gsis_of_their_own() {
        let routes = Routes::new(vm()).unwrap();
        let messages: Vec<_> = (0..3).map(|_| routes.new_message().unwrap()).collect();
        let gsis: Vec<u32> = messages.iter().map(|(gsi, _irq)| *gsi).collect();
        assert_eq!(gsis, [24, 25, 26]);
    }

    #[test]
    fn a_message_that_nobody_takes_does_not_spoil_the_others() {
        let routes = Routes::new(vm()).unwrap();
        let good = Message {
            address: 0xfee0_0000,
            data: 0x41,
        };
        let wrong = Message {
            address: 0xffff_ffff_fee0_0000,
            data: 0,
        };
        let (first, _irq) = routes.new_message().unwrap();
        let (second, _irq) = routes.new_message().unwrap();
        routes.set_message(second, wrong);
        routes.set_message(first, good);
        assert_eq!(lock(&routes.table).messages.get(&first), Some(&Some(good)));
    }
}
