//! From CPUID leaves to [`Features`] (SDM vol. 2, CPUID; AMD APM vol. 3, appendix E).

use super::{Feature, Features};

/// CPUID output register.
#[derive(Clone, Copy)]
enum Reg {
    Eax,
    Ebx,
    Ecx,
    Edx,
}

/// One feature bit: leaf, subleaf, register, bit.
struct Bit(u32, u32, Reg, u8, Feature);

use Feature as F;
use Reg::{Eax, Ebx, Ecx, Edx};

/// Where each feature is enumerated; one that two vendors enumerate differently has two rows.
#[rustfmt::skip]
const BITS: &[Bit] = &[
    Bit(1, 0, Edx, 0, F::Fpu), Bit(1, 0, Edx, 1, F::Vme), Bit(1, 0, Edx, 2, F::De),
    Bit(1, 0, Edx, 3, F::Pse), Bit(1, 0, Edx, 4, F::Tsc), Bit(1, 0, Edx, 5, F::Msr),
    Bit(1, 0, Edx, 6, F::Pae), Bit(1, 0, Edx, 7, F::Mce), Bit(1, 0, Edx, 8, F::Cx8),
    Bit(1, 0, Edx, 9, F::Apic), Bit(1, 0, Edx, 11, F::Sep), Bit(1, 0, Edx, 12, F::Mtrr),
    Bit(1, 0, Edx, 13, F::Pge), Bit(1, 0, Edx, 14, F::Mca), Bit(1, 0, Edx, 15, F::Cmov),
    Bit(1, 0, Edx, 16, F::Pat), Bit(1, 0, Edx, 17, F::Pse36), Bit(1, 0, Edx, 19, F::Clfsh),
    Bit(1, 0, Edx, 23, F::Mmx), Bit(1, 0, Edx, 24, F::Fxsr), Bit(1, 0, Edx, 25, F::Sse),
    Bit(1, 0, Edx, 26, F::Sse2),
    Bit(1, 0, Ecx, 0, F::Sse3), Bit(1, 0, Ecx, 1, F::Pclmulqdq), Bit(1, 0, Ecx, 3, F::Monitor),
    Bit(1, 0, Ecx, 9, F::Ssse3), Bit(1, 0, Ecx, 12, F::Fma), Bit(1, 0, Ecx, 13, F::Cx16),
    Bit(1, 0, Ecx, 17, F::Pcid), Bit(1, 0, Ecx, 19, F::Sse41), Bit(1, 0, Ecx, 20, F::Sse42),
    Bit(1, 0, Ecx, 21, F::X2apic), Bit(1, 0, Ecx, 22, F::Movbe), Bit(1, 0, Ecx, 23, F::Popcnt),
    Bit(1, 0, Ecx, 24, F::TscDeadline), Bit(1, 0, Ecx, 25, F::Aes), Bit(1, 0, Ecx, 26, F::Xsave),
    Bit(1, 0, Ecx, 28, F::Avx), Bit(1, 0, Ecx, 29, F::F16c), Bit(1, 0, Ecx, 30, F::Rdrand),
    Bit(7, 0, Ebx, 0, F::Fsgsbase), Bit(7, 0, Ebx, 1, F::TscAdjust), Bit(7, 0, Ebx, 3, F::Bmi1),
    Bit(7, 0, Ebx, 5, F::Avx2), Bit(7, 0, Ebx, 7, F::Smep), Bit(7, 0, Ebx, 8, F::Bmi2),
    Bit(7, 0, Ebx, 9, F::Erms), Bit(7, 0, Ebx, 10, F::Invpcid), Bit(7, 0, Ebx, 16, F::Avx512f),
    Bit(7, 0, Ebx, 18, F::Rdseed), Bit(7, 0, Ebx, 19, F::Adx), Bit(7, 0, Ebx, 20, F::Smap),
    Bit(7, 0, Ebx, 23, F::Clflushopt), Bit(7, 0, Ebx, 24, F::Clwb), Bit(7, 0, Ebx, 29, F::Sha),
    Bit(7, 0, Ecx, 2, F::Umip), Bit(7, 0, Ecx, 3, F::Pku), Bit(7, 0, Ecx, 5, F::Waitpkg),
    Bit(7, 0, Ecx, 7, F::ShadowStack), Bit(7, 0, Ecx, 8, F::Gfni), Bit(7, 0, Ecx, 9, F::Vaes),
    Bit(7, 0, Ecx, 10, F::Vpclmulqdq), Bit(7, 0, Ecx, 16, F::La57), Bit(7, 0, Ecx, 22, F::Rdpid),
    Bit(7, 0, Ecx, 25, F::Cldemote), Bit(7, 0, Ecx, 27, F::Movdiri),
    Bit(7, 0, Ecx, 28, F::Movdir64b), Bit(7, 0, Ecx, 31, F::Pks),
    Bit(7, 0, Edx, 4, F::Fsrm), Bit(7, 0, Edx, 14, F::Serialize), Bit(7, 0, Edx, 20, F::Ibt),
    Bit(7, 0, Edx, 26, F::SpecCtrl), Bit(7, 0, Edx, 26, F::Ibpb), Bit(7, 0, Edx, 27, F::Stibp),
    Bit(7, 0, Edx, 28, F::FlushL1d), Bit(7, 0, Edx, 29, F::ArchCapabilities),
    Bit(7, 0, Edx, 31, F::Ssbd),
    Bit(7, 1, Eax, 4, F::AvxVnni), Bit(7, 2, Edx, 4, F::BhiCtrl),
    Bit(0xd, 1, Eax, 0, F::Xsaveopt), Bit(0xd, 1, Eax, 1, F::Xsavec),
    Bit(0xd, 1, Eax, 2, F::Xgetbv1), Bit(0xd, 1, Eax, 3, F::Xsaves),
    Bit(0x8000_0001, 0, Ecx, 0, F::LahfLm), Bit(0x8000_0001, 0, Ecx, 4, F::Cr8Legacy),
    Bit(0x8000_0001, 0, Ecx, 5, F::Abm), Bit(0x8000_0001, 0, Ecx, 5, F::Lzcnt),
    Bit(0x8000_0001, 0, Ecx, 6, F::Sse4a), Bit(0x8000_0001, 0, Ecx, 7, F::Misalignsse),
    Bit(0x8000_0001, 0, Ecx, 8, F::Prefetchw), Bit(0x8000_0001, 0, Ecx, 9, F::Osvw),
    Bit(0x8000_0001, 0, Ecx, 11, F::Xop), Bit(0x8000_0001, 0, Ecx, 16, F::Fma4),
    Bit(0x8000_0001, 0, Ecx, 21, F::Tbm), Bit(0x8000_0001, 0, Ecx, 22, F::Topoext),
    Bit(0x8000_0001, 0, Ecx, 29, F::Mwaitx),
    Bit(0x8000_0001, 0, Edx, 11, F::Syscall), Bit(0x8000_0001, 0, Edx, 20, F::Nx),
    Bit(0x8000_0001, 0, Edx, 22, F::Mmxext), Bit(0x8000_0001, 0, Edx, 25, F::Fxsropt),
    Bit(0x8000_0001, 0, Edx, 26, F::Pdpe1gb), Bit(0x8000_0001, 0, Edx, 27, F::Rdtscp),
    Bit(0x8000_0001, 0, Edx, 29, F::Lm),
    Bit(0x8000_0008, 0, Ebx, 0, F::Clzero), Bit(0x8000_0008, 0, Ebx, 2, F::Xsaveerptr),
    Bit(0x8000_0008, 0, Ebx, 9, F::Wbnoinvd), Bit(0x8000_0008, 0, Ebx, 12, F::Ibpb),
    Bit(0x8000_0008, 0, Ebx, 14, F::SpecCtrl), Bit(0x8000_0008, 0, Ebx, 15, F::Stibp),
    Bit(0x8000_0008, 0, Ebx, 24, F::Ssbd),
];

impl Features {
    /// Reads the features from CPUID entries: (leaf, subleaf, eax, ebx, ecx, edx).
    ///
    /// A leaf that does not depend on ECX is given with subleaf 0. Without leaf
    /// 0x80000008 MAXPHYADDR is 36, KVM's default.
    pub fn from_cpuid(entries: impl Iterator<Item = (u32, u32, u32, u32, u32, u32)>) -> Self {
        let mut features = Self::default();
        let mut signature = 0;
        for (leaf, subleaf, eax, ebx, ecx, edx) in entries {
            for Bit(l, s, reg, bit, feature) in BITS {
                let value = match reg {
                    Eax => eax,
                    Ebx => ebx,
                    Ecx => ecx,
                    Edx => edx,
                };
                if *l == leaf && *s == subleaf && value >> bit & 1 != 0 {
                    features.set(*feature, true);
                }
            }
            match (leaf, subleaf) {
                (0, _) => features.set(F::Amd, is_amd(ebx, ecx, edx)),
                (1, _) => signature = eax,
                (0x8000_0008, _) => {
                    // Values outside what page-table entries can hold would break masks.
                    features.maxphyaddr = (eax as u8).clamp(32, 52);
                }
                // x87 cannot be disabled, so it is there even if the leaf says otherwise.
                (0xd, 0) => features.xcr0 = u64::from(eax) | u64::from(edx) << 32 | 1,
                // Any other place would be in the legacy region, or not in the page that the area is for.
                (0xd, 9) if (576..=4088).contains(&ebx) => features.pkru_offset = ebx as u16,
                (0xd, 1) => features.xss = u64::from(ecx) | u64::from(edx) << 32,
                _ => {}
            }
        }
        features.set(F::Zen4, features.has(F::Amd) && is_zen4(signature));
        features
    }
}

/// True if leaf 0 names AMD or Hygon.
fn is_amd(ebx: u32, ecx: u32, edx: u32) -> bool {
    let name = [ebx, edx, ecx].map(u32::to_le_bytes);
    let name = name.as_flattened();
    name == b"AuthenticAMD" || name == b"HygonGenuine"
}

/// True if leaf 1 EAX is of AMD's family 25 and one of the models in it that are Zen 4; the others are Zen 3.
fn is_zen4(signature: u32) -> bool {
    let family = (signature >> 8 & 0xf) + (signature >> 20 & 0xff);
    let model = signature >> 4 & 0xf | signature >> 12 & 0xf0;
    family == 25 && matches!(model, 0x10..=0x1f | 0x60..=0xaf)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_of_amds_family_25() {
        let model = |name: &[u8; 12], signature: u32| {
            let w = |i: usize| u32::from_le_bytes([name[i], name[i + 1], name[i + 2], name[i + 3]]);
            let leaves = [(0, 0, 0x10, w(0), w(8), w(4)), (1, 0, signature, 0, 0, 0)];
            Features::from_cpuid(leaves.into_iter()).has(F::Zen4)
        };
        // Genoa, Raphael, Phoenix, Bergamo; Milan, Vermeer, Rembrandt; Rome; Turin; Intel's.
        for signature in [0x00a1_0f11, 0x00a6_0f12, 0x00a7_0f41, 0x00aa_0f02] {
            assert!(model(b"AuthenticAMD", signature), "{signature:x}");
            assert!(!model(b"GenuineIntel", signature), "{signature:x}");
        }
        for signature in [
            0x00a0_0f11,
            0x00a2_0f12,
            0x00a4_0f41,
            0x0083_0f10,
            0x00b0_0f21,
        ] {
            assert!(!model(b"AuthenticAMD", signature), "{signature:x}");
        }
    }

    #[test]
    fn every_row_is_a_bit_of_its_own() {
        for Bit(leaf, subleaf, reg, bit, feature) in BITS {
            let mut out = [0u32; 4];
            out[*reg as usize] = 1 << bit;
            let f = Features::from_cpuid(core::iter::once((
                *leaf, *subleaf, out[0], out[1], out[2], out[3],
            )));
            assert!(f.has(*feature), "{feature:?}");
            let none = Features::from_cpuid(core::iter::once((*leaf, *subleaf, 0, 0, 0, 0)));
            assert!(!none.has(*feature), "{feature:?}");
        }
    }

    #[test]
    fn vendor_and_sizes() {
        let vendor = |name: &[u8; 12]| {
            let w = |i: usize| u32::from_le_bytes([name[i], name[i + 1], name[i + 2], name[i + 3]]);
            Features::from_cpuid(core::iter::once((0, 0, 0x10, w(0), w(8), w(4)))).has(F::Amd)
        };
        assert!(vendor(b"AuthenticAMD"));
        assert!(vendor(b"HygonGenuine"));
        assert!(!vendor(b"GenuineIntel"));
        let f = Features::from_cpuid(
            [(0x8000_0008, 0, 0x3028, 0, 0, 0), (0xd, 0, 0x206, 0, 0, 0)].into_iter(),
        );
        assert_eq!((f.maxphyaddr, f.xcr0), (40, 0x207));
        for (ebx, offset) in [(832, 832), (0, 2688), (u32::MAX, 2688)] {
            let f = Features::from_cpuid(core::iter::once((0xd, 9, 8, ebx, 0, 0)));
            assert_eq!(f.pkru_offset, offset);
        }
    }
}
