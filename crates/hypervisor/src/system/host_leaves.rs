//! CPUID as the host shows it.

use core::arch::x86_64::__cpuid_count;

/// Registers of one leaf, in CPUID's order.
#[derive(Clone, Copy, Default)]
pub(super) struct Regs {
    pub(super) eax: u32,
    pub(super) ebx: u32,
    pub(super) ecx: u32,
    pub(super) edx: u32,
}

/// A leaf of the host's; zeros beyond its last one.
pub(super) fn host(leaf: u32, subleaf: u32) -> Regs {
    let max = __cpuid_count(leaf & 0xffff_0000, 0).eax;
    if leaf > max {
        return Regs::default();
    }
    let r = __cpuid_count(leaf, subleaf);
    Regs {
        eax: r.eax,
        ebx: r.ebx,
        ecx: r.ecx,
        edx: r.edx,
    }
}

/// As [`host()`], for leaves that say themselves, in EAX of their first subleaf, how many there are.
pub(super) fn host_subleaf(leaf: u32, subleaf: u32) -> Regs {
    if subleaf > host(leaf, 0).eax {
        return Regs::default();
    }
    host(leaf, subleaf)
}

/// The host's processor is AMD's, or a descendant.
pub fn is_amd() -> bool {
    // Asked once: CPUID is an exit where the host is a guest itself, of ten microseconds and more.
    static IS: std::sync::OnceLock<bool> = std::sync::OnceLock::new();
    *IS.get_or_init(|| {
        let v = host(0, 0);
        [v.ebx, v.edx, v.ecx] == [0x6874_7541, 0x6974_6e65, 0x444d_4163]
            || [v.ebx, v.edx, v.ecx] == [0x6f67_7948, 0x6e65_476e, 0x656e_6975]
    })
}
