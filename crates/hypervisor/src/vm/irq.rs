//! The VM's interrupt calls: irqchip, PIT, routing, lines, MSIs, irqfds.

use std::{
    os::fd::{AsFd, BorrowedFd},
    sync::{Arc, Mutex, PoisonError},
};

use host::EventFd;
use irqchip::{
    Entry, IoapicState, Msi, Routing,
    line::source,
    routing::{MAX_ROUTES, RouteRules},
};
use kvm_bindings::*;

use super::{Vm, VmState, chips::Chips};
use crate::{Error, Result, RouteTarget, vm::Route};

/// An eventfd that raises a GSI.
#[derive(Debug)]
struct Irqfd {
    gsi: u32,
    /// The eventfd's identity; where the host does not tell it, the VMM's
    /// number. A number alone may be another eventfd's by now.
    id: (Option<u64>, u32),
    event: EventFd,
    /// Signalled at EOI; the line is level-triggered.
    resample: Option<EventFd>,
}

/// Irqfds and the thread that waits on them.
#[derive(Debug, Default)]
pub(super) struct Irqfds {
    list: Mutex<Vec<Arc<Irqfd>>>,
    /// Tells the thread that the list changed, or that the VM is gone.
    control: Mutex<Option<EventFd>>,
}

impl Vm {
    /// KVM_CREATE_IRQCHIP: EEXIST if there is one, EINVAL once there are vCPUs.
    pub fn create_irqchip(&self) -> Result<()> {
        if self.state.chips().is_some() {
            return Err(Error::Exists);
        }
        if !self.state.vcpus().is_empty() {
            return Err(Error::InvalidArgument);
        }
        self.state
            .chips
            .set(Chips::new(&self.state.options))
            .map_err(|_| Error::Exists)?;
        // Not by the first irqfd: a vCPU's thread may assign it, and not be allowed to make threads.
        self.state.start_irqfd_thread()
    }
    /// KVM_CAP_SPLIT_IRQCHIP: LAPICs here, PIC and an IOAPIC of so many pins in the VMM. EINVAL
    /// for too many, EEXIST if there are chips or vCPUs.
    pub(super) fn split_irqchip(&self, pins: u64) -> Result<()> {
        let pins = u32::try_from(pins)
            .ok()
            .filter(|pins| *pins as usize <= MAX_ROUTES)
            .ok_or(Error::InvalidArgument)?;
        if !self.state.vcpus().is_empty() {
            return Err(Error::Exists);
        }
        self.state
            .chips
            .set(Chips::split(pins, &self.state.options))
            .map_err(|_| Error::Exists)?;
        self.state.start_irqfd_thread()
    }
    /// KVM_CREATE_PIT2: ENOENT without an irqchip, EEXIST if there is one.
    pub fn create_pit2(&self, config: &kvm_pit_config) -> Result<()> {
        let chips = self
            .state
            .chips()
            .filter(|chips| chips.split_pins().is_none())
            .ok_or(Error::NotFound)?;
        let speaker = config.flags & KVM_PIT_SPEAKER_DUMMY != 0;
        if chips.create_pit(speaker) {
            Ok(())
        } else {
            Err(Error::Exists)
        }
    }
    /// KVM_IRQ_LINE and KVM_IRQ_LINE_STATUS: the status.
    pub fn irq_line(&self, gsi: u32, level: bool) -> Result<i32> {
        self.state.note_device_event();
        self.state
            .with_routing(|chip, lapics| chip.set_gsi(lapics, gsi, source::USERSPACE, level).0)
            .ok_or(Error::NoSuchDevice)
    }
    /// KVM_SIGNAL_MSI: positive if delivered, 0 if the guest blocked it; EINVAL without in-kernel
    /// LAPICs and for a reserved address.
    pub fn signal_msi(&self, msi: &kvm_msi) -> Result<i32> {
        if msi.flags & !KVM_MSI_VALID_DEVID != 0 {
            return Err(Error::InvalidArgument);
        }
        let msi = Msi {
            address_lo: msi.address_lo,
            address_hi: msi.address_hi,
            data: msi.data,
        };
        self.state.note_device_event();
        self.state
            .with_routing(|chip, lapics| {
                msi.is_valid(chip.x2apic_format)
                    .then(|| chip.signal_msi(lapics, msi).0)
            })
            .flatten()
            .ok_or(Error::InvalidArgument)
    }
    /// KVM_SET_GSI_ROUTING.
    pub fn set_gsi_routing(&self, routes: &[Route]) -> Result<()> {
        let entries: Option<Vec<Entry>> = routes.iter().map(entry).collect();
        let entries = entries.ok_or(Error::InvalidArgument)?;
        let split = self.state.chips().and_then(Chips::split_pins).is_some();
        self.state
            .with_routing(|chip, _| {
                let rules = RouteRules {
                    split,
                    x2apic_format: chip.x2apic_format,
                };
                chip.routing = Routing::new(&entries, rules).map_err(|_| Error::InvalidArgument)?;
                Ok::<(), Error>(())
            })
            .ok_or(Error::InvalidArgument)??;
        self.state.publish_vectors();
        Ok(())
    }
    /// KVM_GET_IRQCHIP, chip 0 or 1.
    pub fn pic_state(&self, index: usize) -> Result<kvm_pic_state> {
        self.state
            .with_chips(|chip, _| chip.pic.save(index != 0))
            .ok_or(Error::NoSuchDevice)
    }
    /// KVM_SET_IRQCHIP, chip 0 or 1.
    pub fn set_pic_state(&self, index: usize, s: &kvm_pic_state) -> Result<()> {
        self.state
            .with_chips(|chip, _| chip.pic.restore(index != 0, s))
            .ok_or(Error::NoSuchDevice)
    }
    /// KVM_GET_IRQCHIP, chip 2.
    pub fn ioapic_state(&self) -> Result<kvm_ioapic_state> {
        let s = self
            .state
            .with_chips(|chip, _| chip.ioapic.save())
            .ok_or(Error::NoSuchDevice)?;
        Ok(kvm_ioapic_state {
            base_address: s.base_address,
            ioregsel: s.ioregsel,
            id: s.id,
            irr: s.irr,
            pad: s.pad,
            redirtbl: s
                .redirtbl
                .map(|bits| kvm_ioapic_state__bindgen_ty_1 { bits }),
        })
    }
    /// KVM_SET_IRQCHIP, chip 2. (Reading the union in `kvm_ioapic_state` is the caller's.)
    pub fn set_ioapic_state(&self, state: &IoapicState) -> Result<()> {
        self.state
            .with_chips(|chip, lapics| {
                chip.ioapic
                    .restore(state, &mut |irq| irqchip::deliver(lapics, irq, None));
            })
            .ok_or(Error::NoSuchDevice)?;
        self.state.publish_vectors();
        Ok(())
    }
    /// KVM_GET_PIT2.
    pub fn get_pit2(&self) -> Result<kvm_pit_state2> {
        self.state
            .with_chips(|chip, _| chip.pit.as_ref().map(irqchip::Pit::save))
            .flatten()
            .ok_or(Error::NoSuchDevice)
    }
    /// KVM_SET_PIT2.
    pub fn set_pit2(&self, s: &kvm_pit_state2) -> Result<()> {
        let now_ns = host::clock::monotonic_ns();
        self.state
            .with_chips(|chip, _| chip.pit.as_mut().map(|pit| pit.restore(s, now_ns)))
            .flatten()
            .ok_or(Error::NoSuchDevice)
    }
    /// KVM_REINJECT_CONTROL.
    pub fn reinject_control(&self, reinject: bool) -> Result<()> {
        self.state
            .with_chips(|chip, _| chip.pit.as_mut().map(|pit| pit.set_reinject(reinject)))
            .flatten()
            .ok_or(Error::NoSuchDevice)
    }
    /// KVM_IRQFD: EBUSY if the eventfd is in use already.
    pub fn irqfd(&self, args: &kvm_irqfd) -> Result<()> {
        let known = KVM_IRQFD_FLAG_DEASSIGN | KVM_IRQFD_FLAG_RESAMPLE;
        // An EOI is only known to have come where the IOAPIC is.
        let has_chip = if args.flags & KVM_IRQFD_FLAG_RESAMPLE != 0 {
            self.state.has_pic()
        } else {
            self.state.chips().is_some()
        };
        if args.flags & !known != 0 || !has_chip {
            return Err(Error::InvalidArgument);
        }
        let irqfds = &self.state.irqfds;
        let open = |fd: u32| EventFd::duplicate(fd as i32).map_err(|_| Error::BadFd);
        let event = open(args.fd)?;
        let id = match event.id() {
            Some(id) => (Some(id), 0),
            None => (None, args.fd),
        };
        if args.flags & KVM_IRQFD_FLAG_DEASSIGN != 0 {
            irqfds.lock().retain(|i| i.id != id || i.gsi != args.gsi);
            return irqfds.tell();
        }
        let resample = (args.flags & KVM_IRQFD_FLAG_RESAMPLE != 0)
            .then(|| open(args.resamplefd))
            .transpose()?;
        let irqfd = Irqfd {
            gsi: args.gsi,
            id,
            event,
            resample,
        };
        let mut list = irqfds.lock();
        if list.iter().any(|i| i.id == id) {
            return Err(Error::Busy);
        }
        list.push(Arc::new(irqfd));
        drop(list);
        irqfds.tell()
    }
}

fn entry(route: &Route) -> Option<Entry> {
    let route_to = match route.target {
        RouteTarget::Irqchip {
            chip: KVM_IRQCHIP_PIC_MASTER,
            pin,
        } if pin < 8 => irqchip::Route::Pic(pin as u8),
        RouteTarget::Irqchip {
            chip: KVM_IRQCHIP_PIC_SLAVE,
            pin,
        } if pin < 8 => irqchip::Route::Pic(pin as u8 + 8),
        RouteTarget::Irqchip {
            chip: KVM_IRQCHIP_IOAPIC,
            pin,
        } => irqchip::Route::Ioapic(u8::try_from(pin).ok()?),
        RouteTarget::Irqchip { .. } => return None,
        RouteTarget::Msi { address, data } => irqchip::Route::Msi(Msi {
            address_lo: address as u32,
            address_hi: (address >> 32) as u32,
            data,
        }),
    };
    Some(Entry {
        gsi: route.gsi,
        route: route_to,
    })
}

impl Irqfds {
    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Arc<Irqfd>>> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }
    /// Wakes the thread, if there is one.
    pub(super) fn tell(&self) -> Result<()> {
        match &*self.control.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(control) => control.signal(1).map(|_| ()).map_err(|_| Error::Io),
            None => Ok(()),
        }
    }
}

impl VmState {
    /// A level-triggered interrupt of `gsi` has ended: tell its irqfds' devices.
    pub(crate) fn resample(&self, gsi: u32) {
        for irqfd in self.irqfds.lock().iter().filter(|i| i.gsi == gsi) {
            if let Some(resample) = &irqfd.resample {
                // A full counter already says "resample".
                let _ = resample.signal(1);
            }
        }
    }

    fn start_irqfd_thread(self: &Arc<Self>) -> Result<()> {
        let mut control = self
            .irqfds
            .control
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if control.is_some() {
            return Ok(());
        }
        let ours = EventFd::new(0).map_err(|_| Error::NoMemory)?;
        let theirs = ours.try_clone().map_err(|_| Error::NoMemory)?;
        let vm = Arc::downgrade(self);
        std::thread::Builder::new()
            .name("anykvm-irqfd".to_owned())
            .spawn(move || {
                // The VMM's signals are for its own threads.
                host::signal::block_all();
                wait_for_irqfds(&vm, &theirs);
            })
            .map_err(|_| Error::NoMemory)?;
        *control = Some(ours);
        Ok(())
    }
}

/// Raises the GSI of each irqfd that is signalled, until the VM is gone.
fn wait_for_irqfds(vm: &std::sync::Weak<VmState>, control: &EventFd) {
    loop {
        let Some(list) = vm.upgrade().map(|vm| vm.irqfds.lock().clone()) else {
            return;
        };
        let mut fds: Vec<BorrowedFd<'_>> = vec![control.as_fd()];
        fds.extend(list.iter().map(|i| i.event.as_fd()));
        let Ok(ready) = host::poll::readable(&fds, None) else {
            continue;
        };
        let Some(vm) = vm.upgrade() else { return };
        if ready.first().is_some_and(|r| r.readable) {
            let _ = control.take();
        }
        for (irqfd, _) in list
            .iter()
            .zip(ready.iter().skip(1))
            .filter(|(_, r)| r.readable)
        {
            if !matches!(irqfd.event.take(), Ok(Some(_))) {
                continue;
            }
            vm.note_device_event();
            vm.with_routing(|chip, lapics| {
                if irqfd.resample.is_some() {
                    chip.set_gsi(lapics, irqfd.gsi, source::RESAMPLE, true)
                } else {
                    chip.pulse_gsi(lapics, irqfd.gsi, source::USERSPACE)
                }
            });
        }
    }
}
