//! The CPUID features that change how instructions behave.
//!
//! Computed once from the table that KVM_SET_CPUID2 gives ([`Features::from_cpuid`],
//! in `features/cpuid.rs`); execution tests bits here and never walks the table.

mod cpuid;

/// A feature bit that execution depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
#[allow(missing_docs, reason = "the names are CPUID's own")]
pub enum Feature {
    Fpu,
    Vme,
    De,
    Pse,
    Tsc,
    Msr,
    Pae,
    Mce,
    Cx8,
    Apic,
    Sep,
    Pge,
    Cmov,
    Pat,
    Pse36,
    Clfsh,
    Mmx,
    Fxsr,
    Sse,
    Sse2,
    Sse3,
    Pclmulqdq,
    Monitor,
    Ssse3,
    Fma,
    Cx16,
    Pcid,
    Sse41,
    Sse42,
    X2apic,
    Movbe,
    Popcnt,
    TscDeadline,
    Aes,
    Xsave,
    Avx,
    F16c,
    Rdrand,
    Fsgsbase,
    TscAdjust,
    Bmi1,
    Avx2,
    Smep,
    Bmi2,
    Erms,
    Invpcid,
    Avx512f,
    Rdseed,
    Adx,
    Smap,
    Clflushopt,
    Clwb,
    Sha,
    Umip,
    Pku,
    Gfni,
    Vaes,
    Vpclmulqdq,
    La57,
    Rdpid,
    Pks,
    Fsrm,
    Xsaveopt,
    Xsavec,
    Xgetbv1,
    Xsaves,
    LahfLm,
    Abm,
    Sse4a,
    Misalignsse,
    Prefetchw,
    Xop,
    Fma4,
    Tbm,
    Nx,
    Mmxext,
    Fxsropt,
    Pdpe1gb,
    Rdtscp,
    Lm,
    Syscall,
    Topoext,
    Clzero,
    Xsaveerptr,
    Wbnoinvd,
    Cr8Legacy,
    Amd,
    Lzcnt,
    AvxVnni,
    Serialize,
    Mtrr,
    Mca,
    /// IA32_SPEC_CTRL exists: IBRS (Intel or AMD enumeration).
    SpecCtrl,
    Stibp,
    Ssbd,
    /// IA32_PRED_CMD exists: IBPB.
    Ibpb,
    FlushL1d,
    ArchCapabilities,
    /// IA32_SPEC_CTRL has BHI_DIS_S.
    BhiCtrl,
    Osvw,
    Mwaitx,
    Movdiri,
    Movdir64b,
    Waitpkg,
    Cldemote,
    Ibt,
    ShadowStack,
    /// The model is a Zen 4 (AMD's family 25), which leaves some flags otherwise than the Zen 3 of that family.
    Zen4,
}

/// A set of [`Feature`]s and the numbers that go with them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Features {
    bits: u128,
    /// What executes whether CPUID promises it or not.
    native: u128,
    /// MAXPHYADDR in bits.
    pub maxphyaddr: u8,
    /// XCR0 bits that XSETBV accepts.
    pub xcr0: u64,
    /// IA32_XSS bits that WRMSR accepts.
    pub xss: u64,
    /// Where the standard format of XSAVE has PKRU.
    pub pkru_offset: u16,
}

impl Default for Features {
    fn default() -> Self {
        Self {
            bits: 0,
            native: 0,
            maxphyaddr: 36,
            xcr0: 1,
            xss: 0,
            // Of processors with AVX-512.
            pkru_offset: 2688,
        }
    }
}

impl Features {
    /// True if the feature is there.
    #[inline(always)]
    pub const fn has(&self, f: Feature) -> bool {
        self.bits >> (f as u8) & 1 != 0
    }
    /// True if the feature's instructions execute: CPUID promises them, or the processor has them
    /// and a hypervisor cannot withhold them.
    #[inline(always)]
    pub const fn executes(&self, f: Feature) -> bool {
        (self.bits | self.native) >> (f as u8) & 1 != 0
    }
    /// As on hardware, where a table for CPUID hides instructions and takes away few: those of the
    /// `host` execute whatever CPUID says, but for the ones that control registers, XCR0 or KVM's
    /// intercepts withhold.
    #[must_use]
    pub const fn with_native(mut self, host: &Self) -> Self {
        use Feature as F;
        const WITHHELD: &[Feature] = &[
            F::Amd,
            F::Rdtscp,
            F::Rdpid,
            F::Invpcid,
            F::Monitor,
            F::Mwaitx,
            F::Xsave,
            F::Xsaveopt,
            F::Xsavec,
            F::Xsaves,
            F::Xgetbv1,
            F::Fsgsbase,
            F::Pku,
        ];
        let mut native = host.bits;
        let mut i = 0;
        while i < WITHHELD.len() {
            native &= !(1u128 << (WITHHELD[i] as u8));
            i += 1;
        }
        if !host.has(F::Amd) {
            // VMX has controls for these.
            native &= !(1u128 << (F::Rdrand as u8) | 1u128 << (F::Rdseed as u8));
        }
        self.native = native;
        self
    }
    /// Adds or removes one.
    pub const fn set(&mut self, f: Feature, on: bool) {
        let bit = 1u128 << (f as u8);
        if on {
            self.bits |= bit;
        } else {
            self.bits &= !bit;
        }
    }
}
