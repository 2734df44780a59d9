//! Cycles among the modules of one folder.
//!
//! The nodes are a folder's files and subfolders; a subfolder with all that is in it is one node. An edge is a path
//! from one node to something in another. Paths to the folder's own module, or to one further up, do not count:
//! otherwise each `mod.rs` with a structure that its children implement would be a finding.

use std::collections::{BTreeMap, BTreeSet};

use syn::visit::Visit;

use super::source::{Source, is_test};

/// A module path inside a crate.
type Module = Vec<String>;

/// Paths that a file names, as modules of its crate.
struct Paths<'a> {
    /// The file's module, with the inline modules that the visitor is in.
    here: Module,
    modules: &'a BTreeSet<Module>,
    /// By module, the paths that lead to it, as they are written.
    found: BTreeMap<Module, BTreeSet<String>>,
}

impl Paths<'_> {
    /// Notes the module that a path begins in, with what is left of the path.
    fn resolve(&mut self, segments: &[String]) {
        let mut at = match segments.first().map(String::as_str) {
            Some("crate") => Vec::new(),
            Some("self" | "super") => self.here.clone(),
            Some(first) => {
                let mut child = self.here.clone();
                child.push(first.to_owned());
                if !self.modules.contains(&child) {
                    return;
                }
                self.here.clone()
            }
            None => return,
        };
        for segment in segments {
            match segment.as_str() {
                "crate" | "self" => {}
                "super" => {
                    at.pop();
                }
                name => {
                    at.push(name.to_owned());
                    if !self.modules.contains(&at) {
                        at.pop();
                        break;
                    }
                }
            }
        }
        self.found
            .entry(at)
            .or_default()
            .insert(segments.join("::"));
    }

    fn use_tree(&mut self, tree: &syn::UseTree, before: &[String]) {
        let with = |name: String| {
            let mut path = before.to_vec();
            path.push(name);
            path
        };
        match tree {
            syn::UseTree::Path(p) => self.use_tree(&p.tree, &with(p.ident.to_string())),
            syn::UseTree::Group(g) => {
                for tree in &g.items {
                    self.use_tree(tree, before);
                }
            }
            syn::UseTree::Name(n) => self.resolve(&with(n.ident.to_string())),
            syn::UseTree::Rename(r) => self.resolve(&with(r.ident.to_string())),
            syn::UseTree::Glob(_) => self.resolve(before),
        }
    }
}

impl<'ast> Visit<'ast> for Paths<'_> {
    fn visit_item(&mut self, item: &'ast syn::Item) {
        if !is_test(item) {
            syn::visit::visit_item(self, item);
        }
    }
    fn visit_item_mod(&mut self, m: &'ast syn::ItemMod) {
        self.here.push(m.ident.to_string());
        syn::visit::visit_item_mod(self, m);
        self.here.pop();
    }
    fn visit_item_use(&mut self, u: &'ast syn::ItemUse) {
        self.use_tree(&u.tree, &[]);
    }
    fn visit_path(&mut self, path: &'ast syn::Path) {
        if path.segments.len() > 1 {
            let segments: Vec<_> = path.segments.iter().map(|s| s.ident.to_string()).collect();
            self.resolve(&segments);
        }
        syn::visit::visit_path(self, path);
    }
}

/// Modules of one folder that reach each other.
pub(super) struct Cycle {
    /// The crate, and the module path of the folder.
    pub(super) folder: String,
    pub(super) modules: BTreeSet<String>,
    /// The imports that make the cycle, as `from to: path in file`, for `tidy --cycles`.
    pub(super) imports: Vec<String>,
}

/// By a node's name, the nodes that it leads to, each with the imports that do so.
type Edges = BTreeMap<String, BTreeMap<String, Vec<String>>>;

/// Returns the cycles of one crate.
pub(super) fn find(sources: &[Source]) -> Vec<Cycle> {
    let modules: BTreeSet<Module> = sources.iter().map(|s| s.module.clone()).collect();
    let mut folders: BTreeMap<Module, Edges> = BTreeMap::new();
    for source in sources {
        let mut paths = Paths {
            here: source.module.clone(),
            modules: &modules,
            found: BTreeMap::new(),
        };
        for item in &source.items {
            paths.visit_item(item);
        }
        for (target, written) in paths.found {
            let common = source
                .module
                .iter()
                .zip(&target)
                .take_while(|(a, b)| a == b)
                .count();
            let (Some(from), Some(to)) = (source.module.get(common), target.get(common)) else {
                continue;
            };
            let folder = folders.entry(target[..common].to_vec()).or_default();
            let imports = folder.entry(from.clone()).or_default();
            let imports = imports.entry(to.clone()).or_default();
            imports.extend(written.iter().map(|w| format!("{w} in {}", source.name)));
        }
    }
    let krate = sources.first().map_or("", |s| &s.krate);
    let mut found = Vec::new();
    for (folder, edges) in &folders {
        for modules in components(edges) {
            let mut name = krate.to_owned();
            for part in folder {
                name.push('/');
                name.push_str(part);
            }
            let mut imports = Vec::new();
            for (from, targets) in edges.iter().filter(|(from, _)| modules.contains(*from)) {
                for (to, paths) in targets.iter().filter(|(to, _)| modules.contains(*to)) {
                    imports.extend(paths.iter().map(|path| format!("{from} {to}: {path}")));
                }
            }
            found.push(Cycle {
                folder: name,
                modules,
                imports,
            });
        }
    }
    found
}

/// Returns the strongly connected components of more than one node: sets of nodes that reach each other.
fn components(edges: &Edges) -> Vec<BTreeSet<String>> {
    let reach: BTreeMap<&String, BTreeSet<&String>> =
        edges.keys().map(|n| (n, reached(n, edges))).collect();
    let mut found: Vec<BTreeSet<String>> = Vec::new();
    for (node, others) in &reach {
        let cycle: BTreeSet<String> = others
            .iter()
            .filter(|other| reach.get(**other).is_some_and(|r| r.contains(node)))
            .map(|other| (*other).clone())
            .collect();
        if cycle.len() > 1 && !found.contains(&cycle) {
            found.push(cycle);
        }
    }
    found
}

fn reached<'a>(from: &'a String, edges: &'a Edges) -> BTreeSet<&'a String> {
    let mut seen = BTreeSet::new();
    let mut left = vec![from];
    while let Some(node) = left.pop() {
        for next in edges.get(node).into_iter().flat_map(BTreeMap::keys) {
            if seen.insert(next) {
                left.push(next);
            }
        }
    }
    seen
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn cycles_of(files: &[(&str, &str)]) -> Vec<(String, Vec<String>)> {
        let sources: Vec<Source> = files
            .iter()
            .map(|(name, text)| {
                let name = format!("crates/a/src/{name}");
                Source::parse(Path::new(&name), text).unwrap().unwrap()
            })
            .collect();
        let found = find(&sources).into_iter();
        found
            .map(|c| (c.folder, c.modules.into_iter().collect()))
            .collect()
    }

    #[test]
    fn cycles_are_found() {
        // Paths down, and to the root, are allowed.
        let fine = [
            ("lib.rs", "mod x; mod y; pub use x::X;"),
            ("x.rs", "use crate::{X, y::Y};"),
            (
                "y.rs",
                "use crate::X; #[cfg(test)] mod tests { use crate::x::Z; }",
            ),
        ];
        assert!(cycles_of(&fine).is_empty());
        // A cycle is made by an import, by a path in the code, and through a subfolder.
        for back in ["use super::x::X;", "fn f() { crate::x::g(); }"] {
            let files = [
                ("lib.rs", ""),
                ("x.rs", "use crate::y::inner::Y;"),
                ("y/mod.rs", "use super::z;"),
                ("y/inner.rs", ""),
                ("z.rs", back),
            ];
            let names = ["x", "y", "z"].map(str::to_owned).to_vec();
            assert_eq!(cycles_of(&files), [("a".to_owned(), names)]);
        }
        // The cycle is inside of a folder; a module in a file is one level more.
        let files = [
            ("lib.rs", ""),
            ("y/mod.rs", "mod p; mod q;"),
            ("y/p.rs", "mod inner { use super::super::q::Q; }"),
            ("y/q.rs", "use super::p;"),
        ];
        let names = ["p", "q"].map(str::to_owned).to_vec();
        assert_eq!(cycles_of(&files), [("a/y".to_owned(), names)]);
    }
}
