//! Event channels of two levels: a pending bit for each port in the page that the guest shares, a selector in the structure
//! of each vCPU, and an interrupt that tells the vCPU (Xen's public headers, event_channel.h).

use std::collections::{BTreeMap, btree_map::Entry};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, atomic::Ordering};

use irqchip::{DeliveryMode, LapicIrq, LineStatus};
use kvm_bindings::{
    KVM_XEN_EVTCHN_DEASSIGN, KVM_XEN_EVTCHN_RESET, KVM_XEN_EVTCHN_UPDATE,
    kvm_irq_routing_xen_evtchn,
};

use super::{PENDING, XEN_PRIORITY, XenPort};
use crate::{
    Error, Result,
    bell::Bell,
    shared::{VcpuShared, request},
    vm::{Vm, VmState},
};

/// EVTCHNSTAT_interdomain.
const INTERDOMAIN: u32 = 2;
/// EVTCHNSTAT_ipi.
const IPI: u32 = 5;

/// A port of a vCPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Event {
    /// Id of the vCPU.
    pub(crate) vcpu: u32,
    pub(crate) port: u32,
}

/// Where an event goes that the guest sends.
#[derive(Clone, Debug)]
enum Destination {
    Port(Event),
    Eventfd(Arc<Bell>),
}

/// The ports that the guest sends events by, with EVTCHNSTAT_*.
#[derive(Debug, Default)]
pub(super) struct Ports(Mutex<BTreeMap<u32, (u32, Destination)>>);

impl Ports {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<u32, (u32, Destination)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl VmState {
    /// Sets a bit; returns whether it was set. `None` if it is not in memory.
    fn set_bit(&self, bits: u64, bit: u32) -> Option<bool> {
        let (byte, mask) = (bits.wrapping_add(u64::from(bit / 8)), 1 << (bit % 8));
        let old = self.memory.rmw_gpa(byte, 1, |byte| byte | mask)?;
        Some(old & mask != 0)
    }

    fn has_bit(&self, bits: u64, bit: u32) -> bool {
        let byte = self
            .memory
            .read_gpa(bits.wrapping_add(u64::from(bit / 8)), 1);
        byte.is_some_and(|byte| byte >> (bit % 8) & 1 != 0)
    }

    /// True if the port's event is pending, or could not be: there is no page that the guest shares.
    pub(crate) fn is_event_pending(&self, port: u32) -> bool {
        self.xen
            .shared_info()
            .is_none_or(|page| self.has_bit(page.wrapping_add(PENDING), port))
    }

    /// Raises an event: ignored if its port is masked, coalesced if it is pending already. EINVAL for a vCPU or a port that
    /// does not exist, or if there is no page that the guest shares.
    pub(crate) fn send_event(&self, vcpus: &[Arc<VcpuShared>], event: Event) -> Result<LineStatus> {
        let Event { vcpu, port } = event;
        let vcpu = VcpuShared::with_id(vcpus, vcpu).ok_or(Error::InvalidArgument)?;
        let layout = self.xen.layout();
        let page = self.xen.shared_info().filter(|_| port < layout.ports());
        let page = page.ok_or(Error::InvalidArgument)?;
        let was_pending = self.set_bit(page.wrapping_add(PENDING), port);
        if was_pending.ok_or(Error::InvalidArgument)? {
            return Ok(LineStatus::COALESCED);
        }
        if self.has_bit(page.wrapping_add(layout.mask()), port) {
            // A masked event ends the wait for it all the same.
            if vcpu.xen.is_polling.load(Ordering::SeqCst) {
                vcpu.request(request::EVENT);
            }
            return Ok(LineStatus::IGNORED);
        }
        self.select_events(vcpu, 1 << (port / layout.ports_of_word()));
        Ok(LineStatus::DELIVERED)
    }

    /// Tells a vCPU that there are events in these words of the pending bits.
    pub(crate) fn select_events(&self, vcpu: &VcpuShared, words: u64) {
        let Some(info) = vcpu.xen.info() else {
            vcpu.xen.untold.fetch_or(words, Ordering::SeqCst);
            return;
        };
        let selector = info.wrapping_add(self.xen.layout().selector());
        let mut is_new = false;
        for bit in (0..64).filter(|bit| words >> bit & 1 != 0) {
            match self.set_bit(selector, bit) {
                Some(was_set) => is_new |= !was_set,
                None => {
                    vcpu.xen.untold.fetch_or(1 << bit, Ordering::SeqCst);
                }
            }
        }
        if is_new && self.memory.write_gpa(info, 1, 1).is_some() {
            tell(vcpu);
        }
    }

    /// EVTCHNOP_send. False if the VMM has to send it.
    pub(crate) fn send_guest_event(&self, port: u32) -> bool {
        let destination = self.xen.ports.lock().get(&port).map(|(_, d)| d.clone());
        match destination {
            Some(Destination::Port(event)) => {
                let vcpus = self.vcpus();
                self.send_event(&vcpus, event).is_ok()
            }
            Some(Destination::Eventfd(bell)) => {
                bell.ring(1);
                true
            }
            None => false,
        }
    }
}

/// Interrupts a vCPU because it has events: by its own LAPIC's vector, or by the vector of all vCPUs, which it finds by
/// itself.
pub(crate) fn tell(vcpu: &VcpuShared) {
    match vcpu.xen.vector.load(Ordering::Relaxed) {
        0 => vcpu.request(request::EVENT),
        vector => {
            vcpu.interrupt(&LapicIrq::edge(vcpu.id, DeliveryMode::Fixed, vector));
        }
    }
}

impl Vm {
    /// KVM_XEN_HVM_EVTCHN_SEND. EINVAL as for a vCPU, a port or a priority that does not exist, and if there is no page that
    /// the guest shares.
    pub fn send_xen_event(&self, event: &kvm_irq_routing_xen_evtchn) -> Result<()> {
        if event.port == 0 || event.priority != XEN_PRIORITY {
            return Err(Error::InvalidArgument);
        }
        self.state.note_device_event();
        let vcpus = self.state.vcpus();
        let event = Event {
            vcpu: event.vcpu,
            port: event.port,
        };
        self.state.send_event(&vcpus, event).map(drop)
    }

    /// KVM_XEN_ATTR_TYPE_EVTCHN. EINVAL for a port, a kind, a flag or a priority that does not exist, EEXIST for a port that is
    /// assigned, ENOENT for one that is not and is to be changed, and EBADF or EINVAL for what is no eventfd.
    pub(super) fn set_xen_port(&self, port: &XenPort) -> Result<()> {
        let ports = &self.state.xen.ports;
        if port.flags == KVM_XEN_EVTCHN_RESET {
            ports.lock().clear();
            return Ok(());
        }
        if port.send_port == 0 || port.send_port >= self.state.xen.layout().ports() {
            return Err(Error::InvalidArgument);
        }
        match port.flags {
            0 => self.assign_xen_port(port),
            KVM_XEN_EVTCHN_DEASSIGN => {
                let removed = ports.lock().remove(&port.send_port);
                removed.map(drop).ok_or(Error::NotFound)
            }
            KVM_XEN_EVTCHN_UPDATE => self.update_xen_port(port),
            _ => Err(Error::InvalidArgument),
        }
    }

    fn assign_xen_port(&self, port: &XenPort) -> Result<()> {
        let is_possible = match port.kind {
            IPI => port.port == port.send_port,
            INTERDOMAIN => port.port < self.state.xen.layout().ports(),
            _ => false,
        };
        let has_eventfd = port.kind == INTERDOMAIN && port.port == 0;
        let has_priority = has_eventfd || port.priority == XEN_PRIORITY;
        if !is_possible || !has_priority {
            return Err(Error::InvalidArgument);
        }
        let destination = if has_eventfd {
            let fd = port.fd;
            let bell = self.state.on_worker(move |_| Bell::eventfd(fd))?;
            Destination::Eventfd(Arc::new(bell))
        } else {
            Destination::Port(event(port))
        };
        match self.state.xen.ports.lock().entry(port.send_port) {
            Entry::Occupied(_) => Err(Error::Exists),
            Entry::Vacant(place) => {
                place.insert((port.kind, destination));
                Ok(())
            }
        }
    }

    /// Nothing but the vCPU of a port can be changed.
    fn update_xen_port(&self, port: &XenPort) -> Result<()> {
        let mut ports = self.state.xen.ports.lock();
        let (kind, destination) = ports.get_mut(&port.send_port).ok_or(Error::NotFound)?;
        match destination {
            Destination::Port(present)
                if *kind == port.kind
                    && present.port == port.port
                    && port.priority == XEN_PRIORITY =>
            {
                *present = event(port);
                Ok(())
            }
            _ => Err(Error::InvalidArgument),
        }
    }
}

const fn event(port: &XenPort) -> Event {
    Event {
        vcpu: port.vcpu,
        port: port.port,
    }
}
