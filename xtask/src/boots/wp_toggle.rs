//! `guests/linux-wp-toggle`: a module for Debian's kernel that toggles CR0.WP at each switch of tasks.
//!
//! While WP is clear the module writes to memory that is read-only for the kernel, and it counts these writes there: the
//! count says that WP had its effect. Once the module does not toggle any more, the count stays.

use std::{path::Path, time::Duration};

use testkit::boot::Boot;

use super::LIMIT;
use crate::{debian, kernel_module};

/// The sources, in `guests`.
pub(crate) const SOURCES: &str = "linux-wp-toggle";
/// The module's file.
pub(crate) const MODULE: &str = "wp_toggle.ko";
/// Fewer writes than the guest's tasks have switches.
const LEAST_WRITTEN: u64 = 5_000;

const COMMAND: &str = "
    insmod /opt/wp_toggle.ko || exit 3
    cd /sys/module/wp_toggle/parameters
    ssdd -f 10 -i 300 >/dev/null || exit 4
    echo 0 >toggle; cat written
    ssdd -f 10 -i 100 >/dev/null || exit 5
    cat written; rmmod wp_toggle; exit 7";

/// Builds the module, boots a guest with two vCPUs, and has tasks be traced step by step.
pub(super) fn run(anykvm: &Path) -> Result<Duration, String> {
    debian::install(&["rt-tests"])?;
    let kernel = debian::kernel("linux-image-cloud-amd64", "kernel-cloud-amd64")?;
    let module = kernel_module::build(&kernel, SOURCES)?.join(MODULE);
    let outcome = Boot::new(anykvm)
        .kernel(&kernel)
        .cpus(2)
        .limit(LIMIT)
        .overlay(&format!("{}:/opt/{MODULE}", module.display()))
        .overlay("/usr/bin/ssdd:/usr/bin/ssdd")
        .run(&["sh", "-c", COMMAND])
        .map_err(|e| format!("{}: {e}", anykvm.display()))?;
    let text = outcome.text();
    let written: Vec<u64> = text.lines().filter_map(|line| line.parse().ok()).collect();
    match written[..] {
        [first, last] if outcome.status == Some(7) && first == last && first >= LEAST_WRITTEN => {
            Ok(outcome.time)
        }
        _ => Err(format!(
            "status {:?}, output {text:?}\n{}",
            outcome.status,
            outcome.last_words(15)
        )),
    }
}
