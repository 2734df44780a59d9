//! Every `.rs` file is declared by a `mod` item: rustc does not see a file that is not.

use std::path::Path;

use super::{read, sources};

pub(super) fn check(root: &Path) -> Result<Vec<String>, String> {
    let mut findings = Vec::new();
    for path in sources(root)? {
        // The tree itself may be below a folder of that name.
        let below = path.strip_prefix(root).unwrap_or(&path);
        let Some((name, dirs)) = module_of(below) else {
            continue;
        };
        let dirs = dirs.into_iter().map(|dir| root.join(dir));
        let mut declared = false;
        for parent in dirs {
            if parent.is_file() {
                declared |= declares(&read(&parent)?, &name);
            }
        }
        if !declared {
            findings.push(format!("{}: no mod item leads here", path.display()));
        }
    }
    Ok(findings)
}

/// Returns the module that a file below `src` contains, and the files that may declare it, all below the tree's root.
/// Cargo declares the roots of crates, tests, benches and examples.
fn module_of(path: &Path) -> Option<(String, Vec<std::path::PathBuf>)> {
    let stem = path.file_stem()?.to_str()?;
    let mut dir = path.parent()?;
    if !path.components().any(|c| c.as_os_str() == "src") || dir.ends_with("bin") {
        return None;
    }
    let name = match stem {
        "lib" | "main" => return None,
        "mod" => {
            let name = dir.file_name()?.to_str()?.to_owned();
            dir = dir.parent()?;
            name
        }
        _ => stem.to_owned(),
    };
    let mut parents: Vec<_> = ["mod.rs", "lib.rs", "main.rs"]
        .iter()
        .map(|f| dir.join(f))
        .collect();
    parents.push(dir.with_extension("rs"));
    Some((name, parents))
}

fn declares(text: &str, name: &str) -> bool {
    text.lines().any(|line| {
        line.split_once("mod ")
            .and_then(|(_, rest)| rest.strip_prefix(name))
            .is_some_and(|rest| rest.trim_start().starts_with([';', '{']))
    }) || text.contains(&format!("{name}.rs\"]"))
}

#[cfg(test)]
mod tests {
    use super::{declares, module_of};
    use std::path::Path;

    #[test]
    fn mod_items() {
        for (text, want) in [
            ("mod walk;", true),
            ("pub(crate) mod walk;", true),
            ("#[path = \"walk.rs\"]\nmod w;", true),
            ("mod walker;", false),
            ("use walk;", false),
        ] {
            assert_eq!(declares(text, "walk"), want, "{text}");
        }
    }

    #[test]
    fn who_may_declare() {
        let of = |p| module_of(Path::new(p)).map(|m| m.0);
        assert_eq!(of("crates/mmu/src/walk.rs").as_deref(), Some("walk"));
        assert_eq!(of("crates/mmu/src/tdp/mod.rs").as_deref(), Some("tdp"));
        assert_eq!(of("crates/mmu/src/lib.rs"), None);
        assert_eq!(of("crates/mmu/tests/access.rs"), None);
        let parents = module_of(Path::new("crates/mmu/src/tdp/map.rs")).unwrap().1;
        assert!(parents.contains(&Path::new("crates/mmu/src/tdp/mod.rs").to_path_buf()));
    }
}
