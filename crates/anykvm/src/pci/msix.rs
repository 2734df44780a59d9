//! MSI-X: a function's table of messages, its pending bits, and the enable and mask bits in its
//! capability (PCI Local Bus 3.0, 6.8.2).
//!
//! Each vector has a GSI. The routing table gets a vector's message when the vector can be delivered.

use std::sync::Arc;

use anykvm_ioctls::IrqTrigger;

use super::routes::{Message, Routes};
use crate::error::BootError;
use crate::fields::{Malformed, Reader, Writer};

mod spec {
    pub(super) const ENABLE: u16 = 1 << 15;
    pub(super) const MASK_ALL: u16 = 1 << 14;
    pub(super) const ENTRY_LEN: usize = 16;
    /// Offset of the vector control in an entry, and its only bit.
    pub(super) const CONTROL: usize = 12;
    pub(super) const MASKED: u8 = 1;
}

/// Bits of message control that the guest may change.
pub(crate) const CONTROL_WRITABLE: u16 = spec::ENABLE | spec::MASK_ALL;

#[derive(Debug)]
struct Vector {
    /// The table entry as the guest reads it.
    entry: [u8; spec::ENTRY_LEN],
    is_pending: bool,
    gsi: u32,
    irq: IrqTrigger,
}

/// The table, and the state of the capability.
#[derive(Debug)]
pub(crate) struct Msix {
    vectors: Vec<Vector>,
    control: u16,
    routes: Arc<Routes>,
}

impl Msix {
    /// Makes a table of `len` vectors, all masked, as after a reset.
    pub(crate) fn new(routes: Arc<Routes>, len: u16) -> Result<Self, BootError> {
        let mut vectors = Vec::new();
        for _ in 0..len {
            let (gsi, irq) = routes.new_message()?;
            let mut entry = [0; spec::ENTRY_LEN];
            entry[spec::CONTROL] = spec::MASKED;
            vectors.push(Vector {
                entry,
                is_pending: false,
                gsi,
                irq,
            });
        }
        Ok(Self {
            vectors,
            control: 0,
            routes,
        })
    }

    /// Returns the number of vectors.
    pub(crate) fn len(&self) -> u16 {
        u16::try_from(self.vectors.len()).unwrap_or(u16::MAX)
    }

    /// Returns true if the guest uses MSI-X and not INTx.
    pub(crate) fn is_enabled(&self) -> bool {
        self.control & spec::ENABLE != 0
    }

    /// Handles a write to message control.
    pub(crate) fn set_control(&mut self, control: u16) {
        self.control = control;
        self.deliver_pending();
    }

    /// Sends the vector's message; if the vector is masked, notes that it is pending. Numbers that are no vector's
    /// (0xffff is virtio's "none") are ignored.
    pub(crate) fn signal(&mut self, vector: u16) {
        let can_send = self.can_send();
        let Some(vector) = self.vectors.get_mut(usize::from(vector)) else {
            return;
        };
        if can_send && vector.is_unmasked() {
            vector.send();
        } else {
            vector.is_pending = true;
        }
    }

    /// Reads the table for the guest.
    pub(crate) fn read_table(&self, at: usize, data: &mut [u8]) {
        for (i, to) in data.iter_mut().enumerate() {
            let at = at.saturating_add(i);
            let vector = self.vectors.get(at / spec::ENTRY_LEN);
            let byte = vector.and_then(|v| v.entry.get(at % spec::ENTRY_LEN));
            *to = byte.copied().unwrap_or(0);
        }
    }

    /// Writes the table for the guest.
    pub(crate) fn write_table(&mut self, at: usize, data: &[u8]) {
        for (i, from) in data.iter().enumerate() {
            let at = at.saturating_add(i);
            let field = at % spec::ENTRY_LEN;
            let Some(vector) = self.vectors.get_mut(at / spec::ENTRY_LEN) else {
                return;
            };
            let Some(byte) = vector.entry.get_mut(field) else {
                return;
            };
            *byte = match field {
                spec::CONTROL => from & spec::MASKED,
                13..=15 => 0,
                _ => *from,
            };
        }
        // The specification leaves undefined what a change of an unmasked entry does. Here the new message counts, as
        // in QEMU.
        if self.can_send() {
            let first = at / spec::ENTRY_LEN;
            let last = at.saturating_add(data.len().saturating_sub(1)) / spec::ENTRY_LEN;
            for vector in first..=last.min(first.saturating_add(1)) {
                self.route(vector);
            }
        }
        self.deliver_pending();
    }

    /// Reads the pending bits for the guest.
    pub(crate) fn read_pending(&self, at: usize, data: &mut [u8]) {
        for (i, to) in data.iter_mut().enumerate() {
            let first = at.saturating_add(i).saturating_mul(8);
            let bits = self.vectors.iter().skip(first).take(8).enumerate();
            *to = bits.fold(0, |byte, (bit, v)| byte | (u8::from(v.is_pending) << bit));
        }
    }

    /// Saves the table and the pending bits.
    pub(crate) fn save(&self, w: &mut Writer) {
        w.put(&self.control);
        w.count(self.vectors.len());
        for vector in &self.vectors {
            w.put(&vector.entry);
            w.flag(vector.is_pending);
        }
    }

    /// Loads a saved state, and routes the messages that may be sent.
    pub(crate) fn load(&mut self, r: &mut Reader<'_>) -> Result<(), Malformed> {
        self.control = r.get::<u16>()? & CONTROL_WRITABLE;
        r.expect(self.vectors.len())?;
        for vector in &mut self.vectors {
            vector.entry = r.get()?;
            vector.is_pending = r.flag()?;
        }
        if self.can_send() {
            (0..self.vectors.len()).for_each(|index| self.route(index));
        }
        Ok(())
    }

    fn can_send(&self) -> bool {
        self.is_enabled() && self.control & spec::MASK_ALL == 0
    }

    fn route(&self, vector: usize) {
        if let Some(vector) = self.vectors.get(vector).filter(|v| v.is_unmasked()) {
            self.routes.set_message(vector.gsi, vector.message());
        }
    }

    /// Sends what is pending, after something was unmasked.
    fn deliver_pending(&mut self) {
        if !self.can_send() {
            return;
        }
        for index in 0..self.vectors.len() {
            self.route(index);
        }
        for vector in &mut self.vectors {
            if vector.is_pending && vector.is_unmasked() {
                vector.is_pending = false;
                vector.send();
            }
        }
    }
}

impl Vector {
    fn is_unmasked(&self) -> bool {
        self.entry
            .get(spec::CONTROL)
            .is_some_and(|control| control & spec::MASKED == 0)
    }

    fn message(&self) -> Message {
        let [a, b, c, d, e, f, g, h, i, j, k, l, ..] = self.entry;
        Message {
            address: u64::from_le_bytes([a, b, c, d, e, f, g, h]),
            data: u32::from_le_bytes([i, j, k, l]),
        }
    }

    fn send(&self) {
        self.irq.trigger();
    }
}

#[cfg(test)]
mod tests {
    use super::super::routes::tests::vm;
    use super::*;

    fn entry(address: u64, data: u32, is_masked: bool) -> Vec<u8> {
        let mut bytes = address.to_le_bytes().to_vec();
        bytes.extend(data.to_le_bytes());
        bytes.extend(u32::from(is_masked).to_le_bytes());
        bytes
    }

    fn pending(msix: &Msix) -> u8 {
        let mut byte = [0];
        msix.read_pending(0, &mut byte);
        byte[0]
    }

    #[test]
    fn masked_vectors_wait_and_unmasked_ones_send() {
        let mut msix = Msix::new(Routes::new(vm()).unwrap(), 3).unwrap();
        msix.signal(1);
        assert_eq!(pending(&msix), 2, "not enabled yet");
        msix.set_control(spec::ENABLE);
        assert_eq!(pending(&msix), 2, "still masked by its entry");
        msix.write_table(16, &entry(0xfee0_0000, 0x31, false));
        assert_eq!(pending(&msix), 0);
        msix.set_control(spec::ENABLE | spec::MASK_ALL);
        msix.signal(1);
        msix.signal(2);
        assert_eq!(pending(&msix), 6);
        msix.set_control(spec::ENABLE);
        assert_eq!(pending(&msix), 4);
        msix.signal(0xffff);
        msix.signal(3);
        assert_eq!(pending(&msix), 4, "no such vectors");
    }

    #[test]
    fn a_message_arrives_at_its_lapic() {
        let vm = vm();
        let vcpu = vm.create_vcpu(0).unwrap();
        let mut lapic = vcpu.get_lapic().unwrap();
        // The bit of the spurious vector register that enables the LAPIC.
        lapic.regs[0xf1] = 1;
        lapic.regs[0xf0] = -1;
        vcpu.set_lapic(&lapic).unwrap();
        let mut msix = Msix::new(Routes::new(Arc::clone(&vm)).unwrap(), 2).unwrap();
        msix.set_control(spec::ENABLE);
        msix.write_table(16, &entry(0xfee0_0000, 0x51, false));
        msix.signal(1);
        let limit = std::time::Instant::now() + std::time::Duration::from_secs(5);
        // Vector 0x51 is bit 0x11 of the IRR register at 0x200 + 0x20.
        while vcpu.get_lapic().unwrap().regs[0x222] & 2 == 0 {
            assert!(std::time::Instant::now() < limit, "no interrupt");
            std::thread::yield_now();
        }
    }

    #[test]
    fn tables_read_as_written_and_end_where_they_end() {
        let mut msix = Msix::new(Routes::new(vm()).unwrap(), 2).unwrap();
        msix.write_table(0, &entry(0x1_fee0_1000, 0xffff_ffff, true));
        msix.write_table(28, &[0xfe; 4]);
        msix.write_table(30, &[0xff; 8]);
        msix.write_table(usize::MAX, &[0xff; 8]);
        let mut back = vec![0; 48];
        msix.read_table(0, &mut back);
        assert_eq!(back[..16], entry(0x1_fee0_1000, 0xffff_ffff, true));
        assert_eq!(back[28..], [0; 20], "only the mask bit can be written");
        msix.read_table(usize::MAX, &mut back);
        msix.read_pending(usize::MAX, &mut back);
        assert_eq!(back, [0; 48]);
    }
}
