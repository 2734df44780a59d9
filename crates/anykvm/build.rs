//! Links the `anykvm` program so that it is a shared library as well, as the C library's own file
//! is: `anykvm exec` names it in LD_PRELOAD, and there is one file to build, copy and install.
//!
//! The functions that stand before the C library's are listed in `exports.map`; nothing else is
//! visible to the programs it is loaded into.

fn main() {
    name_version();
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

/// Sets `ANYKVM_VERSION` to the version, with the commit where there is a repository.
fn name_version() {
    let version = std::env::var("CARGO_PKG_VERSION").unwrap_or_default();
    let git = |arguments: &[&str]| {
        let output = std::process::Command::new("git").args(arguments).output();
        let output = output.ok().filter(|output| output.status.success())?;
        Some(String::from_utf8(output.stdout).ok()?.trim().to_owned())
    };
    let version = match git(&["rev-parse", "--short=12", "HEAD"]) {
        Some(commit) => format!("{version} ({commit})"),
        None => version,
    };
    println!("cargo:rustc-env=ANYKVM_VERSION={version}");
    // Runs again when a worktree's own HEAD changes, or the branch that it names.
    for name in ["HEAD", "logs/HEAD"] {
        if let Some(path) = git(&["rev-parse", "--git-path", name])
            && std::path::Path::new(&path).exists()
        {
            println!("cargo:rerun-if-changed={path}");
        }
    }
}
