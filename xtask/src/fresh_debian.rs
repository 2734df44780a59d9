//! `cargo xtask fresh-debian [--suite SUITE] [--ci] [NAME…]`: runs README's two commands on a new machine.
//!
//! The machine is a root folder that debootstrap makes, with gcc and this machine's cargo, and with the tracked files
//! of this tree. The commands run in it as root and as an ordinary user, with apt's package lists and without them.
//! This needs root and a mirror.

use std::{
    fs,
    io::Write,
    path::PathBuf,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use crate::tool::tool;
use clap::{Args, builder::PossibleValuesParser};

const SUITE: &str = "bookworm";
const USER: &str = "somebody";
/// Time limit of a command that only finds out what is missing, with cargo's own build before.
const BUILD: Duration = Duration::from_secs(1500);

/// A kind of new user.
struct Case {
    name: &'static str,
    is_root: bool,
    has_lists: bool,
}

const CASES: &[Case] = &[
    Case {
        name: "user-without-lists",
        is_root: false,
        has_lists: false,
    },
    Case {
        name: "user",
        is_root: false,
        has_lists: true,
    },
    Case {
        name: "root-without-lists",
        is_root: true,
        has_lists: false,
    },
    Case {
        name: "root",
        is_root: true,
        has_lists: true,
    },
];

/// Options of `fresh-debian`.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// The release of Debian's.
    #[arg(long, default_value = SUITE)]
    suite: String,
    /// The whole suite as root, not its start only.
    #[arg(long)]
    ci: bool,
    /// These cases alone.
    #[arg(value_parser = PossibleValuesParser::new(CASES.iter().map(|c| c.name)))]
    names: Vec<String>,
}

/// Runs the cases that are named, or all.
pub(crate) fn run(options: &Options) -> Result<(), String> {
    let names = &options.names;
    crate::debian::install(&["debootstrap", "rsync"])?;
    let machine = Machine::make(&options.suite)?;
    for case in CASES {
        if !names.is_empty() && names.iter().all(|name| *name != case.name) {
            continue;
        }
        let start = Instant::now();
        machine
            .boot(case)
            .and_then(|()| machine.suite(case, options.ci))
            .map_err(|e| format!("{}: {e}", case.name))?;
        eprintln!("{:20} {:4} s", case.name, start.elapsed().as_secs());
    }
    Ok(())
}

/// The root folder of a machine.
struct Machine {
    root: PathBuf,
}

impl Machine {
    /// Makes the folder, if it does not exist, and brings the tree up to date.
    fn make(suite: &str) -> Result<Self, String> {
        let root = crate::build::cache().join(format!("fresh-debian-{suite}"));
        if !root.join("etc/debian_version").exists() || !root.join("made").exists() {
            let _ = fs::remove_dir_all(&root);
            fs::create_dir_all(&root).map_err(|e| format!("{}: {e}", root.display()))?;
            tool(
                Command::new("debootstrap")
                    .args(["--variant=minbase", "--include", "gcc,libc6-dev", suite])
                    .arg(&root),
            )?;
            let machine = Self { root };
            machine.shell(
                true,
                &format!(
                    "useradd -m {USER} && rm -rf /var/cache/apt/archives/*.deb && touch /made"
                ),
                b"",
                BUILD,
            )?;
            return machine.with_tree();
        }
        Self { root }.with_tree()
    }

    fn with_tree(self) -> Result<Self, String> {
        let list = tool(
            Command::new("git")
                .arg("-C")
                .arg(crate::tidy::root())
                .args(["ls-files", "--cached", "--others", "--exclude-standard"]),
        )?;
        let file = self.root.join("tmp/files");
        fs::write(&file, list).map_err(|e| e.to_string())?;
        let mut from = crate::tidy::root().into_os_string();
        from.push("/");
        tool(
            Command::new("rsync")
                .args(["-a", "--delete", "--ignore-missing-args", "--files-from"])
                .arg(&file)
                .arg(from)
                .arg(self.root.join("src/")),
        )?;
        // The machine gets this machine's toolchain of rustup, without what was built or fetched with it. Crates come
        // from their registry's local copy, if there is one.
        let home = PathBuf::from(std::env::var_os("HOME").unwrap_or_default());
        for (variable, folder) in [("RUSTUP_HOME", ".rustup"), ("CARGO_HOME", ".cargo")] {
            let from = std::env::var_os(variable).map_or_else(|| home.join(folder), PathBuf::from);
            let to = self.root.join("opt").join(folder);
            let mut from = from.into_os_string();
            from.push("/");
            fs::create_dir_all(&to).map_err(|e| e.to_string())?;
            tool(Command::new("rsync").arg("-a").arg(from).arg(to))?;
        }
        Ok(self)
    }

    /// Runs README's first command, with a line for the guest's shell.
    fn boot(&self, case: &Case) -> Result<(), String> {
        self.set_up(case)?;
        let command = "cargo run --quiet --release -p anykvm -- boot";
        let outcome = self.run(case.is_root, command, b"uname -s; echo $((6 * 7))\n", BUILD)?;
        // An ordinary user without lists gets told what to run, and nothing more.
        if !case.is_root && !case.has_lists {
            let is_told =
                outcome.errors.contains("apt-get update") && outcome.errors.contains("--kernel");
            if outcome.status != Some(2) || !is_told {
                return Err(format!("{command}: {outcome:?}"));
            }
            return Ok(());
        }
        if outcome.status != Some(0) || outcome.output != "Linux\n42\n" {
            return Err(format!("{command}: {outcome:?}"));
        }
        Ok(())
    }

    /// Runs README's second command. It says in one command all that is missing; as root it goes on.
    fn suite(&self, case: &Case, is_whole: bool) -> Result<(), String> {
        if case.is_root && !is_whole {
            return Ok(());
        }
        let outcome = self.run(case.is_root, "cargo xtask ci", b"", BUILD * 3)?;
        let is_right = if case.is_root {
            outcome.status == Some(0)
        } else {
            outcome.status == Some(1)
                && outcome.errors.contains("sudo sh -c '")
                && outcome.errors.contains("qemu-system-x86")
                && !outcome.errors.contains("== ")
        };
        if !is_right {
            return Err(format!("cargo xtask ci: {outcome:?}"));
        }
        Ok(())
    }

    /// Restores the state in which nobody has run anything here.
    fn set_up(&self, case: &Case) -> Result<(), String> {
        let lists = if case.has_lists {
            "apt-get update -qq"
        } else {
            "rm -rf /var/lib/apt/lists/*"
        };
        let script = format!(
            "{lists}; rm -rf /root/.cache /home/{USER}/.cache /var/cache/apt/archives/*.deb; \
             chown -R {} /src /opt/.cargo",
            if case.is_root { "root" } else { USER }
        );
        self.shell(true, &script, b"", BUILD).map(drop)
    }

    fn shell(
        &self,
        is_root: bool,
        script: &str,
        input: &[u8],
        limit: Duration,
    ) -> Result<Outcome, String> {
        let outcome = self.run(is_root, script, input, limit)?;
        if outcome.status == Some(0) {
            Ok(outcome)
        } else {
            Err(format!("{script}: {outcome:?}"))
        }
    }

    /// Runs a shell's line in the machine, in mount and process namespaces of its own.
    fn run(
        &self,
        is_root: bool,
        script: &str,
        input: &[u8],
        limit: Duration,
    ) -> Result<Outcome, String> {
        let user = if is_root { "root" } else { USER };
        let root = self.root.display();
        let inner = format!(
            "export PATH=/opt/.cargo/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
             RUSTUP_HOME=/opt/.rustup CARGO_HOME=/opt/.cargo; cd /src 2>/dev/null || cd /; {script}"
        );
        // Not chroot, in which the kernel allows no user namespaces.
        let outer = format!(
            "set -e; mount --make-rprivate /; mount --bind {root} {root}; cd {root}; mount -t proc proc proc; \
             mount --rbind /dev dev; mount --rbind /sys sys; cp /etc/resolv.conf etc/resolv.conf; \
             mkdir -p outside; pivot_root . outside; umount -l outside; exec su {user} -s /bin/sh -c \"$1\""
        );
        let mut child = Command::new("unshare")
            .args([
                "--mount",
                "--pid",
                "--fork",
                "--kill-child",
                "sh",
                "-c",
                &outer,
                "sh",
                &inner,
            ])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|e| format!("unshare: {e}"))?;
        if let Some(mut stdin) = child.stdin.take() {
            // A program that does not read its input has ended.
            let _ = stdin.write_all(input);
        }
        let streams = [
            collect(child.stdout.take().map(|s| Box::new(s) as _)),
            collect(child.stderr.take().map(|s| Box::new(s) as _)),
        ];
        let end = Instant::now() + limit;
        let status = loop {
            if let Some(status) = child.try_wait().map_err(|e| e.to_string())? {
                break status.code();
            }
            if Instant::now() > end {
                let _ = child.kill();
                let _ = child.wait();
                break None;
            }
            std::thread::sleep(Duration::from_millis(50));
        };
        let [output, errors] = streams.map(|stream| stream.join().unwrap_or_default());
        Ok(Outcome {
            status,
            output,
            errors,
        })
    }
}

/// The outcome of a command.
#[derive(Debug)]
struct Outcome {
    status: Option<i32>,
    output: String,
    errors: String,
}

fn collect(stream: Option<Box<dyn std::io::Read + Send>>) -> std::thread::JoinHandle<String> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(mut stream) = stream {
            // Bytes before an error are kept.
            let _ = stream.read_to_end(&mut bytes);
        }
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cases_have_names_of_their_own() {
        for (n, case) in CASES.iter().enumerate() {
            assert!(
                CASES
                    .iter()
                    .skip(n + 1)
                    .all(|other| other.name != case.name)
            );
        }
    }
}
