//! `cargo xtask bench`: one table of the engines' speeds on this machine.
//!
//! Speeds are those of loops in a guest without a kernel (`guest_speed` of anykvm-ioctls). Boots are those of Debian's
//! cloud kernel with the same initramfs, from the start of the process to its end after the guest has powered itself
//! off; beside QEMU's TCG if it is installed. The best of a few runs counts, and ratios only within one run, because
//! machines are noisy.
//!
//! `cargo xtask bench io` is about virtio: see [`io`]; `wp` about CR0.WP: see [`wp`].

mod io;
mod wp;

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use clap::{Args, Subcommand};
use testkit::boot::{Boot, Outcome, run_limited};

/// Number of boots, of which the fastest counts.
const RUNS: usize = 2;
const LIMIT: Duration = Duration::from_secs(300);
/// Minimum speed of the interpreter, in million instructions per second.
const INTERP_BAR: f64 = 40.0;
const ENGINES: [&str; 2] = ["interp", "jit"];
const QEMU: &str = "qemu-system-x86_64";
/// The kernel's command line of a boot; anykvm adds its own console.
const WORDS: &str = "console=ttyS0 quiet panic=-1";
/// The init of a boot: says that the shell is there, and ends the machine.
const INIT: &str = "#!/bin/busybox sh
/bin/busybox mount -t proc proc /proc
/bin/busybox echo ready $(/bin/busybox nproc)
/bin/busybox poweroff -f
";

/// Options of `bench`.
#[derive(Debug, Args)]
pub(crate) struct Options {
    #[command(subcommand)]
    part: Option<Part>,
}

/// Another table.
#[derive(Debug, Subcommand)]
enum Part {
    /// Virtio.
    Io(io::Options),
    /// Changes of CR0.WP, also by a module in a Linux guest.
    Wp,
}

/// Runs everything and prints the table; fails if the interpreter misses its bar.
pub(crate) fn run(options: &Options) -> Result<(), String> {
    match &options.part {
        Some(Part::Io(options)) => return io::run(options),
        Some(Part::Wp) => return wp::run(),
        None => {}
    }
    let anykvm = crate::build::anykvm()?;
    crate::build::release(&["-p", "anykvm-ioctls", "--example", "guest_speed"])?;
    let mut rows = vec![["", "interpreter", "JIT", "QEMU TCG", "JIT/TCG"].map(str::to_owned)];
    let speeds = ENGINES.map(speeds);
    let [interp, jit] = speeds;
    let (interp, jit) = (interp?, jit?);
    for ((name, slow), (_, fast)) in interp.iter().zip(&jit) {
        rows.push([
            format!("{name}, million instructions/s"),
            format!("{slow:.0}"),
            format!("{fast:.0}"),
            "-".into(),
            "-".into(),
        ]);
    }
    let kernel = crate::debian::kernel("linux-image-cloud-amd64", "kernel-cloud-amd64")?;
    let initramfs = initramfs()?;
    for cpus in [1, 2] {
        let [interp, jit] = ENGINES.map(|engine| {
            best(&format!("{engine}, {cpus} vCPU"), || {
                Boot::new(&anykvm)
                    .kernel(&kernel)
                    .option("--initrd", &initramfs)
                    .option("--append", "quiet")
                    .cpus(cpus)
                    .mem("256M")
                    .engine(engine)
                    .limit(LIMIT)
                    .run(&[])
                    .map_err(|e| format!("{}: {e}", anykvm.display()))
            })
        });
        let (interp, jit) = (interp?, jit?);
        let tcg = match tcg(&kernel, &initramfs, cpus) {
            Some(run) => Some(run?),
            None => None,
        };
        rows.push([
            format!("boot to shell and power off, {cpus} vCPU, s"),
            format!("{interp:.1}"),
            format!("{jit:.1}"),
            tcg.map_or("-".into(), |t| format!("{t:.1}")),
            tcg.map_or("-".into(), |t| format!("{:.2}", jit / t)),
        ]);
    }
    eprint!("{}", table(&rows));
    match interp.iter().find(|(_, speed)| *speed < INTERP_BAR) {
        Some((name, speed)) => Err(format!(
            "the interpreter does {speed:.0} million instructions/s ({name}), less than {INTERP_BAR}"
        )),
        None => Ok(()),
    }
}

/// Returns million instructions per second by loop, on one engine.
fn speeds(engine: &str) -> Result<Vec<(String, f64)>, String> {
    let program = crate::build::target().join("release/examples/guest_speed");
    let mut command = Command::new(&program);
    command.env("ANYKVM_ENGINE", engine);
    let outcome = run_limited(&mut command, LIMIT);
    let outcome = outcome.map_err(|e| format!("{}: {e}", program.display()))?;
    if outcome.status != Some(0) {
        return Err(format!("guest_speed failed: {}", outcome.last_words(5)));
    }
    Ok(parse_speeds(&outcome.text()))
}

fn parse_speeds(text: &str) -> Vec<(String, f64)> {
    text.lines()
        .filter_map(|line| {
            let (name, speed) = line.split_once('\t')?;
            Some((name.to_owned(), speed.parse().ok()?))
        })
        .collect()
}

/// Returns the time of the fastest run. Each run has to have reached its shell.
fn best(name: &str, mut boot: impl FnMut() -> Result<Outcome, String>) -> Result<f64, String> {
    let mut best = f64::MAX;
    for _ in 0..RUNS {
        let outcome = boot()?;
        eprintln!("bench: boot: {name}: {:.1} s", outcome.time.as_secs_f64());
        if outcome.status != Some(0) || !outcome.text().contains("ready") {
            return Err(format!(
                "a boot failed: status {:?}\n{}{}",
                outcome.status,
                outcome.text(),
                outcome.last_words(10)
            ));
        }
        best = best.min(outcome.time.as_secs_f64());
    }
    Ok(best)
}

/// Boots the same with QEMU's translator, if it is installed.
fn tcg(kernel: &Path, initramfs: &Path, cpus: u32) -> Option<Result<f64, String>> {
    Command::new(QEMU).arg("--version").output().ok()?;
    Some(best(&format!("TCG, {cpus} vCPU"), || {
        let mut qemu = Command::new(QEMU);
        qemu.args(["-accel", "tcg", "-cpu", "max,monitor=off,erms=off,fsrm=off"])
            .args(["-m", "256M", "-smp", &cpus.to_string()])
            .args(["-nodefaults", "-no-reboot", "-display", "none"])
            .args(["-serial", "stdio", "-append", WORDS])
            .arg("-kernel")
            .arg(kernel)
            .arg("-initrd")
            .arg(initramfs);
        run_limited(&mut qemu, LIMIT).map_err(|e| format!("{QEMU}: {e}"))
    }))
}

/// Packs busybox and [`INIT`].
fn initramfs() -> Result<PathBuf, String> {
    let folder = crate::build::target().join("bench-initramfs");
    let archive = crate::build::target().join("bench-initramfs.cpio");
    let cannot = |e: std::io::Error| format!("{}: {e}", folder.display());
    for part in ["bin", "dev", "proc"] {
        fs::create_dir_all(folder.join(part)).map_err(cannot)?;
    }
    fs::copy("/bin/busybox", folder.join("bin/busybox"))
        .map_err(|e| format!("/bin/busybox: {e}: install busybox-static"))?;
    fs::write(folder.join("init"), INIT).map_err(cannot)?;
    let mut pack = Command::new("sh");
    pack.args(["-c", "chmod 755 init && find . | busybox cpio -o -H newc"])
        .current_dir(&folder);
    let packed = run_limited(&mut pack, LIMIT).map_err(cannot)?;
    if packed.status != Some(0) {
        return Err(format!("busybox cpio: {}", packed.last_words(3)));
    }
    fs::write(&archive, packed.stdout).map_err(cannot)?;
    Ok(archive)
}

/// Formats the table: the first column to the left, numbers to the right.
fn table(rows: &[[String; 5]]) -> String {
    let width = |column: usize| rows.iter().map(|r| r[column].len()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..5).map(width).collect();
    let mut text = String::new();
    for row in rows {
        for (i, (cell, width)) in row.iter().zip(&widths).enumerate() {
            if i == 0 {
                text.push_str(&format!("{cell:width$}"));
            } else {
                text.push_str(&format!("  {cell:>width$}"));
            }
        }
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_in_line() {
        let row = |a: &str, b: &str| [a, b, "1", "2", "3"].map(str::to_owned);
        assert_eq!(
            table(&[row("", "speed"), row("name", "7")]),
            "      speed  1  2  3\nname      7  1  2  3\n"
        );
    }

    #[test]
    fn speeds_are_read_and_other_lines_are_not() {
        let speeds = parse_speeds("a b\t12.5\nnoise\nc\tx\nd\t7\n");
        assert_eq!(speeds, [("a b".to_owned(), 12.5), ("d".to_owned(), 7.0)]);
    }

    #[test]
    fn a_boot_without_its_shell_is_a_failure() {
        let outcome = |status, text: &str| {
            Ok(Outcome {
                status: Some(status),
                stdout: text.into(),
                stderr: Vec::new(),
                time: Duration::from_secs(2),
                timed_out: false,
            })
        };
        assert_eq!(best("x", || outcome(0, "ready 2\n")), Ok(2.0));
        assert!(best("x", || outcome(0, "")).is_err());
        assert!(best("x", || outcome(1, "ready 2\n")).is_err());
    }
}
