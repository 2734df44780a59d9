//! CPUID of the host's processor.

use core::arch::x86_64::__cpuid_count;

/// The registers of one leaf, in CPUID's order.
#[derive(Clone, Copy, Default)]
pub(super) struct Regs {
    pub(super) eax: u32,
    pub(super) ebx: u32,
    pub(super) ecx: u32,
    pub(super) edx: u32,
}

/// Returns a leaf of the host; zeros beyond its last leaf.
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
    static IS: std::sync::OnceLock<bool> = std::sync::OnceLock::new();
    *IS.get_or_init(|| {
        let v = host(0, 0);
        [v.ebx, v.edx, v.ecx] == [0x6874_7541, 0x6974_6e65, 0x444d_4163]
            || [v.ebx, v.edx, v.ecx] == [0x6f67_7948, 0x6e65_476e, 0x656e_6975]
    })
}
