//! `cargo xtask bench wp`: the module that toggles CR0.WP is built, and `anykvm bench wp` is run with it.

use std::process::Command;

use crate::{
    boots::wp_toggle::{MODULE, SOURCES},
    debian, kernel_module,
};

/// Runs the suite; fails if a bar is missed.
pub(super) fn run() -> Result<(), String> {
    debian::install(&["rt-tests"])?;
    let anykvm = crate::build::anykvm()?;
    let kernel = debian::kernel("linux-image-cloud-amd64", "kernel-cloud-amd64")?;
    let module = kernel_module::build(&kernel, SOURCES)?.join(MODULE);
    let mut command = Command::new(&anykvm);
    command.args(["bench", "wp", "--module"]).arg(module);
    let status = command.arg("--kernel").arg(kernel).status();
    match status.map_err(|e| format!("{}: {e}", anykvm.display()))? {
        status if status.success() => Ok(()),
        status => Err(format!("anykvm bench wp: {status}")),
    }
}
