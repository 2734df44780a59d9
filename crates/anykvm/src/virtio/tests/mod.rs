//! A driver for the tests: PCI discovery, negotiation and queues, all through the guest's interface.

mod block;
mod hostile;
mod others;
mod random;
mod registers;

use std::sync::Arc;
use std::time::{Duration, Instant};

use vm_memory::{Bytes, GuestAddress};

use super::{Backend, VirtioPci};
use crate::memory::{self, GuestMemory};
use crate::pci::Function;
use crate::pci::routes::Routes;
use crate::pci::routes::tests::vm;

pub(super) const MEM: u64 = 8 << 20;
pub(super) const QUEUE_LEN: u16 = 16;
/// Address of the rings of queue 0; those of the next queues follow.
const RINGS: u64 = 0x1_0000;
/// Address of the tests' buffers.
pub(super) const BUFFER: u64 = 0x10_0000;
const LIMIT: Duration = Duration::from_secs(10);

pub(super) const NEXT: u16 = 1;
pub(super) const WRITE: u16 = 2;
pub(super) const INDIRECT: u16 = 4;
/// Status bits.
pub(super) const FEATURES_OK: u8 = 8;
const READY: u8 = 0xf;
pub(super) const NEEDS_RESET: u8 = 0x40;

/// Returns the addresses of descriptor table, available ring and used ring.
pub(super) fn rings(queue: u16) -> [u64; 3] {
    let start = RINGS + u64::from(queue) * 0x1000;
    [start, start + 0x400, start + 0x800]
}

/// A device, and its driver's view of it.
pub(super) struct Driver {
    pub(super) device: VirtioPci,
    pub(super) memory: GuestMemory,
}

impl Driver {
    /// Makes a device in slot 1, with nothing negotiated.
    pub(super) fn new(backend: Box<dyn Backend>) -> Self {
        let vm = vm();
        let memory = memory::allocate(MEM).unwrap();
        let routes = Routes::new(Arc::clone(&vm)).unwrap();
        let device = VirtioPci::new(vm, memory.clone(), &routes, 1, backend).unwrap();
        Self { device, memory }
    }

    /// Makes a device whose features are negotiated and whose first `queues` queues run.
    pub(super) fn ready(backend: Box<dyn Backend>, queues: u16) -> Self {
        let driver = Self::new(backend);
        driver.start(queues);
        driver
    }

    pub(super) fn start(&self, queues: u16) {
        self.negotiate(1 << 32);
        assert_ne!(self.status() & FEATURES_OK, 0);
        for queue in 0..queues {
            self.set_available(queue, 0);
            self.put(rings(queue)[2] + 2, &[0; 2]);
            self.set_queue(queue, QUEUE_LEN, rings(queue));
        }
        self.set_status(READY);
    }

    /// Negotiates: ACKNOWLEDGE, DRIVER, the features, FEATURES_OK.
    pub(super) fn negotiate(&self, features: u64) {
        self.set_status(0);
        self.set_status(3);
        for (select, half) in [(0u32, features & 0xffff_ffff), (1, features >> 32)] {
            self.write(8, &select.to_le_bytes());
            self.write(12, &(half as u32).to_le_bytes());
        }
        self.set_status(3 | FEATURES_OK);
    }

    pub(super) fn set_queue(&self, queue: u16, len: u16, addresses: [u64; 3]) {
        self.write(22, &queue.to_le_bytes());
        self.write(24, &len.to_le_bytes());
        for (at, address) in (32..).step_by(8).zip(addresses) {
            self.write(at, &(address as u32).to_le_bytes());
            self.write(at + 4, &((address >> 32) as u32).to_le_bytes());
        }
        self.write(28, &1u16.to_le_bytes());
    }

    /// Puts descriptors at the start of the table, `head` into the ring, and notifies.
    pub(super) fn submit(&self, queue: u16, head: u16, descriptors: &[(u64, u32, u16, u16)]) {
        let [table, available, _] = rings(queue);
        for (at, (address, len, flags, next)) in (table..).step_by(16).zip(descriptors) {
            self.put(at, &address.to_le_bytes());
            self.put(at + 8, &len.to_le_bytes());
            self.put(at + 12, &flags.to_le_bytes());
            self.put(at + 14, &next.to_le_bytes());
        }
        let idx = self.get16(available + 2);
        let place = available + 4 + u64::from(idx % QUEUE_LEN) * 2;
        self.put(place, &head.to_le_bytes());
        self.set_available(queue, idx.wrapping_add(1));
        self.notify(queue);
    }

    pub(super) fn set_available(&self, queue: u16, idx: u16) {
        self.put(rings(queue)[1] + 2, &idx.to_le_bytes());
    }

    /// Returns how many buffers the device has used.
    pub(super) fn used_count(&self, queue: u16) -> u16 {
        self.get16(rings(queue)[2] + 2)
    }

    pub(super) fn notify(&self, queue: u16) {
        self.write(0x3000 + u64::from(queue) * 4, &queue.to_le_bytes());
    }

    /// Waits until `count` buffers are used. Returns the length of the last.
    pub(super) fn used(&self, queue: u16, count: u16) -> u32 {
        self.wait("a used buffer", || self.used_count(queue) == count);
        let place = rings(queue)[2] + 4 + u64::from((count - 1) % QUEUE_LEN) * 8;
        u32::from_le_bytes(self.get(place + 4, 4).try_into().unwrap())
    }

    /// Waits until the device needs a reset, or `count` buffers are used. Returns true for the former.
    pub(super) fn broken_or_used(&self, queue: u16, count: u16) -> bool {
        let is_broken = || self.status() & NEEDS_RESET != 0;
        self.wait("the end of the request", || {
            is_broken() || self.used_count(queue) == count
        });
        is_broken()
    }

    pub(super) fn wait(&self, what: &str, is_done: impl Fn() -> bool) {
        let limit = Instant::now() + LIMIT;
        while !is_done() {
            assert!(Instant::now() < limit, "waited in vain for {what}");
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    pub(super) fn read<const N: usize>(&self, at: u64) -> [u8; N] {
        let mut data = [0; N];
        self.device.read(at, &mut data);
        data
    }

    pub(super) fn write(&self, at: u64, data: &[u8]) {
        self.device.write(at, data);
    }

    pub(super) fn status(&self) -> u8 {
        self.read::<1>(20)[0]
    }

    pub(super) fn set_status(&self, status: u8) {
        self.write(20, &[status]);
    }

    pub(super) fn put(&self, at: u64, bytes: &[u8]) {
        self.memory.write_slice(bytes, GuestAddress(at)).unwrap();
    }

    fn get16(&self, at: u64) -> u16 {
        u16::from_le_bytes(self.get(at, 2).try_into().unwrap())
    }

    pub(super) fn get(&self, at: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.memory
            .read_slice(&mut bytes, GuestAddress(at))
            .unwrap();
        bytes
    }
}
