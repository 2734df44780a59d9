//! KVM_GET_SUPPORTED_CPUID: what software for x86-64 takes for granted is there.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "a test that cannot be set up fails")]

use anykvm_ioctls::Kvm;
use kvm_bindings::{
    CpuId, KVM_CPUID_FLAG_SIGNIFCANT_INDEX, KVM_MAX_CPUID_ENTRIES, kvm_cpuid_entry2,
};

/// Leaf, register, bit, and who stops working without it.
const NEEDED: &[(u32, char, u32, &str)] = &[
    (1, 'd', 0, "FPU"),
    (1, 'd', 4, "TSC"),
    (1, 'd', 5, "MSR: kernels"),
    (1, 'd', 6, "PAE"),
    (1, 'd', 8, "CX8"),
    (1, 'd', 9, "APIC"),
    (1, 'd', 11, "SEP: 32-bit system calls"),
    (1, 'd', 13, "PGE"),
    (1, 'd', 15, "CMOV"),
    (1, 'd', 16, "PAT"),
    (
        1,
        'd',
        19,
        "CLFSH: the JVM executes CLFLUSH after a look at nothing",
    ),
    (1, 'd', 23, "MMX"),
    (1, 'd', 24, "FXSR"),
    (1, 'd', 25, "SSE"),
    (1, 'd', 26, "SSE2"),
    (1, 'c', 13, "CX16: x86-64-v2"),
    (1, 'c', 23, "POPCNT: x86-64-v2"),
    (1, 'c', 31, "hypervisor"),
    (0x8000_0001, 'd', 11, "SYSCALL"),
    (0x8000_0001, 'd', 20, "NX"),
    (0x8000_0001, 'd', 29, "long mode"),
    (0x8000_0001, 'c', 0, "LAHF in 64-bit mode: x86-64-v2"),
];

#[test]
fn each_leaf_up_to_the_highest_has_an_entry() {
    let kvm = Kvm::new().unwrap();
    let supported = kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).unwrap();
    let functions: Vec<u32> = supported.as_slice().iter().map(|e| e.function).collect();
    let highest = |first: u32| {
        let mut entries = supported.as_slice().iter();
        entries.find(|e| e.function == first).unwrap().eax
    };
    let all: Vec<u32> = [0, 0x8000_0000, 0x4000_0000]
        .into_iter()
        .flat_map(|first| first..=highest(first))
        .collect();
    let mut once = functions;
    once.dedup();
    assert_eq!(once, all);
}

#[test]
fn the_baseline_is_there() {
    let supported = Kvm::new()
        .unwrap()
        .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
        .unwrap();
    let leaf = |function: u32| -> kvm_cpuid_entry2 {
        *supported
            .as_slice()
            .iter()
            .find(|e| e.function == function)
            .unwrap()
    };
    for (function, register, bit, what) in NEEDED {
        let entry = leaf(*function);
        let value = if *register == 'c' {
            entry.ecx
        } else {
            entry.edx
        };
        assert!(
            value >> bit & 1 != 0,
            "leaf {function:#x} bit {bit}: {what}"
        );
    }
    // In units of eight bytes.
    assert_eq!(leaf(1).ebx >> 8 & 0xff, 8, "CLFLUSH line size");
}

/// GCC's `target_clones`, for one, choose code with AVX-512 by the model alone.
#[test]
fn a_model_with_avx512_is_not_shown_without() {
    /// Models of family 6 that its `__builtin_cpu_is` knows to have it.
    const INTEL: [u32; 14] = [
        0x55, 0x57, 0x66, 0x6a, 0x6c, 0x7d, 0x7e, 0x85, 0x8c, 0x8d, 0x8f, 0xa7, 0xad, 0xcf,
    ];
    let kvm = Kvm::new().unwrap();
    let supported = kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).unwrap();
    let mut entries = supported.as_slice().iter();
    let signature = entries.clone().find(|e| e.function == 1).unwrap().eax;
    let has_avx512 = entries.find(|e| e.function == 7).unwrap().ebx >> 16 & 1 != 0;
    let model = signature >> 4 & 15 | signature >> 12 & 0xf0;
    let may_have = match (signature >> 8 & 15) + (signature >> 20 & 0xff) {
        6 => INTEL.contains(&model),
        // Zen 4 and later ones.
        0x19 => matches!(model, 0x10..=0x1f | 0x60..=0xaf),
        family => family == 0x1a,
    };
    assert!(has_avx512 || !may_have, "{signature:#x}");
}

#[test]
fn a_table_with_absurd_sizes_of_components_is_shown() {
    let vm = Kvm::new().unwrap().create_vm().unwrap();
    let vcpu = vm.create_vcpu(0).unwrap();
    let entry = |index, eax, ecx| kvm_cpuid_entry2 {
        function: 0xd,
        index,
        flags: KVM_CPUID_FLAG_SIGNIFCANT_INDEX,
        eax,
        ebx: u32::MAX,
        ecx,
        ..Default::default()
    };
    let mut entries = vec![entry(0, 7, 0), entry(1, 0xf, 0)];
    entries.extend((2..63).map(|index| entry(index, u32::MAX, 2)));
    // XSAVE, and AVX.
    entries.push(kvm_cpuid_entry2 {
        function: 1,
        ecx: 1 << 26 | 1 << 28,
        ..Default::default()
    });
    vcpu.set_cpuid2(&CpuId::from_entries(&entries).unwrap())
        .unwrap();
    let mut xcrs = vcpu.get_xcrs().unwrap();
    xcrs.xcrs[0].value = 7;
    vcpu.set_xcrs(&xcrs).unwrap();
    let shown = vcpu.get_cpuid2(KVM_MAX_CPUID_ENTRIES).unwrap();
    for shown in &shown.as_slice()[..2] {
        assert_eq!(shown.ebx, u32::MAX);
    }
}
