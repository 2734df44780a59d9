//! `anykvm doctor`: reports what this machine allows, what will be slow and why, and how a program would be run.

use std::{ffi::OsStr, fmt::Write, fs, path::Path};

use anykvm_ioctls::{Kvm, VcpuExit};
use anykvm_preload::cpuid::{self, Vendor};
use kvm_bindings::kvm_regs;
use rustix::process::{Resource, getrlimit};

use crate::{cli::DoctorArgs, error::BootError, exec, limits, stdio::print};

/// How good a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Finding {
    Good,
    /// anykvm works, but not as fast, or not with everything.
    Poor,
    /// anykvm does not work.
    Bad,
}
use Finding::{Bad, Good, Poor};

/// A line of the report: how good, about what, and why.
#[derive(Debug)]
struct Line(Finding, &'static str, String);

/// Prints the report. The status is 1 if anykvm does not work here or a program cannot be run.
pub(crate) fn examine(args: &DoctorArgs) -> Result<(u8, Option<String>), BootError> {
    let mut lines = machine();
    lines.extend(args.programs.iter().map(|name| program(name)));
    let is_bad = lines.iter().any(|line| line.0 == Bad);
    let text = if args.json {
        json(&lines)
    } else {
        report(&lines)
    };
    print(&text).map_err(BootError::host("cannot write standard output"))?;
    Ok((is_bad.into(), None))
}

fn report(lines: &[Line]) -> String {
    let mut text = String::new();
    for Line(finding, about, why) in lines {
        let mark = match finding {
            Good => "ok  ",
            Poor => "slow",
            Bad => "FAIL",
        };
        // A write to a String does not fail.
        let _ = writeln!(text, "{mark}  {about:12} {why}");
    }
    text
}

/// Returns the report as JSON, for programs: an array of objects.
fn json(lines: &[Line]) -> String {
    let objects: Vec<String> = lines
        .iter()
        .map(|Line(finding, about, why)| {
            let finding = match finding {
                Good => "ok",
                Poor => "slow",
                Bad => "fail",
            };
            format!(
                "  {{\"finding\": \"{finding}\", \"about\": {}, \"text\": {}}}",
                quote(about),
                quote(why)
            )
        })
        .collect();
    format!("[\n{}\n]\n", objects.join(",\n"))
}

/// Returns a JSON string (RFC 8259).
fn quote(text: &str) -> String {
    let mut quoted = String::from('"');
    for c in text.chars() {
        match c {
            '"' | '\\' => quoted.extend(['\\', c]),
            c if u32::from(c) < 0x20 => quoted.push_str(&format!("\\u{:04x}", u32::from(c))),
            c => quoted.push(c),
        }
    }
    quoted.push('"');
    quoted
}

fn machine() -> Vec<Line> {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    vec![
        trial(),
        processor(&read("/proc/cpuinfo")),
        cores(limits::group_processors()),
        clock(&read(
            "/sys/devices/system/clocksource/clocksource0/current_clocksource",
        )),
        code(),
        mappings(&read("/proc/sys/vm/max_map_count")),
        memory(&read("/proc/meminfo"), limits::group_memory()),
        resources(&[
            (
                "address space",
                "-v",
                getrlimit(Resource::As).current,
                2 << 30,
            ),
            ("data", "-d", getrlimit(Resource::Data).current, 2 << 30),
            (
                "file size",
                "-f",
                getrlimit(Resource::Fsize).current,
                4 << 20,
            ),
            ("open files", "-n", getrlimit(Resource::Nofile).current, 256),
            ("processes", "-u", getrlimit(Resource::Nproc).current, 64),
        ]),
        huge_pages(&read("/sys/kernel/mm/transparent_hugepage/enabled")),
        device(),
        extension(cpuid::lacking()),
    ]
}

/// Runs a guest that halts, which needs everything of this machine that a VM needs.
fn trial() -> Line {
    const ABOUT: &str = "trial";
    match run_guest() {
        Ok(()) => Line(Good, ABOUT, "a guest was created and executed".to_owned()),
        Err(error) => Line(Bad, ABOUT, format!("a guest could not be run: {error}")),
    }
}

fn run_guest() -> Result<(), String> {
    use vm_memory::{Bytes, GuestAddress};
    let failed = |e: anykvm_ioctls::Error| e.to_string();
    // The memory stays mapped until the process ends.
    let memory = Box::leak(Box::new(
        crate::memory::allocate(1 << 20).map_err(|e| e.to_string())?,
    ));
    // mov al, 42; out 0x10, al
    memory
        .write_slice(&[0xb0, 42, 0xe6, 0x10], GuestAddress(0x1000))
        .map_err(|e| e.to_string())?;
    let vm = Kvm::new().and_then(|kvm| kvm.create_vm()).map_err(failed)?;
    vm.set_static_memory(memory).map_err(failed)?;
    let mut vcpu = vm.create_vcpu(0).map_err(failed)?;
    let mut sregs = vcpu.get_sregs().map_err(failed)?;
    sregs.cs.base = 0;
    sregs.cs.selector = 0;
    vcpu.set_sregs(&sregs).map_err(failed)?;
    let regs = kvm_regs {
        rip: 0x1000,
        rflags: 2,
        ..Default::default()
    };
    vcpu.set_regs(&regs).map_err(failed)?;
    match vcpu.run().map_err(failed)? {
        VcpuExit::IoOut(0x10, [42]) => Ok(()),
        other => Err(format!("it ended with {other:?}")),
    }
}

fn processor(cpuinfo: &str) -> Line {
    let field = |name: &str| {
        cpuinfo
            .lines()
            .find(|line| line.starts_with(name))
            .and_then(|line| line.split_once(':'))
            .map_or("", |(_, value)| value.trim())
    };
    let flags: Vec<&str> = field("flags").split(' ').collect();
    let wanted = [
        ("bmi2", "memory accesses keep flags in more instructions"),
        (
            "fsgsbase",
            "each entry into translated code is a system call",
        ),
        ("xsave", "statically linked VMMs cannot be launched"),
        ("avx2", "guests have no AVX2"),
        (
            "constant_tsc",
            "the guest's clock follows the processor's frequency",
        ),
        (
            "nonstop_tsc",
            "the guest's clock stops when the processor sleeps",
        ),
    ];
    let missing: Vec<String> = wanted
        .iter()
        .filter(|(flag, _)| !flags.contains(flag))
        .map(|(flag, effect)| format!("no {flag}: {effect}"))
        .collect();
    let model = field("model name");
    if missing.is_empty() {
        Line(Good, "processor", model.to_owned())
    } else {
        Line(
            Poor,
            "processor",
            format!("{model}; {}", missing.join("; ")),
        )
    }
}

fn cores(quota: Option<f64>) -> Line {
    let count = std::thread::available_parallelism().map_or(1, |n| n.get());
    let quota = quota.unwrap_or(count as f64);
    if quota < count as f64 {
        Line(
            Poor,
            "cores",
            format!(
                "{count}, of which this control group may use {quota:.1}: vCPUs stall when that is spent"
            ),
        )
    } else if count == 1 {
        Line(
            Poor,
            "cores",
            "1: vCPUs, devices and the VMM take turns".to_owned(),
        )
    } else {
        Line(Good, "cores", format!("{count}"))
    }
}

fn clock(source: &str) -> Line {
    match source.trim() {
        "tsc" | "kvm-clock" | "hyperv_clocksource_tsc_page" => {
            Line(Good, "clock", source.trim().to_owned())
        }
        "" => Line(Good, "clock", "not told (no /sys)".to_owned()),
        other => Line(
            Poor,
            "clock",
            format!("{other}: each look at it is a system call"),
        ),
    }
}

fn code() -> Line {
    match host::memfd::map_code(host::PAGE_SIZE) {
        Ok(_) => Line(Good, "code", "may be made and executed".to_owned()),
        Err(error) => Line(
            Poor,
            "code",
            format!("memory for code cannot be had ({error}): guests are interpreted"),
        ),
    }
}

fn mappings(max: &str) -> Line {
    const USUAL: u64 = 65530;
    match max.trim().parse::<u64>() {
        Ok(max) if max < USUAL => Line(
            Poor,
            "mappings",
            format!("vm.max_map_count is {max}: fewer memslots and vCPUs"),
        ),
        Ok(max) => Line(Good, "mappings", format!("{max}")),
        Err(_) => Line(Good, "mappings", "not told (no /proc)".to_owned()),
    }
}

/// Reports the limits of this process (`ulimit`), each with what one or two guests need.
fn resources(limits: &[(&str, &str, Option<u64>, u64)]) -> Line {
    let low: Vec<String> = limits
        .iter()
        .filter_map(|(name, option, limit, enough)| {
            let limit = limit.filter(|limit| limit < enough)?;
            Some(format!("{name} (ulimit {option}): {limit}"))
        })
        .collect();
    if low.is_empty() {
        Line(Good, "limits", "enough for guests".to_owned())
    } else {
        let text = format!("{}: small guests only, or none", low.join(", "));
        Line(Poor, "limits", text)
    }
}

fn memory(meminfo: &str, limit: Option<u64>) -> Line {
    let kib = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))
        .and_then(|rest| rest.split_whitespace().next())
        .and_then(|number| number.parse::<u64>().ok());
    let limit = limit.map(|bytes| bytes >> 10);
    let Some(kib) = kib.into_iter().chain(limit).min() else {
        return Line(Good, "memory", "not told (no /proc)".to_owned());
    };
    let mib = kib >> 10;
    if mib < 1024 {
        Line(Poor, "memory", format!("{mib} MiB: small guests only"))
    } else {
        Line(Good, "memory", format!("{mib} MiB available"))
    }
}

fn huge_pages(enabled: &str) -> Line {
    if enabled.contains("[never]") {
        Line(
            Poor,
            "huge pages",
            "off: guests with much memory run slower".to_owned(),
        )
    } else {
        Line(Good, "huge pages", "given to who asks for them".to_owned())
    }
}

fn device() -> Line {
    let why = if Path::new("/dev/kvm").exists() {
        "/dev/kvm is here too; anykvm does not open it"
    } else {
        "no /dev/kvm, which anykvm does not need"
    };
    Line(Good, "hardware", why.to_owned())
}

/// Reports what programs find that execute CPUID themselves.
fn extension(lacking: Option<Vendor>) -> Line {
    let why = match lacking {
        None => "the processor shows its virtualization to programs that ask it".to_owned(),
        Some(vendor) => format!(
            "the processor shows neither VMX nor SVM; programs that ask it and name /dev/kvm are told of {}",
            match vendor {
                Vendor::Intel => "VMX",
                Vendor::Amd => "SVM",
            }
        ),
    };
    Line(Good, "extension", why)
}

/// Says how many of a program's CPUID instructions are answered, where that matters.
fn asking(file: &Path) -> Option<String> {
    let asking = cpuid::lacking().and_then(|_| cpuid::examine(file))?;
    Some(format!(
        "; {} of its {} CPUID instructions tell of VMX or SVM",
        asking.answered, asking.found
    ))
}

/// Returns the state components that the processor's XCR0 has and a guest's cannot have.
fn host_state() -> u64 {
    /// x87, SSE, AVX and protection keys.
    const GUESTS: u64 = 0x207;
    cpuid::xcr0() & !GUESTS
}

/// Says what happens to a program that takes XCR0 from the processor, if that has more state than guests have.
fn extended_state(file: &Path, lacking: u64) -> Option<String> {
    (lacking != 0 && cpuid::reads_state(file)).then(|| {
        format!(
            "; it reads XCR0 from the processor, which has {}bits {lacking:#x} that guests have not: if it gives \
             them to a guest, as TinyKVM and runsc do, KVM_SET_XCRS says EINVAL",
            if lacking & 0xe0 != 0 { "AVX-512, " } else { "" }
        )
    })
}

/// Says how `anykvm exec` would run a program.
fn program(name: &OsStr) -> Line {
    let verdict = exec::find(name).and_then(|file| exec::check(&file).map(|way| (file, way)));
    match verdict {
        Ok((file, started)) => {
            let way = if started.has_capabilities {
                "launched, without the capabilities of its file, which would keep a preloaded library out"
            } else if started.needs_launcher {
                "launched, as a preloaded library would not reach it"
            } else {
                "by a preloaded library"
            };
            let interpreter = started
                .interpreters
                .last()
                .map_or_else(String::new, |(i, _)| {
                    format!(
                        "; a script, whose interpreter is {}, and what it starts is judged then",
                        i.display()
                    )
                });
            let asking = asking(&file).unwrap_or_default();
            let (finding, state) = match extended_state(&file, host_state()) {
                Some(why) => (Poor, why),
                None => (Good, String::new()),
            };
            let text = format!("{}: {way}{interpreter}{asking}{state}", file.display());
            Line(finding, "program", text)
        }
        Err(why) => Line(Bad, "program", why),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_named() {
        let flags =
            "model name\t: A\nflags\t\t: fpu bmi2 fsgsbase xsave avx2 constant_tsc nonstop_tsc\n";
        assert_eq!(processor(flags).0, Good);
        let Line(finding, _, why) = processor(&flags.replace(" fsgsbase", ""));
        assert_eq!(finding, Poor);
        assert!(why.contains("no fsgsbase: "), "{why}");
        assert_eq!(clock("hpet\n").0, Poor);
        assert_eq!(clock("tsc\n").0, Good);
        assert_eq!(code().0, Good);
        assert_eq!(mappings("1000\n").0, Poor);
        assert_eq!(memory("MemAvailable: 8000000 kB\n", None).0, Good);
        assert_eq!(memory("MemAvailable: 8000000 kB\n", Some(1 << 20)).0, Poor);
        assert_eq!(huge_pages("always madvise [never]\n").0, Poor);
        let limit = |limit| resources(&[("open files", "-n", limit, 256)]).0;
        assert_eq!(
            [limit(None), limit(Some(256)), limit(Some(20))],
            [Good, Good, Poor]
        );
        assert_eq!(quote("a\"\\\n"), "\"a\\\"\\\\\\u000a\"");
        assert_eq!(cores(Some(0.05)).0, Poor);
    }

    #[test]
    fn programs_are_judged() {
        assert_eq!(program(OsStr::new("sh")).0, Good);
        assert_eq!(program(OsStr::new("/nonexistent")).0, Bad);
        assert_eq!(program(OsStr::new("/etc/passwd")).0, Bad);
    }

    #[test]
    fn who_reads_the_processors_state_is_told() {
        // This file names /dev/kvm, and executes XGETBV.
        let own = std::env::current_exe().unwrap();
        let why = extended_state(&own, 0xe0).expect("it is found");
        assert!(why.contains("AVX-512, bits 0xe0"), "{why}");
        assert_eq!(extended_state(&own, 0), None);
        assert_eq!(extended_state(Path::new("/bin/true"), 0xe0), None);
    }

    #[test]
    fn a_guest_runs() {
        run_guest().expect("a guest runs");
    }
}
