//! KVM_GET_SUPPORTED_CPUID: features of the host CPU that execution passes through, and features that are virtualised
//! on any host.
//!
//! A bit is set only if the interpreter, the MMU and the chips really implement it. Bits about speculation are in
//! [`super::speculation`].

use std::sync::OnceLock;

use kvm_bindings::{KVM_CPUID_FLAG_SIGNIFCANT_INDEX, kvm_cpuid_entry2};

use super::{
    host_leaves::{Regs, host, host_subleaf, is_amd},
    own_cpuid,
    speculation::Speculation,
};

/// Leaf of the hypervisor's signature.
const KVM_CPUID_SIGNATURE: u32 = 0x4000_0000;
/// Leaf of KVM's features.
const KVM_CPUID_FEATURES: u32 = 0x4000_0001;

/// KVM_FEATURE_* bits of leaf 0x40000001 that work: kvmclock (both MSR pairs, stable), no I/O delay, steal time, PV
/// EOI, PV unhalt, PV TLB flush, PV IPIs, poll control, PV yield.
///
/// KVM_FEATURE_ASYNC_PF (bit 4) does not work. It is shown for QEMU, whose CPU models ask for it by name. Kernels use
/// asynchronous page faults only with KVM_FEATURE_ASYNC_PF_INT, which is not shown.
pub(crate) const KVM_FEATURES: u32 = 1 << 0
    | 1 << 1
    | 1 << 3
    | 1 << 4
    | 1 << 5
    | 1 << 6
    | 1 << 7
    | 1 << 9
    | 1 << 11
    | 1 << 12
    | 1 << 13
    | 1 << 24;

fn entry(function: u32, index: u32, flags: u32, r: Regs) -> kvm_cpuid_entry2 {
    kvm_cpuid_entry2 {
        function,
        index,
        flags,
        eax: r.eax,
        ebx: r.ebx,
        ecx: r.ecx,
        edx: r.edx,
        ..Default::default()
    }
}

/// Leaf 1 ECX: bits of instructions that run on the host's FPU. Shown if the host has them.
const L1_ECX_HOST: u32 =
    1 << 0 | 1 << 1 | 1 << 9 | 1 << 12 | 1 << 19 | 1 << 20 | 1 << 25 | 1 << 26 | 1 << 28 | 1 << 29;
/// Leaf 1 ECX: bits that are always shown: CX16, PCID, x2APIC, MOVBE, POPCNT, RDRAND, hypervisor. TSC-deadline is
/// reported only by KVM_CAP_TSC_DEADLINE_TIMER, as the API document says.
const L1_ECX_OURS: u32 = 1 << 13 | 1 << 17 | 1 << 21 | 1 << 22 | 1 << 23 | 1 << 30 | 1 << 31;
/// Leaf 1 ECX, Intel: PDCM (IA32_PERF_CAPABILITIES).
const L1_ECX_PDCM: u32 = 1 << 15;
/// Leaf 0xA: version 2, eight general counters of 48 bits and three fixed ones, none of which counts both threads of a
/// core. Of the seven architectural events those of caches and of mispredicted branches are missing.
const ARCHITECTURAL_PMU: Regs = Regs {
    eax: 7 << 24 | 48 << 16 | 8 << 8 | 2,
    ebx: 1 << 3 | 1 << 4 | 1 << 6,
    ecx: 0,
    edx: 1 << 15 | 48 << 5 | 3,
};
/// Leaf 0x80000022: PerfMonV2, with six core counters.
const PERF_MON_V2: Regs = Regs {
    eax: 1,
    ebx: 6,
    ecx: 0,
    edx: 0,
};
/// Leaf 1 EDX: FPU VME DE PSE TSC MSR PAE MCE CX8 APIC SEP MTRR PGE MCA CMOV PAT PSE36 CLFSH MMX FXSR SSE SSE2.
const L1_EDX: u32 = 0x078b_fbff;
/// Leaf 7 EBX, shown if the host has them: AVX2 and SHA, which the host executes.
const L7_EBX_HOST: u32 = 1 << 5 | 1 << 29;
/// Leaf 7 EBX, always shown: FSGSBASE TSC_ADJUST BMI1 SMEP BMI2 ERMS INVPCID RDSEED ADX SMAP CLFLUSHOPT CLWB.
const L7_EBX_OURS: u32 = 1 << 0
    | 1 << 1
    | 1 << 3
    | 1 << 7
    | 1 << 8
    | 1 << 9
    | 1 << 10
    | 1 << 18
    | 1 << 19
    | 1 << 20
    | 1 << 23
    | 1 << 24;
/// Leaf 7 ECX, shown if the host has them: GFNI, VAES, VPCLMULQDQ, CLDEMOTE, MOVDIRI, MOVDIR64B. The last two are
/// interpreted: they are slow.
const L7_ECX_HOST: u32 = 1 << 8 | 1 << 9 | 1 << 10 | 1 << 25 | 1 << 27 | 1 << 28;
/// Leaf 7 ECX, always shown: UMIP, PKU, RDPID, PKS. This MMU implements protection keys, whatever the host has.
const L7_ECX_OURS: u32 = 1 << 2 | PKU | 1 << 22 | 1 << 31;
/// Leaf 7 EDX, always shown: FSRM.
const L7_EDX_OURS: u32 = 1 << 4;
/// Leaf 7 EDX, shown if the host has it: SERIALIZE.
const L7_EDX_HOST: u32 = 1 << 14;
/// Leaf 7, subleaf 1, EAX, shown if the host has it: AVX-VNNI.
const L7_1_EAX_HOST: u32 = 1 << 4;
/// Leaf 7 EDX, Intel: ARCH_CAPABILITIES.
const L7_EDX_INTEL: u32 = 1 << 29;
/// Leaf 7, subleaf 2, EDX, Intel, shown if the host has it: MCDT_NO.
const L7_2_EDX_INTEL: u32 = 1 << 5;
/// Leaf 0x80000001 ECX, shown if the host has them: SSE4A, MISALIGNSSE.
const X1_ECX_HOST: u32 = 1 << 6 | 1 << 7;
/// Leaf 0x80000001 ECX, always shown: LAHF, CR8_LEGACY, ABM, PREFETCHW.
const X1_ECX_OURS: u32 = 1 << 0 | 1 << 4 | 1 << 5 | 1 << 8;
/// Leaf 0x80000001 ECX, AMD, shown if the host has them: CMP_LEGACY, and OSVW, whose MSRs are implemented.
const X1_ECX_AMD_HOST: u32 = 1 << 1 | 1 << 9;
/// Leaf 0x80000001 ECX, AMD: PerfCtrExtCore.
const X1_ECX_PERF_CTR: u32 = 1 << 23;
/// Leaf 0x80000001 ECX: TOPOEXT, for AMD guests whose VMM fills leaf 0x8000001e.
const X1_ECX_TOPOEXT: u32 = 1 << 22;
/// Leaf 0x80000001 EDX: bits that AMD mirrors from leaf 1.
const X1_EDX_MIRROR: u32 = 0x0183_f3ff;
/// Leaf 0x80000001 EDX: SYSCALL NX MMXEXT FXSR_OPT PDPE1GB RDTSCP LM.
const X1_EDX_OURS: u32 = 1 << 11 | 1 << 20 | 1 << 26 | 1 << 27 | 1 << 29;
/// Leaf 0x80000001 EDX: MMXEXT and FXSR_OPT, which only AMD has.
const X1_EDX_AMD: u32 = 1 << 22 | 1 << 25;
/// XCR0 components that execution supports if the host has them: x87, SSE, AVX. PKRU's is there on every host.
const XCR0: u32 = 7;
/// Leaf 7 ECX: PKU.
const PKU: u32 = 1 << 3;
/// Leaf 0xd.1 EAX: XSAVEOPT XSAVEC XGETBV1 XSAVES.
const XSAVE_FEATURES: u32 = 0xf;

/// Leaf 1 EAX: family, model and stepping.
///
/// DEVIATION: if the host's model has AVX-512, which guests do not have, the last model without it is shown: Comet Lake
/// (06_A5H) or Zen 3 (19_21H). Some programs, such as GCC's `target_clones`, choose code with AVX-512 by the model
/// alone.
pub fn signature() -> u32 {
    const AVX512F: u32 = 1 << 16;
    match host(1, 0).eax {
        eax if host(7, 0).ebx & AVX512F == 0 => eax,
        _ if is_amd() => 0x00a2_0f12,
        _ => 0x000a_0655,
    }
}

fn leaf1() -> Regs {
    let h = host(1, 0);
    let pdcm = if is_amd() { 0 } else { L1_ECX_PDCM };
    Regs {
        eax: signature(),
        ebx: h.ebx & 0xff00,
        ecx: h.ecx & L1_ECX_HOST | L1_ECX_OURS | pdcm,
        edx: L1_EDX,
    }
}

fn leaf7() -> Regs {
    let h = host(7, 0);
    Regs {
        eax: if is_amd() { h.eax.min(1) } else { 2 },
        ebx: h.ebx & L7_EBX_HOST | L7_EBX_OURS,
        ecx: h.ecx & L7_ECX_HOST | L7_ECX_OURS,
        edx: h.edx & L7_EDX_HOST | L7_EDX_OURS | if is_amd() { 0 } else { L7_EDX_INTEL },
    }
}

fn extended1(amd: bool) -> Regs {
    let h = host(0x8000_0001, 0);
    let mut edx = X1_EDX_OURS;
    let mut ecx = h.ecx & X1_ECX_HOST | X1_ECX_OURS;
    if amd {
        edx |= X1_EDX_AMD | L1_EDX & X1_EDX_MIRROR;
        ecx |= X1_ECX_TOPOEXT | X1_ECX_PERF_CTR | h.ecx & X1_ECX_AMD_HOST;
    }
    Regs {
        eax: if amd { signature() } else { h.eax },
        ebx: h.ebx,
        ecx,
        edx,
    }
}

/// Returns size and offset of PKRU's XSAVE component. VMMs ask the processor for them, so they are the host's if it has
/// the component; otherwise PKRU is behind AVX's component, as on Zen 3.
fn pkru_leaf() -> Regs {
    const PKRU: u32 = x86_defs::xsave::PKRU as u32;
    let leaf = host(0xd, PKRU.trailing_zeros());
    let fits = leaf.eax == 8 && (HEADER_END..=MAX_PKRU_OFFSET).contains(&leaf.ebx);
    if fits && host(0xd, 0).eax & PKRU != 0 {
        return leaf;
    }
    Regs {
        eax: 8,
        ebx: 832,
        ..Regs::default()
    }
}
const HEADER_END: u32 = x86_defs::xsave::HEADER_END as u32;
/// Largest offset of PKRU: the component is in one page with all components before it.
const MAX_PKRU_OFFSET: u32 = 4096 - 8;

/// Returns the offset of PKRU in an XSAVE image of the standard format.
pub fn pkru_offset() -> usize {
    static OFFSET: OnceLock<usize> = OnceLock::new();
    *OFFSET.get_or_init(|| pkru_leaf().ebx as usize)
}

/// Appends the XSAVE leaves. Sizes are those of the components that the guest may enable.
fn xsave_leaves(out: &mut Vec<kvm_cpuid_entry2>) {
    const AVX: u32 = x86_defs::xsave::AVX as u32;
    const PKRU: u32 = x86_defs::xsave::PKRU as u32;
    let mut xcr0 = host(0xd, 0).eax & XCR0;
    // Sizes in the standard and in the compacted format.
    let mut sizes = [HEADER_END; 2];
    let mut components = Vec::new();
    let avx = (xcr0 & AVX != 0).then(|| host(0xd, AVX.trailing_zeros()));
    for (bit, leaf) in [(AVX, avx), (PKRU, Some(pkru_leaf()))] {
        let Some(leaf) = leaf else { continue };
        xcr0 |= bit;
        sizes = [sizes[0].max(leaf.ebx + leaf.eax), sizes[1] + leaf.eax];
        let leaf = Regs {
            eax: leaf.eax,
            ebx: leaf.ebx,
            ..Regs::default()
        };
        components.push((bit.trailing_zeros(), leaf));
    }
    let [size, compacted] = sizes;
    let whole = Regs {
        eax: xcr0,
        ebx: size,
        ecx: size,
        edx: 0,
    };
    let features = Regs {
        eax: XSAVE_FEATURES,
        ebx: compacted,
        ..Regs::default()
    };
    for (index, registers) in [(0, whole), (1, features)].into_iter().chain(components) {
        out.push(entry(
            0xd,
            index,
            KVM_CPUID_FLAG_SIGNIFCANT_INDEX,
            registers,
        ));
    }
}

/// Appends the deterministic cache leaves (4 on Intel, 0x8000001d on AMD), as the host has them.
fn cache_leaves(function: u32, out: &mut Vec<kvm_cpuid_entry2>) {
    for index in 0..8 {
        let r = host(function, index);
        out.push(entry(function, index, KVM_CPUID_FLAG_SIGNIFCANT_INDEX, r));
        if r.eax & 0x1f == 0 {
            break;
        }
    }
}

/// KVM_GET_SUPPORTED_CPUID. Computed once, because a hypervisor below this one may have to answer each CPUID
/// instruction.
pub fn supported_cpuid() -> Vec<kvm_cpuid_entry2> {
    static SUPPORTED: OnceLock<Vec<kvm_cpuid_entry2>> = OnceLock::new();
    SUPPORTED.get_or_init(make_supported_cpuid).clone()
}

fn make_supported_cpuid() -> Vec<kvm_cpuid_entry2> {
    let amd = is_amd();
    let plain = |f: u32, r: Regs| entry(f, 0, 0, r);
    let mut out = Vec::with_capacity(48);
    let vendor = host(0, 0);
    out.push(plain(
        0,
        Regs {
            eax: vendor.eax.clamp(0xd, 0x1f),
            ..vendor
        },
    ));
    out.push(plain(1, leaf1()));
    if !amd {
        out.push(plain(2, host(2, 0)));
        cache_leaves(4, &mut out);
    }
    // ARAT: the LAPIC's timer runs in every idle state.
    out.push(plain(
        6,
        Regs {
            eax: 1 << 2,
            ..Regs::default()
        },
    ));
    let mut leaf7 = vec![leaf7()];
    // Only Intel's have a second one.
    for subleaf in 1..=leaf7[0].eax {
        let h = host_subleaf(7, subleaf);
        let mut shown = Regs::default();
        match subleaf {
            1 => shown.eax = h.eax & L7_1_EAX_HOST,
            _ => shown.edx = h.edx & L7_2_EDX_INTEL,
        }
        leaf7.push(shown);
    }
    for (index, registers) in (0..).zip(leaf7) {
        out.push(entry(7, index, KVM_CPUID_FLAG_SIGNIFCANT_INDEX, registers));
    }
    for index in 0..2 {
        out.push(entry(
            0xb,
            index,
            KVM_CPUID_FLAG_SIGNIFCANT_INDEX,
            Regs {
                ecx: index,
                ..Regs::default()
            },
        ));
    }
    xsave_leaves(&mut out);
    out.extend(hypervisor_leaves());
    extended_leaves(amd, vendor, &mut out);
    out.push(performance_counters(amd));
    complete(&mut out);
    out
}

/// Appends the leaves from 0x80000000 on.
fn extended_leaves(amd: bool, vendor: Regs, out: &mut Vec<kvm_cpuid_entry2>) {
    let speculation = Speculation::here();
    let plain = |f: u32, r: Regs| entry(f, 0, 0, r);
    out.push(plain(
        0x8000_0000,
        Regs {
            eax: if amd { 0x8000_0022 } else { 0x8000_0008 },
            ..if amd { vendor } else { Regs::default() }
        },
    ));
    out.push(plain(0x8000_0001, extended1(amd)));
    for f in 0x8000_0002..=0x8000_0004 {
        out.push(plain(f, host(f, 0)));
    }
    out.push(plain(0x8000_0005, host(0x8000_0005, 0)));
    out.push(plain(0x8000_0006, host(0x8000_0006, 0)));
    // The TSC is invariant if the host's is, because guests read the host's TSC.
    out.push(plain(
        0x8000_0007,
        Regs {
            edx: host(0x8000_0007, 0).edx & 1 << 8,
            ..Regs::default()
        },
    ));
    /// Bits of a linear address with four levels of page tables, whatever the processor has.
    const LINEAR_BITS: u32 = 48;
    let sizes = host(0x8000_0008, 0);
    // CLZERO and XSAVEERPTR if the host executes them. WBNOINVD is interpreted.
    let mut ebx = 1 << 9;
    if amd {
        ebx |= sizes.ebx & (1 << 0 | 1 << 2) | speculation.sizes_ebx;
    }
    out.push(plain(
        0x8000_0008,
        Regs {
            eax: LINEAR_BITS << 8 | (sizes.eax & 0xff),
            ebx,
            ecx: 0,
            edx: 0,
        },
    ));
    if amd {
        cache_leaves(0x8000_001d, out);
        out.push(plain(0x8000_001e, Regs::default()));
        out.push(plain(
            0x8000_0021,
            Regs {
                eax: speculation.more_eax,
                ecx: speculation.more_ecx,
                ..Regs::default()
            },
        ));
    }
}

/// Returns KVM's leaves and anykvm's own.
fn hypervisor_leaves() -> [kvm_cpuid_entry2; 4] {
    let plain = |function: u32, regs: Regs| entry(function, 0, 0, regs);
    let signature = |first: u32, s: &[u8; 12]| {
        let word = |i: usize| u32::from_le_bytes([s[i], s[i + 1], s[i + 2], s[i + 3]]);
        let regs = Regs {
            eax: first | 1,
            ebx: word(0),
            ecx: word(4),
            edx: word(8),
        };
        plain(first, regs)
    };
    let [ebx, ecx, edx] = own_cpuid::limits();
    let own = Regs {
        eax: own_cpuid::FEATURES,
        ebx,
        ecx,
        edx,
    };
    let kvm = Regs {
        eax: KVM_FEATURES,
        ..Regs::default()
    };
    [
        signature(KVM_CPUID_SIGNATURE, b"KVMKVMKVM\0\0\0"),
        plain(KVM_CPUID_FEATURES, kvm),
        signature(own_cpuid::LEAVES, &own_cpuid::SIGNATURE),
        plain(own_cpuid::LEAVES | 1, own),
    ]
}

fn performance_counters(amd: bool) -> kvm_cpuid_entry2 {
    if amd {
        entry(0x8000_0022, 0, 0, PERF_MON_V2)
    } else {
        entry(0xa, 0, 0, ARCHITECTURAL_PMU)
    }
}

/// True for leaves that have subleaves.
fn has_subleaves(function: u32) -> bool {
    matches!(
        function,
        4 | 7 | 0xb | 0xd | 0xf | 0x10 | 0x12 | 0x14 | 0x17 | 0x18 | 0x1d..=0x1f | 0x8000_001d
    )
}

/// Fills in empty entries, as KVM's list has them, up to the highest leaf: VMMs look for some of these and refuse to
/// start without. The order is KVM's, with its own leaves last.
fn complete(list: &mut Vec<kvm_cpuid_entry2>) {
    for first in [0, 0x8000_0000] {
        let last = list.iter().find(|e| e.function == first);
        let last = last.map_or(first, |e| e.eax);
        for function in first..=last {
            if list.iter().all(|e| e.function != function) {
                let flags = if has_subleaves(function) {
                    KVM_CPUID_FLAG_SIGNIFCANT_INDEX
                } else {
                    0
                };
                list.push(entry(function, 0, flags, Regs::default()));
            }
        }
    }
    list.sort_by_key(|e| {
        let is_ours = e.function >> 24 == KVM_CPUID_SIGNATURE >> 24;
        (is_ours, e.function, e.index)
    });
}

/// KVM_GET_EMULATED_CPUID: features that work although the supported list does not show them.
pub fn emulated_cpuid() -> Vec<kvm_cpuid_entry2> {
    let leaf = |function, eax, ecx| kvm_cpuid_entry2 {
        function,
        eax,
        ecx,
        ..Default::default()
    };
    vec![
        leaf(0, 7, 0),
        // MOVBE in leaf 1, RDPID in leaf 7.
        leaf(1, 0, 1 << 22),
        kvm_cpuid_entry2 {
            flags: KVM_CPUID_FLAG_SIGNIFCANT_INDEX,
            ..leaf(7, 0, 1 << 22)
        },
    ]
}
