//! The state of KVM's chips and clock.

use anykvm_ioctls::VmFd;
use kvm_bindings::{
    KVM_CLOCK_HOST_TSC, KVM_CLOCK_REALTIME, KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER,
    KVM_IRQCHIP_PIC_SLAVE, kvm_clock_data, kvm_irqchip,
};

use crate::error::BootError;
use crate::fields::{Malformed, Reader, Writer};

const CHIPS: [u32; 3] = [
    KVM_IRQCHIP_PIC_MASTER,
    KVM_IRQCHIP_PIC_SLAVE,
    KVM_IRQCHIP_IOAPIC,
];

/// Returns the id of this host's boot. While it stays the same, so does the counter behind the TSC.
fn host() -> Vec<u8> {
    std::fs::read("/proc/sys/kernel/random/boot_id").unwrap_or_default()
}

/// Saves all chips and the clock of a VM whose vCPUs stand still.
pub(super) fn save(vm: &VmFd, w: &mut Writer) -> Result<(), BootError> {
    for chip_id in CHIPS {
        let mut chip = kvm_irqchip {
            chip_id,
            ..Default::default()
        };
        vm.get_irqchip(&mut chip)
            .map_err(BootError::kvm("KVM_GET_IRQCHIP"))?;
        w.put(&chip);
    }
    w.put(&vm.get_pit2().map_err(BootError::kvm("KVM_GET_PIT2"))?);
    w.bytes(&host());
    w.put(&vm.get_clock().map_err(BootError::kvm("KVM_GET_CLOCK"))?);
    Ok(())
}

/// The saved state, of which the clock is set before the vCPUs.
pub(super) struct Chips<'a> {
    chips: [kvm_irqchip; CHIPS.len()],
    pit: kvm_bindings::kvm_pit_state2,
    host: &'a [u8],
    clock: kvm_clock_data,
}

fn refused(call: &'static str) -> impl FnOnce(anykvm_ioctls::Error) -> Malformed {
    move |errno| {
        Malformed(format!(
            "this host refuses the chips' state: {call}: {errno}"
        ))
    }
}

impl<'a> Chips<'a> {
    /// Reads what [`save`] wrote.
    pub(super) fn read(r: &mut Reader<'a>) -> Result<Self, Malformed> {
        r.part("the chips");
        let chips = [r.get()?, r.get()?, r.get()?];
        for (chip, id) in chips.iter().zip(CHIPS) {
            let chip: &kvm_irqchip = chip;
            if chip.chip_id != id {
                return Err(r.wrong("a chip that there is not"));
            }
        }
        Ok(Self {
            chips,
            pit: r.get()?,
            host: r.bytes()?,
            clock: r.get()?,
        })
    }

    /// Sets the clock. Returns what has to be added to this host's TSC for that of the state: 0 on the same host.
    pub(super) fn set_clock(&self, vm: &VmFd, khz: u32) -> Result<u64, Malformed> {
        let clock = kvm_clock_data {
            clock: self.clock.clock,
            // The time that the guest was on its way is added.
            flags: self.clock.flags & KVM_CLOCK_REALTIME,
            realtime: self.clock.realtime,
            ..Default::default()
        };
        vm.set_clock(&clock).map_err(refused("KVM_SET_CLOCK"))?;
        if self.host == host() && !self.host.is_empty() {
            return Ok(0);
        }
        let now = vm.get_clock().map_err(refused("KVM_GET_CLOCK"))?;
        let both = KVM_CLOCK_REALTIME | KVM_CLOCK_HOST_TSC;
        if now.flags & self.clock.flags & both != both {
            return Ok(0);
        }
        let passed = u128::from(now.realtime.saturating_sub(self.clock.realtime));
        let ticks = passed * u128::from(khz) / 1_000_000;
        let there = self.clock.host_tsc.wrapping_add(ticks as u64);
        Ok(there.wrapping_sub(now.host_tsc))
    }

    /// Sets the chips. They come last, because what was set before may have raised interrupts.
    pub(super) fn set(&self, vm: &VmFd) -> Result<(), Malformed> {
        vm.set_pit2(&self.pit).map_err(refused("KVM_SET_PIT2"))?;
        for chip in &self.chips {
            vm.set_irqchip(chip).map_err(refused("KVM_SET_IRQCHIP"))?;
        }
        Ok(())
    }
}
