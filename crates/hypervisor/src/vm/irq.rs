//! The VM's interrupt calls: irqchip, PIT, routing, lines and MSIs.

use irqchip::{
    Entry, IoapicState, LapicSet as _, Msi, Routing,
    line::source,
    routing::{MAX_ROUTES, RouteRules},
};
use kvm_bindings::*;

use super::{Vm, chips::Chips};
use crate::{Error, Result, RouteTarget, vm::Route};

impl Vm {
    /// KVM_CREATE_IRQCHIP. EEXIST if there is an irqchip, EINVAL once there are vCPUs.
    pub fn create_irqchip(&self) -> Result<()> {
        if self.state.chips().is_some() {
            return Err(Error::Exists);
        }
        self.set_chips(Chips::new(&self.state.options), Error::InvalidArgument)
    }
    fn set_chips(&self, chips: Chips, error_with_vcpus: Error) -> Result<()> {
        // The set is not left to the first irqfd, which a vCPU's thread may assign that may not make threads. It is
        // made first, because this may fail.
        self.state.irqfd_set()?;
        // While the lock is held, no vCPU can be added.
        let vcpus = self.state.vcpus();
        if !vcpus.is_empty() {
            return Err(error_with_vcpus);
        }
        self.state.chips.set(chips).map_err(|_| Error::Exists)
    }
    /// KVM_CAP_SPLIT_IRQCHIP: LAPICs in the kernel, the PIC and an IOAPIC with `pins` pins in the VMM. EINVAL for too
    /// many pins, EEXIST if there are chips or vCPUs.
    pub(super) fn split_irqchip(&self, pins: u64) -> Result<()> {
        let pins = u32::try_from(pins)
            .ok()
            .filter(|pins| *pins as usize <= MAX_ROUTES)
            .ok_or(Error::InvalidArgument)?;
        self.set_chips(Chips::split(pins, &self.state.options), Error::Exists)
    }
    /// KVM_CREATE_PIT2. ENOENT without an irqchip, EEXIST if there is a PIT.
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
    /// KVM_IRQ_LINE and KVM_IRQ_LINE_STATUS: returns the status.
    pub fn irq_line(&self, gsi: u32, level: bool) -> Result<i32> {
        self.state.note_device_event();
        self.state
            .with_routing(|chip, lapics| chip.set_gsi(lapics, gsi, source::USERSPACE, level).0)
            .ok_or(Error::NoSuchDevice)
    }
    /// KVM_SIGNAL_MSI. Returns a positive number if the interrupt was delivered, 0 if the guest blocked it or has no such
    /// LAPIC. EINVAL without in-kernel LAPICs and for a reserved address, EPERM before there is a vCPU.
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
                if !msi.is_valid(chip.x2apic_format) {
                    return Err(Error::InvalidArgument);
                }
                if lapics.nr_lapics() == 0 {
                    return Err(Error::Permission);
                }
                Ok(chip.signal_msi(lapics, msi).0.max(0))
            })
            .ok_or(Error::InvalidArgument)?
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
    /// KVM_SET_IRQCHIP, chip 2. The caller has read the union in `kvm_ioapic_state`.
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
        RouteTarget::HvSint { vp, sint } => irqchip::Route::HvSint { vp, sint },
        RouteTarget::XenEvent { vcpu, port } => irqchip::Route::XenEvent { vcpu, port },
    };
    Some(Entry {
        gsi: route.gsi,
        route: route_to,
    })
}
