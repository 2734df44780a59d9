//! The machine's parts: the VM with its chips, serial ports, and the PCI bus with its devices.

use std::sync::Arc;

use anykvm_ioctls::{Kvm, VmFd};
use kvm_bindings::{
    KVM_IRQCHIP_IOAPIC, KVM_PIT_SPEAKER_DUMMY, kvm_ioapic_state, kvm_ioapic_state__bindgen_ty_1,
    kvm_irqchip, kvm_pit_config,
};

use crate::devices::{Connection, Devices, Edge, LastWords, Output, SERIAL_IRQS, Sink, Watch};
use crate::error::BootError;
use crate::layout::{IOAPIC, KVM_IDENTITY_MAP, KVM_TSS, ioapic_id};
use crate::memory::GuestMemory;
use crate::pci::Root;
use crate::pci::routes::Routes;
use crate::virtio::{Backend, BlockDevice, Console, Disk, Port, Rng, VirtioPci};

/// Bit of a redirection table entry that masks it.
const IOAPIC_MASKED: u64 = 1 << 16;

/// What the user's options add to the machine.
pub(super) struct Extras {
    pub(super) disks: Vec<Disk>,
    /// The ports of the virtio console, if the machine has one.
    pub(super) ports: Vec<Port>,
    /// Rows and columns of the terminal.
    pub(super) size: Option<(u16, u16)>,
}

/// Makes a VM with all chips and without vCPUs.
pub(super) fn new_vm(kvm: &Kvm, cpus: u8) -> Result<VmFd, BootError> {
    let max = kvm.get_max_vcpus();
    if usize::from(cpus) > max {
        return Err(BootError::Usage(format!(
            "--cpus {cpus}: this hypervisor supports up to {max}"
        )));
    }
    let vm = kvm.create_vm().map_err(BootError::kvm("KVM_CREATE_VM"))?;
    vm.set_identity_map_address(KVM_IDENTITY_MAP)
        .map_err(BootError::kvm("KVM_SET_IDENTITY_MAP_ADDR"))?;
    vm.set_tss_address(KVM_TSS)
        .map_err(BootError::kvm("KVM_SET_TSS_ADDR"))?;
    vm.create_irq_chip()
        .map_err(BootError::kvm("KVM_CREATE_IRQCHIP"))?;
    set_ioapic_id(&vm, ioapic_id(cpus))?;
    let pit = kvm_pit_config {
        flags: KVM_PIT_SPEAKER_DUMMY,
        ..Default::default()
    };
    vm.create_pit2(pit)
        .map_err(BootError::kvm("KVM_CREATE_PIT2"))?;
    Ok(vm)
}

/// Sets the IOAPIC's id. After a reset it is 0, which is the boot CPU's.
fn set_ioapic_id(vm: &VmFd, id: u8) -> Result<(), BootError> {
    let mut chip = kvm_irqchip {
        chip_id: KVM_IRQCHIP_IOAPIC,
        ..Default::default()
    };
    chip.chip.ioapic = kvm_ioapic_state {
        base_address: u64::from(IOAPIC),
        // The register has four bits; `ioapic_id` says what kernels for more CPUs do.
        id: u32::from(id & 0xf),
        redirtbl: [kvm_ioapic_state__bindgen_ty_1 {
            bits: IOAPIC_MASKED,
        }; 24],
        ..Default::default()
    };
    vm.set_irqchip(&chip)
        .map_err(BootError::kvm("KVM_SET_IRQCHIP"))
}

/// Makes all devices. COM1 is `output`, COM2 `errors`, COM3 a command's input. `on_ready` is called when the guest's
/// init reports on COM4 that it reads its input. `words` gets what kernels say at their end.
pub(super) fn new_devices(
    vm: &Arc<VmFd>,
    memory: &GuestMemory,
    output: &Arc<Output>,
    errors: &Arc<Output>,
    words: &Arc<LastWords>,
    on_ready: Box<dyn Fn(Connection) + Send>,
    extras: Extras,
) -> Result<Arc<Devices>, BootError> {
    let edge = |gsi| -> Result<Edge, BootError> {
        let irq = vm
            .irq_trigger(gsi)
            .map_err(BootError::kvm("an interrupt"))?;
        Ok(Arc::new(move || irq.trigger()))
    };
    let routes = Routes::new(Arc::clone(vm))?;
    let [irq1, irq2, irq3, irq4] = SERIAL_IRQS;
    let watched = |output| Sink::Output(Arc::clone(output), Watch::new(Arc::clone(words)));
    let ports = [
        (watched(output), edge(irq1)?),
        (watched(errors), edge(irq2)?),
        (Sink::Discard, edge(irq3)?),
        (Sink::control(on_ready), edge(irq4)?),
    ];
    let mut backends: Vec<Box<dyn Backend>> = vec![Box::new(Rng)];
    if !extras.ports.is_empty() {
        backends.push(Box::new(Console::new(extras.ports, extras.size)));
    }
    for disk in extras.disks {
        backends.push(Box::new(BlockDevice::new(disk)));
    }
    let mut root = Root::new();
    for backend in backends {
        let slot = root.next_slot()?;
        let device = VirtioPci::new(Arc::clone(vm), memory.clone(), &routes, slot, backend)?;
        root.add(Box::new(device));
    }
    Devices::new(ports, root).map_err(BootError::host("cannot start a thread"))
}
