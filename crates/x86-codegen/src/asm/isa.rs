//! What of the host's instruction set generated code may use.

use std::sync::LazyLock;

use host::cpu::{cpuid, xcr0};
use iced_x86::CpuidFeature;
use x86_defs::xsave;
use x86_native::HostFeatures;

/// Extensions of the host's instruction set that generated code uses where the host has them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Isa {
    /// BEXTR.
    pub(crate) bmi1: bool,
    /// RORX.
    pub(crate) bmi2: bool,
    /// XSAVE and XRSTOR, which the host's kernel has enabled. Processors before 2011 lack them, and many models of
    /// virtual machines.
    pub(crate) xsave: bool,
    /// YMM registers.
    pub(crate) avx: bool,
    pub(crate) rdtscp: bool,
    /// XGETBV says with ECX = 1 which state components are in use (SDM vol. 1, 13.6).
    pub(crate) xinuse: bool,
}

impl Isa {
    /// Returns the extensions of this host, which CPUID is asked for once: it takes microseconds in a virtual machine.
    pub fn of_host(features: &HostFeatures) -> Self {
        let xsave = xcr0() & xsave::SSE != 0;
        static BY_CPUID: LazyLock<[bool; 2]> = LazyLock::new(|| {
            let rdtscp = cpuid(0x8000_0001, 0)[3] & 1 << 27 != 0;
            let xinuse = cpuid(0xd, 1)[0] & 1 << 2 != 0;
            [rdtscp, xinuse]
        });
        let [rdtscp, xinuse] = *BY_CPUID;
        Self {
            bmi1: features.has(CpuidFeature::BMI1),
            bmi2: features.has(CpuidFeature::BMI2),
            xsave,
            avx: features.has(CpuidFeature::AVX),
            rdtscp,
            // Without XSAVE, the leaf may be another one's.
            xinuse: xsave && xinuse,
        }
    }
}
