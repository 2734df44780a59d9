//! Debian's packages, which are installed, or fetched and unpacked into `.cache/`.
//!
//! Nothing is skipped: a missing package is installed, and one that cannot be is an error.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use crate::tool::tool;

/// Commands that fetch the lists of packages: those of the host's architecture, then all.
///
/// While a mirror is updated, it may lack one list. apt then keeps all old lists of that suite. So a list of a foreign
/// architecture must not be asked for before those of the host's are there.
pub(crate) const UPDATES: [&str; 2] = [
    "apt-get update -q -o APT::Architectures=amd64 -o APT::Get::List-Cleanup=0",
    "apt-get update -q",
];

/// Fetches the lists of packages, as root.
pub(crate) fn update_lists() {
    UPDATES.into_iter().for_each(run_update);
}

/// Runs one of [`UPDATES`]. If a package is missing because that fails, the error comes later.
pub(crate) fn run_update(command: &str) {
    if let Err(error) = tool(Command::new("sh").args(["-c", command])) {
        eprintln!("xtask: going on with the lists there are: {error}");
    }
}

/// Installs the packages that are missing, for which it needs root.
pub(crate) fn install(packages: &[&str]) -> Result<(), String> {
    let missing: Vec<&str> = packages
        .iter()
        .copied()
        .filter(|p| !is_installed(p))
        .collect();
    if missing.is_empty() {
        return Ok(());
    }
    eprintln!("xtask: installing {}", missing.join(" "));
    let mut apt = Command::new("apt-get");
    apt.args(["install", "-y", "-qq", "--no-install-recommends"])
        .args(&missing)
        .env("DEBIAN_FRONTEND", "noninteractive");
    tool(&mut apt)
        .map(drop)
        .map_err(|e| format!("install {} first ({e})", missing.join(" ")))
}

pub(crate) fn is_installed(package: &str) -> bool {
    let mut query = Command::new("dpkg-query");
    query.args(["-W", "-f", "${Status}", package]);
    tool(&mut query).is_ok_and(|status| status.trim() == "install ok installed")
}

/// Returns a 32-bit static busybox.
pub(crate) fn busybox_i386() -> Result<PathBuf, String> {
    let unpacked = unpack("busybox-static:i386", "busybox-i386")?;
    ["bin/busybox", "usr/bin/busybox"]
        .map(|place| unpacked.join(place))
        .into_iter()
        .find(|path| path.exists())
        .ok_or_else(|| format!("{}: no busybox in it", unpacked.display()))
}

/// Returns the kernel that a metapackage stands for today.
pub(crate) fn kernel(package: &str, name: &str) -> Result<PathBuf, String> {
    let boot = crate::build::cache().join(name).join("boot");
    if !boot.exists() {
        if package.ends_with(":i386") {
            add_i386()?;
        }
        let depends = tool(Command::new("apt-cache").args(["depends", package]))?;
        let image = depends
            .lines()
            .find_map(|l| l.trim().strip_prefix("Depends: "))
            .ok_or_else(|| format!("apt knows no {package}: run apt-get update"))?;
        unpack(image, name)?;
    }
    newest(&boot).ok_or_else(|| format!("{}: no kernel in it", boot.display()))
}

fn newest(boot: &Path) -> Option<PathBuf> {
    let entries = fs::read_dir(boot).ok()?;
    entries
        .filter_map(|e| Some(e.ok()?.path()))
        .filter(|p| {
            p.file_name()
                .is_some_and(|n| n.to_string_lossy().starts_with("vmlinuz-"))
        })
        .max()
}

/// Downloads and unpacks a Debian package into the cache, if it is not there. Returns the folder.
pub(crate) fn unpack(package: &str, name: &str) -> Result<PathBuf, String> {
    let cache = crate::build::cache();
    let place = cache.join(name);
    if place.exists() {
        return Ok(place);
    }
    let download = cache.join(format!("{name}.partial"));
    let cannot = |e: std::io::Error| format!("{}: {e}", download.display());
    // The folder may be left over from an interrupted run.
    let _ = fs::remove_dir_all(&download);
    fs::create_dir_all(&download).map_err(cannot)?;
    if package.ends_with(":i386") {
        add_i386()?;
    }
    let fetch = || {
        let mut apt = Command::new("apt-get");
        tool(
            apt.args(["download", "-qq", package])
                .current_dir(&download),
        )
    };
    // Old lists may not know the package, or name a version that the mirror has no more.
    if fetch().is_err() {
        update_lists();
        fetch()?;
    }
    let deb = fs::read_dir(&download)
        .map_err(cannot)?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .find(|path| path.extension().is_some_and(|e| e == "deb"))
        .ok_or_else(|| format!("apt-get download {package} left no file"))?;
    let content = download.join("content");
    tool(Command::new("dpkg").arg("-x").arg(deb).arg(&content))?;
    fs::rename(&content, &place).map_err(cannot)?;
    fs::remove_dir_all(&download).map_err(cannot)?;
    Ok(place)
}

/// Makes apt know the i386 packages.
fn add_i386() -> Result<(), String> {
    let known = tool(Command::new("dpkg").arg("--print-foreign-architectures"))?;
    if known.lines().any(|l| l == "i386") {
        return Ok(());
    }
    tool(Command::new("dpkg").args(["--add-architecture", "i386"]))?;
    update_lists();
    Ok(())
}
