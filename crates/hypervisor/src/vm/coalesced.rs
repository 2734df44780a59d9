//! KVM_REGISTER_COALESCED_MMIO: writes that are collected in a ring until the VMM's next exit.

use std::sync::{Mutex, PoisonError, atomic::Ordering};

use io_bus::{RingEntry, RingMemory, Space};
use kvm_bindings::kvm_coalesced_mmio_zone;

use super::Vm;
use crate::{Error, Result};

/// The ring of coalesced writes. It exists once a vCPU's mapping has provided its memory.
#[derive(Default)]
pub(crate) struct Ring(Mutex<Option<Box<dyn RingMemory + Send>>>);

impl core::fmt::Debug for Ring {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("Ring")
    }
}

impl Ring {
    /// Appends a write; false if it has to be an exit. As in KVM there is one ring per VM, and the lock orders the
    /// vCPUs' writes.
    pub(crate) fn push(&self, entry: RingEntry) -> bool {
        let mut ring = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        ring.as_mut()
            .is_some_and(|ring| io_bus::coalesced::push(&mut **ring, entry))
    }
}

impl Vm {
    /// Sets the memory of the ring, a `struct kvm_coalesced_mmio_ring`. Only the first call has an effect.
    pub fn set_coalesced_ring(&self, memory: Box<dyn RingMemory + Send>) {
        let mut ring = self
            .state
            .ring
            .0
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        ring.get_or_insert(memory);
    }
    /// KVM_REGISTER_COALESCED_MMIO. EINVAL for an unknown space. `pio` is the zone's union member, which the caller has
    /// read.
    pub fn register_coalesced_mmio(&self, zone: &kvm_coalesced_mmio_zone, pio: u32) -> Result<()> {
        let space = zone_space(pio)?;
        self.state.has_io.store(true, Ordering::Release);
        self.state.io.update(|io| {
            io.zones.register(space, zone.addr, zone.size);
            Ok(())
        })
    }
    /// KVM_UNREGISTER_COALESCED_MMIO. A zone that does not exist is no error.
    pub fn unregister_coalesced_mmio(
        &self,
        zone: &kvm_coalesced_mmio_zone,
        pio: u32,
    ) -> Result<()> {
        let space = zone_space(pio)?;
        self.state.io.update(|io| {
            io.zones.unregister(space, zone.addr, zone.size);
            Ok(())
        })
    }
}

fn zone_space(pio: u32) -> Result<Space> {
    match pio {
        0 => Ok(Space::Mmio),
        1 => Ok(Space::Pio),
        _ => Err(Error::InvalidArgument),
    }
}
