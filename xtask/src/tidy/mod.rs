//! `cargo xtask tidy`: checks that rustc and clippy do not make.
//!
//! File documentation, file sizes, which crates may contain `unsafe`, edges
//! between layers, links in the documents, names, orphaned files, reminders,
//! the list of quirks, variables of the environment, and what is known and may only become less (`ratchet`).
//! One file per lint.

mod files;
mod layers;
mod links;
mod names;
mod orphans;
pub(crate) mod quirks;
pub(crate) mod ratchet;
mod reminders;
mod variables;

use std::path::{Path, PathBuf};

/// Returns the workspace's root.
pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .unwrap_or(Path::new("."))
        .to_path_buf()
}

/// Runs every lint, and lists all findings.
pub(crate) fn run() -> Result<(), String> {
    let root = root();
    let mut findings = files::check(&root)?;
    findings.extend(layers::check(&root)?);
    findings.extend(links::check(&root)?);
    findings.extend(names::check(&root)?);
    findings.extend(orphans::check(&root)?);
    findings.extend(reminders::check(&root)?);
    findings.extend(quirks::check(&root)?);
    findings.extend(variables::check(&root)?);
    findings.extend(ratchet::check(&root)?);
    if findings.is_empty() {
        return Ok(());
    }
    Err(format!(
        "tidy: {} finding(s)\n{}",
        findings.len(),
        findings.join("\n")
    ))
}

/// Returns a file's text. The error names the file.
fn read(path: &Path) -> Result<String, String> {
    std::fs::read_to_string(path).map_err(|e| format!("{}: {e}", path.display()))
}

/// Returns every Rust source file of the workspace, sorted.
fn sources(root: &Path) -> Result<Vec<PathBuf>, String> {
    let mut files = Vec::new();
    let mut dirs = vec![root.join("crates"), root.join("xtask")];
    while let Some(dir) = dirs.pop() {
        let entries = std::fs::read_dir(&dir).map_err(|e| format!("{}: {e}", dir.display()))?;
        for entry in entries {
            let path = entry.map_err(|e| e.to_string())?.path();
            if path.is_dir() {
                if !path.ends_with("target") {
                    dirs.push(path);
                }
            } else if path.extension().is_some_and(|e| e == "rs") {
                files.push(path);
            }
        }
    }
    files.sort();
    Ok(files)
}
