//! Crates, folders and files are named after things of the domain, and not by words without a meaning.

use std::path::Path;

use super::sources;

/// Words without a meaning.
const FORBIDDEN: &[&str] = &[
    "util", "utils", "common", "base", "misc", "helper", "helpers", "manager",
];

pub(super) fn check(root: &Path) -> Result<Vec<String>, String> {
    Ok(sources(root)?
        .iter()
        .filter_map(|path| check_path(path.strip_prefix(root).unwrap_or(path)))
        .collect())
}

fn check_path(path: &Path) -> Option<String> {
    let text = path.to_str()?;
    let word = text
        .split(['/', '-', '_', '.'])
        .find(|word| FORBIDDEN.contains(word))?;
    Some(format!(
        "{text}: \"{word}\" says nothing about what is inside"
    ))
}

#[cfg(test)]
mod tests {
    use super::check_path;
    use std::path::Path;

    #[test]
    fn whole_words() {
        for (path, found) in [
            ("crates/mmu/src/walk.rs", false),
            ("crates/mmu/src/utils.rs", true),
            ("crates/mmu/src/tlb_helpers.rs", true),
            ("crates/anykvm-common/src/lib.rs", true),
            ("crates/mmu/src/database.rs", false),
        ] {
            assert_eq!(check_path(Path::new(path)).is_some(), found, "{path}");
        }
    }
}
