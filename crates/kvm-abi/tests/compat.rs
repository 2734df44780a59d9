//! `docs/compat.md` says what the tables say.

#[test]
fn the_page_is_in_sync_with_the_tables() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/compat.md");
    let page = kvm_abi::compat_page();
    if std::env::var_os("UPDATE_EXPECT").is_some() {
        std::fs::write(path, &page).unwrap();
    }
    let stored = std::fs::read_to_string(path).unwrap_or_default();
    assert!(
        stored == page,
        "docs/compat.md is stale: UPDATE_EXPECT=1 cargo test -p kvm-abi --test compat"
    );
}
