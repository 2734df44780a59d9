//! A virtual machine: memory, chips, routing, clock and the vCPUs that share them.

use std::sync::Arc;

use kvm_bindings::*;

use crate::{Error, Result, Vcpu};

/// Where a GSI goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RouteTarget {
    /// KVM_IRQ_ROUTING_IRQCHIP.
    Irqchip {
        /// KVM_IRQCHIP_PIC_MASTER, _PIC_SLAVE or _IOAPIC.
        chip: u32,
        /// Pin.
        pin: u32,
    },
    /// KVM_IRQ_ROUTING_MSI.
    Msi {
        /// Message address, upper half included.
        address: u64,
        /// Message data.
        data: u32,
    },
}

/// One entry of KVM_SET_GSI_ROUTING.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Route {
    /// GSI.
    pub gsi: u32,
    /// Target.
    pub target: RouteTarget,
}

/// A virtual machine.
#[derive(Debug)]
pub struct Vm {}

impl Vm {
    /// KVM_CREATE_VM.
    pub fn new() -> Result<Arc<Self>> {
        Err(Error::NotSupported)
    }
    /// KVM_CHECK_EXTENSION on the VM.
    pub fn check_extension(&self, cap: u32) -> i32 {
        crate::system::check_extension(cap)
    }
    /// KVM_CREATE_VCPU.
    pub fn create_vcpu(self: &Arc<Self>, _id: u32) -> Result<Arc<Vcpu>> {
        Err(Error::NotSupported)
    }
    /// KVM_SET_USER_MEMORY_REGION.
    pub fn set_user_memory_region(&self, _region: &kvm_userspace_memory_region) -> Result<()> {
        Err(Error::NotSupported)
    }
    /// KVM_CREATE_IRQCHIP.
    pub fn create_irqchip(&self) -> Result<()> {
        Err(Error::NotSupported)
    }
    /// KVM_CREATE_PIT2.
    pub fn create_pit2(&self, _config: &kvm_pit_config) -> Result<()> {
        Err(Error::NotSupported)
    }
    /// KVM_GET_IRQCHIP, chip 0 or 1.
    pub fn pic_state(&self, _index: usize) -> Result<kvm_pic_state> {
        Err(Error::NotSupported)
    }
    /// KVM_SET_IRQCHIP, chip 0 or 1.
    pub fn set_pic_state(&self, _index: usize, _state: &kvm_pic_state) -> Result<()> {
        Err(Error::NotSupported)
    }
    /// KVM_GET_IRQCHIP, chip 2.
    pub fn ioapic_state(&self) -> Result<kvm_ioapic_state> {
        Err(Error::NotSupported)
    }
    /// KVM_SET_IRQCHIP, chip 2.
    pub fn set_ioapic_state(&self, _state: &kvm_ioapic_state) -> Result<()> {
        Err(Error::NotSupported)
    }
    /// KVM_GET_PIT2.
    pub fn get_pit2(&self) -> Result<kvm_pit_state2> {
        Err(Error::NotSupported)
    }
    /// KVM_SET_PIT2.
    pub fn set_pit2(&self, _state: &kvm_pit_state2) -> Result<()> {
        Err(Error::NotSupported)
    }
    /// KVM_REINJECT_CONTROL.
    pub fn reinject_control(&self, _reinject: bool) -> Result<()> {
        Err(Error::NotSupported)
    }
    /// KVM_IRQ_LINE and KVM_IRQ_LINE_STATUS: the status.
    pub fn irq_line(&self, _gsi: u32, _level: bool) -> Result<i32> {
        Err(Error::NotSupported)
    }
    /// KVM_SET_GSI_ROUTING.
    pub fn set_gsi_routing(&self, _routes: &[Route]) -> Result<()> {
        Err(Error::NotSupported)
    }
    /// KVM_SIGNAL_MSI: >0 delivered, 0 blocked.
    pub fn signal_msi(&self, _msi: &kvm_msi) -> Result<i32> {
        Err(Error::NotSupported)
    }
    /// KVM_IRQFD.
    pub fn irqfd(&self, _irqfd: &kvm_irqfd) -> Result<()> {
        Err(Error::NotSupported)
    }
    /// KVM_IOEVENTFD.
    pub fn ioeventfd(&self, _ioeventfd: &kvm_ioeventfd) -> Result<()> {
        Err(Error::NotSupported)
    }
    /// KVM_GET_CLOCK.
    pub fn get_clock(&self) -> Result<kvm_clock_data> {
        Err(Error::NotSupported)
    }
    /// KVM_SET_CLOCK.
    pub fn set_clock(&self, _clock: &kvm_clock_data) -> Result<()> {
        Err(Error::NotSupported)
    }
    /// KVM_GET_DIRTY_LOG.
    pub fn get_dirty_log(&self, _slot: u32) -> Result<Vec<u64>> {
        Err(Error::NotSupported)
    }
    /// KVM_ENABLE_CAP on the VM.
    pub fn enable_cap(&self, _cap: &kvm_enable_cap) -> Result<()> {
        Err(Error::NotSupported)
    }
    /// KVM_SET_TSS_ADDR.
    pub fn set_tss_addr(&self, _gpa: u64) -> Result<()> {
        Err(Error::NotSupported)
    }
    /// KVM_SET_IDENTITY_MAP_ADDR.
    pub fn set_identity_map_addr(&self, _gpa: u64) -> Result<()> {
        Err(Error::NotSupported)
    }
    /// KVM_SET_BOOT_CPU_ID.
    pub fn set_boot_cpu_id(&self, _id: u32) -> Result<()> {
        Err(Error::NotSupported)
    }
    /// KVM_SET_TSC_KHZ on the VM: default of later vCPUs.
    pub fn set_tsc_khz(&self, _khz: u32) -> Result<()> {
        Err(Error::NotSupported)
    }
    /// KVM_GET_TSC_KHZ on the VM.
    pub fn tsc_khz(&self) -> Result<u32> {
        Err(Error::NotSupported)
    }
    /// KVM_REGISTER_COALESCED_MMIO.
    pub fn register_coalesced_mmio(&self, _zone: &kvm_coalesced_mmio_zone) -> Result<()> {
        Err(Error::NotSupported)
    }
    /// KVM_UNREGISTER_COALESCED_MMIO.
    pub fn unregister_coalesced_mmio(&self, _zone: &kvm_coalesced_mmio_zone) -> Result<()> {
        Err(Error::NotSupported)
    }
}
