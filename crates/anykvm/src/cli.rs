//! The command line.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::endpoint::Endpoint;
use crate::virtio::DiskOption;

/// KVM anywhere: a hypervisor inside an ordinary unprivileged process.
#[derive(Debug, Parser)]
#[command(name = "anykvm", version = VERSION, about, long_about = None, after_help = EXAMPLES)]
pub(crate) struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Boot a Linux kernel: to a shell, or to run one command and exit with its status.
    Boot(Box<BootArgs>),
    /// Pause, save or move a guest that runs with `boot --control`.
    Migrate(MigrateArgs),
    /// Measure: workloads natively, in a guest, and in a guest of QEMU's TCG, in turn.
    Bench(BenchArgs),
    /// Run a VMM with anykvm in place of /dev/kvm.
    Exec(ExecArgs),
    /// Run a VMM and write each of its KVM calls as a line of JSON.
    Trace(TraceArgs),
    /// Say what this machine allows, what will be slow and why, and how a program would be run.
    Doctor(DoctorArgs),
}

/// `anykvm migrate`.
#[derive(Debug, Args)]
#[command(after_help = MIGRATE_HELP)]
pub(crate) struct MigrateArgs {
    /// The socket of `anykvm boot --control`.
    #[arg(value_name = "CONTROL")]
    pub(crate) control: PathBuf,

    /// Where the guest goes: to `anykvm boot --incoming` with the same place, or into a file.
    #[arg(long, value_name = "PLACE", group = "what")]
    pub(crate) to: Option<Endpoint>,

    /// The guest stands still until --resume.
    #[arg(long, group = "what")]
    pub(crate) pause: bool,

    /// The guest goes on.
    #[arg(long, group = "what")]
    pub(crate) resume: bool,

    /// End the migration that is on its way: the guest stays.
    #[arg(long, group = "what")]
    pub(crate) cancel: bool,

    /// Say whether the guest runs, is paused, or is on its way; so it is without any of the others.
    #[arg(long, group = "what")]
    pub(crate) status: bool,

    /// How long the guest may stand still for the memory that it has written last.
    #[arg(
        long,
        value_name = "MILLISECONDS",
        default_value_t = 30,
        requires = "to"
    )]
    pub(crate) downtime: u64,

    /// Compare all memory at both ends, while the guest stands still.
    #[arg(long, requires = "to")]
    pub(crate) verify: bool,
}

/// `anykvm bench`.
#[derive(Debug, Args)]
#[command(after_help = BENCH_HELP)]
pub(crate) struct BenchArgs {
    /// What to measure.
    #[arg(value_enum, required = true)]
    pub(crate) suites: Vec<BenchSuite>,

    /// Times that the machines take turns.
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) rounds: u32,

    /// Runs of each workload in a turn.
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) repeats: u32,

    /// Only these workloads.
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    pub(crate) only: Vec<String>,

    /// Do not run QEMU.
    #[arg(long)]
    pub(crate) no_tcg: bool,

    /// Compare with this build of anykvm only: both at once on one processor, by the processor's time (exits: in turn).
    #[arg(long, value_name = "PROGRAM")]
    pub(crate) against: Option<PathBuf>,

    /// The QEMU to compare with.
    #[arg(long, value_name = "PROGRAM", default_value = "qemu-system-x86_64")]
    pub(crate) qemu: PathBuf,

    /// Kernel of the guests; Debian's cloud kernel by default.
    #[arg(long, value_name = "FILE")]
    pub(crate) kernel: Option<PathBuf>,

    /// The ways of keeping translations that `ctxsw` compares: values of ANYKVM_MMU.
    #[arg(
        long,
        value_name = "MODE",
        value_delimiter = ',',
        default_value = "auto"
    )]
    pub(crate) mmu: Vec<String>,

    /// vCPUs of `ctxsw`'s guests; more than one number compares them.
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "1", value_parser = clap::value_parser!(u32).range(1..=8))]
    pub(crate) cpus: Vec<u32>,

    /// A module built for --kernel. `ctxsw`: a column more, of guests without PCIDs that load it (guests/linux-kept-roots).
    /// `wp`: switches of tasks at which it toggles CR0.WP (guests/linux-wp-toggle; `cargo xtask bench wp` builds and runs that).
    #[arg(long, value_name = "FILE")]
    pub(crate) module: Option<PathBuf>,

    /// Draw the rows of `doorbell`, `dirtylog`, `ctxsw`, `memory` or `wp` into this file.
    #[arg(long, value_name = "FILE")]
    pub(crate) svg: Option<PathBuf>,
}

/// What `anykvm bench` measures.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum BenchSuite {
    /// User-level computing: loops, programs, FP and SIMD.
    Compute,
    /// Processes, scheduling, system calls, page faults.
    Kernel,
    /// From nothing to the shell.
    Boot,
    /// What two vCPUs do more than one.
    Smp,
    /// Exits to the VMM and back.
    Exits,
    /// Writes that only say "look": to the VMM, to eventfds, to functions.
    Doorbell,
    /// Switches from process to process: with PCIDs, without, with page-table isolation.
    Ctxsw,
    /// Firmware and boot loaders in QEMU, until they say that they are done.
    Firmware,
    /// Random accesses to tables of 16 MiB to 2 GiB, in pages of 4 KiB and 2 MiB.
    Memory,
    /// Changes of CR0.WP and other inputs of the permission check, and visits to SMM.
    Wp,
    /// Accesses to performance counters.
    Vpmu,
    /// Harvests of dirty pages beside vCPUs that write, and what they cost these.
    Dirtylog,
}

/// `anykvm exec`.
#[derive(Debug, Args)]
#[command(after_help = EXEC_HELP)]
pub(crate) struct ExecArgs {
    /// Do not say on standard error that /dev/kvm is anykvm.
    #[arg(long, short)]
    pub(crate) quiet: bool,

    /// Watch the VMM's system calls themselves, as is always done for statically linked ones: for
    /// programs that make them by instructions of their own.
    #[arg(long)]
    pub(crate) launch: bool,

    /// The VMM and its arguments.
    #[arg(last = true, required = true, value_name = "VMM")]
    pub(crate) command: Vec<std::ffi::OsString>,
}

/// `anykvm trace`.
#[derive(Debug, Args)]
#[command(after_help = TRACE_HELP)]
pub(crate) struct TraceArgs {
    /// Where the lines go.
    #[arg(long, short, value_name = "FILE", default_value = "kvm-trace.jsonl")]
    pub(crate) output: PathBuf,

    /// Leave the VMM the machine's own /dev/kvm, and only look on.
    #[arg(long)]
    pub(crate) real: bool,

    /// The VMM and its arguments.
    #[arg(last = true, required = true, value_name = "VMM")]
    pub(crate) command: Vec<std::ffi::OsString>,
}

/// `anykvm doctor`.
#[derive(Debug, Args)]
#[command(after_help = DOCTOR_HELP)]
pub(crate) struct DoctorArgs {
    /// Write the findings as JSON.
    #[arg(long)]
    pub(crate) json: bool,

    /// Programs to look at.
    #[arg(value_name = "PROGRAM")]
    pub(crate) programs: Vec<std::ffi::OsString>,
}

/// `anykvm boot`.
#[derive(Debug, Args)]
#[command(after_help = BOOT_HELP)]
pub(crate) struct BootArgs {
    /// The kernel, as with --kernel.
    #[arg(value_name = "KERNEL", conflicts_with = "kernel")]
    pub(crate) image: Option<PathBuf>,

    /// Kernel: a bzImage or an ELF vmlinux. Without it Debian's cloud kernel is found or fetched.
    #[arg(long, short, value_name = "FILE")]
    pub(crate) kernel: Option<PathBuf>,

    /// Initramfs to use in place of the one that anykvm builds.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["overlay", "command", "no_initrd"])]
    pub(crate) initrd: Option<PathBuf>,

    /// Static busybox for the initramfs in place of the machine's or Debian's: a 32-bit kernel
    /// needs a 32-bit one.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["initrd", "no_initrd"])]
    pub(crate) busybox: Option<PathBuf>,

    /// Boot without any initramfs.
    #[arg(long, conflicts_with_all = ["overlay", "command"])]
    pub(crate) no_initrd: bool,

    /// Words to add to the kernel's command line.
    #[arg(
        long,
        value_name = "WORDS",
        default_value = "",
        allow_hyphen_values = true
    )]
    pub(crate) append: String,

    /// Use only --append as the kernel's command line.
    #[arg(long)]
    pub(crate) no_default_cmdline: bool,

    /// Guest memory: a number with K, M, G (bytes without).
    #[arg(long, short, alias = "memory", value_name = "SIZE", default_value = "512M", value_parser = parse_size)]
    pub(crate) mem: u64,

    /// Number of virtual CPUs.
    #[arg(long, short, alias = "smp", value_name = "N", default_value_t = 1)]
    pub(crate) cpus: u32,

    /// Pack a host file or folder into the initramfs, with the shared libraries that its programs
    /// need. May be repeated.
    #[arg(long, value_name = "PATH[:GUESTPATH]")]
    pub(crate) overlay: Vec<String>,

    /// A raw disk image, a block device or a qcow2 image as a virtio disk: /dev/vda, then /dev/vdb and so on.
    /// `ro`: not to be written; `serial`: its serial number; `format`: whatever it looks like (images of
    /// other formats are refused); `backing`: what a qcow2 image rests on, which is used only where it is
    /// named here, and again for what that rests on. May be repeated.
    #[arg(
        long,
        short,
        value_name = "PATH[,ro][,serial=NAME][,format=raw|qcow2][,backing=PATH]"
    )]
    pub(crate) disk: Vec<DiskOption>,

    /// Run on this file system instead of the initramfs: a folder, which is copied (what the guest
    /// changes is lost), or a disk image with a file system (what it changes stays).
    #[arg(long, value_name = "PATH", conflicts_with_all = ["initrd", "no_initrd"])]
    pub(crate) root: Option<PathBuf>,

    /// Where the shell, or the command's output, is in the guest: the first serial port, or the
    /// faster virtio console.
    /// By itself: the virtio console for a command where the kernel has it, else the serial port.
    #[arg(long, value_enum)]
    pub(crate) console: Option<ConsoleKind>,

    /// What the guest's kernel does against speculative execution: `off` is faster, and takes
    /// nothing away that anykvm promises (docs/threat-model.md); `auto` is the kernel's own choice.
    #[arg(long, value_enum, default_value = "off")]
    pub(crate) mitigations: Mitigations,

    /// Let the vCPUs' threads make no system calls but to sleep, to wake and to end: futex, write of
    /// eight bytes, exit. Any other ends the process (SIGSYS).
    #[arg(long)]
    pub(crate) confine: bool,

    /// Listen for `anykvm migrate` at this socket.
    #[arg(long, value_name = "PATH")]
    pub(crate) control: Option<PathBuf>,

    /// Do not boot: take a guest that `anykvm migrate --to` sends here, or has put into a file. --disk names
    /// its disks, in their order; all else it brings.
    #[arg(long, value_name = "PLACE", conflicts_with_all = ["image", "kernel", "initrd", "busybox", "no_initrd", "append", "no_default_cmdline", "mem", "cpus", "overlay", "root", "console", "mitigations", "command"])]
    pub(crate) incoming: Option<Endpoint>,

    /// Print what the vCPUs have counted at the end; and what a vCPU has so far, each time that it
    /// writes to port 0xee0.
    #[arg(long)]
    pub(crate) stats: bool,

    /// Show the kernel's messages and what anykvm is doing.
    #[arg(long, short)]
    pub(crate) verbose: bool,

    /// The command to run in the guest; its exit status becomes anykvm's.
    #[arg(last = true, value_name = "COMMAND")]
    pub(crate) command: Vec<String>,
}

impl BootArgs {
    /// `init=PROGRAM` of --append, which is for a --root's own init.
    pub(crate) fn own_init(&self) -> Option<&str> {
        self.root.as_ref()?;
        let mut words = self.append.split_whitespace().rev();
        words.find_map(|word| word.strip_prefix("init="))
    }
}

/// `--mitigations`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Mitigations {
    /// None: `mitigations=off`.
    Off,
    /// The kernel's own choice.
    Auto,
}

/// `--console`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ConsoleKind {
    /// COM1.
    #[value(name = "ttyS0")]
    TtyS0,
    /// The virtio console.
    #[value(name = "hvc0")]
    Hvc0,
}

impl ConsoleKind {
    /// The device in the guest.
    pub(crate) fn device(self) -> &'static str {
        match self {
            Self::TtyS0 => "ttyS0",
            Self::Hvc0 => "hvc0",
        }
    }
}

const BENCH_HELP: &str = "\
Examples:
  anykvm bench compute kernel                  medians of three rounds, with bars
  anykvm bench compute --only zstd --no-tcg    one workload, natively and in a guest
  anykvm bench kernel --against ./anykvm-old   two builds, by the processor's time

Ratios are medians over the rounds. Outputs have to agree, and bars are checked.
Exit status: 0, 1 if a bar is missed, 2 if something went wrong or outputs differ.";

/// The version, with the commit that it was built from where that is known (`build.rs`).
pub(crate) const VERSION: &str = env!("ANYKVM_VERSION");

const MIGRATE_HELP: &str = "\
Examples:
  anykvm boot --control vm.sock                           a guest that can be moved
  anykvm migrate vm.sock --to file:saved                  into a file; its process ends
  anykvm boot --incoming file:saved                       and out of it
  anykvm boot --incoming unix:/tmp/to --control new.sock  waits for a guest
  anykvm migrate vm.sock --to unix:/tmp/to                which goes there while it runs

PLACE is unix:PATH, tcp:HOST:PORT (which is not encrypted) or file:PATH. Both processes use the same disks.
A guest that could not be moved goes on where it is.
Exit status: 0, 1 if the guest could not do it, 2 if something went wrong.";

const EXAMPLES: &str = "\
Examples:
  anykvm boot                                          a Linux guest with a shell; Ctrl-A X ends it
  anykvm boot -- uname -a                              one command in a guest
  anykvm exec -- qemu-system-x86_64 -accel kvm -m 1G   a VMM that finds /dev/kvm
  anykvm doctor                                        what this machine allows";

const EXEC_HELP: &str = "\
Examples:
  anykvm exec -- qemu-system-x86_64 -accel kvm -cpu host -m 1G -drive file=disk.img,if=virtio
  anykvm exec -- firecracker --no-api --config-file vm.json
  anykvm exec --quiet -- sh -c 'qemu-system-x86_64 -accel kvm …'

The exit status is the VMM's, or 2 if it was not started.";

const TRACE_HELP: &str = "\
Example:
  anykvm trace -o calls.jsonl -- qemu-system-x86_64 -accel kvm -m 512M

The exit status is the VMM's, or 2 if it was not started.";

const DOCTOR_HELP: &str = "\
Examples:
  anykvm doctor
  anykvm doctor qemu-system-x86_64 ./my-vmm
  anykvm doctor --json | jq '.[] | select(.finding != \"ok\")'

Exit status: 0; 1 if anykvm does not work here or a program cannot be run; 2 if something went wrong.";

const BOOT_HELP: &str = "\
Examples:
  anykvm boot                                       a shell; Ctrl-A X ends it
  anykvm boot -c 2 -- sh -c 'uname -a; exit 7'      one command; the status is 7
  tar c src | anykvm boot -- sh -c 'tar x && wc -l src/*' >lines
  anykvm boot bzImage --disk disk.img --append root=/dev/vda --no-initrd
  anykvm boot --root debian/ -- apt list            in a copy of a folder
  anykvm boot --root debian/ --append init=/sbin/init

The kernel is started with mitigations=off unless --mitigations auto is given.

Exit status:
  0        the guest powered off or rebooted, or Ctrl-A X was typed
  N        the status of COMMAND, or of the shell
  2        wrong usage, or something could not be read, written, fetched or set up
  125      the guest crashed or ended before it reported COMMAND's status
  128+N    anykvm was ended by signal N (SIGTERM, SIGHUP, SIGINT), or 141: nobody reads its output
With a terminal: Ctrl-A X ends the guest, Ctrl-A Ctrl-A sends one Ctrl-A. A command whose output is
not a terminal leaves the terminal as it is: Ctrl-C ends the guest.";

/// "512M", "512MB", "1.5G", "1048576".
pub(crate) fn parse_size(text: &str) -> Result<u64, String> {
    let wrong = || format!("'{text}' is not a size: write a number with K, M or G, as in 512M");
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = text.get(digits.len()..).unwrap_or_default();
    let shift = match unit.to_ascii_uppercase().as_str() {
        "" | "B" => 0,
        "K" | "KB" | "KIB" => 10,
        "M" | "MB" | "MIB" => 20,
        "G" | "GB" | "GIB" => 30,
        "T" | "TB" | "TIB" => 40,
        _ => return Err(wrong()),
    };
    let (whole, fraction) = digits.split_once('.').unwrap_or((digits, "0"));
    let whole: u64 = whole.parse().map_err(|_| wrong())?;
    if fraction.len() > 6 || !fraction.bytes().all(|b| b.is_ascii_digit()) {
        return Err(wrong());
    }
    let parts: u64 = fraction.parse().map_err(|_| wrong())?;
    let scale = fraction.bytes().fold(1u64, |scale, _| scale * 10);
    let parts = (u128::from(parts) << shift) / u128::from(scale);
    let whole = whole.checked_mul(1 << shift).ok_or_else(wrong)?;
    whole
        .checked_add(u64::try_from(parts).map_err(|_| wrong())?)
        .ok_or_else(wrong)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_command_has_examples() {
        for command in std::iter::once(&Cli::command()).chain(Cli::command().get_subcommands()) {
            let help = command.get_after_help().map(ToString::to_string);
            let has_examples = help.is_some_and(|text| text.starts_with("Example"));
            assert!(has_examples, "{}", command.get_name());
        }
    }

    #[test]
    fn sizes() {
        let rows = [
            ("4096", Some(4096)),
            ("512M", Some(512 << 20)),
            ("6G", Some(6 << 30)),
            ("1k", Some(1024)),
            ("", None),
            ("M", None),
            ("12X", None),
            ("-1M", None),
            ("99999999999G", None),
            ("512MB", Some(512 << 20)),
            ("512mib", Some(512 << 20)),
            ("1.5G", Some(3 << 29)),
            ("0.25K", Some(256)),
            ("1.", None),
            ("1.5.5G", None),
            (".5G", None),
        ];
        for (text, want) in rows {
            assert_eq!(parse_size(text).ok(), want, "{text}");
        }
    }

    #[test]
    fn everything_after_the_dashes_is_the_command() {
        let cli = Cli::parse_from(["anykvm", "boot", "--cpus", "2", "--", "sh", "-c", "exit 7"]);
        let Command::Boot(args) = cli.command else {
            panic!("not a boot");
        };
        assert_eq!(args.command, ["sh", "-c", "exit 7"]);
        assert_eq!(args.cpus, 2);
    }
}
