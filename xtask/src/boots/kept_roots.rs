//! `guests/linux-kept-roots`: a module for the kernel of Debian 12 that makes CR3 loads keep address spaces, as
//! docs/paravirt.md offers it.
//!
//! The module is built from Debian's headers. A program checks that what one processor does to an address space is seen
//! by another that was not running it. When the module does not look for the
//! program's changes, the program has to fail.

use std::{
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use testkit::boot::Boot;

use super::LIMIT;
use crate::{debian, kernel_module, tool::tool};

const SOURCES: &str = "linux-kept-roots";
/// Loads that have to keep their address space, of some 100,000.
const LEAST_KEPT: u64 = 10_000;

const COMMAND: &str = "
    insmod /opt/kept_roots.ko || exit 3
    /opt/check 10000 || exit 4
    i=0; while [ $i -lt 200 ]; do /bin/true | cat; i=$((i + 1)); done
    hackbench -g 1 -l 100 >/dev/null || exit 5
    rmmod kept_roots; dmesg | sed -n 's/.*kept_roots: \\([0-9]*\\) loads kept.*/kept \\1/p'
    insmod /opt/kept_roots.ko || exit 6
    /opt/check 10000 /sys/module/kept_roots/parameters/careless; test $? = 1 || exit 8
    rmmod kept_roots; exit 7";

/// Builds the module, boots a guest without PCIDs, and runs the program. `None` if Debian's kernel is too new for it.
pub(super) fn run(anykvm: &Path) -> Result<Option<Duration>, String> {
    debian::install(&["rt-tests"])?;
    let kernel = debian::kernel("linux-image-cloud-amd64", "kernel-cloud-amd64")?;
    if version(&debian::release(&kernel)) >= (6, 3) {
        return Ok(None);
    }
    let folder = build(&kernel)?;
    let overlay = |name: &str| format!("{}:/opt/{name}", folder.join(name).display());
    let outcome = Boot::new(anykvm)
        .kernel(&kernel)
        .cpus(2)
        .limit(LIMIT)
        .overlay(&overlay("kept_roots.ko"))
        .overlay(&overlay("check"))
        .overlay("/usr/bin/hackbench:/usr/bin/hackbench")
        .option("--append", "nopcid")
        .run(&["sh", "-c", COMMAND])
        .map_err(|e| format!("{}: {e}", anykvm.display()))?;
    let text = outcome.text();
    if outcome.timed_out || outcome.status != Some(7) {
        return Err(format!(
            "status {:?}, output {text:?}\n{}",
            outcome.status,
            outcome.last_words(15)
        ));
    }
    let kept = text.lines().find_map(|line| line.strip_prefix("kept "));
    let kept = kept.and_then(|kept| kept.parse::<u64>().ok());
    if kept.is_none_or(|kept| kept < LEAST_KEPT) {
        return Err(format!("{kept:?} loads kept their address space: {text:?}"));
    }
    Ok(Some(outcome.time))
}

/// Returns the first two numbers of a kernel's release.
fn version(release: &str) -> (u32, u32) {
    let mut numbers = release
        .split(['.', '-', '+'])
        .map(|n| n.parse().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
}

/// Makes a folder with the module for this kernel, and the program.
fn build(kernel: &Path) -> Result<PathBuf, String> {
    let folder = kernel_module::build(kernel, SOURCES)?;
    let mut gcc = Command::new("gcc");
    gcc.args(["-O2", "-static", "-pthread", "-o"]);
    tool(gcc.arg(folder.join("check")).arg(folder.join("check.c")))?;
    Ok(folder)
}

#[cfg(test)]
mod tests {
    use super::version;

    #[test]
    fn versions() {
        assert_eq!(version("6.1.0-50-cloud-amd64"), (6, 1));
        assert_eq!(version("6.12.117+deb13-cloud-amd64"), (6, 12));
        assert_eq!(version("7.3-cloud-amd64"), (7, 3));
    }
}
