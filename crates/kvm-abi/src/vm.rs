//! A VM descriptor: the parts of KVM's structures that the hypervisor's typed calls do not have (KVM API document, "vm
//! ioctls").
//!
//! Calls without an ABI of their own are made on [`Vm::hypervisor`] directly.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

use hypervisor::{IoapicState, Route, RouteTarget};
use kvm_bindings::*;

use crate::engine;
use crate::errno::{Errno, Result};
use crate::host_memory::Registration;
use crate::internal::Internal;
use crate::process;
use crate::ring::Ring;
use crate::stats::StatsFile;

const EINVAL: Errno = Errno::new(libc::EINVAL);

/// Number of pins of one PIC and of the IOAPIC that KVM_SET_GSI_ROUTING may name.
const PIC_PINS: u32 = 8;
const IOAPIC_PINS: u32 = KVM_IOAPIC_NUM_PINS;

/// The right to be the VM's VFIO device. It ends when this is dropped.
#[derive(Debug)]
pub(crate) struct VfioClaim(#[expect(dead_code, reason = "its end is what it is for")] Arc<()>);

/// The object behind a VM descriptor.
#[derive(Debug)]
pub struct Vm {
    hypervisor: Arc<hypervisor::Vm>,
    /// The file of the first vCPU, whose third page is the VM's ring of coalesced writes.
    ring: OnceLock<Internal>,
    stats: Mutex<Option<StatsFile>>,
    /// KVM has at most one VFIO device per VM. The claim ends with the device's last descriptor.
    vfio: Mutex<Weak<()>>,
    /// The VM's memory ranges, for announcements of changes.
    registration: Registration,
    /// [`process::generation`] of the process that made the VM.
    generation: u32,
}

impl Vm {
    pub(crate) fn new() -> Result<Self> {
        let hypervisor = hypervisor::Vm::new(engine::options())?;
        Ok(Self {
            registration: Registration::new(&hypervisor),
            hypervisor,
            ring: OnceLock::new(),
            stats: Mutex::new(None),
            vfio: Mutex::new(Weak::new()),
            generation: process::generation(),
        })
    }

    /// True in a child of the process that made the VM: KVM answers EIO there.
    pub(crate) fn is_inherited(&self) -> bool {
        self.generation != process::generation()
    }

    /// The typed calls.
    pub fn hypervisor(&self) -> &Arc<hypervisor::Vm> {
        &self.hypervisor
    }

    /// KVM_CHECK_EXTENSION on the VM: 0 for an unknown capability.
    pub fn check_extension(&self, cap: u64) -> i32 {
        u32::try_from(cap).map_or(0, |cap| self.hypervisor.check_extension(cap))
    }

    /// Returns the file that holds the ring of coalesced writes; `None` before the first vCPU.
    ///
    /// KVM shows the same ring in every vCPU's descriptor. Here it is in the first vCPU's file, and code that
    /// intercepts `mmap(2)` puts it into the mappings of the others ([`crate::judge_mapping`]).
    pub fn ring_file(&self) -> Option<BorrowedFd<'_>> {
        self.ring.get().map(AsFd::as_fd)
    }

    /// KVM_GET_STATS_FD: a descriptor from which the statistics can be read.
    ///
    /// # Errors
    ///
    /// Those of making a file.
    pub fn stats_fd(&self) -> Result<OwnedFd> {
        let mut stats = self.stats.lock().unwrap_or_else(PoisonError::into_inner);
        let file = match &mut *stats {
            Some(file) => file,
            empty => {
                let identity = format!("kvm-{}", std::process::id());
                let file = StatsFile::new(&identity, hypervisor::VM_STATS)?;
                self.hypervisor.set_stats_sink(file.sink());
                empty.insert(file)
            }
        };
        file.open()
    }

    /// KVM_REGISTER_COALESCED_MMIO.
    ///
    /// # Errors
    ///
    /// EINVAL for a zone that is neither in port space nor in memory.
    pub fn register_coalesced_mmio(&self, zone: &kvm_coalesced_mmio_zone) -> Result<()> {
        Ok(self
            .hypervisor
            .register_coalesced_mmio(zone, is_pio(zone))?)
    }

    /// KVM_UNREGISTER_COALESCED_MMIO.
    ///
    /// # Errors
    ///
    /// As [`Self::register_coalesced_mmio`].
    pub fn unregister_coalesced_mmio(&self, zone: &kvm_coalesced_mmio_zone) -> Result<()> {
        Ok(self
            .hypervisor
            .unregister_coalesced_mmio(zone, is_pio(zone))?)
    }

    /// Claims to be the VM's one VFIO device; EBUSY while there is one.
    pub(crate) fn claim_vfio(&self) -> Result<VfioClaim> {
        let mut vfio = self.vfio.lock().unwrap_or_else(PoisonError::into_inner);
        if vfio.strong_count() != 0 {
            return Err(Errno::new(libc::EBUSY));
        }
        let claim = Arc::new(());
        *vfio = Arc::downgrade(&claim);
        Ok(VfioClaim(claim))
    }

    /// True if no vCPU's file holds the ring of coalesced writes yet.
    pub(crate) fn lacks_ring(&self) -> bool {
        self.ring.get().is_none()
    }

    /// Sets the file of the first vCPU, and the ring that is mapped from it.
    pub(crate) fn set_ring(&self, file: Internal, ring: Ring) {
        self.hypervisor.set_coalesced_ring(Box::new(ring));
        // If two first vCPUs are made at once, the hypervisor keeps the first ring, and one of the files is dropped.
        let _ = self.ring.set(file);
    }

    /// KVM_SET_USER_MEMORY_REGION. Later changes of the memory must be announced: [`crate::host_memory`].
    ///
    /// # Errors
    ///
    /// EINVAL for misaligned or unknown values, EEXIST for an overlap.
    pub fn set_user_memory_region(&self, region: &kvm_userspace_memory_region) -> Result<()> {
        let (start, size) = (region.userspace_addr, region.memory_size);
        self.registration.setting(region.slot, start, size, || {
            Ok(self.hypervisor.set_user_memory_region(region)?)
        })
    }

    /// KVM_SET_USER_MEMORY_REGION2.
    ///
    /// # Errors
    ///
    /// EINVAL with KVM_MEM_GUEST_MEMFD: private memory needs hardware, its capability is 0.
    pub fn set_user_memory_region2(&self, region: &kvm_userspace_memory_region2) -> Result<()> {
        if region.flags & KVM_MEM_GUEST_MEMFD != 0 {
            return Err(EINVAL);
        }
        self.set_user_memory_region(&kvm_userspace_memory_region {
            slot: region.slot,
            flags: region.flags,
            guest_phys_addr: region.guest_phys_addr,
            memory_size: region.memory_size,
            userspace_addr: region.userspace_addr,
        })
    }

    /// KVM_GET_IRQCHIP: fills the state of the chip that `chip_id` names.
    ///
    /// # Errors
    ///
    /// ENXIO without in-kernel chips, EINVAL for an unknown chip.
    pub fn get_irqchip(&self, irqchip: &mut kvm_irqchip) -> Result<()> {
        match irqchip.chip_id {
            KVM_IRQCHIP_PIC_MASTER => irqchip.chip.pic = self.hypervisor.pic_state(0)?,
            KVM_IRQCHIP_PIC_SLAVE => irqchip.chip.pic = self.hypervisor.pic_state(1)?,
            KVM_IRQCHIP_IOAPIC => irqchip.chip.ioapic = self.hypervisor.ioapic_state()?,
            _ => {
                // Without chips, the error is ENXIO even for an unknown chip.
                self.hypervisor.pic_state(0)?;
                return Err(EINVAL);
            }
        }
        Ok(())
    }

    /// KVM_SET_IRQCHIP.
    ///
    /// # Errors
    ///
    /// As [`Self::get_irqchip`].
    pub fn set_irqchip(&self, irqchip: &kvm_irqchip) -> Result<()> {
        let chip = &irqchip.chip;
        // SAFETY: all members of the union are integers; `chip_id` says which one is meant.
        let (pic, ioapic) = unsafe { (&chip.pic, &chip.ioapic) };
        let ioapic = &IoapicState {
            base_address: ioapic.base_address,
            ioregsel: ioapic.ioregsel,
            id: ioapic.id,
            irr: ioapic.irr,
            pad: ioapic.pad,
            // SAFETY: both members of the union are 64 bits of plain integers.
            redirtbl: ioapic.redirtbl.map(|entry| unsafe { entry.bits }),
        };
        match irqchip.chip_id {
            KVM_IRQCHIP_PIC_MASTER => self.hypervisor.set_pic_state(0, pic)?,
            KVM_IRQCHIP_PIC_SLAVE => self.hypervisor.set_pic_state(1, pic)?,
            KVM_IRQCHIP_IOAPIC => self.hypervisor.set_ioapic_state(ioapic)?,
            _ => {
                self.hypervisor.pic_state(0)?;
                return Err(EINVAL);
            }
        }
        Ok(())
    }

    /// KVM_CREATE_PIT: KVM_CREATE_PIT2 with the speaker port left to the VMM.
    ///
    /// # Errors
    ///
    /// As KVM_CREATE_PIT2: EEXIST for a second one, ENOENT without in-kernel chips.
    pub fn create_pit(&self) -> Result<()> {
        Ok(self.hypervisor.create_pit2(&kvm_pit_config {
            flags: KVM_PIT_SPEAKER_DUMMY,
            ..Default::default()
        })?)
    }

    /// KVM_GET_PIT, the older form of KVM_GET_PIT2 without flags.
    ///
    /// # Errors
    ///
    /// ENXIO without a PIT.
    pub fn get_pit(&self) -> Result<kvm_pit_state> {
        Ok(kvm_pit_state {
            channels: self.hypervisor.get_pit2()?.channels,
        })
    }

    /// KVM_SET_PIT: sets the channels and keeps the flags.
    ///
    /// # Errors
    ///
    /// ENXIO without a PIT.
    pub fn set_pit(&self, state: &kvm_pit_state) -> Result<()> {
        let mut full = self.hypervisor.get_pit2()?;
        full.channels = state.channels;
        Ok(self.hypervisor.set_pit2(&full)?)
    }

    /// KVM_SET_GSI_ROUTING.
    ///
    /// # Errors
    ///
    /// EINVAL for entries that KVM refuses: unknown types, chips, pins and flags, and two
    /// routes of one GSI to one chip.
    pub fn set_gsi_routing(&self, entries: &[kvm_irq_routing_entry]) -> Result<()> {
        let routes = entries.iter().map(route).collect::<Result<Vec<_>>>()?;
        Ok(self.hypervisor.set_gsi_routing(&routes)?)
    }

    /// KVM_IRQ_LINE and KVM_IRQ_LINE_STATUS: returns the injection status.
    ///
    /// # Errors
    ///
    /// ENXIO without in-kernel chips.
    pub fn irq_line(&self, line: &kvm_irq_level) -> Result<i32> {
        // SAFETY: both members of the union are 32-bit integers; on input it is the GSI.
        let gsi = unsafe { line.__bindgen_anon_1.irq };
        Ok(self.hypervisor.irq_line(gsi, line.level != 0)?)
    }
}

fn is_pio(zone: &kvm_coalesced_mmio_zone) -> u32 {
    // SAFETY: both members of the union are 32-bit integers.
    unsafe { zone.__bindgen_anon_1.pio }
}

/// Converts one routing entry.
fn route(entry: &kvm_irq_routing_entry) -> Result<Route> {
    // SAFETY: all members of the union are integers; `type_` says which one is meant.
    let (irqchip, msi) = unsafe { (entry.u.irqchip, entry.u.msi) };
    if entry.gsi >= KVM_MAX_IRQ_ROUTES as u32 || entry.flags != 0 {
        return Err(EINVAL);
    }
    let target = match entry.type_ {
        KVM_IRQ_ROUTING_IRQCHIP => {
            let pins = match irqchip.irqchip {
                KVM_IRQCHIP_PIC_MASTER | KVM_IRQCHIP_PIC_SLAVE => PIC_PINS,
                KVM_IRQCHIP_IOAPIC => IOAPIC_PINS,
                _ => return Err(EINVAL),
            };
            if irqchip.pin >= pins {
                return Err(EINVAL);
            }
            RouteTarget::Irqchip {
                chip: irqchip.irqchip,
                pin: irqchip.pin,
            }
        }
        KVM_IRQ_ROUTING_MSI => RouteTarget::Msi {
            address: u64::from(msi.address_lo) | u64::from(msi.address_hi) << 32,
            data: msi.data,
        },
        KVM_IRQ_ROUTING_HV_SINT => {
            // SAFETY: all members of the union are integers: any bytes are a value of each.
            let source = unsafe { entry.u.hv_sint };
            RouteTarget::HvSint {
                vp: source.vcpu,
                sint: source.sint,
            }
        }
        KVM_IRQ_ROUTING_XEN_EVTCHN => {
            // SAFETY: all members of the union are integers: any bytes are a value of each.
            let event = unsafe { entry.u.xen_evtchn };
            if event.priority != hypervisor::XEN_PRIORITY {
                return Err(EINVAL);
            }
            RouteTarget::XenEvent {
                vcpu: event.vcpu,
                port: event.port,
            }
        }
        _ => return Err(EINVAL),
    };
    Ok(Route {
        gsi: entry.gsi,
        target,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn irqchip_entry(gsi: u32, irqchip: u32, pin: u32) -> kvm_irq_routing_entry {
        let mut entry = kvm_irq_routing_entry {
            gsi,
            type_: KVM_IRQ_ROUTING_IRQCHIP,
            ..Default::default()
        };
        entry.u.irqchip = kvm_irq_routing_irqchip { irqchip, pin };
        entry
    }

    #[test]
    fn routes_that_kvm_refuses() {
        let good = irqchip_entry(23, KVM_IRQCHIP_IOAPIC, 23);
        assert_eq!(
            route(&good),
            Ok(Route {
                gsi: 23,
                target: RouteTarget::Irqchip {
                    chip: KVM_IRQCHIP_IOAPIC,
                    pin: 23
                }
            })
        );
        let bad = [
            irqchip_entry(4096, KVM_IRQCHIP_IOAPIC, 0),
            irqchip_entry(0, KVM_IRQCHIP_IOAPIC, 24),
            irqchip_entry(0, KVM_IRQCHIP_PIC_MASTER, 8),
            irqchip_entry(0, 3, 0),
            kvm_irq_routing_entry { flags: 1, ..good },
            kvm_irq_routing_entry {
                type_: KVM_IRQ_ROUTING_XEN_EVTCHN,
                ..good
            },
            kvm_irq_routing_entry { type_: 0, ..good },
        ];
        for entry in bad {
            assert_eq!(route(&entry), Err(EINVAL), "{} {}", entry.gsi, entry.type_);
        }
    }

    #[test]
    fn msi_routes_keep_the_upper_address_half() {
        let mut entry = kvm_irq_routing_entry {
            gsi: 24,
            type_: KVM_IRQ_ROUTING_MSI,
            ..Default::default()
        };
        entry.u.msi.address_lo = 0xfee0_1000;
        entry.u.msi.address_hi = 0x100;
        entry.u.msi.data = 0x4041;
        assert_eq!(
            route(&entry).unwrap().target,
            RouteTarget::Msi {
                address: 0x100_fee0_1000,
                data: 0x4041
            }
        );
    }
}
