//! Interrupts of a VM: its controllers, routes, irqfds and lines.

use std::ffi::c_int;
use std::os::fd::AsRawFd;

use kvm_bindings::*;
use vmm_sys_util::errno;
use vmm_sys_util::eventfd::EventFd;

use super::{VmFd, refused};
use crate::ioctls::Result;

impl VmFd {
    /// KVM_CREATE_IRQCHIP: PICs, IOAPIC, and a LAPIC in every vCPU created later.
    ///
    /// # Errors
    ///
    /// EEXIST, or EINVAL once a vCPU exists.
    pub fn create_irq_chip(&self) -> Result<()> {
        self.typed()?.create_irqchip().map_err(refused)
    }

    /// KVM_GET_IRQCHIP for the chip in `chip_id`.
    ///
    /// # Errors
    ///
    /// ENXIO without chips, EINVAL for an unknown one.
    pub fn get_irqchip(&self, irqchip: &mut kvm_irqchip) -> Result<()> {
        self.object()?.get_irqchip(irqchip).map_err(refused)
    }

    /// KVM_SET_IRQCHIP for the chip in `chip_id`.
    ///
    /// # Errors
    ///
    /// ENXIO without chips, EINVAL for an unknown one.
    pub fn set_irqchip(&self, irqchip: &kvm_irqchip) -> Result<()> {
        self.object()?.set_irqchip(irqchip).map_err(refused)
    }

    /// KVM_CREATE_PIT2.
    ///
    /// # Errors
    ///
    /// EEXIST for a second one, ENOENT without [`Self::create_irq_chip`].
    pub fn create_pit2(&self, pit_config: kvm_pit_config) -> Result<()> {
        self.typed()?.create_pit2(&pit_config).map_err(refused)
    }

    /// KVM_GET_PIT2.
    ///
    /// # Errors
    ///
    /// ENXIO without a PIT.
    pub fn get_pit2(&self) -> Result<kvm_pit_state2> {
        self.typed()?.get_pit2().map_err(refused)
    }

    /// KVM_SET_PIT2.
    ///
    /// # Errors
    ///
    /// ENXIO without a PIT.
    pub fn set_pit2(&self, pitstate: &kvm_pit_state2) -> Result<()> {
        self.typed()?.set_pit2(pitstate).map_err(refused)
    }

    /// KVM_SIGNAL_MSI: more than 0 delivered, 0 blocked by the guest.
    ///
    /// # Errors
    ///
    /// EINVAL without LAPICs or for unknown flags.
    pub fn signal_msi(&self, msi: kvm_msi) -> Result<c_int> {
        self.typed()?.signal_msi(&msi).map_err(refused)
    }

    /// KVM_SET_GSI_ROUTING: replaces the whole table.
    ///
    /// # Errors
    ///
    /// EINVAL without chips and for entries that KVM refuses.
    pub fn set_gsi_routing(&self, irq_routing: &KvmIrqRouting) -> Result<()> {
        if irq_routing.as_fam_struct_ref().flags != 0 {
            return Err(errno::Error::new(libc::EINVAL));
        }
        self.object()?
            .set_gsi_routing(irq_routing.as_slice())
            .map_err(refused)
    }

    /// KVM_IRQFD: an edge on `gsi` whenever `fd` is signalled.
    ///
    /// # Errors
    ///
    /// EBUSY when `fd` has an irqfd already, EINVAL, EBADF.
    pub fn register_irqfd(&self, fd: &EventFd, gsi: u32) -> Result<()> {
        self.irqfd(kvm_irqfd {
            fd: fd.as_raw_fd().cast_unsigned(),
            gsi,
            ..Default::default()
        })
    }

    /// KVM_IRQFD for a level-triggered line: it stays up until the guest's EOI, at which
    /// `resamplefd` is signalled.
    ///
    /// # Errors
    ///
    /// As [`Self::register_irqfd`].
    pub fn register_irqfd_with_resample(
        &self,
        fd: &EventFd,
        resamplefd: &EventFd,
        gsi: u32,
    ) -> Result<()> {
        self.irqfd(kvm_irqfd {
            fd: fd.as_raw_fd().cast_unsigned(),
            resamplefd: resamplefd.as_raw_fd().cast_unsigned(),
            gsi,
            flags: KVM_IRQFD_FLAG_RESAMPLE,
            ..Default::default()
        })
    }

    /// KVM_IRQFD with the deassign flag. Succeeds also when there was none, as KVM does.
    ///
    /// # Errors
    ///
    /// EBADF.
    pub fn unregister_irqfd(&self, fd: &EventFd, gsi: u32) -> Result<()> {
        self.irqfd(kvm_irqfd {
            fd: fd.as_raw_fd().cast_unsigned(),
            gsi,
            flags: KVM_IRQFD_FLAG_DEASSIGN,
            ..Default::default()
        })
    }

    /// KVM_IRQ_LINE: the level of `irq`, a GSI.
    ///
    /// # Errors
    ///
    /// ENXIO without chips.
    pub fn set_irq_line(&self, irq: u32, active: bool) -> Result<()> {
        self.typed()?
            .irq_line(irq, active)
            .map(drop)
            .map_err(refused)
    }
}
