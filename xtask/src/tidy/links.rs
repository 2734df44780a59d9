//! Every relative link of the top documents leads to a file.

use std::path::Path;

use super::read;

const DOCUMENTS: &[&str] = &[
    "README.md",
    "ARCHITECTURE.md",
    "SPECIFICATION.md",
    "CHANGELOG.md",
];

pub(super) fn check(root: &Path) -> Result<Vec<String>, String> {
    let mut findings = Vec::new();
    for document in DOCUMENTS {
        let path = root.join(document);
        if !path.is_file() {
            findings.push(format!("{document}: is missing"));
            continue;
        }
        for link in links(&read(&path)?) {
            if !root.join(&link).exists() {
                findings.push(format!("{document}: links to {link}, which does not exist"));
            }
        }
    }
    Ok(findings)
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
