//! A kernel's selftests, unpacked from its source's package and built, below `.cache/`.

use std::{
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use super::suite::Suite;
use crate::tool::tool;

/// The packages that building the tests needs.
const NEEDED: &[&str] = &["gcc", "make", "libc6-dev", "linux-libc-dev", "xz-utils"];
const KVM: &str = "tools/testing/selftests/kvm";
/// The parts of the source that are needed.
const PARTS: &[&str] = &["tools", "include", "arch/x86", "scripts"];
/// The parts that `make headers` needs besides.
const HEADERS: &[&str] = &["Makefile", "usr"];

/// Unpacks and builds the tests, if that has not been done. Returns the folder with the programs.
pub(super) fn build(suite: &Suite) -> Result<PathBuf, String> {
    let cache = crate::build::cache();
    let place = cache.join(suite.programs);
    if !place.exists() {
        crate::debian::install(NEEDED)?;
        let package = crate::debian::unpack(suite.package, suite.package)?;
        let source = unpack(suite, &package, &cache.join("linux-source"))?;
        if suite.has_headers {
            let make = ["-j2", "-s", "ARCH=x86_64", "headers"];
            tool(Command::new("make").args(make).current_dir(&source))?;
        }
        let partial = cache.join(format!("{}.partial", suite.programs));
        let _ = fs::remove_dir_all(&partial);
        make(suite, &source.join(KVM), &partial)?;
        fs::rename(&partial, &place).map_err(|e| format!("{}: {e}", place.display()))?;
    }
    let unknown: Vec<String> = programs(&place)?
        .into_iter()
        .filter(|name| suite.tests.iter().all(|(test, _)| test != name))
        .collect();
    if !unknown.is_empty() {
        return Err(format!("not in the list: {}", unknown.join(" ")));
    }
    Ok(place)
}

/// Unpacks the parts of the kernel's source that the tests need.
fn unpack(suite: &Suite, package: &Path, to: &Path) -> Result<PathBuf, String> {
    let name = suite.package;
    let folder = to.join(name);
    if folder.exists() {
        return Ok(folder);
    }
    let partial = to.join("partial");
    let cannot = |e: std::io::Error| format!("{}: {e}", partial.display());
    let _ = fs::remove_dir_all(&partial);
    fs::create_dir_all(&partial).map_err(cannot)?;
    let archive = package.join(format!("usr/src/{name}.tar.xz"));
    let headers = if suite.has_headers { HEADERS } else { &[] };
    let parts = PARTS.iter().chain(headers);
    tool(
        Command::new("tar")
            .arg("-xJf")
            .arg(archive)
            .args(parts.map(|part| format!("{name}/{part}")))
            .current_dir(&partial),
    )?;
    fs::rename(partial.join(name), &folder).map_err(cannot)?;
    Ok(folder)
}

fn make(suite: &Suite, source: &Path, output: &Path) -> Result<(), String> {
    let mut output_argument = OsString::from("OUTPUT=");
    output_argument.push(output);
    // The dirty_log_test of 6.1 uses a macro of later kernels. Their headers' __DECLARE_FLEX_ARRAY is defined too late
    // for steal_time.
    let compiler = if suite.has_headers {
        "CC=gcc"
    } else {
        "CC=gcc -DTEST_ASSERT_EQ=ASSERT_EQ -include linux/stddef.h"
    };
    tool(
        Command::new("make")
            .args(["-j2", "-s", compiler])
            .arg(output_argument)
            .current_dir(source),
    )
    .map(drop)
}

/// Returns the programs below the folder, by the names that the lists use.
fn programs(folder: &Path) -> Result<Vec<String>, String> {
    use std::os::unix::fs::PermissionsExt;
    let mut names = Vec::new();
    for prefix in ["", "x86_64/"] {
        let folder = folder.join(prefix);
        let cannot = |e: std::io::Error| format!("{}: {e}", folder.display());
        for entry in fs::read_dir(&folder).map_err(cannot)? {
            let entry = entry.map_err(cannot)?;
            let data = entry.metadata().map_err(cannot)?;
            let name = entry.file_name().to_string_lossy().into_owned();
            let is_script = Path::new(&name).extension().is_some();
            if data.is_file() && data.permissions().mode() & 0o111 != 0 && !is_script {
                names.push(format!("{prefix}{name}"));
            }
        }
    }
    names.sort();
    Ok(names)
}
