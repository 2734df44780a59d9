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

/// Returns true if apt's lists have the package.
pub(crate) fn is_known(package: &str) -> bool {
    // `apt-cache show` would take a name with a point in it for a pattern.
    let names = tool(Command::new("apt-cache").args(["pkgnames", package]));
    names.is_ok_and(|names| names.lines().any(|name| name == package))
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

/// Returns the kernel that a metapackage stands for today, as `boot/vmlinuz-RELEASE` beside `lib/modules`.
pub(crate) fn kernel(package: &str, name: &str) -> Result<PathBuf, String> {
    let place = crate::build::cache().join(name);
    let boot = place.join("boot");
    if !boot.exists() {
        if package.ends_with(":i386") {
            add_i386()?;
        }
        let image = depends(package)?
            .into_iter()
            .find(|name| name.starts_with("linux-image-"))
            .ok_or_else(|| format!("apt knows no {package}: run apt-get update"))?;
        // Linux 6.19 and later have the kernel and its modules in packages of their own.
        let mut packages = depends(&image)?;
        packages.retain(|p| p.starts_with("linux-binary-") || p.starts_with("linux-modules-"));
        packages.insert(0, image);
        unpack_all(&packages, name)?;
        as_in_older_packages(&place).map_err(|e| format!("{}: {e}", place.display()))?;
        decompress_modules(&place)?;
    }
    newest(&boot).ok_or_else(|| format!("{}: no kernel in it", boot.display()))
}

/// Returns the release of such a kernel.
pub(crate) fn release(kernel: &Path) -> String {
    let name = kernel.file_name().unwrap_or_default().to_string_lossy();
    name.trim_start_matches("vmlinuz-").to_owned()
}

/// Returns the names of the packages that a package depends on.
pub(crate) fn depends(package: &str) -> Result<Vec<String>, String> {
    let depends = tool(Command::new("apt-cache").args(["depends", package]))?;
    let names = depends
        .lines()
        .filter_map(|l| l.trim().strip_prefix("Depends: "));
    Ok(names.map(str::to_owned).collect())
}

/// Moves the kernel and its modules to where the packages of Linux 6.1 have them.
fn as_in_older_packages(place: &Path) -> std::io::Result<()> {
    let modules = place.join("usr/lib/modules");
    if !modules.exists() {
        return Ok(());
    }
    let boot = place.join("boot");
    fs::create_dir_all(&boot)?;
    for entry in fs::read_dir(&modules)? {
        let entry = entry?;
        let kernel = entry.path().join("vmlinuz");
        if kernel.exists() {
            let release = entry.file_name().to_string_lossy().into_owned();
            fs::rename(kernel, boot.join(format!("vmlinuz-{release}")))?;
        }
    }
    fs::create_dir_all(place.join("lib"))?;
    fs::rename(modules, place.join("lib/modules"))
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

/// Debian 13's modules are compressed.
fn decompress_modules(place: &Path) -> Result<(), String> {
    let modules = place.join("lib/modules");
    let found = |limit: &[&str]| {
        let mut find = Command::new("find");
        find.arg(&modules).args(["-name", "*.ko.xz"]).args(limit);
        tool(&mut find)
    };
    if found(&["-print", "-quit"])?.is_empty() {
        return Ok(());
    }
    install(&["xz-utils"])?;
    found(&["-exec", "xz", "-d", "{}", "+"]).map(drop)
}

/// Downloads and unpacks a Debian package into the cache, if it is not there. Returns the folder.
pub(crate) fn unpack(package: &str, name: &str) -> Result<PathBuf, String> {
    unpack_all(&[package.to_owned()], name)
}

/// Downloads and unpacks Debian packages into one folder of the cache, if it is not there. Returns the folder.
fn unpack_all(packages: &[String], name: &str) -> Result<PathBuf, String> {
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
    if packages.iter().any(|package| package.ends_with(":i386")) {
        add_i386()?;
    }
    let fetch = || {
        let mut apt = Command::new("apt-get");
        tool(
            apt.args(["download", "-qq"])
                .args(packages)
                .current_dir(&download),
        )
    };
    // Old lists may not know the package, or name a version that the mirror has no more.
    if fetch().is_err() {
        update_lists();
        fetch()?;
    }
    let mut debs: Vec<PathBuf> = fs::read_dir(&download)
        .map_err(cannot)?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .collect();
    debs.retain(|path| path.extension().is_some_and(|e| e == "deb"));
    if debs.len() != packages.len() {
        return Err(format!(
            "apt-get download {} left {} files",
            packages.join(" "),
            debs.len()
        ));
    }
    let content = download.join("content");
    for deb in debs {
        tool(Command::new("dpkg").arg("-x").arg(deb).arg(&content))?;
    }
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
