//! A kernel and a busybox from Debian: what is on the machine already, else from its packages.
//!
//! `apt-get download` and `dpkg -x` need no privileges, only package lists.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::closure::needs;
use crate::error::BootError;
use crate::terminal;

const KERNEL_PACKAGE: &str = "linux-image-cloud-amd64";
const BUSYBOX_PACKAGE: &str = "busybox-static";

/// A kernel: from our cache, from /boot, or fetched into the cache.
pub(crate) fn kernel() -> Result<PathBuf, BootError> {
    let cache = cache_folder();
    let cached = cache.join("kernel");
    if let Some(found) = newest_kernel(&cached.join("boot")) {
        return Ok(found);
    }
    if let Some(found) = newest_kernel(Path::new("/boot")) {
        return Ok(found);
    }
    let package = dependency(KERNEL_PACKAGE)?;
    fetch(&package, &cache, "kernel")?;
    newest_kernel(&cached.join("boot")).ok_or_else(|| {
        BootError::NoImage(format!(
            "the package {package} holds no kernel; use --kernel FILE"
        ))
    })
}

/// A statically linked busybox: the machine's, or Debian's.
pub(crate) fn busybox() -> Result<PathBuf, BootError> {
    let cache = cache_folder();
    let cached = ["busybox/bin/busybox", "busybox/usr/bin/busybox"].map(|path| cache.join(path));
    let installed = ["/bin/busybox", "/usr/bin/busybox"].map(PathBuf::from);
    let find = || {
        let mut candidates = cached.iter().chain(&installed);
        candidates.find(|path| is_static(path)).cloned()
    };
    if let Some(found) = find() {
        return Ok(found);
    }
    fetch(BUSYBOX_PACKAGE, &cache, "busybox")?;
    find().ok_or_else(|| BootError::NoImage("the busybox-static package holds no busybox".into()))
}

/// `$XDG_CACHE_HOME/anykvm`, `~/.cache/anykvm`, or `./.cache/anykvm` for a user without a home.
fn cache_folder() -> PathBuf {
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
    set("XDG_CACHE_HOME")
        .map(PathBuf::from)
        .or_else(|| set("HOME").map(|home| Path::new(&home).join(".cache")))
        .unwrap_or_else(|| PathBuf::from(".cache"))
        .join("anykvm")
}

/// The newest readable `vmlinuz-*`.
fn newest_kernel(folder: &Path) -> Option<PathBuf> {
    let mut kernels: Vec<PathBuf> = fs::read_dir(folder)
        .ok()?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            name.starts_with("vmlinuz-") && fs::File::open(path).is_ok()
        })
        .collect();
    kernels.sort_by_key(|path| version_key(&path.to_string_lossy()));
    kernels.pop()
}

/// Digits compare as numbers: 6.1.0-9 is older than 6.1.0-10.
fn version_key(name: &str) -> Vec<(u64, String)> {
    let mut key = Vec::new();
    for part in name.split(|c: char| !c.is_ascii_alphanumeric()) {
        key.push((part.parse().unwrap_or(0), part.to_owned()));
    }
    key
}

fn is_static(path: &Path) -> bool {
    fs::read(path)
        .is_ok_and(|bytes| bytes.starts_with(b"\x7fELF") && needs(&bytes).interpreter.is_none())
}

/// The versioned package that a meta package stands for.
fn dependency(package: &str) -> Result<String, BootError> {
    let output = run(Command::new("apt-cache").args(["depends", package]))?;
    let text = String::from_utf8_lossy(&output);
    text.lines()
        .find_map(|line| line.trim().strip_prefix("Depends: linux-image-"))
        .map(|rest| format!("linux-image-{rest}"))
        .ok_or_else(|| no_lists(package))
}

/// Downloads and unpacks `package` as `cache/name`, whole or not at all.
fn fetch(package: &str, cache: &Path, name: &str) -> Result<(), BootError> {
    if terminal::shows_progress() {
        eprintln!("anykvm: fetching Debian's package {package} (once)");
    }
    let partial = cache.join(format!("{name}.partial-{}", std::process::id()));
    let unpacked = partial.join("unpacked");
    fs::create_dir_all(&unpacked).map_err(BootError::host("cannot make the cache folder"))?;
    let result = download(package, &partial, &unpacked).and_then(|()| {
        let place = cache.join(name);
        match fs::rename(&unpacked, &place) {
            // Another anykvm was faster.
            Err(_) if place.exists() => Ok(()),
            other => other.map_err(BootError::host("cannot fill the cache folder")),
        }
    });
    // A leftover costs only space.
    let _ = fs::remove_dir_all(&partial);
    result
}

fn download(package: &str, partial: &Path, unpacked: &Path) -> Result<(), BootError> {
    run(Command::new("apt-get")
        .args(["download", "-q", package])
        .current_dir(partial))
    .map_err(|_| no_lists(package))?;
    let deb = fs::read_dir(partial)
        .map_err(BootError::host("cannot read the cache folder"))?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .find(|path| path.extension().is_some_and(|e| e == "deb"))
        .ok_or_else(|| no_lists(package))?;
    run(Command::new("dpkg").arg("-x").arg(deb).arg(unpacked)).map(drop)
}

fn no_lists(package: &str) -> BootError {
    BootError::NoImage(format!(
        "cannot fetch Debian's package {package}: run 'apt-get update' as root once and try again, or pass --kernel FILE (and --initrd FILE)"
    ))
}

/// Standard output, or the first line of standard error as the reason.
fn run(command: &mut Command) -> Result<Vec<u8>, BootError> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command.output().map_err(|error| {
        BootError::NoImage(format!(
            "no kernel found in /boot, and {program} cannot be run ({error}); pass --kernel FILE (and --initrd FILE)"
        ))
    })?;
    if output.status.success() {
        return Ok(output.stdout);
    }
    let text = String::from_utf8_lossy(&output.stderr);
    let line = text.lines().next().unwrap_or("no reason given");
    Err(BootError::NoImage(format!("{program} failed: {line}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_compare_by_number() {
        assert!(version_key("vmlinuz-6.1.0-9") < version_key("vmlinuz-6.1.0-10"));
        assert!(version_key("vmlinuz-5.10.0-30") < version_key("vmlinuz-6.1.0-1"));
    }

    #[test]
    fn this_program_is_not_static() {
        assert!(!is_static(&std::env::current_exe().unwrap()));
        assert!(!is_static(Path::new("/nonexistent")));
    }
}
