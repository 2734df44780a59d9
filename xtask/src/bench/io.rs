//! `cargo xtask bench io [ROUNDS]`: virtio in Debian's QEMU under `anykvm exec`, beside the same machine under QEMU's
//! translator.
//!
//! The disk is in memory, and each of its pages contains its number. The network is QEMU's own, and a thread here
//! echoes packets. Times are by the guest's clock. Ratios are within a round, because machines are noisy, and their
//! medians count.

use std::{
    fs,
    net::{Ipv4Addr, UdpSocket},
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use testkit::boot::{Outcome, run_limited};

use crate::vmms::{Archive, modules};

const GUEST: &str = include_str!("io.c");
const ROUNDS: u32 = 3;
const READS: u32 = 8_000;
const PACKETS: u32 = 4_000;
/// Number of the disk's pages of 4 KiB, as in the guest's program.
const PAGES: u64 = 16384;
/// A folder that is in memory.
const DISK_FOLDER: &str = "/dev/shm";
const LIMIT: Duration = Duration::from_secs(300);
/// Each row's name in the guest's lines, and in the table.
const ROWS: [(&str, &str); 3] = [
    ("depth-1", "4 KiB reads, queue depth 1, µs"),
    ("depth-32", "4 KiB reads, queue depth 32, µs"),
    ("echo", "echo of 64 bytes, µs"),
];

/// The disk's file, which is removed when this is dropped.
struct Disk(PathBuf);

impl Disk {
    fn new() -> Result<Self, String> {
        let file = Path::new(DISK_FOLDER).join(format!("anykvm-bench-{}", std::process::id()));
        let mut content = vec![0; PAGES as usize * 4096];
        for (page, number) in content.chunks_exact_mut(4096).zip(0_u64..) {
            for (word, n) in page.chunks_exact_mut(8).zip(0_u64..) {
                word.copy_from_slice(&(number + (n << 32)).to_le_bytes());
            }
        }
        fs::write(&file, content).map_err(|e| format!("{}: {e}", file.display()))?;
        Ok(Self(file))
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        // If the file cannot be removed, nothing can be done about it.
        let _ = fs::remove_file(&self.0);
    }
}

/// Options of `bench io`.
#[derive(Debug, clap::Args)]
pub(super) struct Options {
    /// Rounds, of which the best counts.
    #[arg(default_value_t = ROUNDS, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
}

/// Runs everything and prints the table; fails if TCG is faster in any row.
pub(super) fn run(options: &Options) -> Result<(), String> {
    let rounds = options.rounds;
    crate::debian::install(&["busybox-static", "gcc", "libc6-dev", "qemu-system-x86"])?;
    let anykvm = crate::build::anykvm()?;
    let kernel = crate::debian::kernel("linux-image-cloud-amd64", "kernel-cloud-amd64")?;
    let initramfs = initramfs(&kernel)?;
    let disk = Disk::new()?;
    let port = echo()?;
    let mut ours = Vec::new();
    let mut theirs = Vec::new();
    for round in 1..=rounds {
        for (name, times) in [("anykvm", &mut ours), ("TCG", &mut theirs)] {
            let mut command = if name == "anykvm" {
                let mut command = Command::new(&anykvm);
                command.args(["exec", "--", "qemu-system-x86_64", "-accel", "kvm"]);
                command.args(["-cpu", "host"]);
                command
            } else {
                let mut command = Command::new("qemu-system-x86_64");
                command.args(["-accel", "tcg", "-cpu", "max,monitor=off,erms=off,fsrm=off"]);
                command
            };
            machine(&mut command, &kernel, &initramfs, &disk.0, port);
            let outcome = run_limited(&mut command, LIMIT).map_err(|e| e.to_string())?;
            let measured = measured(&outcome)?;
            eprintln!("bench: io: round {round} of {rounds}: {name}: {measured:.1?} µs");
            times.push(measured);
        }
    }
    let mut rows = vec![["", "anykvm", "QEMU TCG", "TCG/anykvm", "worst"].map(str::to_owned)];
    let mut slower = Vec::new();
    for (row, (_, name)) in ROWS.iter().enumerate() {
        let column = |times: &[[f64; ROWS.len()]]| times.iter().map(|t| t[row]).collect();
        let (a, b): (Vec<f64>, Vec<f64>) = (column(&ours), column(&theirs));
        let ratios: Vec<f64> = a.iter().zip(&b).map(|(a, b)| b / a).collect();
        let ratio = median(&ratios);
        if ratio <= 1.0 {
            slower.push(*name);
        }
        let worst = ratios.iter().copied().fold(f64::INFINITY, f64::min);
        rows.push([
            (*name).to_owned(),
            format!("{:.1}", median(&a)),
            format!("{:.1}", median(&b)),
            format!("{ratio:.2}"),
            format!("{worst:.2}"),
        ]);
    }
    eprint!("{}", super::table(&rows));
    if slower.is_empty() {
        Ok(())
    } else {
        Err(format!("slower than TCG: {}", slower.join("; ")))
    }
}

/// Adds the arguments that both machines have.
fn machine(command: &mut Command, kernel: &Path, initramfs: &Path, disk: &Path, port: u16) {
    let drive = format!(
        "file={},if=none,id=d,format=raw,readonly=on,cache=writeback,aio=threads",
        disk.display()
    );
    let words = format!("console=ttyS0 quiet panic=-1 port={port} reads={READS} packets={PACKETS}");
    command
        .args(["-m", "512", "-nodefaults", "-display", "none", "-no-reboot"])
        .args(["-serial", "stdio", "-drive", &drive])
        .args(["-device", "virtio-blk-pci,drive=d"])
        .args(["-netdev", "user,id=n", "-device", "virtio-net-pci,netdev=n"])
        .args(["-append", &words, "-kernel"])
        .arg(kernel)
        .arg("-initrd")
        .arg(initramfs);
}

/// Makes the initramfs with the guest's program and the drivers.
fn initramfs(kernel: &Path) -> Result<PathBuf, String> {
    let target = crate::build::target();
    let program = target.join("bench-io-guest");
    let source = target.join("bench-io-guest.c");
    fs::write(&source, GUEST).map_err(|e| format!("{}: {e}", source.display()))?;
    let mut gcc = Command::new("gcc");
    gcc.args(["-O2", "-static", "-o"]).args([&program, &source]);
    let compiled = run_limited(&mut gcc, LIMIT).map_err(|e| format!("gcc: {e}"))?;
    if compiled.status != Some(0) {
        return Err(format!("gcc: {}", compiled.last_words(5)));
    }
    let mut archive = Archive::default();
    for folder in ["dev", "m", "proc"] {
        archive.folder(folder);
    }
    let read = |file: &Path| fs::read(file).map_err(|e| format!("{}: {e}", file.display()));
    archive.file("init", &read(&program)?, 0o755);
    archive.file("dev/console", &[], 0);
    let drivers = modules(kernel, &["virtio_pci", "virtio_blk", "virtio_net"])?;
    for (number, module) in drivers.iter().enumerate() {
        archive.file(&format!("m/{number}"), &read(module)?, 0o644);
    }
    let path = target.join("bench-io-initramfs");
    fs::write(&path, archive.end()).map_err(|e| format!("{}: {e}", path.display()))?;
    Ok(path)
}

/// Sends every packet back, from a thread that ends with the process. Returns its port.
fn echo() -> Result<u16, String> {
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).map_err(|e| e.to_string())?;
    let port = socket.local_addr().map_err(|e| e.to_string())?.port();
    std::thread::spawn(move || {
        let mut packet = [0; 2048];
        while let Ok((len, from)) = socket.recv_from(&mut packet) {
            // If the guest is gone, it misses nothing.
            let _ = socket.send_to(&packet[..len], from);
        }
    });
    Ok(port)
}

/// Returns the microseconds of each of [`ROWS`].
fn measured(outcome: &Outcome) -> Result<[f64; ROWS.len()], String> {
    let text = outcome.text();
    let bad = || {
        format!(
            "a guest failed: status {:?}\n{text}{}",
            outcome.status,
            outcome.last_words(5)
        )
    };
    if outcome.status != Some(0) || !text.contains("GUEST-IS-GOOD") {
        return Err(bad());
    }
    let mut times = [0.0; ROWS.len()];
    for (time, (name, _)) in times.iter_mut().zip(ROWS) {
        let line = text.lines().find_map(|line| {
            let mut words = line
                .trim()
                .split(' ')
                .skip_while(|w| *w != "RESULT")
                .skip(1);
            (words.next()? == name).then_some(())?;
            let count: f64 = words.next()?.parse().ok()?;
            let ns: f64 = words.next()?.parse().ok()?;
            (count > 0.0).then_some(ns / count / 1e3)
        });
        *time = line.ok_or_else(bad)?;
    }
    Ok(times)
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_taken_from_a_good_guest_alone() {
        let outcome = |status, text: &str| Outcome {
            status: Some(status),
            stdout: text.into(),
            stderr: Vec::new(),
            time: Duration::ZERO,
            timed_out: false,
        };
        let lines = "RESULT warm-up 1 9\nRESULT depth-1 2 80000\r\nRESULT depth-32 10 20000\r\nRESULT echo 5 5000\r\n";
        let good = format!("{lines}GUEST-IS-GOOD\r\n");
        assert_eq!(measured(&outcome(0, &good)), Ok([40.0, 2.0, 1.0]));
        assert!(measured(&outcome(0, lines)).is_err());
        assert!(measured(&outcome(1, &good)).is_err());
        assert!(measured(&outcome(0, &good.replace("echo 5", "echo 0"))).is_err());
        assert!(measured(&outcome(0, &good.replace("depth-32", "x"))).is_err());
    }

    #[test]
    fn the_middle_one_counts() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
    }
}
