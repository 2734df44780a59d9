//! The results of entries that do not simply pass, and why.

/// The expected result of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Expect {
    Passes,
    /// The entry skips itself, as on hardware without what the reason names.
    Skips(&'static str),
    Fails(&'static str),
}
use Expect::{Fails, Passes, Skips};

const NESTED: &str = "no nested virtualization";
const LBR: &str = "no last-branch records";
const PEBS: &str = "no PEBS";

/// Exceptions by name. A name that ends with `*` stands for all names with this begin.
const EXCEPTIONS: &[(&str, Expect)] = &[
    (
        "asyncpf",
        Skips("no page of the guest's is ever waited for"),
    ),
    ("cet", Skips("no shadow stacks")),
    ("ept*", Skips(NESTED)),
    ("pmu_lbr", Skips(LBR)),
    ("pmu_pebs", Skips(PEBS)),
    ("svm*", Skips(NESTED)),
    ("tsx-ctrl", Skips("no TSX")),
    (
        "vmware_backdoors",
        Fails(
            "off, as in KVM unless its module is told enable_vmware_backdoor=Y, without which the suite leaves it out",
        ),
    ),
    ("vmx*", Skips(NESTED)),
];

/// The reason in a suite of 64 bits.
const EMULATOR: &str = "AMD's processors take a far jump by a pointer in memory as 32 bits also with REX.W, and \
    so do KVM's guests but where the pointer is in a device's memory, as here; up to there, and with \
    vendor=GenuineIntel, all passes";

/// Features of the host that results depend on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Host {
    pub(super) is_amd: bool,
}

impl Host {
    /// Finds the features in the text of /proc/cpuinfo.
    pub(super) fn of(cpuinfo: &str) -> Self {
        let has = |word: &str| cpuinfo.split_whitespace().any(|w| w == word);
        Self {
            is_amd: has("AuthenticAMD") || has("HygonGenuine"),
        }
    }
}

/// Returns the expected result of the entry, in a suite of 32 or 64 bits.
pub(super) fn expectation(name: &str, bits: u32, host: Host) -> Expect {
    match name {
        "emulator" if bits == 64 && host.is_amd => return Fails(EMULATOR),
        _ => {}
    }
    let matches = |pattern: &str| match pattern.strip_suffix('*') {
        Some(start) => name.starts_with(start),
        None => name == pattern,
    };
    let found = EXCEPTIONS.iter().find(|(pattern, _)| matches(pattern));
    found.map_or(Passes, |(_, expect)| *expect)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exceptions_are_by_name_or_by_its_beginning() {
        for (name, bits, is_amd, expected) in [
            ("vmexit_cpuid", 64, true, Passes),
            ("vmx_apicv_test", 64, true, Skips(NESTED)),
            ("hyperv_clock", 64, true, Passes),
            ("pmu", 64, true, Passes),
            ("pmu_lbr", 64, false, Skips(LBR)),
            ("emulator", 64, true, Fails(EMULATOR)),
            ("emulator", 64, false, Passes),
            ("emulator", 32, true, Passes),
            ("pku", 64, false, Passes),
            ("pks", 64, true, Passes),
        ] {
            let row = (name, bits, is_amd);
            let host = Host { is_amd };
            assert_eq!(expectation(name, bits, host), expected, "{row:?}");
        }
    }

    #[test]
    fn the_host_is_known_by_its_cpuinfo() {
        assert!(Host::of("vendor_id : AuthenticAMD\nflags : fpu\n").is_amd);
        assert!(!Host::of("vendor_id : GenuineIntel\nflags : fpu\n").is_amd);
    }
}
