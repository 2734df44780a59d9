//! How a device interrupts the guest: by MSI-X vectors, or by the ISR byte and an INTx line.
//!
//! Virtio 1.2, 4.1.4.5 and 4.1.5.1.2.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};

use crate::fields::{Malformed, Reader, Writer};
use crate::lock::lock;
use crate::pci::msix::Msix;
use crate::pci::routes::Line;

/// The value that means "no vector".
pub(super) const NO_VECTOR: u16 = 0xffff;
/// ISR bits.
const ISR_QUEUE: u8 = 1;
const ISR_CONFIG: u8 = 2;

#[derive(Debug)]
struct Level {
    isr: u8,
    line: Line,
}

/// A device's interrupts, which the transport and the worker share.
#[derive(Debug)]
pub(super) struct Interrupts {
    pub(super) msix: Mutex<Msix>,
    /// The vector of each queue.
    queue_vectors: Vec<AtomicU16>,
    config_vector: AtomicU16,
    level: Mutex<Level>,
    is_intx_off: AtomicBool,
}

impl Interrupts {
    pub(super) fn new(msix: Msix, line: Line, queues: usize) -> Self {
        Self {
            msix: Mutex::new(msix),
            queue_vectors: (0..queues).map(|_| AtomicU16::new(NO_VECTOR)).collect(),
            config_vector: AtomicU16::new(NO_VECTOR),
            level: Mutex::new(Level { isr: 0, line }),
            is_intx_off: AtomicBool::new(false),
        }
    }

    /// Signals that queue `index` has used buffers.
    pub(super) fn signal_queue(&self, index: usize) {
        if let Some(vector) = self.queue_vectors.get(index) {
            self.signal(vector, ISR_QUEUE);
        }
    }

    /// Signals that the configuration or the status has changed.
    pub(super) fn signal_config(&self) {
        self.signal(&self.config_vector, ISR_CONFIG);
    }

    /// Returns the vector of a queue, or of configuration changes.
    pub(super) fn vector(&self, queue: Option<usize>) -> u16 {
        self.slot(queue)
            .map_or(NO_VECTOR, |vector| vector.load(Ordering::Acquire))
    }

    /// Sets a vector. One that does not exist becomes "none", which the driver can read.
    pub(super) fn set_vector(&self, queue: Option<usize>, vector: u16) {
        let vectors = lock(&self.msix).len();
        let vector = if vector < vectors { vector } else { NO_VECTOR };
        if let Some(slot) = self.slot(queue) {
            slot.store(vector, Ordering::Release);
        }
    }

    /// Reads the ISR byte for the guest, which also lowers the interrupt.
    pub(super) fn take_isr(&self) -> u8 {
        let mut level = lock(&self.level);
        let isr = std::mem::take(&mut level.isr);
        level.line.set(false);
        isr
    }

    /// Returns true if INTx is asserted, for the PCI status register.
    pub(super) fn is_level_up(&self) -> bool {
        lock(&self.level).isr != 0
    }

    /// Follows a change of the interrupt-disable bit or of MSI-X.
    pub(super) fn set_intx_off(&self, is_off: bool) {
        self.is_intx_off.store(is_off, Ordering::Release);
        let level = lock(&self.level);
        level.line.set(!is_off && level.isr != 0);
    }

    /// Sets everything to the state after power-on, except for the MSI-X table, which is PCI's.
    pub(super) fn reset(&self) {
        for vector in self.queue_vectors.iter().chain([&self.config_vector]) {
            vector.store(NO_VECTOR, Ordering::Release);
        }
        self.take_isr();
    }

    /// Saves the vectors, and what is asserted.
    pub(super) fn save(&self, w: &mut Writer) {
        lock(&self.msix).save(w);
        w.count(self.queue_vectors.len());
        for vector in self.queue_vectors.iter().chain([&self.config_vector]) {
            w.put(&vector.load(Ordering::Acquire));
        }
        w.flag(self.is_intx_off.load(Ordering::Acquire));
        w.put(&lock(&self.level).isr);
    }

    /// Loads a saved state.
    pub(super) fn load(&self, r: &mut Reader<'_>) -> Result<(), Malformed> {
        lock(&self.msix).load(r)?;
        r.expect(self.queue_vectors.len())?;
        for queue in (0..self.queue_vectors.len()).map(Some).chain([None]) {
            self.set_vector(queue, r.get()?);
        }
        let is_off = r.flag()?;
        lock(&self.level).isr = r.get::<u8>()? & (ISR_QUEUE | ISR_CONFIG);
        self.set_intx_off(is_off);
        Ok(())
    }

    fn slot(&self, queue: Option<usize>) -> Option<&AtomicU16> {
        match queue {
            Some(index) => self.queue_vectors.get(index),
            None => Some(&self.config_vector),
        }
    }

    fn signal(&self, vector: &AtomicU16, cause: u8) {
        {
            let mut msix = lock(&self.msix);
            if msix.is_enabled() {
                msix.signal(vector.load(Ordering::Acquire));
                return;
            }
        }
        // The ISR and the line change together. Otherwise a line could stay up that nobody lowers.
        let mut level = lock(&self.level);
        level.isr |= cause;
        level.line.set(!self.is_intx_off.load(Ordering::Acquire));
    }
}
