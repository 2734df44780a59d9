//! Known findings, which are listed in `xtask/ratchet.txt`. The list may only shrink.
//!
//! There are three rules: modules of one folder form no cycle ([`cycles`]), functions have at most [`MAX_FUNCTION`]
//! lines ([`functions`]), and files at most [`MAX_FILE`]. A finding that is not in the list fails, and so does an entry
//! of the list without a finding. `cargo xtask tidy --shrink` removes such entries, and never adds one.

mod cycles;
mod functions;
mod source;

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};

use self::source::Source;
use super::{read, sources};

/// Maximum number of lines of a function, with its signature and braces.
const MAX_FUNCTION: usize = 100;
/// Maximum number of lines of a file, without in-file tests.
const MAX_FILE: usize = 600;
/// The file with the list.
const LIST: &str = "xtask/ratchet.txt";

/// Findings by rule and place, with their extent.
type Findings = BTreeMap<String, Extent>;

/// The extent of a finding.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Extent {
    /// So many lines.
    Lines(usize),
    /// These modules.
    Modules(BTreeSet<String>),
}

impl Extent {
    /// Returns true if the extent is not greater than `known`.
    fn is_within(&self, known: &Self) -> bool {
        match (self, known) {
            (Self::Lines(now), Self::Lines(then)) => now <= then,
            (Self::Modules(now), Self::Modules(then)) => now.is_subset(then),
            _ => false,
        }
    }
}

impl std::fmt::Display for Extent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Lines(n) => write!(f, "{n}"),
            Self::Modules(names) => {
                let names: Vec<_> = names.iter().map(String::as_str).collect();
                f.write_str(&names.join(" "))
            }
        }
    }
}

/// Compares the findings with the list.
pub(super) fn check(root: &Path) -> Result<Vec<String>, String> {
    let known = parse(&read(&root.join(LIST))?)?;
    Ok(compare(&find(root)?, &known))
}

/// Removes from the list what is not found any more, and lowers what has become less.
pub(crate) fn shrink(root: &Path) -> Result<(), String> {
    let path = root.join(LIST);
    let text = read(&path)?;
    let found = find(root)?;
    let mut kept = String::new();
    for line in text.lines() {
        if line.starts_with('#') || line.is_empty() {
            kept.push_str(line);
            kept.push('\n');
            continue;
        }
        let (key, extent) = entry(line)?;
        if let Some(now) = found.get(&key) {
            let extent = if now.is_within(&extent) { now } else { &extent };
            kept.push_str(&format!("{key}: {extent}\n"));
        }
    }
    std::fs::write(&path, kept).map_err(|e| format!("{}: {e}", path.display()))
}

/// Prints the imports that make each cycle, including those in the list.
pub(crate) fn show_cycles(root: &Path) -> Result<(), String> {
    let mut crates: BTreeMap<String, Vec<Source>> = BTreeMap::new();
    for path in sources(root)? {
        let name = path.strip_prefix(root).unwrap_or(&path);
        if let Some(source) = Source::parse(name, &read(&path)?)? {
            crates.entry(source.krate.clone()).or_default().push(source);
        }
    }
    for cycle in crates.values().flat_map(|sources| cycles::find(sources)) {
        let modules: Vec<_> = cycle.modules.iter().map(String::as_str).collect();
        eprintln!("{}: {}", cycle.folder, modules.join(" "));
        for import in cycle.imports {
            eprintln!("    {import}");
        }
    }
    Ok(())
}

fn compare(found: &Findings, known: &Findings) -> Vec<String> {
    let mut findings = Vec::new();
    for (key, now) in found {
        match known.get(key) {
            Some(then) if now.is_within(then) => {}
            Some(then) => findings.push(format!("{key}: {now}, and {LIST} allows {then}")),
            None => findings.push(format!("{key}: {now}")),
        }
    }
    for key in known.keys().filter(|k| !found.contains_key(*k)) {
        findings.push(format!(
            "{LIST}: nothing is found any more for `{key}`: cargo xtask tidy --shrink"
        ));
    }
    findings
}

/// Reads an entry: `rule place: extent`.
fn entry(line: &str) -> Result<(String, Extent), String> {
    let wrong = || format!("{LIST}: not an entry: {line}");
    let (key, extent) = line.split_once(": ").ok_or_else(wrong)?;
    let extent = if key.starts_with("cycle ") {
        Extent::Modules(extent.split_whitespace().map(str::to_owned).collect())
    } else {
        Extent::Lines(extent.parse().map_err(|_| wrong())?)
    };
    Ok((key.to_owned(), extent))
}

fn parse(text: &str) -> Result<Findings, String> {
    let lines = text
        .lines()
        .filter(|l| !l.starts_with('#') && !l.is_empty());
    lines.map(entry).collect()
}

fn find(root: &Path) -> Result<Findings, String> {
    let mut crates: BTreeMap<String, Vec<Source>> = BTreeMap::new();
    let mut findings = Findings::new();
    for path in sources(root)? {
        let name = path.strip_prefix(root).unwrap_or(&path);
        let Some(source) = Source::parse(name, &read(&path)?)? else {
            continue;
        };
        if source.lines > MAX_FILE {
            findings.insert(format!("file {}", source.name), Extent::Lines(source.lines));
        }
        for (function, lines) in functions::long(&source) {
            findings.insert(format!("function {function}"), Extent::Lines(lines));
        }
        crates.entry(source.krate.clone()).or_default().push(source);
    }
    for sources in crates.values() {
        for cycle in cycles::find(sources) {
            let key = format!("cycle {}", cycle.folder);
            // Two cycles of one folder are one entry.
            match findings.get_mut(&key) {
                Some(Extent::Modules(all)) => all.extend(cycle.modules),
                _ => {
                    findings.insert(key, Extent::Modules(cycle.modules));
                }
            }
        }
    }
    Ok(findings)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings(text: &str) -> Findings {
        parse(text).unwrap()
    }

    #[test]
    fn the_list_only_shrinks() {
        let known = findings("# comment\ncycle a/src: x y z\nfunction a::f: 120\n");
        for (found, wrong) in [
            ("cycle a/src: x y z\nfunction a::f: 120\n", 0),
            ("cycle a/src: x y\nfunction a::f: 101\n", 0),
            // The lists have more of the same, something new, or something that is gone.
            ("cycle a/src: w x\nfunction a::f: 120\n", 1),
            ("cycle a/src: x y\nfunction a::f: 121\n", 1),
            ("cycle a/src: x y\nfunction a::f: 120\nfile b: 700\n", 1),
            ("cycle a/src: x y\n", 1),
        ] {
            assert_eq!(compare(&findings(found), &known).len(), wrong, "{found}");
        }
        assert!(parse("function a::f: many\n").is_err());
    }
}
