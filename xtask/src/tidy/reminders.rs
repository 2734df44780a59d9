//! There are no reminders in the code: what is missing is documented as missing.

use std::path::Path;

use super::{read, sources};

pub(super) fn check(root: &Path) -> Result<Vec<String>, String> {
    let mut findings = Vec::new();
    for path in sources(root)? {
        findings.extend(check_text(&path.display().to_string(), &read(&path)?));
    }
    Ok(findings)
}

fn check_text(name: &str, text: &str) -> Vec<String> {
    // The words are in halves, so that this file does not find itself.
    let words = [
        concat!("TO", "DO"),
        concat!("FIX", "ME"),
        concat!("todo", "!("),
    ];
    text.lines()
        .enumerate()
        .filter(|(_, line)| words.iter().any(|w| line.contains(w)))
        .map(|(n, _)| format!("{name}:{}: a reminder", n + 1))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::check_text;

    #[test]
    fn finds_reminders() {
        let text = format!("//! Fine.\n// {} later\n", concat!("TO", "DO"));
        assert_eq!(check_text("a.rs", &text), ["a.rs:2: a reminder"]);
        assert!(check_text("a.rs", "//! Mastodons.\n").is_empty());
    }
}
