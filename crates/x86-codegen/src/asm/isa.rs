//! What of the host's instruction set generated code may use.

use std::sync::LazyLock;

use host::cpu::cpuid;
use iced_x86::CpuidFeature;
use x86_native::HostFeatures;

/// Extensions of the host's instruction set that generated code uses where the host has them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Isa {
    /// BEXTR.
    pub(crate) bmi1: bool,
    /// RORX.
    pub(crate) bmi2: bool,
    /// YMM registers.
    pub(crate) avx: bool,
    /// XGETBV says with ECX = 1 which state components are in use (SDM vol. 1, 13.6).
    pub(crate) xinuse: bool,
}

impl Isa {
    /// Returns the extensions of this host. XGETBV's is asked for once, as CPUID takes microseconds in a virtual
    /// machine.
    pub fn of_host(features: &HostFeatures) -> Self {
        static XINUSE: LazyLock<bool> = LazyLock::new(|| cpuid(0xd, 1)[0] & 1 << 2 != 0);
        Self {
            bmi1: features.has(CpuidFeature::BMI1),
            bmi2: features.has(CpuidFeature::BMI2),
            avx: features.has(CpuidFeature::AVX),
            xinuse: *XINUSE,
        }
    }
}
