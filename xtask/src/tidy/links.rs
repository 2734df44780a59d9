//! Every relative link of a document leads to a file.

use std::path::{Path, PathBuf};

use super::read;

/// Documents that have to exist.
const DOCUMENTS: &[&str] = &[
    "README.md",
    "ARCHITECTURE.md",
    "SPECIFICATION.md",
    "CHANGELOG.md",
];

pub(super) fn check(root: &Path) -> Result<Vec<String>, String> {
    let mut findings = Vec::new();
    let missing = DOCUMENTS.iter().filter(|d| !root.join(d).is_file());
    findings.extend(missing.map(|document| format!("{document}: is missing")));
    let mut documents = Vec::new();
    for folder in ["", "docs", "docs/decisions"] {
        documents.extend(documents_of(&root.join(folder))?);
    }
    for path in documents {
        let folder = path.parent().unwrap_or(root);
        for link in links(&read(&path)?) {
            if !folder.join(&link).exists() {
                let document = path.strip_prefix(root).unwrap_or(&path).display();
                findings.push(format!("{document}: links to {link}, which does not exist"));
            }
        }
    }
    Ok(findings)
}

fn documents_of(folder: &Path) -> Result<Vec<PathBuf>, String> {
    let wrong = |e| format!("{}: {e}", folder.display());
    let mut documents = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(wrong)? {
        let path = entry.map_err(wrong)?.path();
        if path.extension().is_some_and(|e| e == "md") {
            documents.push(path);
        }
    }
    documents.sort();
    Ok(documents)
}

fn links(text: &str) -> Vec<String> {
    text.split("](")
        .skip(1)
        .filter_map(|rest| rest.split([')', '#']).next())
        .filter(|l| !l.is_empty() && !l.contains("://"))
        .map(str::to_owned)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::links;

    #[test]
    fn relative_links_only() {
        assert_eq!(
            links("[a](crates/mmu) [b](https://example.org) [c](#x)"),
            ["crates/mmu"]
        );
    }
}
