//! What `cargo xtask ci` needs of the machine: Debian packages, package lists, the i386 architecture. This is found out
//! before anything is built. For root it is installed; other users are told once, by one command, all that is missing.

use std::{fs, path::Path, process::Command};

use crate::{
    debian::{UPDATES, is_installed, run_update},
    tool::tool,
};

/// All packages that the steps use.
const PACKAGES: &[&str] = &[
    "busybox-static",
    "cpu-checker",
    "e2fsprogs",
    "gcc",
    "gdb",
    "libc6-dev",
    "libvirt-clients",
    "linux-libc-dev",
    "make",
    "mtools",
    "openssl",
    "ovmf",
    "perl-base",
    "python3",
    "qemu-system-x86",
    "qemu-utils",
    "rt-tests",
    "sqlite3",
    "syslinux",
    "xz-utils",
    "zstd",
];
/// The architecture of busybox, the 32-bit program of the suite.
const ARCHITECTURE: &str = "i386";

/// What is missing.
#[derive(Debug, Default, PartialEq, Eq)]
struct Missing {
    packages: Vec<&'static str>,
    architecture: bool,
    lists: bool,
}

impl Missing {
    fn find() -> Self {
        Self {
            packages: PACKAGES
                .iter()
                .copied()
                .filter(|p| !is_installed(p))
                .collect(),
            architecture: !has_architecture(),
            lists: !has_lists(Path::new("/var/lib/apt/lists")),
        }
    }

    fn is_nothing(&self) -> bool {
        *self == Self::default()
    }

    /// Returns the commands for root's shell that install what is missing.
    fn commands(&self) -> Vec<String> {
        if self.is_nothing() {
            return Vec::new();
        }
        let [own, all] = UPDATES.map(str::to_owned);
        let mut commands = vec![own];
        if self.architecture {
            commands.push(format!("dpkg --add-architecture {ARCHITECTURE}"));
        }
        commands.push(all);
        if !self.packages.is_empty() {
            commands.push(format!(
                "DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends {}",
                self.packages.join(" ")
            ));
        }
        commands
    }
}

/// Installs what is missing, or says what it is.
pub(crate) fn check() -> Result<(), String> {
    if tool(Command::new("dpkg-query").arg("--version")).is_err() {
        return Err("the suite runs on Debian: there is no dpkg here".to_owned());
    }
    let missing = Missing::find();
    if missing.is_nothing() {
        return Ok(());
    }
    let commands = missing.commands();
    if tool(Command::new("id").arg("-u"))?.trim() != "0" {
        return Err(format!(
            "this machine lacks something. Please run this once, then again what you ran:\n\n    \
             sudo sh -c '{}'\n",
            commands.join("; ")
        ));
    }
    install(&commands)?;
    // The packages may have replaced others: a QEMU of this release, the qemu-utils of another.
    install(&Missing::find().commands())?;
    let missing = Missing::find();
    if missing.is_nothing() {
        return Ok(());
    }
    Err(format!("still missing after apt-get: {missing:?}"))
}

/// Runs the commands, as root.
fn install(commands: &[String]) -> Result<(), String> {
    for command in commands {
        eprintln!("ci: {command}");
        if UPDATES.contains(&command.as_str()) {
            run_update(command);
        } else {
            tool(Command::new("sh").args(["-c", command]))?;
        }
    }
    Ok(())
}

fn has_architecture() -> bool {
    tool(Command::new("dpkg").arg("--print-foreign-architectures"))
        .is_ok_and(|text| text.lines().any(|line| line == ARCHITECTURE))
}

/// Returns true if there are package lists for both architectures.
fn has_lists(folder: &Path) -> bool {
    let names: Vec<String> = fs::read_dir(folder)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect();
    ["amd64", ARCHITECTURE].iter().all(|architecture| {
        let part = format!("binary-{architecture}_Packages");
        names.iter().any(|name| name.contains(&part))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_is_said_at_once() {
        let missing = Missing {
            packages: vec!["gdb", "zstd"],
            architecture: true,
            lists: true,
        };
        let text = missing.commands().join("; ");
        let [own, all] = UPDATES;
        assert!(text.starts_with(&format!("{own}; dpkg --add-architecture i386; {all}; ")));
        assert!(text.ends_with(" gdb zstd"), "{text}");
        assert!(Missing::default().commands().is_empty());
    }

    #[test]
    fn lists_of_both_architectures_are_needed() {
        let folder = std::env::temp_dir().join(format!("anykvm-lists-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        assert!(!has_lists(&folder));
        fs::write(
            folder.join("x_dists_bookworm_main_binary-amd64_Packages.lz4"),
            "",
        )
        .unwrap();
        assert!(!has_lists(&folder));
        fs::write(
            folder.join("x_dists_bookworm_main_binary-i386_Packages"),
            "",
        )
        .unwrap();
        assert!(has_lists(&folder));
        fs::remove_dir_all(&folder).unwrap();
        assert!(!has_lists(&folder));
    }
}
