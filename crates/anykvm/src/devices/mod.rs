//! The devices that answer the guest's port and MMIO accesses: serial ports, CMOS, power and reset.
//!
//! Accesses to KVM's own chips (PIC, IOAPIC, LAPIC, PIT) do not come here. A port or address that no device has reads
//! as ones, as on an idle bus.

mod cmos;
mod control;
mod output;
mod power;
mod serial;
mod watch;

use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, Weak};
use std::thread;

pub(crate) use control::Connection;
pub(crate) use output::{Output, Stream};
pub(crate) use power::SLEEP_TYPE_S5;
pub(crate) use serial::{Edge, Sink};
pub(crate) use watch::{LastWords, Watch};

use crate::ending::Ending;
use crate::fields::{Malformed, Reader, Writer};
use crate::lock::lock;
use crate::pci::Root;
use cmos::Cmos;
use power::Power;
use serial::Uart;

/// Ports of COM1 to COM4. They are a PC's, so that kernels find them without ACPI, too.
pub(crate) const SERIAL_PORTS: [u16; 4] = [0x3f8, 0x2f8, 0x3e8, 0x2e8];
/// ISA interrupts of COM1 to COM4.
pub(crate) const SERIAL_IRQS: [u32; 4] = [4, 3, 4, 3];
/// Number of a UART's registers.
const SERIAL_LEN: u16 = 8;

/// All devices. The vCPU threads and the input thread share them; each device has a lock.
pub(crate) struct Devices {
    uarts: [Mutex<Uart>; 4],
    cmos: Mutex<Cmos>,
    power: Mutex<Power>,
    pci: Root,
}

impl Devices {
    /// Makes one UART for each of `ports` (where its output goes, and its interrupt). `pci` is the PCI bus with its
    /// devices.
    pub(crate) fn new(ports: [(Sink, Edge); 4], pci: Root) -> std::io::Result<Arc<Self>> {
        let (ask, asked) = channel();
        let mut index = 0usize;
        let uarts = ports.map(|(sink, irq)| {
            let (ask, this) = (ask.clone(), index);
            index += 1;
            // The receiver is gone only if the thread could not be started.
            let ask = move || ask.send(this).unwrap_or_default();
            Mutex::new(Uart::new(sink, irq, Box::new(ask)))
        });
        let devices = Arc::new(Self {
            uarts,
            cmos: Mutex::default(),
            power: Mutex::new(Power::new()),
            pci,
        });
        let weak = Arc::downgrade(&devices);
        thread::Builder::new()
            .name("serial".into())
            .spawn(move || refill_rested(&asked, &weak))?;
        Ok(devices)
    }

    /// Queues bytes for the guest to read from COM`index + 1`. They wait until the guest takes them.
    pub(crate) fn feed(&self, index: usize, bytes: &[u8]) {
        if let Some(uart) = self.uarts.get(index) {
            lock(uart).feed(bytes);
        }
    }

    /// Returns how many bytes the guest has not taken yet.
    pub(crate) fn backlog(&self, index: usize) -> usize {
        self.uarts.get(index).map_or(0, |uart| lock(uart).backlog())
    }

    /// Handles IN. `data` has the access's size, or several bytes for a string instruction.
    pub(crate) fn port_read(&self, port: u16, data: &mut [u8]) {
        data.fill(0xff);
        if let Some((uart, register)) = self.uart(port) {
            let mut uart = lock(uart);
            data.iter_mut().for_each(|byte| *byte = uart.read(register));
            return;
        }
        match port {
            0x70 | 0x71 => data.fill(lock(&self.cmos).read(port)),
            _ if self.pci.port_read(port, data) => {}
            _ => lock(&self.power).read(port, data),
        }
    }

    /// Handles OUT. Returns an ending if the guest has stopped the machine by it.
    pub(crate) fn port_write(&self, port: u16, data: &[u8]) -> Option<Ending> {
        if let Some((uart, register)) = self.uart(port) {
            let mut uart = lock(uart);
            return data.iter().find_map(|byte| uart.write(register, *byte));
        }
        match port {
            0x70 | 0x71 => {
                let mut cmos = lock(&self.cmos);
                data.iter().for_each(|byte| cmos.write(port, *byte));
                None
            }
            _ if self.pci.port_write(port, data) => None,
            _ => lock(&self.power).write(port, data),
        }
    }

    /// Handles a load from an address without RAM.
    pub(crate) fn mmio_read(&self, gpa: u64, data: &mut [u8]) {
        data.fill(0xff);
        // Where no device answers, the ones stay.
        self.pci.mmio_read(gpa, data);
    }

    /// Handles a store to an address without RAM.
    pub(crate) fn mmio_write(&self, gpa: u64, data: &[u8]) {
        self.pci.mmio_write(gpa, data);
    }

    /// Stops the devices: they interrupt nobody and do not touch guest memory until [`Self::resume`].
    pub(crate) fn pause(&self) {
        self.uarts.iter().for_each(|uart| lock(uart).hold());
        self.pci.pause();
    }

    /// Makes the devices go on. A serial port sends on what it has received and the guest has not taken yet.
    pub(crate) fn resume(&self) {
        self.pci.resume();
        self.uarts.iter().for_each(|uart| lock(uart).release());
    }

    /// Saves the state of all devices, which stand still.
    pub(crate) fn save(&self, w: &mut Writer) {
        self.uarts.iter().for_each(|uart| lock(uart).save(w));
        lock(&self.cmos).save(w);
        lock(&self.power).save(w);
        self.pci.save(w);
    }

    /// Loads a saved state into new devices of the same kinds.
    pub(crate) fn load(&self, r: &mut Reader<'_>) -> Result<(), Malformed> {
        for uart in &self.uarts {
            lock(uart).load(r.part("a serial port"))?;
        }
        lock(&self.cmos).load(r.part("the CMOS memory"))?;
        lock(&self.power).load(r.part("the power management"))?;
        self.pci.load(r)
    }

    fn uart(&self, port: u16) -> Option<(&Mutex<Uart>, u8)> {
        SERIAL_PORTS
            .into_iter()
            .zip(&self.uarts)
            .find_map(|(base, uart)| {
                let register = port.checked_sub(base).filter(|r| *r < SERIAL_LEN)?;
                Some((uart, u8::try_from(register).ok()?))
            })
    }
}

/// Refills the FIFOs of UARTs that have rested, until the devices are gone.
fn refill_rested(asked: &Receiver<usize>, devices: &Weak<Devices>) {
    while let Ok(index) = asked.recv() {
        let Some(devices) = devices.upgrade() else {
            return;
        };
        let Some(uart) = devices.uarts.get(index) else {
            return;
        };
        let rest = lock(uart).rest();
        thread::sleep(rest);
        lock(uart).refill();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn devices() -> Arc<Devices> {
        let ports = [0; 4].map(|_| (Sink::Discard, Arc::new(|| {}) as Edge));
        Devices::new(ports, Root::new()).unwrap()
    }

    #[test]
    fn nobody_answers_with_ones() {
        let devices = devices();
        for port in [0x80, 0x3b0, 0x3f7, 0x400, 0xcfc] {
            let mut data = [0; 4];
            devices.port_read(port, &mut data);
            assert_eq!(data, [0xff; 4], "{port:#x}");
        }
        let mut data = [0; 8];
        devices.mmio_read(0xd000_0000, &mut data);
        assert_eq!(data, [0xff; 8]);
    }

    #[test]
    fn each_uart_has_its_own_scratch_register() {
        let devices = devices();
        for (value, base) in (1u8..).zip(SERIAL_PORTS) {
            assert!(devices.port_write(base + 7, &[value]).is_none());
        }
        for (value, base) in (1u8..).zip(SERIAL_PORTS) {
            let mut data = [0];
            devices.port_read(base + 7, &mut data);
            assert_eq!(data, [value]);
        }
    }

    #[test]
    fn the_ways_to_stop() {
        let rows: [(u16, &[u8], &str); 5] = [
            (0xcf9, &[6], "Some(Reset)"),
            (0x64, &[0xfe], "Some(Reset)"),
            (0x604, &[0, 0x34], "Some(PowerOff)"),
            (0x604, &[0, 0x14], "None"),
            (0xcf9, &[2], "None"),
        ];
        for (port, data, want) in rows {
            let ending = devices().port_write(port, data);
            assert_eq!(format!("{ending:?}"), want, "{port:#x}");
        }
    }
}
