//! KVM_IOEVENTFD: guest writes that signal an eventfd and nothing else.

use std::sync::Arc;

use host::EventFd;
use std::sync::{Mutex, PoisonError};

use io_bus::{DoorbellError, DoorbellSpec, IoBus, RingEntry, RingMemory, Space};
use kvm_bindings::*;

use super::Vm;
use crate::{Error, Result};

/// An eventfd and the VMM's number for it, by which it is removed.
#[derive(Debug)]
pub(crate) struct Bell {
    fd: i32,
    pub(crate) event: EventFd,
}

/// The doorbells and coalesced zones of a VM, as vCPUs read them. Chips answer for themselves.
pub(crate) type IoTable = IoBus<(), Arc<Bell>>;

/// The ring of coalesced writes, once a vCPU's mapping has brought its memory.
#[derive(Default)]
pub(crate) struct Ring(Mutex<Option<Box<dyn RingMemory + Send>>>);

impl core::fmt::Debug for Ring {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("Ring")
    }
}

impl Ring {
    /// Appends a write; false if it has to be an exit. KVM's ring is one per VM:
    /// the lock puts the vCPUs' writes in order.
    pub(crate) fn push(&self, entry: RingEntry) -> bool {
        let mut ring = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        ring.as_mut()
            .is_some_and(|ring| io_bus::coalesced::push(&mut **ring, entry))
    }
}

impl From<DoorbellError> for Error {
    fn from(e: DoorbellError) -> Self {
        match e {
            DoorbellError::Invalid => Self::InvalidArgument,
            DoorbellError::Exists => Self::Exists,
            DoorbellError::NotFound => Self::NotFound,
        }
    }
}

impl Vm {
    /// KVM_IOEVENTFD: EINVAL for unknown flags and lengths, EEXIST if some write
    /// would ring two doorbells, ENOENT for removing what is not there.
    pub fn ioeventfd(&self, args: &kvm_ioeventfd) -> Result<()> {
        let flag = |nr: u32| args.flags & 1 << nr != 0;
        let known = 1 << kvm_ioeventfd_flag_nr_datamatch
            | 1 << kvm_ioeventfd_flag_nr_pio
            | 1 << kvm_ioeventfd_flag_nr_deassign;
        if args.flags & !known != 0 {
            return Err(Error::InvalidArgument);
        }
        let spec = DoorbellSpec {
            space: if flag(kvm_ioeventfd_flag_nr_pio) {
                Space::Pio
            } else {
                Space::Mmio
            },
            address: args.addr,
            len: args.len,
            datamatch: flag(kvm_ioeventfd_flag_nr_datamatch).then_some(args.datamatch),
        };
        let bells = &self.state.io;
        if flag(kvm_ioeventfd_flag_nr_deassign) {
            bells
                .update(|b| b.doorbells.deassign(spec, |bell| bell.fd == args.fd))
                .map_err(Error::from)?;
            return Ok(());
        }
        let event = EventFd::duplicate(args.fd).map_err(|_| Error::BadFd)?;
        let bell = Arc::new(Bell { fd: args.fd, event });
        bells
            .update(|b| b.doorbells.assign(spec, bell))
            .map_err(Error::from)
    }
    /// Where coalesced writes go: `struct kvm_coalesced_mmio_ring`. The first one stays.
    pub fn set_coalesced_ring(&self, memory: Box<dyn RingMemory + Send>) {
        let mut ring = self
            .state
            .ring
            .0
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        ring.get_or_insert(memory);
    }
    /// KVM_REGISTER_COALESCED_MMIO: EINVAL for an unknown space. `pio` is the member of
    /// the zone's union that the caller has read.
    pub fn register_coalesced_mmio(&self, zone: &kvm_coalesced_mmio_zone, pio: u32) -> Result<()> {
        let space = zone_space(pio)?;
        self.state.io.update(|io| {
            io.zones.register(space, zone.addr, zone.size);
            Ok(())
        })
    }
    /// KVM_UNREGISTER_COALESCED_MMIO: it is no error if there is no such zone.
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
