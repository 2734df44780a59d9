//! The machines that workloads run on: the host, a guest of ours, a guest of QEMU's TCG.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use super::workloads::{PREPARE, Suite, Workload};
use crate::error::BootError;
use crate::images::{self, Overlay};

/// A run of a whole suite that takes longer hangs.
const LIMIT: Duration = Duration::from_secs(1200);
/// TCG's processor, for a fair comparison: with plain `max`, spinning in MONITOR/MWAIT takes TCG's time, and `rep
/// movsb` goes byte by byte.
pub(super) const TCG_CPU: &str = "max,monitor=off,erms=off,fsrm=off";
/// The kernel's command line in every guest.
pub(super) const WORDS: &str = "console=ttyS0 quiet panic=-1";
/// The line before the first workload.
const PREPARED: &str = "prepared";
/// The guest's folder with the workloads' files.
const FOLDER: &str = "/bench";

/// The machine that executes a workload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Machine {
    Native,
    Anykvm,
    Tcg,
}

/// A machine, and the options of its guest.
#[derive(Clone, Copy, Debug)]
pub(super) struct Guest<'a> {
    pub(super) machine: Machine,
    pub(super) cpus: u32,
    pub(super) mem: &'a str,
    /// Words for the kernel's command line.
    pub(super) words: &'a str,
    /// The value of `ANYKVM_MMU`.
    pub(super) mmu: Option<&'a str>,
    /// True if the VMM prints the vCPUs' counters.
    pub(super) stats: bool,
}

impl<'a> Guest<'a> {
    pub(super) const fn new(machine: Machine, cpus: u32, mem: &'a str) -> Self {
        Self {
            machine,
            cpus,
            mem,
            words: "",
            mmu: None,
            stats: false,
        }
    }
}

/// The output and times of a run.
#[derive(Debug, Default)]
pub(super) struct Run {
    pub(super) samples: Vec<Sample>,
    /// The output on standard error.
    pub(super) errors: String,
    /// Time from the start of the process to the line `ready`.
    pub(super) ready: Duration,
    /// Processor time that the process had taken by then.
    pub(super) ready_cpu: Duration,
    /// Time to the end of the process.
    pub(super) total: Duration,
}

/// One line of a workload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Sample {
    pub(super) name: String,
    pub(super) ns: u64,
    pub(super) sum: String,
    /// Processor time that the process has taken since the line before.
    pub(super) cpu: Duration,
}

/// The files that runs need.
#[derive(Debug)]
pub(super) struct Files {
    folder: PathBuf,
    kernel: PathBuf,
    pub(super) qemu: PathBuf,
    /// The program of native runs, and the source that guests are built from.
    program: PathBuf,
    source: PathBuf,
    /// Programs of only one suite.
    more: Vec<PathBuf>,
}

impl Files {
    /// Compiles the program, and finds the other files.
    pub(super) fn new(kernel: Option<&Path>, qemu: &Path) -> Result<Self, BootError> {
        let folder = std::env::temp_dir().join(format!("anykvm-bench-{}", std::process::id()));
        fs::create_dir_all(&folder).map_err(BootError::host("cannot make a folder"))?;
        let files = Self {
            kernel: match kernel {
                Some(path) => path.into(),
                None => images::kernel()?,
            },
            qemu: qemu.into(),
            program: folder.join("program"),
            source: folder.join("program.i"),
            more: Vec::new(),
            folder,
        };
        let c = files.folder.join("program.c");
        fs::write(&c, include_str!("program.c")).map_err(BootError::host("cannot write"))?;
        gcc(&["-O2"], &c, &files.program)?;
        gcc(&["-E", "-P"], &c, &files.source)?;
        Ok(files)
    }

    /// Compiles one more program, which runs find beside the first.
    pub(super) fn add_program(&mut self, name: &str, source: &str) -> Result<(), BootError> {
        let program = self.folder.join(name);
        let c = program.with_extension("c");
        fs::write(&c, source).map_err(BootError::host("cannot write"))?;
        gcc(&["-O2"], &c, &program)?;
        self.more.push(program);
        Ok(())
    }

    /// Adds a file that runs find beside the programs.
    pub(super) fn add_file(&mut self, file: &Path) {
        self.more.push(file.into());
    }

    /// Makes the guest's archive for a suite, which runs `script` and then powers off.
    pub(super) fn initrd(&self, suite: Option<Suite>, script: &str) -> Result<PathBuf, BootError> {
        let file = self.folder.join("initrd");
        let mut overlays = vec![
            overlay(&self.program, &format!("{FOLDER}/program"))?,
            overlay(&self.source, &format!("{FOLDER}/program.i"))?,
        ];
        for path in &self.more {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            overlays.push(overlay(path, &format!("{FOLDER}/{name}"))?);
        }
        if let Some(suite) = suite {
            for path in host_files(suite)? {
                overlays.push(overlay(&path, &path.to_string_lossy())?);
            }
        }
        let init = format!(
            "#!/bin/busybox sh
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root TMPDIR=/tmp
mount -t devtmpfs dev /dev
mount -t proc proc /proc
mount -t sysfs sys /sys
mkdir -p /dev/shm
exec </dev/null >/dev/ttyS0 2>&1
cd {FOLDER}
echo ready $(nproc)
{script}
echo over
poweroff -f
"
        );
        let archive = images::pack(&images::busybox()?, init.as_bytes(), &overlays)?;
        fs::write(&file, archive).map_err(BootError::host("cannot write the initramfs"))?;
        Ok(file)
    }

    /// Runs workloads `repeats` times, one after another. Without any workload, the guest only boots.
    pub(super) fn run(
        &self,
        machine: Machine,
        cpus: u32,
        mem: &str,
        workloads: &[&Workload],
        repeats: u32,
    ) -> Result<Run, BootError> {
        let suite = workloads.first().map(|w| w.suite);
        let script = script(workloads, repeats)?;
        self.run_script(&Guest::new(machine, cpus, mem), suite, &script)
    }

    /// Runs workloads in a guest of ours, one after another, and each in all `ways`: words before its command.
    pub(super) fn run_ways(
        &self,
        workloads: &[&Workload],
        ways: &[&str],
        repeats: u32,
    ) -> Result<Run, BootError> {
        let one = |w: &&Workload| {
            let all: Vec<String> = ways
                .iter()
                .map(|way| format!("{way} {}", w.script))
                .collect();
            all.join("\n")
        };
        let script = script_of(workloads.iter().map(one), repeats)?;
        // The kernel is not to stop sampling because an interrupt seems to take long.
        let script = format!("echo 0 >/proc/sys/kernel/perf_cpu_time_max_percent\n{script}");
        let guest = Guest::new(Machine::Anykvm, 1, "1G");
        self.run_script(&guest, workloads.first().map(|w| w.suite), &script)
    }

    /// Runs a script that prints workloads' lines.
    pub(super) fn run_script(
        &self,
        guest: &Guest<'_>,
        suite: Option<Suite>,
        script: &str,
    ) -> Result<Run, BootError> {
        if guest.machine == Machine::Native {
            return self.native(guest.cpus, script);
        }
        let words = format!("{WORDS} {}", guest.words);
        let initrd = self.initrd(suite, script)?;
        let mut command = if guest.machine == Machine::Anykvm {
            let mut command = self.boot(&own()?, guest.cpus, guest.mem, &words, &initrd);
            command.args(guest.stats.then_some("--stats"));
            if let Some(mmu) = guest.mmu {
                command.env("ANYKVM_MMU", mmu);
            }
            command
        } else {
            let mut command = Command::new(&self.qemu);
            command.args(["-accel", "tcg", "-cpu", TCG_CPU]);
            self.qemu_board(&mut command, (guest.cpus, guest.mem), &words, &initrd);
            command.args(["-serial", "stdio"]);
            command
        };
        follow(&mut command)
    }

    /// Adds QEMU's arguments for the board: all but those for the accelerator and the serial port.
    pub(super) fn qemu_board(
        &self,
        command: &mut Command,
        (cpus, mem): (u32, &str),
        words: &str,
        initrd: &Path,
    ) {
        command
            .args(["-m", mem, "-smp", &cpus.to_string(), "-nodefaults"])
            .args(["-no-reboot", "-display", "none", "-append", words])
            .arg("-kernel");
        command.arg(&self.kernel).arg("-initrd").arg(initrd);
    }

    /// Returns the path of a file that is removed with the others.
    pub(super) fn file(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// Returns the command by which `program` boots a guest.
    pub(super) fn boot(
        &self,
        program: &Path,
        cpus: u32,
        mem: &str,
        words: &str,
        initrd: &Path,
    ) -> Command {
        let mut command = Command::new(program);
        command
            .args(["boot", "--mem", mem, "--cpus", &cpus.to_string()])
            .args(["--append", words, "--no-default-cmdline", "--kernel"]);
        command.arg(&self.kernel).arg("--initrd").arg(initrd);
        command
    }

    /// Runs workloads in a guest of this build and one of the build `other`, at once on one processor, so that both
    /// have the same neighbours, caches and clock.
    pub(super) fn pair(
        &self,
        other: &Path,
        mem: &str,
        workloads: &[&Workload],
        repeats: u32,
    ) -> Result<[Run; 2], BootError> {
        let script = script(workloads, repeats)?;
        let initrd = self.initrd(workloads.first().map(|w| w.suite), &script)?;
        let run = |program: &Path| {
            let boot = self.boot(program, 1, mem, WORDS, &initrd);
            let mut command = Command::new("taskset");
            command.args(["-c", "0"]).arg(boot.get_program());
            follow(command.args(boot.get_args()))
        };
        let own = own()?;
        let (own, other) = std::thread::scope(|s| {
            let own = s.spawn(|| run(&own));
            let other = run(other);
            (own.join(), other)
        });
        let own = own.map_err(|_| BootError::NoImage("a run ended early".to_owned()))?;
        Ok([own?, other?])
    }

    fn native(&self, cpus: u32, script: &str) -> Result<Run, BootError> {
        let last = std::thread::available_parallelism().map_or(1, |n| n.get() as u32) - 1;
        let set = (0..cpus.min(last + 1)).map(|n| (last - n).to_string());
        let set = set.collect::<Vec<_>>().join(",");
        let script = format!("cd {} && {script}\necho over", self.folder.display());
        let mut command = Command::new("taskset");
        command
            .args(["-c", &set, "busybox", "sh", "-c", &script])
            .env_clear()
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
            .env("HOME", "/root")
            .env("TMPDIR", &self.folder);
        follow(&mut command)
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        // A leftover only takes space.
        let _ = fs::remove_dir_all(&self.folder);
    }
}

/// Returns a script that runs `body` so many times.
pub(super) fn repeated(body: &str, repeats: u32) -> String {
    format!("n=0; while [ $n -lt {repeats} ]; do\n{body}\nn=$((n + 1)); done")
}

pub(super) fn own() -> Result<PathBuf, BootError> {
    std::env::current_exe().map_err(BootError::host("cannot find anykvm"))
}

/// Returns the processor time of a process's threads, without those that have ended.
fn cpu_time(process: u32) -> Duration {
    let tasks = fs::read_dir(format!("/proc/{process}/task"));
    let times = tasks.into_iter().flatten().filter_map(|task| {
        let text = fs::read_to_string(task.ok()?.path().join("schedstat")).ok()?;
        text.split(' ').next()?.parse::<u64>().ok()
    });
    Duration::from_nanos(times.sum())
}

fn overlay(host: &Path, guest: &str) -> Result<Overlay, BootError> {
    Overlay::parse(&format!("{}:{guest}", host.display()))
}

pub(super) fn script(workloads: &[&Workload], repeats: u32) -> Result<String, BootError> {
    if workloads.is_empty() {
        return Ok(String::new());
    }
    script_of(workloads.iter().map(|w| w.script.to_owned()), repeats)
}

fn script_of(lines: impl Iterator<Item = String>, repeats: u32) -> Result<String, BootError> {
    let lines: Vec<String> = lines.collect();
    Ok(format!(
        "export LC_ALL=C PYTHON={}\n{PREPARE}\necho {PREPARED}\n{}",
        python()?.display(),
        repeated(&lines.join("\n"), repeats)
    ))
}

fn python() -> Result<PathBuf, BootError> {
    fs::canonicalize("/usr/bin/python3").map_err(|_| missing("python3"))
}

pub(super) fn missing(package: &str) -> BootError {
    BootError::NoImage(format!(
        "this needs Debian's package {package}: apt-get install {package}"
    ))
}

/// Returns programs and data of the host, for the guest.
fn host_files(suite: Suite) -> Result<Vec<PathBuf>, BootError> {
    let programs: &[(&str, &str)] = match suite {
        Suite::Compute => &[
            ("/usr/bin/zstd", "zstd"),
            ("/usr/bin/xz", "xz-utils"),
            ("/usr/bin/sqlite3", "sqlite3"),
            ("/usr/bin/openssl", "openssl"),
            ("/usr/bin/gcc", "gcc"),
        ],
        Suite::Kernel => &[
            ("/usr/bin/hackbench", "rt-tests"),
            ("/usr/bin/ssdd", "rt-tests"),
            ("/usr/bin/perf", "linux-perf"),
        ],
        Suite::Smp => &[
            ("/usr/bin/hackbench", "rt-tests"),
            ("/usr/bin/make", "make"),
            ("/usr/bin/gcc", "gcc"),
        ],
        Suite::Memory => &[],
    };
    let mut files = Vec::new();
    for (path, package) in programs {
        if !Path::new(path).exists() {
            return Err(missing(package));
        }
        files.push(path.into());
    }
    if matches!(suite, Suite::Compute | Suite::Smp) {
        let cc1 = Command::new("gcc").arg("-print-prog-name=cc1").output();
        let cc1 = cc1.map_err(BootError::host("cannot run gcc"))?.stdout;
        files.push(String::from_utf8_lossy(&cc1).trim().into());
    }
    if suite == Suite::Compute {
        let python = python()?;
        let name = python.file_name().unwrap_or_default();
        let library = Path::new("/usr/lib").join(name);
        files.push(python.clone());
        for part in ["encodings", "collections", "lib-dynload"] {
            files.push(library.join(part));
        }
        let modules = fs::read_dir(&library).map_err(|_| missing("libpython3-stdlib"))?;
        files.extend(
            modules
                .filter_map(|entry| Some(entry.ok()?.path()))
                .filter(|path| path.extension().is_some_and(|e| e == "py")),
        );
    }
    Ok(files)
}

fn gcc(arguments: &[&str], source: &Path, out: &Path) -> Result<(), BootError> {
    let mut gcc = Command::new("gcc");
    gcc.args(arguments).arg("-o").arg(out).arg(source);
    succeed(gcc.args(["-lm", "-lpthread"]), "gcc (package gcc)")
}

pub(super) fn succeed(command: &mut Command, what: &str) -> Result<(), BootError> {
    let output = command
        .output()
        .map_err(|e| BootError::NoImage(format!("cannot run {what}: {e}")))?;
    if output.status.success() {
        return Ok(());
    }
    let text = String::from_utf8_lossy(&output.stderr);
    Err(BootError::NoImage(format!("{what} failed: {text}")))
}

/// Runs a process and reads its lines. It has to print `over`.
pub(super) fn follow(command: &mut Command) -> Result<Run, BootError> {
    let program = command.get_program().to_string_lossy().into_owned();
    let start = Instant::now();
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|e| BootError::NoImage(format!("cannot run {program}: {e}")))?;
    let (lines, received) = channel();
    let process = child.id();
    let errors = child.stderr.take().map(|stream| {
        std::thread::spawn(move || {
            let lines = BufReader::new(stream).lines().map_while(Result::ok);
            lines.collect::<Vec<_>>().join("\n")
        })
    });
    if let Some(stream) = child.stdout.take() {
        std::thread::spawn(move || {
            let mut stream = BufReader::new(stream);
            let mut line = Vec::new();
            while stream.read_until(b'\n', &mut line).is_ok_and(|n| n != 0) {
                let text = String::from_utf8_lossy(&line).trim_end().to_owned();
                line.clear();
                let at = (start.elapsed(), cpu_time(process));
                if lines.send((at, text)).is_err() {
                    return;
                }
            }
        });
    }
    let mut run = Run::default();
    let mut others = Vec::new();
    let mut is_over = false;
    let mut before = Duration::ZERO;
    loop {
        match received.recv_timeout(LIMIT.saturating_sub(start.elapsed())) {
            Ok(((at, cpu), line)) => match parse(&line) {
                Some(sample) => {
                    let cpu = cpu.saturating_sub(core::mem::replace(&mut before, cpu));
                    run.samples.push(Sample { cpu, ..sample });
                }
                None if line.starts_with("ready ") => (run.ready, run.ready_cpu) = (at, cpu),
                None if line == PREPARED => before = cpu,
                None if line == "over" => is_over = true,
                None => others.push(line),
            },
            Err(RecvTimeoutError::Disconnected) => break,
            Err(RecvTimeoutError::Timeout) => {
                // The process may have ended just now.
                let _ = child.kill();
                break;
            }
        }
    }
    child.wait().map_err(BootError::host("cannot wait"))?;
    run.total = start.elapsed();
    let errors = errors.and_then(|e| e.join().ok()).unwrap_or_default();
    if !is_over {
        return Err(BootError::NoImage(format!(
            "{program} did not come to its end after {:.1} s\n{}\n{errors}",
            run.total.as_secs_f64(),
            others.join("\n"),
        )));
    }
    run.errors = errors;
    Ok(run)
}

fn parse(line: &str) -> Option<Sample> {
    let mut words = line.strip_prefix("@ ")?.split(' ');
    Some(Sample {
        name: words.next()?.to_owned(),
        ns: words.next()?.parse().ok()?,
        sum: words.next()?.to_owned(),
        cpu: Duration::ZERO,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_workloads_are_told_from_others() {
        let sample = |name: &str, ns, sum: &str| Sample {
            name: name.into(),
            ns,
            sum: sum.into(),
            cpu: Duration::ZERO,
        };
        assert_eq!(parse("@ fib 12 ab"), Some(sample("fib", 12, "ab")));
        for line in ["", "@", "fib 12 ab", "@ fib x ab", "@ fib 12"] {
            assert_eq!(parse(line), None, "{line}");
        }
    }

    #[test]
    fn a_process_that_stops_early_is_an_error() {
        let shell = |script: &str| follow(Command::new("sh").args(["-c", script]));
        let run = shell("echo ready 1; echo @ a 5 x; echo noise; echo over").unwrap();
        assert_eq!(run.samples.len(), 1);
        assert!(shell("echo ready 1; echo @ a 5 x").is_err());
    }

    #[test]
    fn processors_time_grows_while_a_process_computes() {
        let mut spins = Command::new("sh");
        let mut spins = spins.args(["-c", "while :; do :; done"]).spawn().unwrap();
        let begin = Instant::now();
        while cpu_time(spins.id()) < Duration::from_millis(10) {
            assert!(begin.elapsed() < Duration::from_secs(60));
            std::thread::sleep(Duration::from_millis(1));
        }
        spins.kill().unwrap();
        spins.wait().unwrap();
        assert_eq!(cpu_time(u32::MAX), Duration::ZERO);
    }
}
