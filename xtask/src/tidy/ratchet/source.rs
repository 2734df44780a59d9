//! [`Source`]: a parsed file of a crate's library or program.

use std::path::Path;

use syn::spanned::Spanned;

/// A parsed file.
pub(super) struct Source {
    /// The file's path from the workspace's root.
    pub(super) name: String,
    /// Name of the crate's folder.
    pub(super) krate: String,
    /// Module path inside the crate; empty for the root.
    pub(super) module: Vec<String>,
    /// Number of lines, without in-file tests.
    pub(super) lines: usize,
    /// The items that the file declares.
    pub(super) items: Vec<syn::Item>,
}

impl Source {
    /// Parses a file. `None` for a file that is not part of the product: tests, examples, build scripts.
    pub(super) fn parse(name: &Path, text: &str) -> Result<Option<Self>, String> {
        let parts: Vec<&str> = name.iter().filter_map(|p| p.to_str()).collect();
        let Some(src) = parts.iter().position(|p| *p == "src") else {
            return Ok(None);
        };
        let inside = &parts[src + 1..];
        if inside.iter().any(|p| *p == "tests" || *p == "tests.rs") {
            return Ok(None);
        }
        let file = syn::parse_file(text).map_err(|e| format!("{}: {e}", name.display()))?;
        let mut module: Vec<String> = inside
            .iter()
            .map(|p| p.trim_end_matches(".rs").to_owned())
            .collect();
        module.pop_if(|last| matches!(last.as_str(), "mod" | "lib" | "main"));
        let tests: usize = file
            .items
            .iter()
            .filter(|i| is_test(i))
            .map(|i| i.span().end().line + 1 - i.span().start().line)
            .sum();
        let items = file.items.into_iter().filter(|i| !is_test(i)).collect();
        Ok(Some(Self {
            name: parts.join("/"),
            krate: parts[..src].last().copied().unwrap_or_default().to_owned(),
            module,
            lines: text.lines().count() - tests,
            items,
        }))
    }
}

/// Returns true if the item has `#[cfg(test)]`.
pub(super) fn is_test(item: &syn::Item) -> bool {
    let attributes = match item {
        syn::Item::Mod(m) => &m.attrs,
        syn::Item::Fn(f) => &f.attrs,
        syn::Item::Use(u) => &u.attrs,
        syn::Item::Impl(i) => &i.attrs,
        _ => return false,
    };
    attributes.iter().any(|a| {
        a.path().is_ident("cfg")
            && a.parse_args::<syn::Path>()
                .is_ok_and(|path| path.is_ident("test"))
    })
}
