//! Modules for Debian's kernels, built from the sources in `guests/` and Debian's headers.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use crate::{debian, tidy::root, tool::tool};

/// Builds the module in `guests/NAME` for a kernel (`…/vmlinuz-RELEASE`). Returns the folder that the module, and a copy of
/// its sources, are in.
pub(crate) fn build(kernel: &Path, name: &str) -> Result<PathBuf, String> {
    let release = debian::release(kernel);
    // What a kernel has to be built with depends on Debian's release. The headers are only unpacked.
    let depends = debian::depends(&format!("linux-headers-{release}"))?;
    let compiler = depends.iter().find_map(|package| compiler(package));
    let compiler = compiler.ok_or_else(|| format!("{release}: what compiled it is not told"))?;
    debian::install(&["make", compiler])?;
    let headers = headers(&release, depends)?;
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

/// Returns `gcc-N` if the package has the compiler in its name: `linux-compiler-gcc-12-x86`, `gcc-14`, `gcc-16-for-host`.
fn compiler(package: &str) -> Option<&str> {
    let name = package.get(package.find("gcc-")?..)?;
    let digits = name.get(4..)?.find(|c: char| !c.is_ascii_digit());
    name.get(..digits.map_or(name.len(), |end| end + 4))
}

/// A kernel's headers, as their package and those that it depends on would install them.
fn headers(release: &str, depends: Vec<String>) -> Result<PathBuf, String> {
    let root = crate::build::cache().join(format!("headers-{release}"));
    let own = root.join(format!("usr/src/linux-headers-{release}"));
    if own.exists() {
        return Ok(own);
    }
    let partial = crate::build::cache().join(format!("headers-{release}.partial"));
    let failed = |e: std::io::Error| format!("{}: {e}", partial.display());
    let mut packages = depends;
    packages.retain(|p| p.starts_with("linux-headers-") || p.starts_with("linux-kbuild-"));
    packages.push(format!("linux-headers-{release}"));
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

#[cfg(test)]
mod tests {
    use super::compiler;

    #[test]
    fn compilers_by_the_names_of_packages() {
        for (package, want) in [
            ("linux-compiler-gcc-12-x86", Some("gcc-12")),
            ("gcc-14", Some("gcc-14")),
            ("gcc-16-for-host", Some("gcc-16")),
            ("linux-kbuild-6.1", None),
        ] {
            assert_eq!(compiler(package), want);
        }
    }
}
