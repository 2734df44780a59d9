//! `cargo xtask selftests [--all] [NAME…]`: the kernel's KVM selftests from Debian's `linux-source-6.1`, through
//! `anykvm exec`.
//!
//! The list below says how each test has to end; any other end is a failure, and so is a test that the package has and
//! the list does not. `--all` adds tests that take long.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use crate::tool::tool;
use clap::{Args, builder::PossibleValuesParser};

/// How a test has to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Expect {
    /// It passes.
    Pass,
    /// The test passes but takes long, so it needs `--all`.
    Slow,
    /// The test skips itself, as on hardware without what the reason names.
    Skip(&'static str),
    /// The test passes, or skips itself where the reason holds.
    PassOrSkip(&'static str),
}
use Expect::{Pass, PassOrSkip, Skip, Slow};

const NESTED: &str = "no nested virtualization";
const INTEL: &str = "for Intel hosts; run on one it needs nested virtualization";
const SEV: &str = "no encrypted memory";
const XEN: &str = "no Xen guests";

const TESTS: &[(&str, Expect)] = &[
    (
        "access_tracking_perf_test",
        Skip("the host tracks no idle pages"),
    ),
    ("demand_paging_test", Pass),
    ("dirty_log_perf_test", Pass),
    ("dirty_log_test", Slow),
    ("hardware_disable_test", Slow),
    ("kvm_binary_stats_test", Pass),
    ("kvm_create_max_vcpus", Pass),
    ("kvm_page_table_test", Pass),
    ("max_guest_memory_test", Slow),
    ("memslot_modification_stress_test", Pass),
    ("memslot_perf_test", Slow),
    ("rseq_test", Slow),
    ("set_memory_region_test", Slow),
    ("steal_time", Pass),
    ("system_counter_offset_test", Pass),
    ("x86_64/amx_test", Skip("the host has no AMX")),
    ("x86_64/cpuid_test", Pass),
    ("x86_64/cr4_cpuid_sync_test", Pass),
    ("x86_64/debug_regs", Pass),
    (
        "x86_64/emulator_error_test",
        Skip("no smaller MAXPHYADDR: nothing fails to be emulated"),
    ),
    ("x86_64/evmcs_test", Skip(NESTED)),
    ("x86_64/fix_hypercall_test", Pass),
    ("x86_64/get_msr_index_features", Pass),
    ("x86_64/hyperv_clock", Pass),
    ("x86_64/hyperv_cpuid", Pass),
    ("x86_64/hyperv_features", Pass),
    ("x86_64/hyperv_svm_test", Skip(NESTED)),
    ("x86_64/kvm_clock_test", Pass),
    ("x86_64/kvm_pv_test", Pass),
    ("x86_64/max_vcpuid_cap_test", Pass),
    ("x86_64/mmio_warning_test", Skip(INTEL)),
    ("x86_64/monitor_mwait_test", Pass),
    ("x86_64/nested_exceptions_test", Skip(NESTED)),
    (
        "x86_64/nx_huge_pages_test",
        Skip("a mitigation for processors that anykvm is not"),
    ),
    ("x86_64/platform_info_test", Pass),
    (
        "x86_64/pmu_event_filter_test",
        PassOrSkip("it knows AMD's processors up to Zen 3"),
    ),
    ("x86_64/set_boot_cpu_id", Pass),
    ("x86_64/set_sregs_test", Pass),
    ("x86_64/sev_migrate_tests", Skip(SEV)),
    ("x86_64/smm_test", Pass),
    ("x86_64/state_test", Pass),
    ("x86_64/svm_int_ctl_test", Skip(NESTED)),
    ("x86_64/svm_nested_shutdown_test", Skip(NESTED)),
    ("x86_64/svm_nested_soft_inject_test", Skip(NESTED)),
    ("x86_64/svm_vmcall_test", Skip(NESTED)),
    ("x86_64/sync_regs_test", Pass),
    ("x86_64/triple_fault_event_test", Skip(NESTED)),
    ("x86_64/tsc_msrs_test", Pass),
    ("x86_64/tsc_scaling_sync", Pass),
    ("x86_64/ucna_injection_test", Skip("no CMCI")),
    ("x86_64/userspace_io_test", Pass),
    ("x86_64/userspace_msr_exit_test", Pass),
    ("x86_64/vmx_apic_access_test", Skip(INTEL)),
    ("x86_64/vmx_close_while_nested_test", Skip(INTEL)),
    ("x86_64/vmx_dirty_log_test", Skip(INTEL)),
    ("x86_64/vmx_exception_with_invalid_guest_state", Skip(INTEL)),
    ("x86_64/vmx_invalid_nested_guest_state", Skip(INTEL)),
    ("x86_64/vmx_msrs_test", Skip(INTEL)),
    ("x86_64/vmx_nested_tsc_scaling_test", Skip(INTEL)),
    ("x86_64/vmx_pmu_caps_test", Skip(INTEL)),
    ("x86_64/vmx_preemption_timer_test", Skip(INTEL)),
    ("x86_64/vmx_set_nested_state_test", Skip(INTEL)),
    ("x86_64/vmx_tsc_adjust_test", Skip(INTEL)),
    ("x86_64/xapic_ipi_test", Slow),
    ("x86_64/xapic_state_test", Pass),
    ("x86_64/xen_shinfo_test", Skip(XEN)),
    ("x86_64/xen_vmcall_test", Skip(XEN)),
    ("x86_64/xss_msr_test", Pass),
];

/// The package with the tests, and the packages that building them needs.
const PACKAGE: &str = "linux-source-6.1";
const NEEDED: &[&str] = &["gcc", "make", "libc6-dev", "linux-libc-dev", "xz-utils"];
const KVM: &str = "tools/testing/selftests/kvm";
/// Time limit of a test, for a busy host.
const LIMIT: Duration = Duration::from_secs(120);
/// Time limit of a slow test. hardware_disable_test makes 512 processes with four vCPUs that compute, each of which
/// takes a second of processor time.
const SLOW_LIMIT: Duration = Duration::from_secs(1500);
/// Tests that may fail for a reason of their own, and how often they are tried.
const REPEATED: &[(&str, u32, &str)] = &[(
    "dirty_log_test",
    3,
    "it looks at pages while the guest writes them, and takes a preempted vCPU for a lost page",
)];
/// Exit status of a test that skips itself (kselftest's KSFT_SKIP).
const SKIPPED: i32 = 4;

/// Options of `selftests`.
#[derive(Debug, Default, Args)]
pub(crate) struct Options {
    /// The slow ones too.
    #[arg(long)]
    all: bool,
    /// These alone.
    #[arg(value_parser = PossibleValuesParser::new(TESTS.iter().map(|(name, _)| *name)))]
    names: Vec<String>,
}

/// Runs the quick tests, all tests, or those that are named.
pub(crate) fn run(options: &Options) -> Result<(), String> {
    let (all, names) = (options.all, &options.names);
    let folder = build()?;
    let anykvm = crate::build::anykvm()?;
    let mut failed = Vec::new();
    for &(name, expect) in TESTS {
        let wanted = if names.is_empty() {
            all || expect != Slow
        } else {
            names.iter().any(|n| *n == name)
        };
        if !wanted {
            continue;
        }
        let start = Instant::now();
        let attempts = REPEATED.iter().find(|(test, ..)| *test == name);
        let attempts = attempts.map_or(1, |(_, attempts, _)| *attempts);
        let result = attempt(&anykvm, &folder.join(name), expect, attempts);
        let seconds = start.elapsed().as_secs_f64();
        match result {
            Ok(what) => eprintln!("{name:40} {what:5} {seconds:6.1} s"),
            Err(why) => {
                eprintln!("{name:40} FAILED {seconds:5.1} s: {why}");
                failed.push(name);
            }
        }
    }
    if failed.is_empty() {
        Ok(())
    } else {
        Err(format!("selftests failed: {}", failed.join(" ")))
    }
}

fn expectation(name: &str) -> Option<Expect> {
    TESTS
        .iter()
        .find(|(test, _)| *test == name)
        .map(|(_, expect)| *expect)
}

/// Runs a test until it ends as expected, a few times at most.
fn attempt(
    anykvm: &Path,
    test: &Path,
    expect: Expect,
    attempts: u32,
) -> Result<&'static str, String> {
    let limit = if expect == Slow { SLOW_LIMIT } else { LIMIT };
    let mut result = Err("not run".to_owned());
    for _ in 0..attempts {
        result = check(expect, &run_one(anykvm, test, limit)?);
        if result.is_ok() {
            break;
        }
    }
    result
}

/// The exit status, if the test has ended in time, and its output.
struct Ended {
    status: Option<i32>,
    output: String,
}

fn run_one(anykvm: &Path, test: &Path, limit: Duration) -> Result<Ended, String> {
    let cannot = |e: std::io::Error| format!("{}: {e}", test.display());
    let log = test.with_extension("log");
    let output = fs::File::create(&log).map_err(cannot)?;
    let errors = output.try_clone().map_err(cannot)?;
    // timeout(1) also ends a test's children, which are in its process group.
    let status = Command::new("timeout")
        .args(["--kill-after=5", &limit.as_secs().to_string()])
        .arg(anykvm)
        .args(["exec", "--quiet", "--"])
        .arg(test)
        .stdin(Stdio::null())
        .stdout(output)
        .stderr(errors)
        .status()
        .map_err(cannot)?;
    // These are the statuses of timeout when the time is over, or when it had to kill.
    let status = status.code().filter(|s| ![124, 137].contains(s));
    let output = fs::read(&log).map_err(cannot)?;
    Ok(Ended {
        status,
        output: String::from_utf8_lossy(&output).into_owned(),
    })
}

fn check(expect: Expect, ended: &Ended) -> Result<&'static str, String> {
    let last = ended
        .output
        .lines()
        .rev()
        .find(|l| !l.trim().is_empty())
        .unwrap_or("no output");
    match (expect, ended.status) {
        (Pass | Slow | PassOrSkip(_), Some(0)) => Ok("pass"),
        (Skip(_) | PassOrSkip(_), Some(SKIPPED)) => Ok("skip"),
        (_, None) => Err(format!("did not end in time; {last}")),
        (_, Some(status)) => Err(format!("status {status}; {last}")),
    }
}

/// Unpacks and builds the tests, if that has not been done. Returns the folder with the programs.
fn build() -> Result<PathBuf, String> {
    let cache = crate::build::cache();
    let place = cache.join("selftests");
    if !place.exists() {
        crate::debian::install(NEEDED)?;
        let package = crate::debian::unpack(PACKAGE, PACKAGE)?;
        let source = unpack(&package, &cache.join("linux-source"))?;
        let partial = cache.join("selftests.partial");
        let _ = fs::remove_dir_all(&partial);
        make(&source.join(KVM), &partial)?;
        fs::rename(&partial, &place).map_err(|e| format!("{}: {e}", place.display()))?;
    }
    let unknown: Vec<String> = programs(&place)?
        .into_iter()
        .filter(|name| expectation(name).is_none())
        .collect();
    if !unknown.is_empty() {
        return Err(format!("not in the list: {}", unknown.join(" ")));
    }
    Ok(place)
}

/// Unpacks the parts of the kernel's source that the tests need.
fn unpack(package: &Path, to: &Path) -> Result<PathBuf, String> {
    let folder = to.join(PACKAGE);
    if folder.join(KVM).exists() {
        return Ok(folder);
    }
    let cannot = |e: std::io::Error| format!("{}: {e}", to.display());
    let _ = fs::remove_dir_all(to);
    fs::create_dir_all(to).map_err(cannot)?;
    let archive = package.join(format!("usr/src/{PACKAGE}.tar.xz"));
    let parts = ["tools", "include", "arch/x86", "scripts"].map(|p| format!("{PACKAGE}/{p}"));
    tool(
        Command::new("tar")
            .arg("-xJf")
            .arg(archive)
            .args(parts)
            .current_dir(to),
    )?;
    Ok(folder)
}

fn make(source: &Path, output: &Path) -> Result<(), String> {
    let mut output_argument = std::ffi::OsString::from("OUTPUT=");
    output_argument.push(output);
    // The package's dirty_log_test uses a macro of later kernels. Their headers' __DECLARE_FLEX_ARRAY is defined too
    // late for steal_time.
    let compiler = "CC=gcc -DTEST_ASSERT_EQ=ASSERT_EQ -include linux/stddef.h";
    tool(
        Command::new("make")
            .args(["-j2", "-s", compiler])
            .arg(output_argument)
            .current_dir(source),
    )
    .map(drop)
}

/// Returns the programs below the folder, by the names that the list uses.
fn programs(folder: &Path) -> Result<Vec<String>, String> {
    use std::os::unix::fs::PermissionsExt;
    let mut names = Vec::new();
    for prefix in ["", "x86_64/"] {
        let folder = folder.join(prefix);
        let cannot = |e: std::io::Error| format!("{}: {e}", folder.display());
        for entry in fs::read_dir(&folder).map_err(cannot)? {
            let entry = entry.map_err(cannot)?;
            let data = entry.metadata().map_err(cannot)?;
            let name = entry.file_name().to_string_lossy().into_owned();
            let is_script = Path::new(&name).extension().is_some();
            if data.is_file() && data.permissions().mode() & 0o111 != 0 && !is_script {
                names.push(format!("{prefix}{name}"));
            }
        }
    }
    names.sort();
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_reasons_are_given() {
        for (i, (name, expect)) in TESTS.iter().enumerate() {
            assert!(TESTS.iter().skip(i + 1).all(|(n, _)| n != name), "{name}");
            assert_ne!(*expect, Skip(""), "{name}");
        }
        for (name, attempts, why) in REPEATED {
            assert!(expectation(name).is_some() && *attempts > 1 && !why.is_empty());
        }
    }

    #[test]
    fn only_what_is_expected_is_no_failure() {
        let ended = |status| Ended {
            status,
            output: "last words\n\n".to_owned(),
        };
        for (expect, status, good) in [
            (Pass, Some(0), true),
            (Slow, Some(0), true),
            (Skip(XEN), Some(4), true),
            (Pass, Some(4), false),
            (Skip(XEN), Some(0), false),
            (PassOrSkip(XEN), Some(0), true),
            (PassOrSkip(XEN), Some(4), true),
            (PassOrSkip(XEN), Some(1), false),
            (Pass, Some(254), false),
            (Skip(XEN), None, false),
            (Pass, None, false),
        ] {
            assert_eq!(check(expect, &ended(status)).is_ok(), good, "{status:?}");
        }
    }
}
