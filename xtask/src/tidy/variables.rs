//! Each variable of the environment that the product reads is in README's table, and each one there is read.

use std::{collections::BTreeSet, path::Path};

use super::{read, sources};

const PREFIX: &str = "\"ANYKVM_";

pub(super) fn check(root: &Path) -> Result<Vec<String>, String> {
    let mut used = BTreeSet::new();
    for path in sources(root)? {
        let below = path.strip_prefix(root).unwrap_or(&path);
        let has = |name: &str| below.components().any(|part| part.as_os_str() == name);
        if below.starts_with("crates") && has("src") && !has("tests") && !has("tests.rs") {
            used.extend(read_by(&read(&path)?));
        }
    }
    let told = told_by(&read(&root.join("README.md"))?);
    let missing = used.difference(&told);
    let idle = told.difference(&used);
    Ok(missing
        .map(|name| format!("README.md: the variable {name} is read and not in the table"))
        .chain(idle.map(|name| format!("README.md: nothing reads {name}")))
        .collect())
}

/// Names in quotation marks, but for those that the compiler reads, and those of tests.
fn read_by(text: &str) -> BTreeSet<String> {
    let product = text.split("#[cfg(test)]").next().unwrap_or_default();
    let pieces: Vec<&str> = product.split(PREFIX).collect();
    pieces
        .windows(2)
        .filter(|pair| !pair[0].ends_with("env!("))
        .filter_map(|pair| Some(format!("ANYKVM_{}", pair[1].split_once('"')?.0)))
        .filter(|name| name.bytes().all(|b| b == b'_' || b.is_ascii_uppercase()))
        .collect()
}

/// Names in the first column of a table.
fn told_by(text: &str) -> BTreeSet<String> {
    let cells = text.lines().filter_map(|line| line.strip_prefix("| "));
    let first = cells.filter_map(|cells| Some(cells.split_once(" |")?.0));
    let names = first.flat_map(|cell| cell.split('`'));
    names
        .filter(|name| name.starts_with("ANYKVM_"))
        .map(str::to_owned)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::{read_by, told_by};

    #[test]
    fn finds_variables() {
        let text = "env!(\"ANYKVM_VERSION\") var(\"ANYKVM_ONE\")\n#[cfg(test)] var(\"ANYKVM_TWO\")";
        assert_eq!(
            read_by(text).into_iter().collect::<Vec<_>>(),
            ["ANYKVM_ONE"]
        );
        let table = "| `ANYKVM_ONE`, `ANYKVM_TWO` | both |\nnot `ANYKVM_THREE`\n";
        assert_eq!(told_by(table).len(), 2);
    }
}
