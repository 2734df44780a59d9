//! `cargo xtask boots [--all] [NAME…]`: Debian's kernels to a shell, through the command line.
//!
//! Each boot's guest reports its kernel, its number of CPUs and whether its
//! memory is there; status and output are checked. `--all` adds the kernels and
//! sizes that take longer or need more memory than CI has.

mod kept_roots;
mod paravirt;
pub(crate) mod wp_toggle;

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use clap::{Args, builder::PossibleValuesParser};
use testkit::boot::{Boot, Outcome};

/// One of Debian's kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kernel {
    /// The kernel that `anykvm boot` finds or fetches.
    Cloud,
    /// linux-image-amd64.
    Full,
    /// linux-image-686-pae, with a 32-bit busybox.
    I386,
}

/// A boot.
#[derive(Debug)]
struct Case {
    name: &'static str,
    kernel: Kernel,
    engine: &'static str,
    cpus: u32,
    mem: &'static str,
    /// Minimum MemTotal in MiB.
    mem_mib: u64,
    /// What `uname -m` prints.
    machine: &'static str,
    /// Words added to the kernel's command line.
    append: &'static str,
    /// Number of CPUs that the kernel then uses.
    online: u32,
    /// An environment variable and its value.
    variable: Option<(&'static str, &'static str)>,
    /// True if the vCPUs' threads may make almost no system calls.
    confined: bool,
    /// True if the boot is part of CI.
    in_ci: bool,
}

/// Makes a boot with 2 vCPUs and options of the kernel, after which `online` CPUs work.
const fn options(name: &'static str, append: &'static str, online: u32) -> Case {
    Case {
        append,
        online,
        in_ci: false,
        ..cloud(name, "jit", 2)
    }
}

const fn cloud(name: &'static str, engine: &'static str, cpus: u32) -> Case {
    Case {
        name,
        kernel: Kernel::Cloud,
        engine,
        cpus,
        mem: "256M",
        mem_mib: 200,
        machine: "x86_64",
        append: "",
        online: cpus,
        variable: None,
        confined: false,
        in_ci: true,
    }
}

/// Makes a boot with little room for translated code, or with code that is dropped at random.
const fn code(name: &'static str, variable: &'static str, value: &'static str) -> Case {
    Case {
        variable: Some((variable, value)),
        in_ci: false,
        ..cloud(name, "jit", 2)
    }
}

/// The variable for a small code buffer: code that does not fit is translated again.
pub(crate) const SMALL_CACHE: (&str, &str) = ("ANYKVM_CODE_CACHE", "2M");
/// The variable that drops code at any moment.
pub(crate) const RANDOM_FLUSHES: (&str, &str) = ("ANYKVM_CODE_FLUSH", "2000");

const CASES: &[Case] = &[
    cloud("1-vcpu", "jit", 1),
    cloud("2-vcpus", "jit", 2),
    cloud("8-vcpus", "jit", 8),
    cloud("interpreter", "interp", 2),
    Case {
        confined: true,
        ..cloud("confined", "jit", 2)
    },
    Case {
        confined: true,
        in_ci: false,
        ..cloud("confined-interpreter", "interp", 2)
    },
    Case {
        mem: "6G",
        mem_mib: 5800,
        in_ci: false,
        ..cloud("6-gib", "jit", 2)
    },
    Case {
        kernel: Kernel::Full,
        mem: "512M",
        mem_mib: 440,
        in_ci: false,
        ..cloud("full-kernel", "jit", 2)
    },
    Case {
        kernel: Kernel::I386,
        mem: "512M",
        mem_mib: 440,
        machine: "i686",
        in_ci: false,
        ..cloud("i386-kernel", "jit", 2)
    },
    Case {
        in_ci: false,
        ..cloud("interpreter-4-vcpus", "interp", 4)
    },
    code("small-code-cache", SMALL_CACHE.0, SMALL_CACHE.1),
    code("random-flushes", RANDOM_FLUSHES.0, RANDOM_FLUSHES.1),
    options("nosmp", "nosmp", 1),
    options("no-apic", "noapic nolapic", 1),
    options("no-pcid", "nopcid", 2),
    options("tsc-clock", "clocksource=tsc", 2),
    // Debian's cloud kernel reads no MP table.
    options("no-acpi", "acpi=off", 1),
    options("mitigations", "mitigations=auto", 2),
];

/// Prints the machine, its CPUs and its memory in KiB. All CPUs have to work.
const COMMAND: &str = "
    uname -m; nproc; sed -n 's/^MemTotal: *\\([0-9]*\\) kB/\\1/p' /proc/meminfo
    n=0; while [ $n -lt $(nproc) ]; do taskset -c $n sh -c 'i=0; while [ $i -lt 300 ]; do i=$((i + 1)); done; echo $i'; n=$((n + 1)); done
    exit 7";
/// Time limit of a boot, with 8 vCPUs on a busy host.
const LIMIT: Duration = Duration::from_secs(400);

/// Options of `boots`.
#[derive(Debug, Default, Args)]
pub(crate) struct Options {
    /// All, not CI's alone.
    #[arg(long)]
    all: bool,
    /// These alone.
    #[arg(value_parser = PossibleValuesParser::new(known()))]
    names: Vec<String>,
}

fn known() -> impl Iterator<Item = &'static str> {
    let cases = CASES.iter().map(|c| c.name);
    cases
        .chain(DISKS.map(|d| d.0))
        .chain([PARAVIRT, KEPT_ROOTS, WP_TOGGLE])
}

/// Runs CI's boots, all boots, or those that are named.
pub(crate) fn run(options: &Options) -> Result<(), String> {
    let (all, names) = (options.all, &options.names);
    let anykvm = crate::build::anykvm()?;
    let mut failed = Vec::new();
    for case in CASES {
        let wanted = if names.is_empty() {
            case.in_ci || all
        } else {
            names.iter().any(|n| *n == case.name)
        };
        if !wanted {
            continue;
        }
        let mut boot = Boot::new(&anykvm)
            .cpus(case.cpus)
            .mem(case.mem)
            .engine(case.engine)
            .limit(LIMIT);
        if !case.append.is_empty() {
            boot = boot.option("--append", case.append);
        }
        if case.confined {
            boot = boot.flag("--confine");
        }
        if let Some((name, value)) = case.variable {
            boot = boot.variable(name, value);
        }
        if let Some(path) = kernel(case.kernel)? {
            boot = boot.kernel(&path);
        }
        if case.kernel == Kernel::I386 {
            let busybox = crate::debian::busybox_i386()?;
            boot = boot.option("--busybox", busybox);
        }
        let outcome = boot.run(&["sh", "-c", COMMAND]);
        let outcome = outcome.map_err(|e| format!("{}: {e}", anykvm.display()))?;
        let seconds = outcome.time.as_secs_f64();
        match check(case, &outcome) {
            Ok(()) => eprintln!("{:20} ok    {seconds:6.1} s", case.name),
            Err(why) => {
                let words = outcome.last_words(15);
                eprintln!("{:20} FAILED {seconds:5.1} s: {why}\n{words}", case.name);
                failed.push(case.name);
            }
        }
    }
    let is_named = |name| names.is_empty() || names.iter().any(|n| *n == name);
    let disks = DISKS.map(|(name, console)| (name, Some(console)));
    let others = [PARAVIRT, KEPT_ROOTS, WP_TOGGLE].map(|name| (name, None));
    for (name, console) in disks.into_iter().chain(others) {
        if !is_named(name) {
            continue;
        }
        let result = match console {
            Some(console) => self::disks(&anykvm, console).map(Some),
            None if name == KEPT_ROOTS => kept_roots::run(&anykvm),
            None if name == WP_TOGGLE => wp_toggle::run(&anykvm).map(Some),
            None => paravirt::run(&anykvm).map(Some),
        };
        match result {
            Ok(Some(time)) => eprintln!("{name:20} ok    {:6.1} s", time.as_secs_f64()),
            Ok(None) => eprintln!("{name:20} not run: its module is for Linux before 6.3"),
            Err(why) => {
                eprintln!("{name:20} FAILED: {why}");
                failed.push(name);
            }
        }
    }
    if failed.is_empty() {
        Ok(())
    } else {
        Err(format!("boots failed: {}", failed.join(" ")))
    }
}

/// The boot that uses KVM's paravirtual features.
const PARAVIRT: &str = "paravirt";
/// The boot with a module that makes CR3 loads keep address spaces.
const KEPT_ROOTS: &str = "kept-roots";
/// The boot with a module that toggles CR0.WP at each switch of tasks.
const WP_TOGGLE: &str = "wp-toggle";
/// Boots with two disks, with these consoles.
const DISKS: [(&str, &str); 2] = [("disks", "ttyS0"), ("virtio-console", "hvc0")];
/// Size of a disk in bytes: more than the guest's cache keeps while it is copied.
const DISK: usize = 24 << 20;

/// Boots a guest that reads one disk, which it must not write, and copies it to the other.
fn disks(anykvm: &Path, console: &str) -> Result<Duration, String> {
    const COPY: &str = "
        set -e; test $(cat /sys/block/vda/ro /sys/block/vdb/ro | tr -d '\\n') = 10
        dd if=/dev/vda of=/dev/vdb bs=64k 2>&1 | grep -c records; sync
        sha256sum </dev/vda; sha256sum </dev/vdb; exit 7";
    let folder = crate::tidy::root().join("target").join("disks");
    let failed = |e: std::io::Error| format!("{}: {e}", folder.display());
    std::fs::create_dir_all(&folder).map_err(failed)?;
    let (from, to) = (folder.join("from"), folder.join("to"));
    let mut x = 1_u64;
    let content: Vec<u8> = std::iter::repeat_with(|| {
        x = x.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        (x >> 56) as u8
    })
    .take(DISK)
    .collect();
    std::fs::write(&from, &content).map_err(failed)?;
    std::fs::write(&to, vec![0; DISK]).map_err(failed)?;
    let outcome = Boot::new(anykvm)
        .cpus(2)
        .limit(LIMIT)
        .option("--console", console)
        .option("--disk", format!("{},ro", from.display()))
        .option("--disk", &to)
        .run(&["sh", "-c", COPY])
        .map_err(failed)?;
    if outcome.timed_out || outcome.status != Some(7) {
        return Err(format!(
            "status {:?}, output {:?}",
            outcome.status,
            outcome.text()
        ));
    }
    let text = outcome.text();
    let sums: Vec<&str> = text.lines().skip(1).collect();
    if sums.len() != 2 || sums[0] != sums[1] {
        return Err(format!("digests: {text:?}"));
    }
    if std::fs::read(&to).map_err(failed)? != content {
        return Err("the copy is not what was copied".into());
    }
    std::fs::remove_dir_all(&folder).map_err(failed)?;
    Ok(outcome.time)
}

/// Returns the kernel's file. `None` for the kernel that anykvm finds itself.
fn kernel(which: Kernel) -> Result<Option<PathBuf>, String> {
    match which {
        Kernel::Cloud => Ok(None),
        Kernel::Full => crate::debian::kernel("linux-image-amd64", "kernel-amd64").map(Some),
        Kernel::I386 => {
            crate::debian::kernel("linux-image-686-pae:i386", "kernel-686-pae").map(Some)
        }
    }
}

fn check(case: &Case, outcome: &Outcome) -> Result<(), String> {
    if outcome.timed_out {
        return Err("did not end in time".into());
    }
    let text = outcome.text();
    if outcome.status != Some(7) {
        return Err(format!("status {:?}, output {text:?}", outcome.status));
    }
    let lines: Vec<&str> = text.lines().collect();
    let mut want = vec![case.machine.to_owned(), case.online.to_string()];
    let memory = lines.get(2).and_then(|l| l.parse::<u64>().ok());
    if memory.is_none_or(|kib| kib >> 10 < case.mem_mib) {
        return Err(format!("memory: output {text:?}"));
    }
    want.extend(lines.get(2).map(|&l| l.to_owned()));
    want.extend((0..case.online).map(|_| "300".to_owned()));
    if lines != want {
        return Err(format!("output {text:?}, expected {want:?}"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_complete_output_and_the_command_s_status_pass() {
        let case = cloud("x", "jit", 2);
        let outcome = |status, text: &str| Outcome {
            status,
            stdout: text.into(),
            stderr: Vec::new(),
            time: Duration::ZERO,
            timed_out: false,
        };
        let good = "x86_64\n2\n230000\n300\n300\n";
        let rows = [
            (Some(7), good, true),
            (Some(0), good, false),
            (None, good, false),
            (Some(7), "", false),
            (Some(7), "x86_64\n1\n230000\n300\n", false),
            (Some(7), "x86_64\n2\n23000\n300\n300\n", false),
            (Some(7), "x86_64\n2\n230000\n300\n", false),
            (Some(7), "i686\n2\n230000\n300\n300\n", false),
        ];
        for (status, text, passes) in rows {
            let result = check(&case, &outcome(status, text));
            assert_eq!(result.is_ok(), passes, "{status:?} {text:?}: {result:?}");
        }
    }

    #[test]
    fn names_are_unique() {
        for (i, case) in CASES.iter().enumerate() {
            assert!(CASES.iter().skip(i + 1).all(|c| c.name != case.name));
        }
    }
}
