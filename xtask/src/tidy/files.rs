//! Every source file begins with `//!` and stays under the size limit. An attribute forbids `unsafe` in all crates
//! except the named ones.

use std::path::Path;

use super::{read, sources};

/// Maximum number of lines of a file, without in-file tests.
const MAX_LINES: usize = 800;

/// Crates that may contain `unsafe`; ARCHITECTURE.md says why each one needs it.
pub(super) const UNSAFE_CRATES: &[&str] = &[
    "anykvm-ioctls",
    "anykvm-preload",
    "engine-frame",
    "guest-memory",
    "host",
    "kvm-abi",
    "x86-jit",
    "x86-native",
];

pub(super) fn check(root: &Path) -> Result<Vec<String>, String> {
    let mut findings = Vec::new();
    for path in sources(root)? {
        findings.extend(check_file(&path.display().to_string(), &read(&path)?));
    }
    Ok(findings)
}

fn check_file(name: &str, text: &str) -> Vec<String> {
    let mut findings = Vec::new();
    if !text.starts_with("//!") {
        findings.push(format!("{name}: does not open with //!"));
    }
    let lines = text
        .split("#[cfg(test)]\nmod tests {")
        .next()
        .unwrap_or(text)
        .lines()
        .count();
    if lines > MAX_LINES {
        findings.push(format!("{name}: {lines} lines, more than {MAX_LINES}"));
    }
    let is_root = name.ends_with("src/lib.rs") || name.ends_with("src/main.rs");
    let may_be_unsafe = UNSAFE_CRATES
        .iter()
        .any(|c| name.contains(&format!("crates/{c}/")));
    if is_root && !may_be_unsafe && !text.contains("#![forbid(unsafe_code)]") {
        findings.push(format!("{name}: lacks #![forbid(unsafe_code)]"));
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::check_file;

    #[test]
    fn finds_what_is_wrong() {
        assert!(check_file("crates/mmu/src/walk.rs", "//! Walk.\n").is_empty());
        assert_eq!(check_file("crates/mmu/src/walk.rs", "fn f() {}\n").len(), 1);
        assert_eq!(check_file("crates/mmu/src/lib.rs", "//! Mmu.\n").len(), 1);
        assert!(check_file("crates/host/src/lib.rs", "//! Host.\n").is_empty());
        let long = format!("//! Long.\n{}", "\n".repeat(900));
        assert_eq!(check_file("crates/mmu/src/walk.rs", &long).len(), 1);
    }
}
