//! `cargo xtask tidy`: what rustc and clippy do not check.
//!
//! File documentation, file sizes, which crates may contain `unsafe`, edges
//! between layers, and links in ARCHITECTURE.md.

mod files;
mod layers;
mod links;

use std::path::{Path, PathBuf};

/// The workspace's root.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .unwrap_or(Path::new("."))
        .to_path_buf()
}

/// Runs every lint and lists all that it finds.
pub(crate) fn run() -> Result<(), String> {
    let root = root();
    let mut findings = files::check(&root)?;
    findings.extend(layers::check(&root)?);
    findings.extend(links::check(&root)?);
    if findings.is_empty() {
        return Ok(());
    }
    Err(format!(
        "tidy: {} finding(s)\n{}",
        findings.len(),
        findings.join("\n")
    ))
}

/// A file's text, or an error that names it.
fn read(path: &Path) -> Result<String, String> {
    std::fs::read_to_string(path).map_err(|e| format!("{}: {e}", path.display()))
}
