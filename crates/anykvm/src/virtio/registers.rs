//! The common configuration structure (virtio 1.2, 4.1.4.3): features, status, queues.

use virtio_bindings::virtio_config::{
    VIRTIO_CONFIG_S_DRIVER_OK, VIRTIO_CONFIG_S_FEATURES_OK, VIRTIO_CONFIG_S_NEEDS_RESET,
    VIRTIO_F_VERSION_1,
};
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};
use virtio_queue::{Queue, QueueT};

use super::interrupts::Interrupts;
use crate::fields::{Malformed, Reader, Writer};
use crate::memory::GuestMemory;

/// Length of the structure in bytes.
pub(super) const LEN: usize = 56;

/// Feature bits of every device.
pub(super) const COMMON_FEATURES: u64 =
    (1 << VIRTIO_F_VERSION_1) | (1 << VIRTIO_RING_F_EVENT_IDX) | (1 << VIRTIO_RING_F_INDIRECT_DESC);

/// Offsets.
mod spec {
    pub(super) const DEVICE_FEATURE_SELECT: u64 = 0;
    pub(super) const DRIVER_FEATURE_SELECT: u64 = 8;
    pub(super) const DRIVER_FEATURE: u64 = 12;
    pub(super) const CONFIG_VECTOR: u64 = 16;
    pub(super) const STATUS: u64 = 20;
    pub(super) const QUEUE_SELECT: u64 = 22;
    pub(super) const QUEUE_SIZE: u64 = 24;
    pub(super) const QUEUE_VECTOR: u64 = 26;
    pub(super) const QUEUE_ENABLE: u64 = 28;
    pub(super) const QUEUE_ADDRESSES: u64 = 32;
}

#[derive(Debug, Clone, Copy, Default)]
struct QueueRegisters {
    max_size: u16,
    size: u16,
    is_enabled: bool,
    /// Addresses of the descriptor table, the available ring and the used ring.
    addresses: [u64; 3],
}

/// What the transport has to do after a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Request {
    /// Nothing.
    None,
    /// Reset the device: the status became 0.
    Reset,
    /// Take the queues over: the driver is ready.
    Activate,
}

/// The registers.
#[derive(Debug)]
pub(super) struct Registers {
    offered: u64,
    accepted: u64,
    device_select: u32,
    driver_select: u32,
    status: u8,
    queue_select: u16,
    queues: Vec<QueueRegisters>,
}

impl Registers {
    /// Makes the registers as after power-on.
    pub(super) fn new(features: u64, queue_sizes: &[u16]) -> Self {
        let queues = queue_sizes.iter().map(|max_size| QueueRegisters {
            max_size: *max_size,
            size: *max_size,
            ..Default::default()
        });
        Self {
            offered: features | COMMON_FEATURES,
            accepted: 0,
            device_select: 0,
            driver_select: 0,
            status: 0,
            queue_select: 0,
            queues: queues.collect(),
        }
    }

    /// Sets the registers to their state after power-on.
    pub(super) fn reset(&mut self) {
        let sizes: Vec<u16> = self.queues.iter().map(|q| q.max_size).collect();
        *self = Self::new(self.offered, &sizes);
    }

    /// Saves what the driver has set.
    pub(super) fn save(&self, w: &mut Writer) {
        w.put(&self.offered);
        w.put(&self.accepted);
        w.put(&self.device_select);
        w.put(&self.driver_select);
        w.put(&self.status);
        w.put(&self.queue_select);
        w.count(self.queues.len());
        for queue in &self.queues {
            w.put(&queue.size);
            w.flag(queue.is_enabled);
            w.put(&queue.addresses);
        }
    }

    /// Loads what the driver had set, on a device with the same features.
    pub(super) fn load(&mut self, r: &mut Reader<'_>) -> Result<(), Malformed> {
        let offered: u64 = r.get()?;
        if offered != self.offered {
            return Err(r.wrong(&format!(
                "it has features {offered:#x} there and {:#x} here",
                self.offered
            )));
        }
        self.accepted = r.get()?;
        self.device_select = r.get()?;
        self.driver_select = r.get()?;
        self.status = r.get()?;
        self.queue_select = r.get()?;
        r.expect(self.queues.len())?;
        for queue in &mut self.queues {
            queue.size = r.get()?;
            queue.is_enabled = r.flag()?;
            queue.addresses = r.get()?;
        }
        Ok(())
    }

    /// Returns the structure as the guest reads it now.
    pub(super) fn bytes(&self, interrupts: &Interrupts, is_broken: bool) -> [u8; LEN] {
        let selected = usize::from(self.queue_select);
        let queue = self.queues.get(selected).copied().unwrap_or_default();
        let broken = if is_broken {
            low8(VIRTIO_CONFIG_S_NEEDS_RESET)
        } else {
            0
        };
        let mut bytes = Vec::with_capacity(LEN);
        bytes.extend(self.device_select.to_le_bytes());
        bytes.extend(word(self.offered, self.device_select).to_le_bytes());
        bytes.extend(self.driver_select.to_le_bytes());
        bytes.extend(word(self.accepted, self.driver_select).to_le_bytes());
        bytes.extend(interrupts.vector(None).to_le_bytes());
        bytes.extend(u16::try_from(self.queues.len()).unwrap_or(0).to_le_bytes());
        // The generation stays the same, because no configuration changes.
        bytes.extend([self.status | broken, 0]);
        bytes.extend(self.queue_select.to_le_bytes());
        bytes.extend(queue.size.to_le_bytes());
        bytes.extend(interrupts.vector(Some(selected)).to_le_bytes());
        bytes.extend(u16::from(queue.is_enabled).to_le_bytes());
        // Each queue has its own place in the notification area.
        bytes.extend(self.queue_select.to_le_bytes());
        for address in queue.addresses {
            bytes.extend(address.to_le_bytes());
        }
        bytes.try_into().unwrap_or([0; LEN])
    }

    /// Handles a write of 1, 2, 4 or 8 bytes. Drivers must use the field's width (4.1.3.1); other writes have no
    /// effect.
    pub(super) fn write(&mut self, at: u64, data: &[u8], interrupts: &Interrupts) -> Request {
        match *data {
            [value] if at == spec::STATUS => return self.set_status(value),
            [a, b] => self.write16(at, u16::from_le_bytes([a, b]), interrupts),
            [a, b, c, d] => self.write32(at, u32::from_le_bytes([a, b, c, d])),
            [a, b, c, d, e, f, g, h] => {
                self.write32(at, u32::from_le_bytes([a, b, c, d]));
                self.write32(at.saturating_add(4), u32::from_le_bytes([e, f, g, h]));
            }
            _ => {}
        }
        Request::None
    }

    fn write16(&mut self, at: u64, value: u16, interrupts: &Interrupts) {
        let selected = usize::from(self.queue_select);
        match at {
            spec::CONFIG_VECTOR => interrupts.set_vector(None, value),
            spec::QUEUE_SELECT => self.queue_select = value,
            spec::QUEUE_VECTOR => interrupts.set_vector(Some(selected), value),
            spec::QUEUE_SIZE => {
                if let Some(queue) = self.idle_queue()
                    && value.is_power_of_two()
                    && value <= queue.max_size
                {
                    queue.size = value;
                }
            }
            // Only a reset disables a queue.
            spec::QUEUE_ENABLE if value == 1 => {
                if let Some(queue) = self.idle_queue() {
                    queue.is_enabled = true;
                }
            }
            _ => {}
        }
    }

    fn write32(&mut self, at: u64, value: u32) {
        match at {
            spec::DEVICE_FEATURE_SELECT => self.device_select = value,
            spec::DRIVER_FEATURE_SELECT => self.driver_select = value,
            spec::DRIVER_FEATURE if !self.has(VIRTIO_CONFIG_S_FEATURES_OK) => {
                let shift = match self.driver_select {
                    0 => 0,
                    1 => 32,
                    _ => return,
                };
                let kept = self.accepted & !(0xffff_ffff << shift);
                self.accepted = kept | (u64::from(value) << shift);
            }
            spec::QUEUE_ADDRESSES..=55 => {
                let (which, half) = ((at - spec::QUEUE_ADDRESSES) / 8, at % 8);
                let Some(queue) = self.idle_queue() else {
                    return;
                };
                let which = usize::try_from(which).unwrap_or(usize::MAX);
                let Some(address) = queue.addresses.get_mut(which) else {
                    return;
                };
                match half {
                    0 => *address = (*address & !0xffff_ffff) | u64::from(value),
                    4 => *address = (*address & 0xffff_ffff) | (u64::from(value) << 32),
                    _ => {}
                }
            }
            _ => {}
        }
    }

    fn set_status(&mut self, value: u8) -> Request {
        if value == 0 {
            return Request::Reset;
        }
        let was_ready = self.has(VIRTIO_CONFIG_S_DRIVER_OK);
        let mut status = value & !low8(VIRTIO_CONFIG_S_NEEDS_RESET);
        let wants_features = status & low8(VIRTIO_CONFIG_S_FEATURES_OK) != 0;
        let has_version_1 = self.accepted & (1 << VIRTIO_F_VERSION_1) != 0;
        if wants_features && (self.accepted & !self.offered != 0 || !has_version_1) {
            // The driver reads the bit back and finds that the device does not agree (3.1.1).
            status &= !low8(VIRTIO_CONFIG_S_FEATURES_OK);
        }
        self.status = status;
        let is_ready = self.has(VIRTIO_CONFIG_S_DRIVER_OK) && self.has(VIRTIO_CONFIG_S_FEATURES_OK);
        if is_ready && !was_ready {
            Request::Activate
        } else {
            Request::None
        }
    }

    /// Returns the enabled queues, which have been checked. `None` if one of them cannot work.
    pub(super) fn new_queues(&self, memory: &GuestMemory) -> Option<Vec<Option<Queue>>> {
        self.queues
            .iter()
            .map(|registers| {
                if !registers.is_enabled {
                    return Some(None);
                }
                new_queue(registers, self.accepted, memory).map(Some)
            })
            .collect()
    }

    fn has(&self, bit: u32) -> bool {
        self.status & low8(bit) != 0
    }

    /// Returns the selected queue, while its registers may still be changed.
    fn idle_queue(&mut self) -> Option<&mut QueueRegisters> {
        self.queues
            .get_mut(usize::from(self.queue_select))
            .filter(|queue| !queue.is_enabled)
    }
}

fn new_queue(registers: &QueueRegisters, features: u64, memory: &GuestMemory) -> Option<Queue> {
    let mut queue = Queue::new(registers.max_size).ok()?;
    let [descriptors, available, used] = registers.addresses.map(vm_memory::GuestAddress);
    queue.try_set_size(registers.size).ok()?;
    queue.try_set_desc_table_address(descriptors).ok()?;
    queue.try_set_avail_ring_address(available).ok()?;
    queue.try_set_used_ring_address(used).ok()?;
    queue.set_event_idx(features & (1 << VIRTIO_RING_F_EVENT_IDX) != 0);
    queue.set_ready(true);
    queue.is_valid(memory).then_some(queue)
}

/// Returns one of the 32-bit halves of the feature bits.
fn word(features: u64, select: u32) -> u32 {
    let shifted = match select {
        0 => features,
        1 => features >> 32,
        _ => 0,
    };
    u32::try_from(shifted & 0xffff_ffff).unwrap_or(0)
}

/// Returns a status bit as a byte; all of them fit.
fn low8(bit: u32) -> u8 {
    u8::try_from(bit & 0xff).unwrap_or(0)
}
