//! Functions that are too long.

use syn::{spanned::Spanned, visit::Visit};

use super::{
    MAX_FUNCTION,
    source::{Source, is_test},
};

struct Functions<'a> {
    source: &'a Source,
    long: Vec<(String, usize)>,
}

impl Functions<'_> {
    fn note(&mut self, name: &syn::Ident, first: proc_macro2::Span, block: &syn::Block) {
        let lines = block.span().end().line + 1 - first.start().line;
        if lines > MAX_FUNCTION {
            self.long
                .push((format!("{}::{name}", self.source.name), lines));
        }
    }
}

impl<'ast> Visit<'ast> for Functions<'_> {
    fn visit_item(&mut self, item: &'ast syn::Item) {
        if !is_test(item) {
            syn::visit::visit_item(self, item);
        }
    }
    fn visit_item_fn(&mut self, f: &'ast syn::ItemFn) {
        self.note(&f.sig.ident, f.sig.span(), &f.block);
        syn::visit::visit_item_fn(self, f);
    }
    fn visit_impl_item_fn(&mut self, f: &'ast syn::ImplItemFn) {
        self.note(&f.sig.ident, f.sig.span(), &f.block);
        syn::visit::visit_impl_item_fn(self, f);
    }
}

/// Returns each function above the limit, with its number of lines.
pub(super) fn long(source: &Source) -> Vec<(String, usize)> {
    let mut functions = Functions {
        source,
        long: Vec::new(),
    };
    for item in &source.items {
        functions.visit_item(item);
    }
    functions.long
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn long_functions_are_found() {
        let body = "    let _ = 0;\n".repeat(MAX_FUNCTION);
        let text = format!(
            "//! A file.\nfn short() {{}}\nimpl X {{\n fn long() {{\n{body}}}\n}}\n#[cfg(test)]\nmod tests {{\n fn f() {{\n{body}}}\n}}\n"
        );
        let source = Source::parse(Path::new("crates/a/src/b.rs"), &text);
        let source = source.unwrap().unwrap();
        assert_eq!(
            long(&source),
            [("crates/a/src/b.rs::long".to_owned(), MAX_FUNCTION + 2)]
        );
        assert_eq!(source.lines, MAX_FUNCTION + 6);
    }
}
