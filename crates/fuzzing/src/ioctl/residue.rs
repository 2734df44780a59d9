//! [`Residue`]: what KVM's objects could leave behind in a process.

use std::fs;

/// Counts from `/proc/self`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Residue {
    /// Number of open descriptors.
    pub descriptors: usize,
    /// Number of threads.
    pub threads: usize,
    /// Number of mappings.
    pub mappings: usize,
    /// Resident memory in KiB.
    pub rss_kib: u64,
}

impl Residue {
    /// Returns the counts once the threads of VMs that are gone have ended, for which nobody waits.
    pub fn settled() -> Self {
        for _ in 0..500 {
            if Self::now().threads == 1 {
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        Self::now()
    }

    /// Returns the current counts.
    pub fn now() -> Self {
        let count = |path: &str| fs::read_dir(path).map_or(0, Iterator::count);
        let text = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let status = text("/proc/self/status");
        let rss = status
            .lines()
            .find_map(|line| line.strip_prefix("VmRSS:"))
            .and_then(|rest| rest.split_whitespace().next())
            .and_then(|number| number.parse().ok());
        Self {
            descriptors: count("/proc/self/fd"),
            threads: count("/proc/self/task"),
            // Mappings of the allocator come and go.
            mappings: text("/proc/self/maps")
                .lines()
                .filter(|line| line.contains("memfd:"))
                .count(),
            rss_kib: rss.unwrap_or(0),
        }
    }
}
