//! The other engines for the tests of a file, which run on the usual one.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::process::Command;

/// Runs all tests of this program once more, in a process whose vCPUs have `engine`.
pub(crate) fn again_on(engine: &str) {
    const ENGINE: &str = "ANYKVM_ENGINE";
    if std::env::var_os(ENGINE).is_some() {
        return;
    }
    let program = std::env::current_exe().unwrap();
    let output = Command::new(program).env(ENGINE, engine).output().unwrap();
    let shown = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{engine}: {shown}");
}
