//! `cargo xtask loom`: the models of lock-free code, each in all orders of its threads' steps.
//!
//! The models are a build of their own: with `--cfg loom`, the code uses loom's atomics (guest-memory's `words.rs`).

use std::process::Command;

/// Crates with models, and the module that has them.
const CRATES: &[&str] = &["guest-memory"];
const MODELS: &str = "models::";

pub(crate) fn run() -> Result<(), String> {
    for name in CRATES {
        let status = Command::new(env!("CARGO"))
            .args(["test", "--release", "--lib", "-p", name, MODELS])
            .current_dir(crate::tidy::root())
            .env("CARGO_TARGET_DIR", crate::build::target().join("loom"))
            .env("RUSTFLAGS", "--cfg loom")
            .status()
            .map_err(|e| format!("cannot run cargo: {e}"))?;
        if !status.success() {
            return Err(format!("a model of {name} fails"));
        }
    }
    Ok(())
}
