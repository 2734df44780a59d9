//! CPUID of the host's processor.

use core::arch::x86_64::__cpuid_count;
use std::sync::OnceLock;

use x86_defs::xsave;

/// The registers of one leaf, in CPUID's order.
#[derive(Clone, Copy, Default)]
pub(super) struct Regs {
    pub(super) eax: u32,
    pub(super) ebx: u32,
    pub(super) ecx: u32,
    pub(super) edx: u32,
}

/// Returns a leaf of the host; zeros beyond its last leaf. Instructions that the host's kernel has not enabled are not
/// shown: it may have XSAVE off (`noxsave`), or AVX (against gather data sampling).
pub(super) fn host(leaf: u32, subleaf: u32) -> Regs {
    let max = __cpuid_count(leaf & 0xffff_0000, 0).eax;
    if leaf > max {
        return Regs::default();
    }
    let r = __cpuid_count(leaf, subleaf);
    let r = Regs {
        eax: r.eax,
        ebx: r.ebx,
        ecx: r.ecx,
        edx: r.edx,
    };
    usable(leaf, subleaf, r, host::cpu::xcr0())
}

/// Returns a leaf without XSAVE and AVX's extensions, unless XCR0 has their components.
fn usable(leaf: u32, subleaf: u32, mut r: Regs, xcr0: u64) -> Regs {
    /// XSAVE and OSXSAVE.
    const L1_ECX_XSAVE: u32 = 1 << 26 | 1 << 27;
    /// FMA, AVX, F16C.
    const L1_ECX_AVX: u32 = 1 << 12 | 1 << 28 | 1 << 29;
    /// AVX2.
    const L7_EBX_AVX: u32 = 1 << 5;
    /// VAES, VPCLMULQDQ.
    const L7_ECX_AVX: u32 = 1 << 9 | 1 << 10;
    /// AVX-VNNI.
    const L7_1_EAX_AVX: u32 = 1 << 4;
    let has_avx = xcr0 & xsave::AVX != 0;
    match (leaf, subleaf) {
        (1, _) if xcr0 & xsave::SSE == 0 => r.ecx &= !(L1_ECX_XSAVE | L1_ECX_AVX),
        (1, _) if !has_avx => r.ecx &= !L1_ECX_AVX,
        (7, 0) if !has_avx => {
            r.ebx &= !L7_EBX_AVX;
            r.ecx &= !L7_ECX_AVX;
        }
        (7, 1) if !has_avx => r.eax &= !L7_1_EAX_AVX,
        (0xd, 0) => r.eax &= xcr0 as u32,
        _ => {}
    }
    r
}

/// Like [`host()`], for leaves whose first subleaf has the number of subleaves in EAX.
pub(super) fn host_subleaf(leaf: u32, subleaf: u32) -> Regs {
    if subleaf > host(leaf, 0).eax {
        return Regs::default();
    }
    host(leaf, subleaf)
}

/// True if the host's processor is AMD's or a descendant of one.
pub fn is_amd() -> bool {
    // Asked once: if the host is a guest itself, CPUID is an exit of ten microseconds or more.
    static IS: OnceLock<bool> = OnceLock::new();
    *IS.get_or_init(|| {
        let v = host(0, 0);
        [v.ebx, v.edx, v.ecx] == [0x6874_7541, 0x6974_6e65, 0x444d_4163]
            || [v.ebx, v.edx, v.ecx] == [0x6f67_7948, 0x6e65_476e, 0x656e_6975]
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_kernel_has_not_enabled_is_not_shown() {
        let all = Regs {
            eax: u32::MAX,
            ebx: u32::MAX,
            ecx: u32::MAX,
            edx: u32::MAX,
        };
        let shown = |leaf, subleaf, xcr0| usable(leaf, subleaf, all, xcr0);
        let avx = xsave::X87 | xsave::SSE | xsave::AVX;
        assert_eq!(shown(1, 0, avx).ecx, u32::MAX);
        assert_eq!(shown(7, 0, avx).ebx, u32::MAX);
        assert_eq!(shown(0xd, 0, avx).eax, 7);
        // XSAVE without AVX.
        assert_eq!(shown(1, 0, 3).ecx, !(1 << 12 | 1 << 28 | 1 << 29));
        assert_eq!(shown(7, 0, 3).ecx, !(1 << 9 | 1 << 10));
        // Neither.
        assert_eq!(shown(1, 0, 1).ecx >> 26 & 7, 0);
        assert_eq!(shown(7, 1, 1).eax, !(1 << 4));
    }
}
