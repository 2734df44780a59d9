//! Functions that the test buses share. There are no devices, MSRs are those of the model, and the same call always
//! returns the same value.

/// Implements the functions of [`x86_cpu::GuestBus`] that concern neither memory nor ports.
macro_rules! surroundings {
    () => {
        fn read_msr(
            &mut self,
            cpu: &mut ::x86_cpu::CpuState,
            index: u32,
        ) -> Result<u64, ::x86_cpu::Fault> {
            ::x86_cpu::msr_model::read(cpu, index).ok_or(::x86_cpu::Exception::GP0.into())
        }
        fn write_msr(
            &mut self,
            cpu: &mut ::x86_cpu::CpuState,
            index: u32,
            value: u64,
        ) -> Result<(), ::x86_cpu::Fault> {
            use ::x86_cpu::msr_model::MsrWrite;
            match ::x86_cpu::msr_model::write(cpu, index, value) {
                MsrWrite::Rejected | MsrWrite::Unknown => Err(::x86_cpu::Exception::GP0.into()),
                _ => Ok(()),
            }
        }
        fn cpuid(&mut self, _: &mut ::x86_cpu::CpuState, leaf: u32, subleaf: u32) -> [u32; 4] {
            [leaf, subleaf, 3, 4]
        }
        fn read_pmc(
            &mut self,
            _: &mut ::x86_cpu::CpuState,
            _: u32,
        ) -> Result<u64, ::x86_cpu::Fault> {
            Err(::x86_cpu::Exception::GP0.into())
        }
        fn set_task_priority(&mut self, _: &mut ::x86_cpu::CpuState, _: u8) {}
        fn hypercall(&mut self, _: &mut ::x86_cpu::CpuState) -> Result<(), ::x86_cpu::Fault> {
            Ok(())
        }
        fn random(&mut self) -> u64 {
            0x0123_4567_89ab_cdef
        }
        fn commit(&mut self) {}
    };
}

pub(crate) use surroundings;
