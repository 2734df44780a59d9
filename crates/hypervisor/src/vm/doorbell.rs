//! Guest writes that only notify: KVM_IOEVENTFD, and subscribers in the VMM's process.
//!
//! A write finds its doorbell in the vCPU's own view of the table, which is locked while the doorbell rings. A thread
//! that removes a doorbell renews all views, and so waits for vCPUs that are in the middle of ringing, as KVM waits for
//! its readers. Afterwards no vCPU rings the doorbell, and nothing refers to it. Otherwise a VMM that removes a
//! doorbell and then reads the eventfd a last time could miss a signal.

use std::sync::{Arc, PoisonError, Weak, atomic::Ordering};

use host::EventFd;
use io_bus::{DoorbellError, DoorbellSpec, Space, WriteAnswer};
use kvm_bindings::*;

use super::{Vm, VmState};
use crate::{
    Error, Result,
    bell::{Bell, Identity, Subscriber, is_calling, not_an_eventfd},
    shared::VcpuShared,
};

/// Which kind of address a guest's write went to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rung {
    /// A doorbell's, which has rung.
    Doorbell,
    /// A coalesced zone's: the write belongs in the ring.
    Coalesce,
    /// Neither: the write is for the VMM.
    Nobody,
}

/// Classifies a vCPU's write of the low bytes of `value`, and rings if there is a doorbell.
#[inline]
pub(crate) fn write(
    vm: &VmState,
    vcpu: &VcpuShared,
    (space, address): (Space, u64),
    len: u32,
    value: u64,
) -> Rung {
    if !vm.has_io.load(Ordering::Acquire) {
        return Rung::Nobody;
    }
    match vcpu.io().get().write(space, address, len, value) {
        WriteAnswer::Doorbell(bell) => {
            bell.ring(value);
            Rung::Doorbell
        }
        WriteAnswer::Coalesce => Rung::Coalesce,
        WriteAnswer::Chip((), _) | WriteAnswer::Exit => Rung::Nobody,
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

/// A subscription to a doorbell, which ends when it is dropped.
#[derive(Debug)]
pub struct Doorbell {
    vm: Arc<Vm>,
    bell: Arc<Bell>,
}

impl Drop for Doorbell {
    fn drop(&mut self) {
        let removed = self.vm.state.io.update(|io| {
            io.doorbells.remove(|bell| Arc::ptr_eq(bell, &self.bell));
            Ok::<(), Error>(())
        });
        // Cannot fail: the doorbell exists.
        let _ = removed;
        self.vm.renew_views();
    }
}

impl VmState {
    /// Returns what rings the eventfd. Each takes a descriptor of the process, so no eventfd has two.
    fn bell(&self, fd: i32) -> Result<Arc<Bell>> {
        let new = Bell::eventfd(fd)?;
        let mut bells = self.bells.lock().unwrap_or_else(PoisonError::into_inner);
        bells.retain(|bell| bell.strong_count() > 0);
        let mut known = bells.iter().filter_map(Weak::upgrade);
        if let Some(same) = known.find(|bell| bell.is_same_eventfd(&new)) {
            return Ok(same);
        }
        let new = Arc::new(new);
        bells.push(Arc::downgrade(&new));
        Ok(new)
    }
}

impl Vm {
    /// KVM_IOEVENTFD. EBADF or EINVAL for what is no eventfd, EMFILE if the process has all the descriptors that it may
    /// have; EINVAL for unknown flags and lengths, EEXIST if some
    /// write would ring two doorbells, ENOENT for removing one that does not exist. Once removed, a doorbell's eventfd
    /// is not signalled any more.
    pub fn ioeventfd(&self, args: &kvm_ioeventfd) -> Result<()> {
        let flag = |nr: u32| args.flags & 1 << nr != 0;
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
        let io = &self.state.io;
        if flag(kvm_ioeventfd_flag_nr_deassign) {
            let fd = args.fd;
            let named = self.state.on_worker(move |_| {
                let event = EventFd::duplicate(fd).map_err(not_an_eventfd)?;
                Ok::<_, Error>(Identity::of(&event, fd))
            })?;
            io.update(|io| {
                io.doorbells.deassign(
                    spec,
                    |bell| matches!(**bell, Bell::Event { id, .. } if id.is(named)),
                )
            })?;
            self.renew_views();
            return Ok(());
        }
        let known = 1 << kvm_ioeventfd_flag_nr_datamatch
            | 1 << kvm_ioeventfd_flag_nr_pio
            | 1 << kvm_ioeventfd_flag_nr_deassign;
        if args.flags & !known != 0 {
            return Err(Error::InvalidArgument);
        }
        // Errors of the address come before errors of the eventfd.
        spec.check()?;
        let fd = args.fd;
        let bell = self.state.on_worker(move |state| state.bell(fd))?;
        self.state.has_io.store(true, Ordering::Release);
        Ok(io.update(|io| io.doorbells.assign(spec, bell))?)
    }

    /// Like KVM_IOEVENTFD, but calls a function, until the result is dropped.
    pub fn subscribe(self: &Arc<Self>, spec: DoorbellSpec, call: Subscriber) -> Result<Doorbell> {
        let bell = Arc::new(Bell::Subscriber(call));
        let added = Arc::clone(&bell);
        self.state.has_io.store(true, Ordering::Release);
        self.state
            .io
            .update(|io| io.doorbells.assign(spec, added))?;
        Ok(Doorbell {
            vm: Arc::clone(self),
            bell,
        })
    }

    /// Waits for vCPUs that ring by an earlier table. A subscriber that calls this does not wait, because two
    /// subscribers would wait for each other.
    fn renew_views(&self) {
        if is_calling() {
            return;
        }
        let vcpus = self.state.vcpus().clone();
        for vcpu in &vcpus {
            vcpu.io().get();
        }
    }
}
