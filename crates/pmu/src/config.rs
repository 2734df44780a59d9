//! What CPUID shows of a PMU (SDM vol. 2, CPUID leaf 0xA; AMD APM vol. 3, E.4.20).

use crate::{MAX_FIXED, MAX_GENERAL};

/// The vendor whose registers the PMU has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Vendor {
    /// There is no PMU.
    #[default]
    None,
    /// The architectural PMU of leaf 0xA.
    Intel,
    /// AMD's PMU: the four counters of the K7, or the six of the core, with or without global registers.
    Amd,
}

/// The kind of a PMU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Config {
    /// Whose.
    pub vendor: Vendor,
    /// Number of general counters.
    pub general: u8,
    /// Number of fixed counters.
    pub fixed: u8,
    /// True if there are global registers: with Intel's version 2, or AMD's PerfMonV2.
    pub has_global: bool,
    /// AMD: true if the core's registers are there, besides the K7's.
    pub has_core: bool,
    /// Intel: architectural events that are absent, a bit each.
    pub unavailable: u32,
    /// Intel: true if general counters can be written in full (IA32_PERF_CAPABILITIES.FW_WRITE).
    pub full_width: bool,
    /// EAX of CPUID leaf 1. The model decides about events beyond the architectural ones.
    pub signature: u32,
}

impl Config {
    /// Makes the kind from EAX, EBX and EDX of CPUID leaf 0xA; version 0 has no PMU.
    pub fn intel([eax, ebx, edx]: [u32; 3], signature: u32) -> Self {
        let version = eax & 0xff;
        if version == 0 {
            return Self::default();
        }
        let has_global = version >= 2;
        let listed = eax >> 24;
        // Events behind the end of the list are absent, too.
        let beyond = u32::MAX.checked_shl(listed).unwrap_or(0);
        Self {
            vendor: Vendor::Intel,
            general: (eax >> 8 & 0xff).min(MAX_GENERAL as u32) as u8,
            fixed: if has_global {
                (edx & 0x1f).min(MAX_FIXED as u32) as u8
            } else {
                0
            },
            has_global,
            has_core: false,
            unavailable: ebx | beyond,
            full_width: false,
            signature,
        }
    }
    /// Makes the kind from AMD's CPUID. `has_core`: leaf 0x80000001 shows PerfCtrExtCore. The numbers are EAX and EBX
    /// of leaf 0x80000022.
    pub fn amd(has_core: bool, [eax, ebx]: [u32; 2], signature: u32) -> Self {
        let has_global = eax & 1 != 0;
        let general = match (has_global, has_core) {
            (true, _) => (ebx & 0xf).min(6),
            (false, true) => 6,
            (false, false) => 4,
        };
        Self {
            vendor: Vendor::Amd,
            general: general as u8,
            has_global,
            has_core: has_core || has_global,
            signature,
            ..Self::default()
        }
    }

    /// Returns family and model of the signature.
    pub(crate) const fn family_model(&self) -> (u32, u32) {
        let s = self.signature;
        let family = (s >> 8 & 0xf)
            + if s >> 8 & 0xf == 0xf {
                s >> 20 & 0xff
            } else {
                0
            };
        (family, s >> 4 & 0xf | s >> 12 & 0xf0)
    }
}
