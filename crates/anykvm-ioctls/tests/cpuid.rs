//! KVM_GET_SUPPORTED_CPUID: what software for x86-64 takes for granted is there.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "a test that cannot be set up fails")]

mod host_cpu;

use anykvm_ioctls::Kvm;
use host_cpu::is_amd;
use kvm_bindings::{
    CpuId, KVM_CPUID_FLAG_SIGNIFCANT_INDEX, KVM_MAX_CPUID_ENTRIES, Msrs, kvm_cpuid_entry2,
    kvm_msr_entry,
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
    let all: Vec<u32> = [0, 0x8000_0000, 0x4000_0000, 0x4000_0200]
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
/// VMMs and programs choose the depth of page tables by it.
#[test]
fn linear_addresses_have_the_width_of_the_page_tables() {
    const LA57: u32 = 1 << 16;
    let supported = Kvm::new().unwrap();
    let supported = supported.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES);
    let supported = supported.unwrap();
    let leaf = |function: u32| {
        let mut entries = supported.as_slice().iter();
        *entries.find(|e| e.function == function).unwrap()
    };
    let width = if leaf(7).ecx & LA57 == 0 { 48 } else { 57 };
    assert_eq!(leaf(0x8000_0008).eax >> 8 & 0xff, width);
}

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

/// The processor that translated code runs on does not have the weakness, says the host's kernel.
fn is_immune(name: &str) -> bool {
    let path = format!("/sys/devices/system/cpu/vulnerabilities/{name}");
    std::fs::read_to_string(path).is_ok_and(|line| line.trim() == "Not affected")
}

/// Registers of feature bits, and those of them that work on every host; the others say what the host has.
const MADE_HERE: &[(u32, u32, char, &[u32])] = &[
    // CX16, PCID, x2APIC, MOVBE, POPCNT, RDRAND, hypervisor; PDCM, for Intel's performance counters.
    (1, 0, 'c', &[13, 15, 17, 21, 22, 23, 30, 31]),
    // MTRR, PGE, MCA, PAT, PSE36 and what is older; CLFSH, MMX, FXSR, SSE, SSE2.
    (
        1,
        0,
        'd',
        &[
            0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 14, 15, 16, 17, 19, 23, 24, 25, 26,
        ],
    ),
    // FSGSBASE, TSC_ADJUST, BMI1, SMEP, BMI2, ERMS, INVPCID, RDSEED, ADX, SMAP, CLFLUSHOPT, CLWB.
    (7, 0, 'b', &[0, 1, 3, 7, 8, 9, 10, 18, 19, 20, 23, 24]),
    // UMIP, PKU, RDPID, PKS.
    (7, 0, 'c', &[2, 3, 22, 31]),
    // FSRM; IA32_ARCH_CAPABILITIES, for Intel.
    (7, 0, 'd', &[4, 29]),
    (7, 1, 'a', &[]),
    (7, 1, 'b', &[]),
    (7, 1, 'c', &[]),
    (7, 1, 'd', &[]),
    (7, 2, 'd', &[]),
    // PKRU; XSAVEOPT, XSAVEC, XGETBV with ECX 1, XSAVES.
    (0xd, 0, 'a', &[9]),
    (0xd, 1, 'a', &[0, 1, 2, 3]),
    // LAHF, CR8_LEGACY, ABM, PREFETCHW; TOPOEXT and PerfCtrExtCore, for AMD.
    (0x8000_0001, 0, 'c', &[0, 4, 5, 8, 22, 23]),
    // SYSCALL, NX, MMXEXT, FXSR_OPT, PDPE1GB, RDTSCP, LM, and what AMD mirrors from leaf 1.
    (
        0x8000_0001,
        0,
        'd',
        &[
            0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 14, 15, 16, 17, 20, 22, 23, 24, 25, 26, 27,
            29,
        ],
    ),
    (0x8000_0007, 0, 'a', &[]),
    (0x8000_0007, 0, 'b', &[]),
    (0x8000_0007, 0, 'd', &[]),
    // By the word of the host's kernel: SSB_NO, BTC_NO, SRSO_NO, TSA_SQ_NO, TSA_L1_NO. WBNOINVD.
    (0x8000_0008, 0, 'b', &[9, 26, 29]),
    (0x8000_0021, 0, 'a', &[29]),
    (0x8000_0021, 0, 'b', &[]),
    (0x8000_0021, 0, 'c', &[1, 2]),
];

/// A value of ours by leaf, subleaf and register, and the processor's.
fn shown_and_own(supported: &CpuId, function: u32, index: u32, name: char) -> [u32; 2] {
    let mut entries = supported.as_slice().iter();
    let entry = entries.find(|e| (e.function, e.index) == (function, index));
    let host = core::arch::x86_64::__cpuid_count(function, index);
    let highest = core::arch::x86_64::__cpuid(function & 0x8000_0000).eax;
    let [shown, own] = match name {
        'a' => [entry.map(|e| e.eax), Some(host.eax)],
        'b' => [entry.map(|e| e.ebx), Some(host.ebx)],
        'c' => [entry.map(|e| e.ecx), Some(host.ecx)],
        _ => [entry.map(|e| e.edx), Some(host.edx)],
    };
    let own = if function <= highest { own } else { None };
    [shown, own].map(Option::unwrap_or_default)
}

#[test]
fn no_feature_is_shown_that_neither_the_host_nor_the_engine_has() {
    let kvm = Kvm::new().unwrap();
    let supported = kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).unwrap();
    for (function, index, name, bits) in MADE_HERE {
        let [shown, own] = shown_and_own(&supported, *function, *index, *name);
        let here = bits.iter().fold(0, |all, bit| all | 1 << bit);
        let made_up = shown & !own & !here;
        assert_eq!(made_up, 0, "{function:#x}.{index} {name}: {made_up:#x}");
    }
    // What is no feature is the host's, or is not told: caches, TLBs, the processor's name.
    for entry in supported.as_slice() {
        if !matches!(
            entry.function,
            2 | 4 | 0x8000_0002..=0x8000_0006 | 0x8000_0019 | 0x8000_001d
        ) {
            continue;
        }
        for (name, value) in ['a', 'b', 'c', 'd']
            .into_iter()
            .zip([entry.eax, entry.ebx, entry.ecx, entry.edx])
        {
            let [_, own] = shown_and_own(&supported, entry.function, entry.index, name);
            assert!(value == own || value == 0, "{entry:x?} {name}: {own:#x}");
        }
    }
}

/// Guests choose their own protection by these bits, and translated code runs on the host's processor.
#[test]
fn guests_are_told_of_no_immunity_that_the_host_does_not_have() {
    let kvm = Kvm::new().unwrap();
    let supported = kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).unwrap();
    let register =
        |function: u32, index: u32, name: char| shown_and_own(&supported, function, index, name);
    // By the host's own bit, or by its kernel's word.
    for (function, index, name, bit, weakness, what) in [
        (0x8000_0008, 0, 'b', 26, "spec_store_bypass", "SSB_NO"),
        (0x8000_0008, 0, 'b', 29, "retbleed", "BTC_NO"),
        (0x8000_0021, 0, 'a', 2, "", "LFENCE serialises"),
        (0x8000_0021, 0, 'a', 29, "spec_rstack_overflow", "SRSO_NO"),
        (0x8000_0021, 0, 'c', 1, "tsa", "TSA_SQ_NO"),
        (0x8000_0021, 0, 'c', 2, "tsa", "TSA_L1_NO"),
        (7, 2, 'd', 5, "", "MCDT_NO"),
        (0x8000_0007, 0, 'd', 8, "", "the TSC is invariant"),
    ] {
        let [shown, own] = register(function, index, name).map(|r| r >> bit & 1 != 0);
        assert!(!shown || own || is_immune(weakness), "{what}");
        // And what is known to be so spares guests the trouble. Intel's guests look elsewhere, even where a hypervisor
        // below shows them AMD's leaves.
        let is_looked_at = match function {
            7 => false,
            0x8000_0007 => true,
            _ => is_amd(),
        };
        assert!(shown || !is_looked_at || !own, "{what} is not passed on");
    }
    // Nothing of the kind that needs a barrier, an MSR or a change of privilege of the host's.
    for (function, index, name, bits, what) in [
        (
            7,
            0,
            'd',
            1 << 10 | 0xf << 26 & !(1 << 29) | 1 << 31,
            "barriers",
        ),
        (7, 2, 'd', 0x1f, "IA32_SPEC_CTRL's bits"),
        (
            0x8000_0008,
            0,
            'b',
            0x00cf_d000 | 1 << 24 | 1 << 25,
            "IBPB, IBRS, STIBP, SSBD",
        ),
        (
            0x8000_0021,
            0,
            'a',
            1 << 8 | 1 << 5 | 1 << 27 | 1 << 28 | 1 << 30,
            "automatic IBRS and others",
        ),
    ] {
        let [shown, _] = register(function, index, name);
        assert_eq!(shown & bits, 0, "{what}");
    }
}

#[test]
fn arch_capabilities_are_the_hosts() {
    const ARCH_CAPABILITIES: u32 = 0x10a;
    let kvm = Kvm::new().unwrap();
    let entry = kvm_msr_entry {
        index: ARCH_CAPABILITIES,
        ..Default::default()
    };
    let mut msrs = Msrs::from_entries(&[entry]).unwrap();
    assert_eq!(kvm.get_msrs(&mut msrs).unwrap(), 1);
    let told = msrs.as_slice()[0].data;
    for (bit, weakness) in [
        (0, "meltdown"),
        (0, "l1tf"),
        (3, "l1tf"),
        (4, "spec_store_bypass"),
        (5, "mds"),
        (6, "itlb_multihit"),
        (8, "tsx_async_abort"),
        (13, "mmio_stale_data"),
        (14, "mmio_stale_data"),
        (15, "mmio_stale_data"),
        (26, "gather_data_sampling"),
        (27, "reg_file_data_sampling"),
        (62, "indirect_target_selection"),
    ] {
        assert!(
            told >> bit & 1 == 0 || is_immune(weakness),
            "{bit} {weakness}"
        );
    }
    // No IBRS_ALL, and nothing unknown; BHI_NO and PBRSB_NO are of a line with much else.
    assert_eq!(told & !(0x4000_0000_0d10_e179), 0);
    // A new vCPU has the same.
    let vcpu = kvm.create_vm().unwrap().create_vcpu(0).unwrap();
    let mut msrs = Msrs::from_entries(&[entry]).unwrap();
    assert_eq!(vcpu.get_msrs(&mut msrs).unwrap(), 1);
    assert_eq!(msrs.as_slice()[0].data, told);
}
