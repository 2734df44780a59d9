//! What CPUID and IA32_ARCH_CAPABILITIES tell guests about speculation (SDM vol. 4, table 2-2; AMD APM vol. 3, appendix
//! E).
//!
//! Translated code runs on the host's processor and speculates as that processor does. So guests are told what the
//! host's own CPUID shows, and what the host's kernel says that the processor is not affected by. Not shown is what
//! needs a change of privilege, a barrier or an MSR of the host, none of which a process has: IBRS (IBRS_ALL, automatic
//! IBRS), IBPB, STIBP and SSBD.

use std::sync::OnceLock;

use super::host_leaves;

/// Bits of IA32_ARCH_CAPABILITIES, each with the vulnerabilities that the processor must not have for it to be set.
const CAPABILITIES: &[(u64, &[&str])] = &[
    // RDCL_NO; SKIP_L1DFL_VMENTRY.
    (1 << 0, &["meltdown", "l1tf"]),
    (1 << 3, &["l1tf"]),
    // SSB_NO, MDS_NO, IF_PSCHANGE_MC_NO, TAA_NO.
    (1 << 4, &["spec_store_bypass"]),
    (1 << 5, &["mds"]),
    (1 << 6, &["itlb_multihit"]),
    (1 << 8, &["tsx_async_abort"]),
    // SBDR_SSDP_NO, FBSDP_NO, PSDP_NO.
    (7 << 13, &["mmio_stale_data"]),
    // GDS_NO, RFDS_NO, ITS_NO.
    (1 << 26, &["gather_data_sampling"]),
    (1 << 27, &["reg_file_data_sampling"]),
    (1 << 62, &["indirect_target_selection"]),
];
/// Bits of IA32_ARCH_CAPABILITIES that depend on a part of the kernel's line about `spectre_v2`: BHI_NO, PBRSB_NO.
const PARTS: [(u64, &str); 2] = [
    (1 << 20, "BHI: Not affected"),
    (1 << 24, "PBRSB-eIBRS: Not affected"),
];

/// Leaf 0x80000008 EBX, AMD: SSB_NO and BTC_NO.
const SIZES: [(u32, &str); 2] = [(1 << 26, "spec_store_bypass"), (1 << 29, "retbleed")];
/// Leaf 0x80000021 EAX: LFENCE serialises, as the host's own CPUID shows.
const LFENCE: u32 = 1 << 2;
/// Leaf 0x80000021 EAX: SRSO_NO.
const SRSO_NO: u32 = 1 << 29;
/// Leaf 0x80000021 ECX: TSA_SQ_NO and TSA_L1_NO.
const TSA_NO: u32 = 1 << 1 | 1 << 2;

/// What guests of this host are told about speculation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Speculation {
    /// IA32_ARCH_CAPABILITIES.
    pub(crate) arch_capabilities: u64,
    /// Bits of leaf 0x80000008 EBX.
    pub(crate) sizes_ebx: u32,
    /// Bits of leaf 0x80000021 EAX and ECX.
    pub(crate) more_eax: u32,
    pub(crate) more_ecx: u32,
}

/// The host's own leaves: 0x80000008 EBX, 0x80000021 EAX and ECX. All are 0 on Intel's processors.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Leaves {
    pub(crate) sizes_ebx: u32,
    pub(crate) more_eax: u32,
    pub(crate) more_ecx: u32,
}

impl Leaves {
    /// Reads the host's own leaves.
    fn of_host() -> Self {
        if !host_leaves::is_amd() {
            return Self::default();
        }
        let more = host_leaves::host(0x8000_0021, 0);
        Self {
            sizes_ebx: host_leaves::host(0x8000_0008, 0).ebx,
            more_eax: more.eax,
            more_ecx: more.ecx,
        }
    }
}

impl Speculation {
    /// Returns what holds for a processor that shows `leaves` and a kernel whose line about each vulnerability is
    /// `line`'s result.
    fn of(leaves: Leaves, line: impl Fn(&str) -> Option<String>) -> Self {
        let is_immune = |name: &&str| line(name).as_deref() == Some("Not affected");
        let mut arch_capabilities = 0;
        for (bits, names) in CAPABILITIES {
            if names.iter().all(is_immune) {
                arch_capabilities |= bits;
            }
        }
        let branches = line("spectre_v2").unwrap_or_default();
        for (bit, part) in PARTS {
            if branches == "Not affected" || branches.contains(part) {
                arch_capabilities |= bit;
            }
        }
        let when = |bits: u32, name: &str| if is_immune(&name) { bits } else { 0 };
        let mut sizes_ebx = 0;
        for (bit, name) in SIZES {
            sizes_ebx |= leaves.sizes_ebx & bit | when(bit, name);
        }
        let srso = leaves.more_eax & SRSO_NO | when(SRSO_NO, "spec_rstack_overflow");
        Self {
            arch_capabilities,
            sizes_ebx,
            more_eax: leaves.more_eax & LFENCE | srso,
            more_ecx: leaves.more_ecx & TSA_NO | when(TSA_NO, "tsa"),
        }
    }

    /// Returns what holds on this host. The first call reads files.
    pub(crate) fn here() -> Self {
        static HERE: OnceLock<Speculation> = OnceLock::new();
        *HERE.get_or_init(|| Self::of(Leaves::of_host(), host::vulnerability))
    }
}

/// Reads the host kernel's files once, while the process may still open files.
pub fn note_host() {
    Speculation::here();
}

#[cfg(test)]
mod tests {
    use super::*;

    const NONE: Leaves = Leaves {
        sizes_ebx: 0,
        more_eax: 0,
        more_ecx: 0,
    };

    #[test]
    fn nothing_is_claimed_where_the_host_says_nothing() {
        let told = Speculation::of(NONE, |_| None);
        assert_eq!(told, Speculation::default());
    }

    #[test]
    fn each_weakness_takes_its_own_bits_away() {
        let all = |_: &str| Some("Not affected".to_owned());
        let whole = Speculation::of(NONE, all);
        // All bits but IBRS_ALL.
        assert_eq!(whole.arch_capabilities, 0x4000_0000_0d10_e179);
        assert_eq!(
            (whole.sizes_ebx, whole.more_eax, whole.more_ecx),
            (1 << 26 | 1 << 29, 1 << 29, 6)
        );
        for (name, line, capabilities, [sizes, eax, ecx]) in [
            ("meltdown", "Mitigation: PTI", 1, [0; 3]),
            ("l1tf", "Mitigation: PTE Inversion", 9, [0; 3]),
            ("mds", "Vulnerable", 1 << 5, [0; 3]),
            (
                "spec_store_bypass",
                "Mitigation: Speculative Store Bypass disabled via prctl",
                1 << 4,
                [1 << 26, 0, 0],
            ),
            (
                "itlb_multihit",
                "KVM: Mitigation: VMX disabled",
                1 << 6,
                [0; 3],
            ),
            (
                "tsx_async_abort",
                "Mitigation: TSX disabled",
                1 << 8,
                [0; 3],
            ),
            (
                "mmio_stale_data",
                "Unknown: No mitigations",
                7 << 13,
                [0; 3],
            ),
            (
                "spectre_v2",
                "Mitigation: Retpolines; PBRSB-eIBRS: Not affected; BHI: Retpoline",
                1 << 20,
                [0; 3],
            ),
            (
                "spectre_v2",
                "Mitigation: Enhanced IBRS; BHI: Not affected",
                1 << 24,
                [0; 3],
            ),
            (
                "gather_data_sampling",
                "Mitigation: Microcode",
                1 << 26,
                [0; 3],
            ),
            (
                "reg_file_data_sampling",
                "Vulnerable: No microcode",
                1 << 27,
                [0; 3],
            ),
            (
                "indirect_target_selection",
                "Mitigation: Aligned branch/return thunks",
                1 << 62,
                [0; 3],
            ),
            (
                "retbleed",
                "Mitigation: untrained return thunk",
                0,
                [1 << 29, 0, 0],
            ),
            (
                "spec_rstack_overflow",
                "Vulnerable: Safe RET, no microcode",
                0,
                [0, 1 << 29, 0],
            ),
            ("tsa", "Mitigation: Clear CPU buffers", 0, [0, 0, 6]),
        ] {
            let told = Speculation::of(NONE, |n| {
                if n == name {
                    Some(line.to_owned())
                } else {
                    all(n)
                }
            });
            assert_eq!(
                whole.arch_capabilities & !told.arch_capabilities,
                capabilities,
                "{name}"
            );
            let missing = [
                whole.sizes_ebx & !told.sizes_ebx,
                whole.more_eax & !told.more_eax,
                whole.more_ecx & !told.more_ecx,
            ];
            assert_eq!(missing, [sizes, eax, ecx], "{name}");
        }
    }

    #[test]
    fn what_the_processor_shows_needs_no_kernel() {
        let told = Speculation::of(
            Leaves {
                sizes_ebx: u32::MAX,
                more_eax: u32::MAX,
                more_ecx: u32::MAX,
            },
            |_| Some("Vulnerable".to_owned()),
        );
        // No other bit of these leaves is set: neither IBRS, IBPB and STIBP nor automatic IBRS.
        assert_eq!(
            (told.sizes_ebx, told.more_eax, told.more_ecx),
            (1 << 26 | 1 << 29, 1 << 2 | 1 << 29, 6)
        );
    }
}
