//! `docs/quirks.md` lists every deviation that is marked in the code, and nothing else. `cargo xtask docs` writes it.

use std::fmt::Write;
use std::path::Path;

use super::{read, sources};

const DOCUMENT: &str = "docs/quirks.md";
const HEAD: &str = "# Quirks\n\n\
    Deliberate differences from hardware or from KVM, collected from the code by `cargo xtask docs`.\n";

pub(super) fn check(root: &Path) -> Result<Vec<String>, String> {
    let written = std::fs::read_to_string(root.join(DOCUMENT)).unwrap_or_default();
    Ok(if written == document(root)? {
        Vec::new()
    } else {
        vec![format!("{DOCUMENT}: stale, run cargo xtask docs")]
    })
}

/// Writes the document.
pub(crate) fn write(root: &Path) -> Result<(), String> {
    let path = root.join(DOCUMENT);
    if let Some(dir) = path.parent() {
        std::fs::create_dir_all(dir).map_err(|e| format!("{}: {e}", dir.display()))?;
    }
    std::fs::write(&path, document(root)?).map_err(|e| format!("{DOCUMENT}: {e}"))
}

fn document(root: &Path) -> Result<String, String> {
    let mut text = HEAD.to_owned();
    for path in sources(root)? {
        let quirks = quirks(&read(&path)?);
        if quirks.is_empty() {
            continue;
        }
        let name = path.strip_prefix(root).unwrap_or(&path).display();
        // A write to a string cannot fail.
        let _ = write!(text, "\n[{name}](../{name}):\n\n");
        for quirk in quirks {
            let _ = writeln!(text, "- {quirk}");
        }
    }
    Ok(text)
}

/// Returns the text of each marked comment, up to the end of its paragraph.
fn quirks(text: &str) -> Vec<String> {
    let marker = concat!("DEVIA", "TION: ");
    let mut found = Vec::new();
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        let Some((before, first)) = line.split_once(marker) else {
            continue;
        };
        let comment = before.trim();
        if !matches!(comment, "//" | "///" | "//!") {
            continue;
        }
        let mut quirk = first.trim().to_owned();
        for line in lines.by_ref() {
            match line.trim().strip_prefix(comment).map(str::trim) {
                Some(more) if !more.is_empty() => {
                    quirk.push(' ');
                    quirk.push_str(more);
                }
                _ => break,
            }
        }
        found.push(quirk);
    }
    found
}

#[cfg(test)]
mod tests {
    use super::quirks;

    #[test]
    fn whole_paragraphs() {
        let marker = concat!("DEVIA", "TION:");
        let text = format!(
            "//! A chip.\n//!\n//! {marker} one\n//! goes on.\n//!\n//! Else.\nfn f() {{\n    // {marker} two\n    g();\n}}\n"
        );
        assert_eq!(quirks(&text), ["one goes on.", "two"]);
    }
}
