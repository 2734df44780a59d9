//! A crate depends only on crates of lower layers (the table in ARCHITECTURE.md).

use std::path::Path;

use super::read;

/// Crates by layer, from the lowest up. Tools (`testkit`, `fuzzing`, `xtask`) may use all of them.
const LAYERS: &[&[&str]] = &[
    &["x86-defs", "engine-frame", "host"],
    &["guest-memory", "x86-cpu", "irqchip", "pmu"],
    &["x86-native", "mmu", "io-bus"],
    &["x86-interp"],
    &["x86-codegen"],
    &["x86-jit"],
    &["hypervisor"],
    &["kvm-abi"],
    &["anykvm-ioctls", "anykvm-preload"],
    &["anykvm"],
];

fn layer(name: &str) -> Option<usize> {
    LAYERS.iter().position(|l| l.contains(&name))
}

pub(super) fn check(root: &Path) -> Result<Vec<String>, String> {
    let mut findings = Vec::new();
    for (depth, names) in LAYERS.iter().enumerate() {
        for name in *names {
            let manifest = read(&root.join("crates").join(name).join("Cargo.toml"))?;
            findings.extend(check_manifest(name, depth, &manifest));
        }
    }
    Ok(findings)
}

fn check_manifest(name: &str, depth: usize, manifest: &str) -> Vec<String> {
    let section = manifest.split("[dependencies]").nth(1).unwrap_or("");
    let section = section.split("\n[").next().unwrap_or("");
    section
        .lines()
        .filter_map(|l| l.split(['.', ' ', '=']).next())
        .filter(|d| layer(d).is_some_and(|l| l >= depth))
        .map(|d| format!("crates/{name}: depends on {d}, which is not in a lower layer"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::check_manifest;

    #[test]
    fn edges_only_go_down() {
        assert!(check_manifest("mmu", 2, "[dependencies]\nx86-cpu.workspace = true\n").is_empty());
        assert_eq!(
            check_manifest("mmu", 2, "[dependencies]\nhypervisor.workspace = true\n").len(),
            1
        );
        assert!(
            check_manifest(
                "mmu",
                2,
                "[dependencies]\n\n[dev-dependencies]\nhypervisor.workspace = true\n"
            )
            .is_empty()
        );
    }
}
