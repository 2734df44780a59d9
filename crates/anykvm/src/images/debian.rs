//! A kernel and a busybox: those on the machine, else from Debian's or Ubuntu's packages.
//!
//! `apt-get download` and `dpkg -x` need no privileges, only package lists.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::closure::needs;
use crate::error::BootError;
use crate::{setup, terminal};

/// Where apt keeps what it has fetched.
const ARCHIVES: &str = "/var/cache/apt/archives";
/// Where distributions keep modules and, many of them, the kernel beside them (`RELEASE/vmlinuz`).
const MODULES: &str = "/usr/lib/modules";
/// What the names of kernels' packages begin with.
const IMAGE: &str = "linux-image-";
/// What the names of the packages begin with into which Linux 6.19 and later are divided: the kernel and its modules.
const PARTS: [&str; 2] = ["linux-binary-", "linux-modules-"];

/// A file that is looked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wanted {
    Kernel,
    Busybox,
}

/// Debian's package that stands for the newest kernel for virtual machines.
const DEBIANS: &str = "linux-image-cloud-amd64";
/// Ubuntu's.
const UBUNTUS: &str = "linux-image-virtual";
/// How the names of such kernels' packages end.
const FLAVOURS: [&str; 2] = ["-cloud-amd64", "-generic"];

impl Wanted {
    fn folder(self) -> &'static str {
        match self {
            Self::Kernel => "kernel",
            Self::Busybox => "busybox",
        }
    }

    /// Makes an error that says what is missing and how a user can provide it.
    fn missing(self, why: &str) -> BootError {
        let text = match self {
            Self::Kernel => format!(
                "no kernel was given or found in /boot, and {why}; or pass --kernel FILE: any \
                 distribution's kernel package has one (/boot/vmlinuz-RELEASE)"
            ),
            Self::Busybox => format!(
                "no static busybox was found, and {why}; or pass --busybox FILE (distributions \
                 have it in busybox-static or busybox), or an initramfs with --initrd FILE"
            ),
        };
        BootError::NoImage(text)
    }
}

/// Returns a kernel: from our cache, from /boot or /usr/lib/modules, or fetched into the cache.
pub(crate) fn kernel() -> Result<PathBuf, BootError> {
    let found = || {
        let cached = cache_folder().and_then(|cache| newest_kernel(&cache.join("kernel/boot")));
        cached
            .or_else(|| newest_kernel(Path::new("/boot")))
            .or_else(|| newest_beside_modules(Path::new(MODULES)))
    };
    find_or_fetch(Wanted::Kernel, found)
}

/// Returns a statically linked busybox: the machine's, or Debian's.
pub(crate) fn busybox() -> Result<PathBuf, BootError> {
    let found = || {
        let cache = cache_folder().unwrap_or_default();
        let cached =
            ["busybox/bin/busybox", "busybox/usr/bin/busybox"].map(|path| cache.join(path));
        let installed = ["/bin/busybox", "/usr/bin/busybox"].map(PathBuf::from);
        let mut candidates = cached.into_iter().chain(installed);
        candidates.find(|path| path.is_absolute() && is_static(path))
    };
    find_or_fetch(Wanted::Busybox, found)
}

fn find_or_fetch(
    wanted: Wanted,
    found: impl Fn() -> Option<PathBuf>,
) -> Result<PathBuf, BootError> {
    if let Some(found) = found() {
        return Ok(found);
    }
    fetch(wanted)?;
    found().ok_or_else(|| wanted.missing("the distribution's package has none"))
}

/// Returns `$XDG_CACHE_HOME/anykvm` or `~/.cache/anykvm`.
fn cache_folder() -> Option<PathBuf> {
    let set = |name: &str| {
        let path = PathBuf::from(std::env::var_os(name)?);
        // Relative paths are ignored (XDG base directory specification).
        path.is_absolute().then_some(path)
    };
    set("XDG_CACHE_HOME")
        .or_else(|| Some(set("HOME")?.join(".cache")))
        .map(|folder| folder.join("anykvm"))
}

/// The same, to be written to: no folder of another user's, and none at a place by chance.
fn own_cache_folder() -> Result<PathBuf, BootError> {
    use std::os::unix::fs::MetadataExt;
    const ADVICE: &str = "set XDG_CACHE_HOME to a folder for it";
    let folder = cache_folder().ok_or_else(|| {
        BootError::NoImage(format!(
            "a package has to be fetched, but there is no HOME to keep it in: {ADVICE}"
        ))
    })?;
    let cannot = |why: String| {
        BootError::NoImage(format!(
            "cannot keep what is fetched in {}: {why}; {ADVICE}",
            folder.display()
        ))
    };
    // The nearest folder that is there already.
    let there = folder
        .ancestors()
        .find_map(|p| Some((p, p.metadata().ok()?)));
    if let Some((place, meta)) = there
        && meta.uid() != rustix::process::geteuid().as_raw()
        && std::env::var_os("XDG_CACHE_HOME").is_none()
    {
        return Err(cannot(format!("{} is another user's", place.display())));
    }
    fs::create_dir_all(&folder).map_err(|error| cannot(error.to_string()))?;
    rustix::fs::access(&folder, rustix::fs::Access::WRITE_OK)
        .map_err(|errno| cannot(std::io::Error::from(errno).to_string()))?;
    Ok(folder)
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

/// The newest readable `RELEASE/vmlinuz`.
fn newest_beside_modules(modules: &Path) -> Option<PathBuf> {
    let entries = fs::read_dir(modules).ok()?.flatten();
    let kernels = entries.map(|entry| entry.path().join("vmlinuz"));
    kernels
        .filter(|path| fs::File::open(path).is_ok())
        .max_by_key(|path| version_key(&path.to_string_lossy()))
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

/// Fetches and unpacks a package into the cache, whole or not at all.
fn fetch(wanted: Wanted) -> Result<(), BootError> {
    for program in ["apt-get", "apt-cache", "dpkg"] {
        if anykvm_preload::program::find(program.as_ref()).is_none() {
            return Err(wanted.missing("it cannot be fetched without apt (no Debian or Ubuntu)"));
        }
    }
    let cache = own_cache_folder()?;
    let name = wanted.folder();
    forget_leftovers(&cache, name);
    let partial = cache.join(format!("{name}.partial-{}", std::process::id()));
    let partial = setup::Temporary::new(partial);
    let unpacked = partial.path().join("unpacked");
    fs::create_dir_all(&unpacked).map_err(BootError::host("cannot make the cache folder"))?;
    for deb in package_files(wanted, partial.path())? {
        let unpack = run(Command::new("dpkg").arg("-x").arg(deb).arg(&unpacked));
        unpack.map_err(|why| wanted.missing(&why))?;
    }
    put_into_boot(&unpacked).map_err(BootError::host("cannot fill the cache folder"))?;
    let place = cache.join(name);
    match fs::rename(&unpacked, &place) {
        // Another anykvm was faster.
        Err(_) if place.exists() => Ok(()),
        other => other.map_err(BootError::host("cannot fill the cache folder")),
    }
}

/// Folders of runs that were killed.
fn forget_leftovers(cache: &Path, name: &str) {
    let prefix = format!("{name}.partial-");
    for entry in fs::read_dir(cache).into_iter().flatten().flatten() {
        let file_name = entry.file_name();
        let pid = file_name.to_str().and_then(|n| n.strip_prefix(&prefix));
        if pid.is_some_and(|pid| !Path::new("/proc").join(pid).exists()) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

/// Moves a kernel that its package has beside its modules to `boot/vmlinuz-RELEASE`.
fn put_into_boot(unpacked: &Path) -> std::io::Result<()> {
    let modules = unpacked.join(MODULES.trim_start_matches('/'));
    let Some(kernel) = newest_beside_modules(&modules) else {
        return Ok(());
    };
    let release = kernel.parent().and_then(Path::file_name);
    let mut name = std::ffi::OsString::from("vmlinuz-");
    name.push(release.unwrap_or_default());
    let boot = unpacked.join("boot");
    fs::create_dir_all(&boot)?;
    fs::rename(kernel, boot.join(name))
}

/// The package and its parts as files: apt's own copies, or what is downloaded into `folder`.
fn package_files(wanted: Wanted, folder: &Path) -> Result<Vec<PathBuf>, BootError> {
    let why = match download(wanted, folder) {
        Ok(files) => return Ok(files),
        Err(why) => why,
    };
    let cannot = |why: String| wanted.missing(&format!("it cannot be fetched: {why}"));
    // The lists are missing, or name versions that are gone.
    if !rustix::process::geteuid().is_root() {
        return Err(cannot(format!(
            "{why}: is there a network, and are the package lists up to date (sudo apt-get update)?"
        )));
    }
    terminal::progress("updating apt's package lists");
    let update = run(Command::new("apt-get").args(["update", "-q"]));
    // An update that fails may still have fetched the list that is wanted.
    download(wanted, folder).map_err(|why| match update {
        Ok(_) => cannot(why),
        Err(update) => cannot(format!("{why}; {update}")),
    })
}

/// Fetches a package and its parts. The error is apt's own.
fn download(wanted: Wanted, folder: &Path) -> Result<Vec<PathBuf>, String> {
    let package = match wanted {
        Wanted::Kernel => dependency(DEBIANS).or_else(|why| dependency(UBUNTUS).map_err(|_| why)),
        Wanted::Busybox => Ok("busybox-static".to_owned()),
    };
    let prefix = match &package {
        Ok(package) => package.clone(),
        // Without lists, any version on this machine will do.
        Err(_) => IMAGE.to_owned(),
    };
    let file = match in_archives(Path::new(ARCHIVES), &prefix) {
        Some(file) => file,
        None => download_one(&package?, folder)?,
    };
    let parts = match wanted {
        Wanted::Kernel => parts(&file)?,
        Wanted::Busybox => Vec::new(),
    };
    let mut files = vec![file];
    for part in parts {
        files.push(match in_archives(Path::new(ARCHIVES), &part) {
            Some(file) => file,
            None => download_one(&part, folder)?,
        });
    }
    Ok(files)
}

/// Fetches the package of this name.
fn download_one(package: &str, folder: &Path) -> Result<PathBuf, String> {
    terminal::progress(&format!("fetching the package {package} (once)"));
    run(Command::new("apt-get")
        .args(["download", "-q", package])
        .current_dir(folder))?;
    in_archives(folder, package).ok_or_else(|| format!("apt-get download {package} left no file"))
}

/// Returns the packages with the [`PARTS`] of a kernel: none if the kernel is in this one.
fn parts(image: &Path) -> Result<Vec<String>, String> {
    let mut query = Command::new("dpkg-deb");
    let output = run(query.arg("-f").arg(image).arg("Depends"))?;
    let text = String::from_utf8_lossy(&output);
    let names = text.split(',').filter_map(|d| d.split_whitespace().next());
    Ok(names
        .filter(|name| PARTS.iter().any(|part| name.starts_with(part)))
        .map(str::to_owned)
        .collect())
}

/// Returns the newest package in the folder with a kernel, or of this name.
fn in_archives(archives: &Path, prefix: &str) -> Option<PathBuf> {
    let mut found: Vec<PathBuf> = debs(archives)
        .into_iter()
        .filter(|path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            let is_named = if prefix.ends_with('-') {
                is_kernel(&name)
            } else {
                name.split('_').next() == Some(prefix)
            };
            is_named && name.ends_with("_amd64.deb") && fs::File::open(path).is_ok()
        })
        .collect();
    found.sort_by_key(|path| version_key(&path.to_string_lossy()));
    found.pop()
}

/// Returns true for `linux-image-6.1.0-50-cloud-amd64_…`, and false for the package that stands for it.
fn is_kernel(file: &str) -> bool {
    let package = file.split('_').next().unwrap_or_default();
    let Some(release) = package.strip_prefix(IMAGE) else {
        return false;
    };
    release.starts_with(|c: char| c.is_ascii_digit())
        && FLAVOURS.iter().any(|flavour| release.ends_with(flavour))
}

fn debs(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let paths = entries.map(|entry| entry.path());
    paths
        .filter(|path| path.extension().is_some_and(|e| e == "deb"))
        .collect()
}

/// Returns the versioned package that a meta package stands for.
fn dependency(package: &str) -> Result<String, String> {
    let output = run(Command::new("apt-cache").args(["depends", package]))?;
    let text = String::from_utf8_lossy(&output);
    let mut names = text
        .lines()
        .filter_map(|line| line.trim().strip_prefix("Depends: "));
    names
        .find(|name| name.starts_with(IMAGE))
        .map(str::to_owned)
        .ok_or_else(|| format!("apt's lists have no {package}"))
}

/// Returns a program's standard output, or its errors.
fn run(command: &mut Command) -> Result<Vec<u8>, String> {
    let program = command.get_program().to_string_lossy().into_owned();
    // The messages are examined, so they have to be in a known language.
    let output = setup::run(command.env("LC_ALL", "C.UTF-8"))
        .map_err(|error| format!("{program} cannot be run ({error})"))?;
    if output.status.success() {
        return Ok(output.stdout);
    }
    let text = String::from_utf8_lossy(&output.stderr);
    let errors: Vec<&str> = text
        .lines()
        .filter(|line| line.starts_with("E: "))
        .collect();
    let reason = match errors.as_slice() {
        [] => text.lines().next().unwrap_or("no reason given").to_owned(),
        errors => errors.join(" "),
    };
    Err(format!("{program} says: {reason}"))
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

    #[test]
    fn packages_that_apt_has_fetched_are_found() {
        let folder = std::env::temp_dir().join(format!("anykvm-debs-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        for name in [
            "linux-image-cloud-amd64_6.1_amd64.deb",
            "linux-image-6.1.0-9-cloud-amd64_6.1.9-1_amd64.deb",
            "linux-image-6.1.0-10-cloud-amd64_6.1.10-1_amd64.deb",
            "linux-image-6.1.0-11-amd64_6.1.11-1_amd64.deb",
            "linux-image-5.15.0-204-generic_5.15.0-204.1_amd64.deb",
            "busybox-static_1.35_i386.deb",
            "busybox-static_1.35_amd64.deb",
            "busybox_1.35_amd64.deb",
        ] {
            fs::write(folder.join(name), "").unwrap();
        }
        let found = |prefix| {
            let path = in_archives(&folder, prefix)?;
            Some(path.file_name()?.to_str()?.to_owned())
        };
        let newest = "linux-image-6.1.0-10-cloud-amd64_6.1.10-1_amd64.deb";
        assert_eq!(found("linux-image-").as_deref(), Some(newest));
        let older = "linux-image-6.1.0-9-cloud-amd64";
        assert!(found(older).unwrap().starts_with(older));
        let busybox = "busybox-static_1.35_amd64.deb";
        assert_eq!(found("busybox-static").as_deref(), Some(busybox));
        assert_eq!(found("linux-image-7.0"), None);
        fs::remove_dir_all(folder).unwrap();
    }
}
