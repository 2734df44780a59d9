//! `cargo xtask vmms [--all | --quick] [--times N] [--tcg] [NAME…]`: unmodified VMMs under `anykvm exec`.
//!
//! Debian's QEMU boots Debian's kernel on each machine type, CPU model, interrupt controller and firmware, and the
//! guest checks what it was given: CPUs, memory, disks, network. QEMU's own monitor, its snapshots, its debugger stub
//! and reboots are driven from outside (`driven`), and it is migrated while it runs (`live`). Other VMMs: `others`.

mod cases;
mod disk;
mod driven;
mod files;
mod guest;
mod live;
mod models;
mod nested;
mod others;
mod saved;
mod traced;

use std::{
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use clap::{Args, Subcommand, builder::PossibleValuesParser};
use testkit::boot::run_limited;

use cases::CASES;
pub(crate) use guest::{Archive, modules};

/// Debian packages with QEMU and its helpers.
const PACKAGES: &[&str] = &[
    "busybox-static",
    "gcc",
    "gdb",
    "iproute2",
    "libc6-dev",
    "mtools",
    "ovmf",
    "qemu-system-x86",
    "qemu-utils",
    "syslinux",
];
/// Time limit of a case on a busy host.
const LIMIT: Duration = Duration::from_secs(300);

/// The part of the matrix that a case belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Part {
    /// `--quick`, part of CI.
    Quick,
    /// By default.
    Normal,
    /// `--all`: large kernels, many repetitions.
    All,
}

/// What QEMU runs.
#[derive(Clone, Copy, Debug)]
enum Run {
    /// `-kernel` and `-initrd` of Debian's cloud kernel.
    Cloud,
    /// `-kernel` and `-initrd` of Debian's full kernel.
    Full,
    /// From a disk image with a boot loader, which the arguments name as drive `boot`.
    Disk,
    /// A function that sends QEMU commands.
    Driven(fn(&Setup, &[&str]) -> Result<(), String>),
    /// A function that sends QEMU commands, with a program in the guest that writes memory.
    Live(fn(&Setup, &[&str]) -> Result<(), String>),
}

/// One way to run QEMU.
#[derive(Debug)]
struct Case {
    name: &'static str,
    part: Part,
    run: Run,
    /// QEMU's arguments, separated by spaces. `{dir}` stands for a folder of the case, and `{port}` for the port of a
    /// file server.
    arguments: &'static str,
    cpus: u32,
    mem_mib: u64,
    /// Words on the kernel's command line.
    append: &'static str,
    /// Commands of the guest's shell; the case passes if they all do.
    check: &'static str,
    /// What a QEMU prints that does not have these options any more.
    refusal: Option<&'static str>,
}

/// What the command line says of live migrations.
#[derive(Clone, Copy, Debug)]
struct How {
    /// How often the guest is migrated in a row.
    times: u32,
    /// True if QEMU's own translator is timed, too.
    tcg: bool,
}

/// What all cases share, and the case's own folder.
#[derive(Clone)]
struct Setup {
    anykvm: PathBuf,
    /// The engine; `None` for QEMU's own translator.
    engine: Option<&'static str>,
    how: How,
    kernel: PathBuf,
    initrd: PathBuf,
    dir: PathBuf,
    cpus: u32,
    mem_mib: u64,
}

impl Setup {
    /// Returns `anykvm exec` of QEMU, without devices that a case does not ask for.
    fn command(&self, arguments: &[&str]) -> Command {
        self.command_through(&["exec"], arguments)
    }

    /// Returns the same with another command of anykvm.
    fn command_through(&self, through: &[&str], arguments: &[&str]) -> Command {
        let mut command;
        if let Some(engine) = self.engine {
            command = Command::new(&self.anykvm);
            command.env("ANYKVM_ENGINE", engine);
            command.args(through);
            command.args(["--", "qemu-system-x86_64"]);
        } else {
            command = Command::new("qemu-system-x86_64");
            command.args(["-accel", "tcg"]);
        }
        command.arg("-nodefaults");
        if self.engine.is_some() && !arguments.contains(&"-accel") {
            command.args(["-accel", "kvm"]);
        }
        command.args(["-display", "none", "-m", &self.mem_mib.to_string()]);
        command.args(["-smp", &self.cpus.to_string()]);
        command.args(arguments);
        command
    }

    /// Returns a setup with QEMU's own translator. `arguments` must not name an accelerator then.
    fn with_tcg(&self) -> Self {
        Self {
            engine: None,
            ..self.clone()
        }
    }

    fn accelerator(&self) -> &'static str {
        self.engine.map_or("TCG", |_| "anykvm")
    }

    /// Adds the kernel, which is booted directly, with `append` on its command line.
    fn kernel(&self, command: &mut Command, append: &str) {
        command
            .arg("-kernel")
            .arg(&self.kernel)
            .arg("-initrd")
            .arg(&self.initrd);
        command.args(["-append", &format!("{} {append}", guest::COMMAND_LINE)]);
    }
}

/// Which cases, and how.
#[derive(Debug, Default, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct Options {
    #[command(subcommand)]
    pub(crate) others: Option<Others>,
    /// All: large kernels, many repetitions.
    #[arg(long, conflicts_with = "quick")]
    pub(crate) all: bool,
    /// Only those of CI.
    #[arg(long)]
    pub(crate) quick: bool,
    /// The guest is interpreted.
    #[arg(long)]
    pub(crate) interp: bool,
    /// How often.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) times: u32,
    /// QEMU's own translator beside it, where a case compares.
    #[arg(long)]
    pub(crate) tcg: bool,
    /// These cases alone.
    #[arg(value_parser = PossibleValuesParser::new(CASES.iter().map(|c| c.name)))]
    pub(crate) names: Vec<String>,
}

/// Not QEMU.
#[derive(Debug, Subcommand)]
pub(crate) enum Others {
    /// Other VMMs, whose programs are named.
    Others(others::Options),
}

/// Runs what the options ask for.
pub(crate) fn run(options: &Options) -> Result<(), String> {
    if let Some(Others::Others(options)) = &options.others {
        return others::run(options);
    }
    let part = if options.all {
        Part::All
    } else if options.quick {
        Part::Quick
    } else {
        Part::Normal
    };
    let engine = if options.interp { "interp" } else { "jit" };
    let names = &options.names;
    let how = How {
        times: options.times.max(1),
        tcg: options.tcg,
    };
    crate::debian::install(PACKAGES)?;
    let anykvm = crate::build::anykvm()?;
    let mut failed = Vec::new();
    for case in CASES {
        let wanted = if names.is_empty() {
            case.part <= part
        } else {
            names.iter().any(|n| n == case.name)
        };
        if !wanted {
            continue;
        }
        let start = Instant::now();
        let result = one(case, &anykvm, engine, how);
        let seconds = start.elapsed().as_secs_f64();
        match result {
            Ok(()) => eprintln!("{:20} ok    {seconds:6.1} s", case.name),
            Err(why) if case.refusal.is_some_and(|words| why.contains(words)) => {
                eprintln!("{:20} refused by this QEMU", case.name);
            }
            Err(why) => {
                eprintln!("{:20} FAILED {seconds:5.1} s: {why}", case.name);
                failed.push(case.name);
            }
        }
    }
    if failed.is_empty() {
        Ok(())
    } else {
        Err(format!("VMMs failed: {}", failed.join(" ")))
    }
}

fn one(case: &Case, anykvm: &Path, engine: &'static str, how: How) -> Result<(), String> {
    let cache = crate::build::cache();
    let dir = cache.join("vmms").join(case.name);
    // The folder may be left over from the last run.
    let _ = std::fs::remove_dir_all(&dir);
    std::fs::create_dir_all(&dir).map_err(|e| format!("{}: {e}", dir.display()))?;
    let kernel = match case.run {
        Run::Full => crate::debian::kernel("linux-image-amd64", "kernel-amd64")?,
        _ => crate::debian::kernel("linux-image-cloud-amd64", "kernel-cloud-amd64")?,
    };
    let server = guest::Server::start()?;
    let data = guest::data();
    let image = dir.join("data.img");
    std::fs::write(&image, &data).map_err(|e| format!("{}: {e}", image.display()))?;
    let check = case.check.replace("{port}", &server.port().to_string());
    let writer = match case.run {
        Run::Live(_) => Some(guest::compiled(live::WRITER, &dir)?),
        _ => None,
    };
    let machine = (case.cpus, case.mem_mib);
    let initrd = guest::initramfs(&kernel, &dir, &check, machine, writer.as_deref())?;
    let setup = Setup {
        anykvm: anykvm.into(),
        engine: Some(engine),
        how,
        kernel,
        initrd,
        dir,
        cpus: case.cpus,
        mem_mib: case.mem_mib,
    };
    let folder = setup.dir.display().to_string();
    let text = case.arguments.replace("{dir}", &folder);
    let arguments: Vec<&str> = text.split_whitespace().collect();
    let mut command = setup.command(&arguments);
    match case.run {
        Run::Driven(drive) | Run::Live(drive) => return drive(&setup, &arguments),
        Run::Disk => {
            let image = disk::bootable(&setup)?;
            let drive = format!("file={},format=raw,if=none,id=boot", image.display());
            command.args(["-drive", &drive]);
        }
        Run::Cloud | Run::Full => setup.kernel(&mut command, case.append),
    }
    command.args(["-no-reboot", "-serial", "stdio"]);
    let outcome = run_limited(&mut command, LIMIT).map_err(|e| e.to_string())?;
    guest::verdict(&outcome)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique() {
        for (i, case) in CASES.iter().enumerate() {
            assert!(CASES.iter().skip(i + 1).all(|c| c.name != case.name));
        }
    }
}
