//! Accesses without a TLB entry: to memory whose translation has to be looked up, or to a device.

use mmu::{Miss, Translation};
use x86_cpu::{Access, CpuState, Fault, Feature, Privilege, Word};

use super::{Bus, device::is_in_page};
use crate::Exit;

impl Bus {
    /// Stops the instruction, because the process cannot access the VMM's memory at this page as the guest asks.
    #[cold]
    pub(super) fn host_fault<T>(&mut self, gpa: u64) -> Result<T, Fault> {
        self.exit = Some(Exit::MemoryFault { gpa });
        Err(Fault::Exit)
    }

    /// Stops a delivery whose IDT or stack is not in memory: KVM cannot deliver an event through the VMM.
    #[cold]
    pub(super) fn stop_delivery(&mut self, cpu: &CpuState) {
        /// EPT misconfiguration, by which KVM knows devices on Intel's processors.
        const EPT_MISCONFIG: u64 = 49;
        /// Nested page fault.
        const NPF: u64 = 0x400;
        if let Some(Exit::Mmio { gpa, .. }) = self.exit {
            self.replay.forget();
            let is_amd = cpu.features.has(Feature::Amd);
            let reason = if is_amd { NPF } else { EPT_MISCONFIG };
            self.exit = Some(Exit::InternalError {
                suberror: kvm_bindings::KVM_INTERNAL_ERROR_DELIVERY_EV,
                // As in KVM: more about the exit, its reason, more again, the address, the processor.
                data: vec![0, reason, 0, gpa, 0],
            });
        }
    }

    pub(in crate::vcpu) fn translate(
        &mut self,
        cpu: &mut CpuState,
        gva: u64,
        access: Access,
        who: Privilege,
    ) -> Result<Translation, Fault> {
        match self.mmu.translate(cpu, gva, access, who) {
            Ok(to) => Ok(to),
            Err(Miss::Exception(e)) => Err(e.into()),
            Err(Miss::Host { gpa }) => self.host_fault(gpa),
            // `translate` does not return this; the address would be a device's in any case.
            Err(Miss::Device { gpa }) => Ok(Translation { gpa, page: None }),
        }
    }

    /// Reads after a TLB miss.
    #[inline(never)]
    pub(super) fn read_miss<T: Word>(
        &mut self,
        cpu: &mut CpuState,
        gva: u64,
        who: Privilege,
    ) -> Result<T, Fault> {
        let known = self.mmu.known_device(gva, false, who);
        let result = match known {
            Some(gpa) => Err(Miss::Device { gpa }),
            None => self.mmu.read(cpu, gva, who),
        };
        match result {
            Ok(v) => Ok(v),
            Err(Miss::Exception(e)) => Err(e.into()),
            Err(Miss::Host { gpa }) => self.host_fault(gpa),
            // The whole operand is on one device page, and the access is allowed.
            Err(Miss::Device { gpa }) if T::SIZE <= 8 && is_in_page(gva, T::SIZE) => {
                let value = self.device_load(cpu, gpa, T::SIZE as u8)?;
                Ok(T::from_u128(value.into()))
            }
            Err(Miss::Device { .. }) => {
                let mut bytes = [0; 16];
                self.load_pieces(cpu, gva, &mut bytes[..T::SIZE], who)?;
                Ok(T::from_le(&bytes[..T::SIZE]))
            }
        }
    }

    /// Writes after a TLB miss.
    #[inline(never)]
    pub(super) fn write_miss<T: Word>(
        &mut self,
        cpu: &mut CpuState,
        gva: u64,
        value: T,
        who: Privilege,
    ) -> Result<(), Fault> {
        let known = self.mmu.known_device(gva, true, who);
        let result = match known {
            Some(gpa) => Err(Miss::Device { gpa }),
            None => self.mmu.write(cpu, gva, value, who),
        };
        match result {
            Ok(()) => Ok(()),
            Err(Miss::Exception(e)) => Err(e.into()),
            Err(Miss::Host { gpa }) => self.host_fault(gpa),
            Err(Miss::Device { gpa }) if T::SIZE <= 8 && is_in_page(gva, T::SIZE) => {
                self.device_store(cpu, gpa, T::SIZE as u8, value.to_u128() as u64)
            }
            Err(Miss::Device { .. }) => self.store_pieces(cpu, gva, &value.to_le()[..T::SIZE], who),
        }
    }

    /// Maps a miss of a fetch: code outside of memory cannot be executed (KVM_INTERNAL_ERROR_EMULATION).
    pub(super) fn fetch_result<T>(
        &mut self,
        cpu: &CpuState,
        r: Result<T, Miss>,
    ) -> Result<T, Fault> {
        match r {
            Ok(v) => Ok(v),
            Err(Miss::Exception(e)) => Err(e.into()),
            Err(Miss::Host { gpa }) => self.host_fault(gpa),
            Err(Miss::Device { gpa }) => {
                self.exit = Some(Exit::InternalError {
                    suberror: kvm_bindings::KVM_INTERNAL_ERROR_EMULATION,
                    data: vec![cpu.rip(), gpa],
                });
                Err(Fault::Exit)
            }
        }
    }
}
