//! Modules for Debian's kernels, built from the sources in `guests/` and Debian's headers.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use crate::{debian, tidy::root, tool::tool};

/// The packages that building takes, besides the headers, which are only unpacked.
const PACKAGES: &[&str] = &["make", "gcc-12"];

/// Builds the module in `guests/NAME` for a kernel (`…/vmlinuz-RELEASE`). Returns the folder that the module, and a copy of
/// its sources, are in.
pub(crate) fn build(kernel: &Path, name: &str) -> Result<PathBuf, String> {
    debian::install(PACKAGES)?;
    let file = kernel.file_name().unwrap_or_default().to_string_lossy();
    let release = file.trim_start_matches("vmlinuz-");
    let headers = headers(release)?;
    let (from, folder) = (
        root().join("guests").join(name),
        root().join("target").join(name),
    );
    let failed = |e: std::io::Error| format!("{}: {e}", folder.display());
    fs::create_dir_all(&folder).map_err(failed)?;
    for entry in fs::read_dir(&from).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        fs::copy(entry.path(), folder.join(entry.file_name())).map_err(failed)?;
    }
    let kernel = format!("KERNEL={}", headers.display());
    tool(Command::new("make").arg("-C").arg(&folder).arg(kernel))?;
    Ok(folder)
}

/// A kernel's headers, as its package would install them.
fn headers(release: &str) -> Result<PathBuf, String> {
    let root = crate::build::cache().join(format!("headers-{release}"));
    let own = root.join(format!("usr/src/linux-headers-{release}"));
    if own.exists() {
        return Ok(own);
    }
    // 6.1.0-50-cloud-amd64: what is common is 6.1.0-50's, its tools are 6.1's.
    let version = release.split('-').take(2).collect::<Vec<_>>().join("-");
    let series = version.split('.').take(2).collect::<Vec<_>>().join(".");
    let partial = crate::build::cache().join(format!("headers-{release}.partial"));
    let failed = |e: std::io::Error| format!("{}: {e}", partial.display());
    let packages = [
        format!("linux-headers-{release}"),
        format!("linux-headers-{version}-common"),
        format!("linux-kbuild-{series}"),
    ];
    // A leftover of an interrupted run.
    let _ = fs::remove_dir_all(&partial);
    fs::create_dir_all(&partial).map_err(failed)?;
    for package in packages {
        let place = debian::unpack(&package, &package)?;
        tool(
            Command::new("cp")
                .arg("-a")
                .arg(place.join("."))
                .arg(&partial),
        )?;
    }
    let makefile = partial.join(format!("usr/src/linux-headers-{release}/Makefile"));
    let text = fs::read_to_string(&makefile).map_err(failed)?;
    let text = text.replace("/usr/src/", &format!("{}/usr/src/", root.display()));
    fs::write(&makefile, text).map_err(failed)?;
    fs::rename(&partial, &root).map_err(failed)?;
    Ok(own)
}
