//! The part of Hyper-V's interface that a VM's vCPUs share: its "partition" (Hypervisor Top-Level Functional
//! Specification).

use std::collections::{BTreeMap, btree_map::Entry};
use std::sync::{
    Mutex, MutexGuard, PoisonError,
    atomic::{AtomicBool, Ordering, fence},
};

use guest_memory::GuestMemory;
use kvm_bindings::{KVM_HYPERV_CONN_ID_MASK, KVM_HYPERV_EVENTFD_DEASSIGN, kvm_hyperv_eventfd};

use super::{Vm, clock::TscParams, debugger::Debugger};
use crate::{Error, Result, bell::Bell};

/// Lowest bit of an MSR that names a page: the page is in use.
pub(crate) const ENABLE: u64 = 1;
/// Nanoseconds per unit of the reference time.
pub(crate) const UNIT_NS: u64 = 100;

/// Partition-wide MSRs.
#[derive(Debug, Default)]
pub(crate) struct Partition {
    /// HV_X64_MSR_GUEST_OS_ID. While it is zero, hypercalls are off.
    pub(crate) guest_os_id: u64,
    /// HV_X64_MSR_HYPERCALL.
    pub(crate) hypercall: u64,
    /// HV_X64_MSR_REFERENCE_TSC.
    pub(crate) reference_tsc: u64,
    /// HV_X64_MSR_CRASH_CTL.
    pub(crate) crash_ctl: u64,
    /// HV_X64_MSR_CRASH_P0 to P4.
    pub(crate) crash: [u64; 5],
    /// HV_X64_MSR_REENLIGHTENMENT_CONTROL.
    pub(crate) reenlightenment: u64,
    /// HV_X64_MSR_TSC_EMULATION_CONTROL.
    pub(crate) tsc_emulation_control: u64,
    /// HV_X64_MSR_TSC_EMULATION_STATUS.
    pub(crate) tsc_emulation_status: u64,
    /// HV_X64_MSR_TSC_INVARIANT_CONTROL.
    pub(crate) tsc_invariant: u64,
    /// HV_X64_MSR_SYNDBG_*.
    pub(crate) debugger: Debugger,
    /// Contents of the reference TSC page, while it is valid.
    reference: Option<Reference>,
    /// Sequence number of the reference TSC page.
    sequence: u32,
}

/// The reference time as a function of the TSC: `tsc × scale >> 64 + offset`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Reference {
    scale: u64,
    offset: u64,
}

impl Reference {
    /// Returns `None` for a TSC so slow that the scale does not fit.
    fn new(tsc: TscParams, (host_tsc, kvmclock_ns): (u64, u64)) -> Option<Self> {
        // A second has 10^7 units and khz × 1000 ticks.
        let scale = (10_000u128 << 64).checked_div(tsc.real_khz().into())?;
        let scale = u64::try_from(scale).ok()?;
        let mut reference = Self { scale, offset: 0 };
        reference.offset =
            (kvmclock_ns / UNIT_NS).wrapping_sub(reference.time(tsc.guest(host_tsc)));
        Some(reference)
    }

    fn time(self, tsc: u64) -> u64 {
        let scaled = (u128::from(tsc) * u128::from(self.scale)) >> 64;
        (scaled as u64).wrapping_add(self.offset)
    }
}

impl Partition {
    /// Returns the reference time as the page gives it, if the page is valid. So page and MSR always agree.
    pub(crate) fn time(&self, tsc: u64) -> Option<u64> {
        self.reference.map(|reference| reference.time(tsc))
    }

    /// Rewrites the page after the guest has set its address or the clock has changed. False if the page is no memory.
    pub(crate) fn write_page(
        &mut self,
        memory: &GuestMemory,
        tsc: TscParams,
        master: (u64, u64),
    ) -> bool {
        self.reference = None;
        if self.reference_tsc & ENABLE == 0 {
            return true;
        }
        let gpa = self.reference_tsc & !0xfff;
        // The page may have the sequence number of another process, if the guest was migrated in the middle of a read.
        let seen = memory.read_gpa(gpa, 4).map_or(0, |seen| seen as u32);
        let last = if seen == 0 { self.sequence } else { seen };
        // The guest reads without a lock, so the order is: no sequence, contents, next sequence.
        if memory.write_gpa(gpa, 4, 0).is_none() {
            return false;
        }
        let Some(reference) = Reference::new(tsc, master) else {
            // Without a valid page the guest reads the MSR.
            return true;
        };
        fence(Ordering::SeqCst);
        let words = [reference.scale, reference.offset].map(u64::to_le_bytes);
        let is_written = memory.write_bytes(gpa.wrapping_add(8), words.as_flattened());
        fence(Ordering::SeqCst);
        // 0 and all ones are not sequence numbers.
        self.sequence = match last.wrapping_add(1) {
            0 | u32::MAX => 1,
            next => next,
        };
        if !is_written || memory.write_gpa(gpa, 4, self.sequence.into()).is_none() {
            return false;
        }
        self.reference = Some(reference);
        true
    }
}

/// [`Partition`] behind its lock, with flags that vCPUs read without the lock.
#[derive(Debug, Default)]
pub(crate) struct HyperV {
    partition: Mutex<Partition>,
    has_page: AtomicBool,
    /// The guest has set HV_X64_MSR_GUEST_OS_ID, so hypercalls are Hyper-V's.
    has_hypercalls: AtomicBool,
    /// The eventfds of KVM_HYPERV_EVENTFD, by connection.
    connections: Mutex<BTreeMap<u32, Bell>>,
}

impl HyperV {
    /// Locks the partition's registers. No other lock may be taken while this one is held.
    pub(crate) fn partition(&self) -> MutexGuard<'_, Partition> {
        self.partition
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
    /// Updates the flags. Called when the registers have been written.
    pub(crate) fn publish(&self, partition: &Partition) {
        let has_page = partition.reference_tsc & ENABLE != 0;
        self.has_page.store(has_page, Ordering::Release);
        self.has_hypercalls
            .store(partition.guest_os_id != 0, Ordering::Release);
    }
    /// True if there is a reference TSC page.
    pub(crate) fn has_page(&self) -> bool {
        self.has_page.load(Ordering::Acquire)
    }
    fn connections(&self) -> MutexGuard<'_, BTreeMap<u32, Bell>> {
        self.connections
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
    /// HvCallSignalEvent: signals the connection's eventfd; false if it has none.
    pub(crate) fn signal(&self, connection: u32) -> bool {
        let connections = self.connections();
        let bell = connections.get(&connection);
        if let Some(bell) = bell {
            bell.ring(1);
        }
        bell.is_some()
    }
    /// True if hypercalls are Hyper-V's, provided that the guest's CPUID is Hyper-V's, too.
    pub(crate) fn has_hypercalls(&self) -> bool {
        self.has_hypercalls.load(Ordering::Acquire)
    }
}

impl Vm {
    /// KVM_HYPERV_EVENTFD. EINVAL for unknown flags and impossible connections, EBADF or EINVAL for what is no eventfd,
    /// EEXIST for a connection that has one, ENOENT for removing one that is not there. Once removed, the eventfd is
    /// not signalled any more.
    pub fn hyperv_eventfd(&self, args: &kvm_hyperv_eventfd) -> Result<()> {
        let connection = args.conn_id;
        let is_known = args.flags & !KVM_HYPERV_EVENTFD_DEASSIGN == 0;
        if !is_known || connection & !KVM_HYPERV_CONN_ID_MASK != 0 {
            return Err(Error::InvalidArgument);
        }
        let hyperv = &self.state.hyperv;
        if args.flags & KVM_HYPERV_EVENTFD_DEASSIGN != 0 {
            let removed = hyperv.connections().remove(&connection);
            return removed.map(drop).ok_or(Error::NotFound);
        }
        let fd = args.fd;
        let bell = self.state.on_worker(move |_| Bell::eventfd(fd))?;
        match hyperv.connections().entry(connection) {
            Entry::Occupied(_) => Err(Error::Exists),
            Entry::Vacant(place) => {
                place.insert(bell);
                Ok(())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vm::clock::VmClock;

    #[test]
    fn the_reference_time_is_that_of_kvmclock() {
        let clock = VmClock::new();
        let tsc = clock.default_tsc();
        let (host_tsc, ns) = clock.master();
        let reference = Reference::new(tsc, (host_tsc, ns)).unwrap();
        let second = u64::from(tsc.khz) * 1000;
        for seconds in [0, 1, 1000, 100_000] {
            let time = reference.time(tsc.guest(host_tsc + seconds * second));
            let want = ns / UNIT_NS + seconds * 10_000_000;
            assert!(
                time.abs_diff(want) < 10 + seconds,
                "{seconds}: {time} {want}"
            );
        }
    }
}
