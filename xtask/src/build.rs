//! The release build of `anykvm` that boots and benches use, and the folder of fetched files.

use std::{
    path::PathBuf,
    process::{Command, Stdio},
};

/// Builds `anykvm` optimised. Returns the program.
pub(crate) fn anykvm() -> Result<PathBuf, String> {
    release(&["-p", "anykvm"])?;
    Ok(target().join("release/anykvm"))
}

/// Runs `cargo build --release` for what the arguments name.
pub(crate) fn release(arguments: &[&str]) -> Result<(), String> {
    let status = Command::new(env!("CARGO"))
        .args(["build", "--release", "--quiet"])
        .args(arguments)
        .current_dir(crate::tidy::root())
        .stdin(Stdio::null())
        .status()
        .map_err(|e| format!("cannot run cargo: {e}"))?;
    if status.success() {
        Ok(())
    } else {
        Err(format!(
            "cargo build --release {} failed",
            arguments.join(" ")
        ))
    }
}

/// Returns Cargo's output folder.
pub(crate) fn target() -> PathBuf {
    let root = crate::tidy::root();
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), |t| root.join(t))
}

/// Returns the folder of files that are fetched from Debian and never committed.
pub(crate) fn cache() -> PathBuf {
    crate::tidy::root().join(".cache")
}
