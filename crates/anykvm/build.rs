//! Links the `anykvm` program so that it is a shared library as well, as the C library's own file
//! is: `anykvm exec` names it in LD_PRELOAD, and there is one file to build, copy and install.
//!
//! The functions that stand before the C library's are listed in `exports.map`; nothing else is
//! visible to the programs it is loaded into.

fn main() {
    let folder = std::env::var("CARGO_MANIFEST_DIR").unwrap_or_default();
    println!("cargo:rerun-if-changed=exports.map");
    for argument in [
        "--no-pie".to_owned(),
        "-shared".to_owned(),
        format!("--version-script={folder}/exports.map"),
    ] {
        println!("cargo:rustc-link-arg-bins=-Wl,{argument}");
    }
}
