//! What the suite takes from the host: Debian packages, files, an i386 busybox.
//!
//! Nothing is skipped: what is missing is installed, and what cannot be is an error.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use super::programs::BUSYBOX_I386;

/// Installs those packages that are missing; needs root for that.
pub(super) fn install(packages: &[&str]) -> Result<(), String> {
    let missing: Vec<&str> = packages
        .iter()
        .copied()
        .filter(|p| !is_installed(p))
        .collect();
    if missing.is_empty() {
        return Ok(());
    }
    eprintln!("guests: installing {}", missing.join(" "));
    let mut apt = Command::new("apt-get");
    apt.args(["install", "-y", "-qq", "--no-install-recommends"])
        .args(&missing)
        .env("DEBIAN_FRONTEND", "noninteractive");
    run(&mut apt)
        .map(drop)
        .map_err(|e| format!("install {} first ({e})", missing.join(" ")))
}

fn is_installed(package: &str) -> bool {
    let mut query = Command::new("dpkg-query");
    query.args(["-W", "-f", "${Status}", package]);
    run(&mut query).is_ok_and(|status| status.trim() == "install ok installed")
}

/// Makes the folder of files that are not the host's own, and returns it.
pub(super) fn prepare() -> Result<PathBuf, String> {
    let opt = crate::build::cache().join("guests-opt");
    let busybox = opt.join(BUSYBOX_I386);
    if busybox.exists() {
        return Ok(opt);
    }
    let unpacked = unpack("busybox-static:i386", "busybox-i386")?;
    fs::create_dir_all(&opt).map_err(|e| format!("{}: {e}", opt.display()))?;
    for place in ["bin/busybox", "usr/bin/busybox"] {
        if unpacked.join(place).exists() {
            return fs::copy(unpacked.join(place), &busybox)
                .map(|_| opt)
                .map_err(|e| format!("{}: {e}", busybox.display()));
        }
    }
    Err(format!("{}: no busybox in it", unpacked.display()))
}

/// Downloads and unpacks a Debian package into the cache, once; returns the folder.
pub(crate) fn unpack(package: &str, name: &str) -> Result<PathBuf, String> {
    let cache = crate::build::cache();
    let place = cache.join(name);
    if place.exists() {
        return Ok(place);
    }
    let download = cache.join(format!("{name}.partial"));
    let cannot = |e: std::io::Error| format!("{}: {e}", download.display());
    // A leftover of an interrupted run.
    let _ = fs::remove_dir_all(&download);
    fs::create_dir_all(&download).map_err(cannot)?;
    if package.ends_with(":i386") {
        add_i386()?;
    }
    run(Command::new("apt-get")
        .args(["download", "-qq", package])
        .current_dir(&download))?;
    let deb = fs::read_dir(&download)
        .map_err(cannot)?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .find(|path| path.extension().is_some_and(|e| e == "deb"))
        .ok_or_else(|| format!("apt-get download {package} left no file"))?;
    let content = download.join("content");
    run(Command::new("dpkg").arg("-x").arg(deb).arg(&content))?;
    fs::rename(&content, &place).map_err(cannot)?;
    fs::remove_dir_all(&download).map_err(cannot)?;
    Ok(place)
}

/// Makes apt know the i386 packages.
fn add_i386() -> Result<(), String> {
    let known = run(Command::new("dpkg").arg("--print-foreign-architectures"))?;
    if known.lines().any(|l| l == "i386") {
        return Ok(());
    }
    run(Command::new("dpkg").args(["--add-architecture", "i386"]))?;
    run(Command::new("apt-get").args(["update", "-qq"])).map(drop)
}

/// The paths with `*` replaced by what is there. All have to exist.
pub(super) fn expand(paths: &[&str]) -> Result<Vec<String>, String> {
    let mut found = Vec::new();
    for path in paths {
        let Some((before, after)) = path.split_once('*') else {
            if !Path::new(path).exists() {
                return Err(format!("{path}: not on this machine"));
            }
            found.push((*path).to_owned());
            continue;
        };
        let (folder, prefix) = before.rsplit_once('/').unwrap_or(("", before));
        let entries = fs::read_dir(folder).map_err(|e| format!("{folder}: {e}"))?;
        let mut names: Vec<String> = entries
            .filter_map(|e| Some(e.ok()?.file_name().to_string_lossy().into_owned()))
            .filter(|n| n.len() >= prefix.len() + after.len())
            .filter(|n| n.starts_with(prefix) && n.ends_with(after))
            .map(|n| format!("{folder}/{n}"))
            .filter(|p| Path::new(p).is_file())
            .collect();
        if names.is_empty() {
            return Err(format!("{path}: nothing like it on this machine"));
        }
        names.sort();
        found.append(&mut names);
    }
    Ok(found)
}

/// Standard output, or what went wrong.
fn run(command: &mut Command) -> Result<String, String> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command
        .output()
        .map_err(|e| format!("cannot run {program}: {e}"))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let errors = String::from_utf8_lossy(&output.stderr);
    let line = errors.lines().last().unwrap_or("no reason given");
    Err(format!("{program}: {line}"))
}

#[cfg(test)]
mod tests {
    use super::expand;

    #[test]
    fn a_star_stands_for_what_is_there() {
        let found = expand(&["/proc/self/stat*", "/proc/self/maps"]).unwrap();
        assert!(found.contains(&"/proc/self/status".to_owned()));
        assert!(found.contains(&"/proc/self/maps".to_owned()));
        assert!(expand(&["/proc/self/nothing*"]).is_err());
        assert!(expand(&["/nonexistent"]).is_err());
    }
}
