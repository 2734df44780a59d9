//! What of the host's instruction set generated code may use.

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
}

impl Isa {
    /// Returns the extensions of this host.
    pub fn of_host(features: &HostFeatures) -> Self {
        Self {
            bmi1: features.has(CpuidFeature::BMI1),
            bmi2: features.has(CpuidFeature::BMI2),
            avx: features.has(CpuidFeature::AVX),
        }
    }
}
