//! Virtio over PCI (virtio 1.2, 4.1), modern only: one BAR with all structures, MSI-X, INTx.
//!
//! ```text
//! BAR 0, 64 KiB   0x0000 common configuration   0x1000 ISR   0x2000 device configuration
//!                 0x3000 notifications, 4 bytes per queue    0x8000 MSI-X table   0xc000 PBA
//! ```
//!
//! Notifications are doorbells, which move with the BAR.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use anykvm_ioctls::{Doorbell, DoorbellSpec, Space, VmFd};

use super::Backend;
use super::interrupts::Interrupts;
use super::registers::{self, Registers, Request};
use super::worker::{self, Active, Core};
use crate::error::BootError;
use crate::fields::{Malformed, Reader, Writer};
use crate::layout::PCI_WINDOW;
use crate::lock::lock;
use crate::memory::GuestMemory;
use crate::pci::Function;
use crate::pci::config::{ConfigSpace, Identity, spec as header};
use crate::pci::msix::{CONTROL_WRITABLE, Msix};
use crate::pci::routes::{Routes, gsi_of_slot};

mod spec {
    pub(super) const VENDOR: u16 = 0x1af4;
    /// First PCI device id of modern devices; the virtio device id is added.
    pub(super) const FIRST_DEVICE: u16 = 0x1040;
    pub(super) const CAP_VENDOR: u8 = 9;
    /// Types of virtio's capabilities.
    pub(super) const COMMON_CFG: u8 = 1;
    pub(super) const NOTIFY_CFG: u8 = 2;
    pub(super) const ISR_CFG: u8 = 3;
    pub(super) const DEVICE_CFG: u8 = 4;
    pub(super) const PCI_CFG: u8 = 5;
    pub(super) const CAP_MSIX: u8 = 0x11;
    pub(super) const BAR_LEN: u32 = 0x1_0000;
    pub(super) const ISR: u64 = 0x1000;
    pub(super) const DEVICE: u64 = 0x2000;
    pub(super) const NOTIFY: u64 = 0x3000;
    pub(super) const NOTIFY_STRIDE: u32 = 4;
    pub(super) const MSIX_TABLE: u64 = 0x8000;
    pub(super) const MSIX_PENDING: u64 = 0xc000;
    /// Length in bytes of each structure's part of the BAR.
    pub(super) const PART: u32 = 0x1000;
    /// Offsets in the configuration access capability.
    pub(super) const WINDOW_OFFSET: u16 = 8;
    pub(super) const WINDOW_LEN: u16 = 12;
    pub(super) const WINDOW_DATA: u16 = 16;
}

/// The address of a BAR that is not decoded.
const NOWHERE: u64 = u64::MAX;

#[derive(Debug)]
struct State {
    config: ConfigSpace,
    common: Registers,
    /// Offsets of the two capabilities with effects.
    msix_cap: u16,
    window_cap: u16,
}

/// A virtio device in a PCI slot.
pub(crate) struct VirtioPci {
    vm: Arc<VmFd>,
    name: &'static str,
    core: Arc<Core>,
    device_config: Vec<u8>,
    /// Address at which the BAR is decoded, and the doorbells there.
    base: AtomicU64,
    doorbells: Mutex<Vec<Doorbell>>,
    state: Mutex<State>,
}

impl VirtioPci {
    /// Makes a device for `slot`, with its BAR assigned as firmware would, and starts its worker.
    pub(crate) fn new(
        vm: Arc<VmFd>,
        memory: GuestMemory,
        routes: &Arc<Routes>,
        slot: u8,
        mut backend: Box<dyn Backend>,
    ) -> Result<Self, BootError> {
        let profile = backend.profile();
        let queues = profile.queue_sizes.len();
        // There is one vector for configuration changes, and one for each queue.
        let vectors = u16::try_from(queues).unwrap_or(0).saturating_add(1);
        let msix = Msix::new(Arc::clone(routes), vectors)?;
        let interrupts = Interrupts::new(msix, routes.line(slot), queues);
        let bells = Arc::default();
        backend.connect(&bells);
        let core = Arc::new(Core::new(memory, interrupts, queues, bells, backend));
        let identity = Identity {
            vendor: spec::VENDOR,
            device: spec::FIRST_DEVICE.saturating_add(profile.kind),
            class: profile.class,
            revision: 1,
        };
        let mut config = ConfigSpace::new(identity);
        config.set(header::SUBSYSTEM, &spec::VENDOR.to_le_bytes());
        config.set(header::SUBSYSTEM + 2, &profile.kind.to_le_bytes());
        config.set(header::INTERRUPT_LINE, &[gsi_of_slot(slot)]);
        config.set(header::INTERRUPT_PIN, &[1]);
        config.set_bar0(PCI_WINDOW + u32::from(slot) * spec::BAR_LEN, spec::BAR_LEN);
        let (msix_cap, window_cap) = add_capabilities(&mut config, vectors, profile.config.len());
        let device = Self {
            vm,
            name: profile.name,
            core: Arc::clone(&core),
            device_config: profile.config.clone(),
            base: AtomicU64::new(NOWHERE),
            doorbells: Mutex::default(),
            state: Mutex::new(State {
                config,
                common: Registers::new(profile.features, &profile.queue_sizes),
                msix_cap,
                window_cap,
            }),
        };
        device.place(&lock(&device.state))?;
        worker::start(profile.name, core)?;
        Ok(device)
    }

    /// Moves the doorbells to the BAR's current address.
    fn place(&self, state: &State) -> Result<(), BootError> {
        let base = state.config.bar0().map_or(NOWHERE, u64::from);
        let earlier = self.base.swap(base, Ordering::AcqRel);
        if earlier == base {
            return Ok(());
        }
        let mut doorbells = lock(&self.doorbells);
        doorbells.clear();
        if base == NOWHERE {
            return Ok(());
        }
        for queue in (0u32..).take(self.core.queues) {
            let offset = spec::NOTIFY + u64::from(queue * spec::NOTIFY_STRIDE);
            let place = DoorbellSpec {
                space: Space::Mmio,
                address: base.saturating_add(offset),
                len: 0,
                datamatch: None,
            };
            // A doorbell that is refused does not exist; its notifications come as exits.
            let doorbell = self.vm.subscribe(place, self.core.bells.ringer(queue));
            doorbells.push(doorbell.map_err(BootError::kvm("a doorbell"))?);
        }
        Ok(())
    }

    fn reset(&self, state: &mut State) {
        // The lock is free once the worker has let go of the queues.
        *lock(&self.core.active) = None;
        self.core.is_broken.store(false, Ordering::Release);
        self.core.interrupts.reset();
        state.common.reset();
    }

    fn activate(&self, state: &State) {
        let Some(queues) = state.common.new_queues(&self.core.memory) else {
            self.core.break_down();
            return;
        };
        *lock(&self.core.active) = Some(Active { queues });
        // Buffers may have been added before.
        for queue in 0..self.core.queues {
            self.core.kick(queue);
        }
    }

    fn read_bar(&self, state: &State, at: u64, data: &mut [u8]) {
        data.fill(0);
        let interrupts = &self.core.interrupts;
        match at {
            0..spec::ISR => {
                let is_broken = self.core.is_broken.load(Ordering::Acquire);
                copy(&state.common.bytes(interrupts, is_broken), at, data);
            }
            spec::ISR => {
                let isr = interrupts.take_isr();
                data.iter_mut().take(1).for_each(|byte| *byte = isr);
            }
            spec::DEVICE..spec::NOTIFY => copy(&self.device_config, at - spec::DEVICE, data),
            spec::MSIX_TABLE..spec::MSIX_PENDING => {
                lock(&interrupts.msix).read_table(offset(at, spec::MSIX_TABLE), data);
            }
            spec::MSIX_PENDING.. => {
                lock(&interrupts.msix).read_pending(offset(at, spec::MSIX_PENDING), data);
            }
            _ => {}
        }
    }

    fn write_bar(&self, state: &mut State, at: u64, data: &[u8]) {
        let interrupts = &self.core.interrupts;
        match at {
            0..spec::ISR => match state.common.write(at, data, interrupts) {
                Request::None => {}
                Request::Reset => self.reset(state),
                Request::Activate => self.activate(state),
            },
            // A write comes here only if the doorbell does not exist.
            spec::NOTIFY..spec::MSIX_TABLE => {
                let queue = (at - spec::NOTIFY) / u64::from(spec::NOTIFY_STRIDE);
                self.core.kick(usize::try_from(queue).unwrap_or(usize::MAX));
            }
            spec::MSIX_TABLE..spec::MSIX_PENDING => {
                lock(&interrupts.msix).write_table(offset(at, spec::MSIX_TABLE), data);
            }
            // The device configuration, the ISR and the pending bits are read-only.
            _ => {}
        }
    }

    /// Returns offset in the BAR and length of the access that the configuration access capability describes (4.1.4.9),
    /// if `at` is its data register.
    fn window_access(state: &State, at: u16) -> Option<(u64, usize)> {
        if at != state.window_cap + spec::WINDOW_DATA {
            return None;
        }
        let len = state.config.u32_at(state.window_cap + spec::WINDOW_LEN);
        let offset = state.config.u32_at(state.window_cap + spec::WINDOW_OFFSET);
        // BAR 0 is the only BAR, and its number the only value that the field can have.
        matches!(len, 1 | 2 | 4)
            .then(|| Some((u64::from(offset), usize::try_from(len).ok()?)))
            .flatten()
            .filter(|(offset, _)| *offset < u64::from(spec::BAR_LEN))
    }

    /// Follows a write to the header or to the MSI-X capability.
    fn follow_config(&self, state: &State) {
        let interrupts = &self.core.interrupts;
        let control = state.config.u16_at(state.msix_cap + 2) & CONTROL_WRITABLE;
        let is_msix = {
            let mut msix = lock(&interrupts.msix);
            msix.set_control(control);
            msix.is_enabled()
        };
        let is_off = state.config.command() & header::COMMAND_INTX_OFF != 0;
        interrupts.set_intx_off(is_off || is_msix);
        // If the guest moves the BAR onto another device's doorbells, this device gets none, and its notifications are
        // exits.
        let _ = self.place(state);
    }
}

impl Function for VirtioPci {
    fn read_config(&self, at: u16, data: &mut [u8]) {
        let state = lock(&self.state);
        if let Some((offset, len)) = Self::window_access(&state, at) {
            if let Some(data) = data.get_mut(..len) {
                self.read_bar(&state, offset, data);
            }
            return;
        }
        state.config.read(at, data);
        if at <= header::STATUS && self.core.interrupts.is_level_up() {
            let byte = data.get_mut(usize::from(header::STATUS - at));
            byte.into_iter()
                .for_each(|byte| *byte |= header::STATUS_INTX);
        }
    }

    fn write_config(&self, at: u16, data: &[u8]) {
        let state = &mut *lock(&self.state);
        if let Some((offset, len)) = Self::window_access(state, at) {
            if let Some(data) = data.get(..len) {
                self.write_bar(state, offset, data);
            }
            return;
        }
        state.config.write(at, data);
        self.follow_config(state);
    }

    fn window(&self) -> Option<(u64, u64)> {
        let base = self.base.load(Ordering::Acquire);
        (base != NOWHERE).then_some((base, u64::from(spec::BAR_LEN)))
    }

    fn read(&self, at: u64, data: &mut [u8]) {
        self.read_bar(&lock(&self.state), at, data);
    }

    fn write(&self, at: u64, data: &[u8]) {
        self.write_bar(&mut lock(&self.state), at, data);
    }

    fn pause(&self) {
        self.core.pause();
    }

    fn resume(&self) {
        self.core.resume();
    }

    fn save(&self, w: &mut Writer) {
        let state = lock(&self.state);
        state.config.save(w);
        state.common.save(w);
        self.core.interrupts.save(w);
        self.core.save(w);
    }

    fn load(&self, r: &mut Reader<'_>) -> Result<(), Malformed> {
        let state = &mut *lock(&self.state);
        r.part(self.name);
        state.config.load(r)?;
        state.common.load(r)?;
        self.core.interrupts.load(r)?;
        self.core
            .load(state.common.new_queues(&self.core.memory), r)?;
        self.place(state)
            .map_err(|error| r.wrong(&error.to_string()))
    }
}

impl Drop for VirtioPci {
    fn drop(&mut self) {
        self.core.stop();
    }
}

/// Adds MSI-X and virtio's five capabilities. Returns the offsets of the first and of the last.
fn add_capabilities(config: &mut ConfigSpace, vectors: u16, config_len: usize) -> (u16, u16) {
    let low32 = |value: u64| u32::try_from(value).unwrap_or(0);
    let mut msix = vectors.saturating_sub(1).to_le_bytes().to_vec();
    msix.extend(low32(spec::MSIX_TABLE).to_le_bytes());
    msix.extend(low32(spec::MSIX_PENDING).to_le_bytes());
    let msix_cap = config.add_capability(spec::CAP_MSIX, &msix);
    config.allow(msix_cap + 2, &CONTROL_WRITABLE.to_le_bytes());

    let mut add = |kind: u8, at: u64, len: u32, more: &[u8]| {
        let cap_len = u8::try_from(16 + more.len()).unwrap_or(0);
        // The body has length, type, BAR 0, id, padding.
        let mut body = vec![cap_len, kind, 0, 0, 0, 0];
        body.extend(low32(at).to_le_bytes());
        body.extend(len.to_le_bytes());
        body.extend(more);
        config.add_capability(spec::CAP_VENDOR, &body)
    };
    let common_len = u32::try_from(registers::LEN).unwrap_or(0);
    let config_len = u32::try_from(config_len).unwrap_or(0);
    add(spec::COMMON_CFG, 0, common_len, &[]);
    add(spec::ISR_CFG, spec::ISR, 1, &[]);
    if config_len > 0 {
        add(spec::DEVICE_CFG, spec::DEVICE, config_len, &[]);
    }
    let stride = spec::NOTIFY_STRIDE.to_le_bytes();
    add(spec::NOTIFY_CFG, spec::NOTIFY, spec::PART, &stride);
    let window_cap = add(spec::PCI_CFG, 0, 0, &[0; 4]);
    config.allow(window_cap + spec::WINDOW_OFFSET, &[0xff; 8]);
    (msix_cap, window_cap)
}

fn offset(at: u64, start: u64) -> usize {
    at.checked_sub(start)
        .and_then(|at| usize::try_from(at).ok())
        .unwrap_or(usize::MAX)
}

/// Copies the bytes of `from` from `at` on. The rest of `data` stays as it is.
fn copy(from: &[u8], at: u64, data: &mut [u8]) {
    let at = usize::try_from(at).unwrap_or(usize::MAX);
    for (to, from) in data.iter_mut().zip(from.iter().skip(at)) {
        *to = *from;
    }
}
