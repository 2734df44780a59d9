//! The decoder's CPUID features: which are floating-point and vector ones, and
//! which this host has.

use std::sync::LazyLock;

use iced_x86::CpuidFeature;

/// Returns true for features of the x87.
pub(crate) fn is_x87(f: CpuidFeature) -> bool {
    matches!(
        f,
        CpuidFeature::FPU | CpuidFeature::FPU287 | CpuidFeature::FPU387
    )
}

/// Returns true for features whose instructions compute on x87, MMX, XMM and YMM registers.
pub fn is_fp(f: CpuidFeature) -> bool {
    use CpuidFeature as F;
    is_x87(f)
        || matches!(
            f,
            F::MMX
                | F::SSE
                | F::SSE2
                | F::SSE3
                | F::SSSE3
                | F::SSE4_1
                | F::SSE4_2
                | F::SSE4A
                | F::AES
                | F::PCLMULQDQ
                | F::SHA
                | F::GFNI
                | F::AVX
                | F::AVX2
                | F::FMA
                | F::F16C
                | F::VAES
                | F::VPCLMULQDQ
                | F::AVX_VNNI
        )
}

/// Returns true on AMD and Hygon processors.
pub(crate) fn is_amd() -> bool {
    let id = core::arch::x86_64::__cpuid(0);
    matches!(
        (id.ebx, id.edx, id.ecx),
        (0x6874_7541, 0x6974_6e65, 0x444d_4163) | (0x6f67_7948, 0x6e65_476e, 0x656e_6975)
    )
}

/// Returns true if this host executes the feature's instructions in user mode. Features that are not listed count as
/// absent.
pub fn host_has(f: CpuidFeature) -> bool {
    use CpuidFeature as F;
    use std::is_x86_feature_detected as detected;
    match f {
        F::INTEL8086 | F::INTEL186 | F::INTEL286 | F::INTEL386 | F::INTEL486 | F::X64 => true,
        // Every x86-64 processor has these features.
        F::CMOV | F::CX8 | F::MULTIBYTENOP | F::CLFSH => true,
        F::FPU | F::FPU287 | F::FPU387 | F::MMX | F::SSE | F::SSE2 => true,
        F::SSE3 => detected!("sse3"),
        F::SSSE3 => detected!("ssse3"),
        F::SSE4_1 => detected!("sse4.1"),
        F::SSE4_2 => detected!("sse4.2"),
        F::SSE4A => detected!("sse4a"),
        F::AES => detected!("aes"),
        F::PCLMULQDQ => detected!("pclmulqdq"),
        F::SHA => detected!("sha"),
        F::GFNI => detected!("gfni"),
        F::AVX => detected!("avx"),
        F::AVX2 => detected!("avx2"),
        F::FMA => detected!("fma"),
        F::F16C => detected!("f16c"),
        F::VAES => detected!("vaes"),
        F::VPCLMULQDQ => detected!("vpclmulqdq"),
        F::AVX_VNNI => detected!("avxvnni"),
        F::BMI1 => detected!("bmi1"),
        F::BMI2 => detected!("bmi2"),
        F::ADX => detected!("adx"),
        F::LZCNT => detected!("lzcnt"),
        F::POPCNT => detected!("popcnt"),
        F::MOVBE => detected!("movbe"),
        F::CMPXCHG16B => detected!("cmpxchg16b"),
        _ => false,
    }
}

/// A set of the decoder's CPUID features: those that a host executes in user mode.
///
/// Code generators take the set as an argument, so that their output depends on nothing but their arguments.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostFeatures {
    bits: [u64; 4],
}

impl HostFeatures {
    /// Returns the features of this host: those of [`host_has`], determined once.
    pub fn detected() -> Self {
        static DETECTED: LazyLock<HostFeatures> =
            LazyLock::new(|| HostFeatures::of(CpuidFeature::values().filter(|f| host_has(*f))));
        *DETECTED
    }
    /// Returns the set of exactly these features.
    pub fn of(features: impl IntoIterator<Item = CpuidFeature>) -> Self {
        let mut all = Self::default();
        for f in features {
            all.bits[f as usize / 64 % 4] |= 1 << (f as usize % 64);
        }
        all
    }
    /// Returns true if the set has the feature.
    pub fn has(&self, f: CpuidFeature) -> bool {
        self.bits[f as usize / 64 % 4] >> (f as usize % 64) & 1 != 0
    }
}
