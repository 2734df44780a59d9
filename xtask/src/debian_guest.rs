//! `cargo xtask debian-guest [--rounds N]`: boots a whole Debian under Debian's QEMU, with anykvm and with TCG.
//!
//! debootstrap makes a root file system with systemd. The guest boots it with 2 vCPUs to a login, apt-get installs a
//! package from a folder in it, and it powers off. The first run needs root and a mirror.

use std::{
    fs,
    io::{Read, Write},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, Command, Stdio},
    sync::mpsc::{Receiver, RecvTimeoutError, channel},
    time::{Duration, Instant},
};

use crate::tool::tool;

const PACKAGES: &[&str] = &["debootstrap", "e2fsprogs", "qemu-system-x86"];
const INCLUDED: &str = "systemd,systemd-sysv,udev,linux-image-cloud-amd64,initramfs-tools,kmod";
/// The package that apt-get installs in the guest.
const PACKAGE: &str = "hello";
/// How long each step of a machine may take.
const PATIENCE: Duration = Duration::from_secs(600);
/// Minimum of TCG's time divided by anykvm's.
const BAR: f64 = 3.0;

/// Seconds until the login, until the package is installed, and until the power is off; and seconds of processor time,
/// which other load on the machine affects less.
type Times = [f64; 4];

/// Options of `debian-guest`.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Boots on each, of which the best counts.
    #[arg(long, default_value_t = 1)]
    rounds: u32,
}

/// Boots the guest on both in turn.
pub(crate) fn run(options: &Options) -> Result<(), String> {
    crate::debian::install(PACKAGES)?;
    let folder = crate::build::cache().join("debian-guest");
    prepare(&folder)?;
    let anykvm = crate::build::anykvm()?;
    let mut best = [[f64::MAX; 4]; 2];
    for _ in 0..options.rounds {
        for (machine, best) in [Some(anykvm.as_path()), None].into_iter().zip(&mut best) {
            let name = if machine.is_some() { "anykvm" } else { "TCG" };
            let times = boot(&folder, machine).map_err(|e| format!("{name}: {e}"))?;
            let [login, installed, off, processors] = times;
            eprintln!(
                "{name:6}  login {login:6.1} s, installed {installed:6.1} s, off {off:6.1} s; of processors {processors:6.1} s"
            );
            if times[2] < best[2] {
                *best = times;
            }
        }
    }
    let ratio = best[1][2] / best[0][2];
    let processors = best[1][3] / best[0][3];
    eprintln!(
        "TCG takes {ratio:.2} times as long (bar: {BAR}), and {processors:.2} times the processors' time"
    );
    if ratio < BAR {
        return Err(format!("{ratio:.2} is below the bar"));
    }
    Ok(())
}

/// Makes the image, if it does not exist.
fn prepare(folder: &Path) -> Result<(), String> {
    let image = folder.join("disk.img");
    if image.exists() {
        return Ok(());
    }
    let root = folder.join("root");
    let _ = fs::remove_dir_all(&root);
    fs::create_dir_all(folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    tool(
        Command::new("debootstrap")
            .args(["--variant=minbase", "--include", INCLUDED, "bookworm"])
            .arg(&root),
    )?;
    let repository = root.join("opt/repository");
    let script = format!(
        "set -e; passwd -d root; echo guest > /etc/hostname; echo '/dev/vda / ext4 defaults 0 1' > /etc/fstab; \
         cd /opt/repository; apt-get update; apt-get download {PACKAGE}; \
         for f in *.deb; do dpkg-deb -f $f; echo Filename: ./$f; echo Size: $(stat -c %s $f); \
         echo SHA256: $(sha256sum < $f | cut -d' ' -f1); echo; done > Packages; \
         echo 'deb [trusted=yes] file:/opt/repository ./' > /etc/apt/sources.list; \
         rm -rf /var/lib/apt/lists/* /var/cache/apt/archives/*.deb"
    );
    fs::create_dir_all(&repository).map_err(|e| format!("{}: {e}", repository.display()))?;
    tool(
        Command::new("chroot")
            .arg(&root)
            .args(["sh", "-c", &script]),
    )?;
    for (link, name) in [("vmlinuz", "vmlinuz"), ("initrd.img", "initrd")] {
        let from = root.join(link).canonicalize();
        let from = from.map_err(|e| format!("{link}: {e}"))?;
        fs::copy(&from, folder.join(name)).map_err(|e| format!("{}: {e}", from.display()))?;
    }
    let partial = folder.join("partial.img");
    tool(
        Command::new("mke2fs")
            .args(["-q", "-F", "-t", "ext4", "-d"])
            .arg(&root)
            .arg(&partial)
            .arg("1500M"),
    )?;
    fs::rename(&partial, &image).map_err(|e| format!("{}: {e}", image.display()))?;
    fs::remove_dir_all(&root).map_err(|e| format!("{}: {e}", root.display()))
}

/// A machine and its serial port.
struct Machine {
    child: Child,
    input: ChildStdin,
    output: Receiver<Vec<u8>>,
    text: Vec<u8>,
}

impl Machine {
    fn start(mut command: Command) -> Result<Self, String> {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .map_err(|e| e.to_string())?;
        let input = child.stdin.take().ok_or("no input")?;
        let mut stream = child.stdout.take().ok_or("no output")?;
        let (sender, output) = channel();
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(count @ 1..) = stream.read(&mut buffer) {
                if sender.send(buffer[..count].to_vec()).is_err() {
                    break;
                }
            }
        });
        Ok(Self {
            child,
            input,
            output,
            text: Vec::new(),
        })
    }

    /// Waits until the guest has printed `what`, and drops the output before it.
    fn wait_for(&mut self, what: &str) -> Result<(), String> {
        let end = Instant::now() + PATIENCE;
        loop {
            let found = self
                .text
                .windows(what.len())
                .position(|part| part == what.as_bytes());
            if let Some(at) = found {
                self.text.drain(..at + what.len());
                return Ok(());
            }
            let left = end.saturating_duration_since(Instant::now());
            match self.output.recv_timeout(left) {
                Ok(bytes) => self.text.extend(bytes),
                Err(error) => {
                    let why = if error == RecvTimeoutError::Timeout {
                        "in time"
                    } else {
                        "before QEMU ended"
                    };
                    let last = self.text.len().saturating_sub(800);
                    let text = String::from_utf8_lossy(&self.text[last..]).into_owned();
                    return Err(format!("no '{what}' {why}, after: {text}"));
                }
            }
        }
    }

    fn say(&mut self, line: &str) -> Result<(), String> {
        let line = format!("{line}\n");
        self.input
            .write_all(line.as_bytes())
            .and_then(|()| self.input.flush())
            .map_err(|e| e.to_string())
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        // A run that fails leaves the process running.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns the processor time of the children that have ended; `/proc/self/stat` has it in hundredths of seconds
/// (proc(5)).
fn children_seconds() -> Result<f64, String> {
    let path = "/proc/self/stat";
    let text = fs::read_to_string(path).map_err(|e| format!("{path}: {e}"))?;
    parse_children_seconds(&text).ok_or_else(|| format!("{path}: {text}"))
}

fn parse_children_seconds(stat: &str) -> Option<f64> {
    // The second field is in parentheses and may have spaces. cutime and cstime are the 16th and 17th fields.
    let (_, rest) = stat.rsplit_once(')')?;
    let mut fields = rest.split_whitespace().skip(13);
    let mut number = || fields.next()?.parse::<f64>().ok();
    Some((number()? + number()?) / 100.0)
}

/// Boots the guest on anykvm; without it, on TCG.
fn boot(folder: &Path, anykvm: Option<&Path>) -> Result<Times, String> {
    let disk: PathBuf = folder.join("run.img");
    tool(
        Command::new("cp")
            .arg("--sparse=always")
            .arg(folder.join("disk.img"))
            .arg(&disk),
    )?;
    let mut command = match anykvm {
        Some(anykvm) => {
            let mut command = Command::new(anykvm);
            command.args(["exec", "--quiet", "--", "qemu-system-x86_64"]);
            command.args(["-accel", "kvm", "-cpu", "host"]);
            command
        }
        None => {
            let mut command = Command::new("qemu-system-x86_64");
            command.args(["-accel", "tcg,thread=multi", "-cpu", "max"]);
            command
        }
    };
    command
        .args([
            "-M",
            "q35",
            "-smp",
            "2",
            "-m",
            "1024",
            "-nodefaults",
            "-no-reboot",
        ])
        .args(["-display", "none", "-serial", "stdio", "-kernel"])
        .arg(folder.join("vmlinuz"))
        .arg("-initrd")
        .arg(folder.join("initrd"))
        .args(["-append", "console=ttyS0 root=/dev/vda rw", "-drive"])
        .arg(format!("file={},format=raw,if=virtio", disk.display()));
    let before = children_seconds()?;
    let start = Instant::now();
    let seconds = || start.elapsed().as_secs_f64();
    let mut machine = Machine::start(command)?;
    machine.wait_for("login:")?;
    let login = seconds();
    machine.say("root")?;
    machine.wait_for("# ")?;
    // The command's echo must not contain the text that is waited for.
    machine.say(&format!(
        "test $(nproc) = 2 && apt-get update && apt-get -y install {PACKAGE} && {PACKAGE} && echo DONE-$((40 + 2))"
    ))?;
    machine.wait_for("DONE-42")?;
    let installed = seconds();
    machine.say("systemctl poweroff")?;
    let end = Instant::now() + PATIENCE;
    while Instant::now() < end {
        if let Some(status) = machine.child.try_wait().map_err(|e| e.to_string())? {
            let off = seconds();
            return if status.success() {
                Ok([login, installed, off, children_seconds()? - before])
            } else {
                Err(status.to_string())
            };
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Err("it did not power off".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_times_of_children_are_found() {
        let stat = "7 (a) b) S 1 7 7 0 -1 4 100 200 0 0 11 12 250 50 20 0 1 0 5 6 7";
        assert_eq!(parse_children_seconds(stat), Some(3.0));
        assert_eq!(parse_children_seconds("7 (a) S 1"), None);
    }
}
