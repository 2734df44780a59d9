//! What this process may use: the limits of the machine's memory, of control groups and of resources.

use std::fs;
use std::path::{Path, PathBuf};

use rustix::process::{Resource, getrlimit};

use crate::error::BootError;
use crate::stdio::say;

/// What a guest takes besides its memory: of address space and of data (private writable memory), once and for each vCPU.
const ADDRESSES: [u64; 2] = [768 << 20, 384 << 20];
const DATA: [u64; 2] = [128 << 20, 64 << 20];

/// Where control groups are mounted.
const GROUPS: &str = "/sys/fs/cgroup";

/// Refuses a guest for which this process cannot have the address space. It would fail later otherwise.
pub(crate) fn check(mem: u64, cpus: u32) -> Result<(), BootError> {
    for (limit, option, what, [once, each]) in [
        (Resource::As, "-v", "address space", ADDRESSES),
        (Resource::Data, "-d", "data", DATA),
    ] {
        let need = mem
            .saturating_add(once)
            .saturating_add(each.saturating_mul(cpus.into()));
        if let Some(limit) = getrlimit(limit).current
            && limit < need
        {
            return Err(BootError::Usage(format!(
                "this process may have {} MiB of {what} (ulimit {option}), and a guest of {} MiB \
                 takes about {} MiB",
                limit >> 20,
                mem >> 20,
                need >> 20
            )));
        }
    }
    Ok(())
}

/// Warns of a guest that is larger than the memory that there is.
pub(crate) fn warn(mem: u64) {
    let mut least = machine_memory().map(|bytes| (bytes, "this machine has"));
    if let Some(bytes) = group_memory()
        && least.is_none_or(|(least, _)| bytes < least)
    {
        least = Some((bytes, "this control group may use"));
    }
    if let Some((bytes, whose)) = least
        && mem > bytes
    {
        say(&format!(
            "--mem: the guest's {} MiB are more than the {} MiB that {whose}; what uses them all is \
             killed",
            mem >> 20,
            bytes >> 20
        ));
    }
}

/// Returns the size of the machine's memory, with swap.
fn machine_memory() -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let kib = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        line.split_whitespace().next()?.parse::<u64>().ok()
    };
    Some((kib("MemTotal:")? + kib("SwapTotal:").unwrap_or(0)) << 10)
}

/// Returns the smallest memory limit of our control group and those above it.
pub(crate) fn group_memory() -> Option<u64> {
    let places = group_folders("memory");
    let values = places.iter().flat_map(|folder| {
        ["memory.max", "memory.limit_in_bytes"].map(|name| fs::read_to_string(folder.join(name)))
    });
    values
        .flatten()
        .filter_map(|text| text.trim().parse::<u64>().ok())
        // Version 1 writes a very large number if there is no limit.
        .filter(|bytes| *bytes < 1 << 60)
        .min()
}

/// Returns the smallest number of processors that the quotas of our control groups allow.
pub(crate) fn group_processors() -> Option<f64> {
    let read = |path: PathBuf| fs::read_to_string(path).unwrap_or_default();
    let of = |folder: &PathBuf| {
        let text = read(folder.join("cpu.max"));
        let both = format!(
            "{} {}",
            read(folder.join("cpu.cfs_quota_us")).trim(),
            read(folder.join("cpu.cfs_period_us")).trim()
        );
        quota(&text).or_else(|| quota(&both))
    };
    let quotas: Vec<f64> = group_folders("cpu").iter().filter_map(of).collect();
    quotas.into_iter().min_by(f64::total_cmp)
}

/// Reads a quota: `max 100000`, `50000 100000`, `-1 100000`.
fn quota(text: &str) -> Option<f64> {
    let mut words = text.split_whitespace().map(str::parse::<f64>);
    match (words.next(), words.next()) {
        (Some(Ok(quota)), Some(Ok(period))) if quota > 0.0 && period > 0.0 => Some(quota / period),
        _ => None,
    }
}

/// Returns the folders of our control group for `controller` and of those above it, in versions 2 and 1.
fn group_folders(controller: &str) -> Vec<PathBuf> {
    let text = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    folders(&text, controller, Path::new(GROUPS))
}

fn folders(groups: &str, controller: &str, root: &Path) -> Vec<PathBuf> {
    let mut folders = Vec::new();
    for line in groups.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else {
            continue;
        };
        let top = if controllers.is_empty() {
            root.to_path_buf()
        } else if controllers.split(',').any(|name| name == controller) {
            root.join(controllers)
        } else {
            continue;
        };
        let own = top.join(path.trim_start_matches('/'));
        let above = own
            .ancestors()
            .take_while(|folder| folder.starts_with(&top));
        folders.extend(above.map(Path::to_path_buf));
        // In a container, the path may be the host's, which does not exist here.
        folders.push(top);
    }
    folders
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quotas_and_groups() {
        assert_eq!(quota("max 100000"), None);
        assert_eq!(quota("-1 100000"), None);
        assert_eq!(quota("150000 100000\n"), Some(1.5));
        let root = Path::new("/sys/fs/cgroup");
        let of = |text: &str, controller: &str| -> Vec<String> {
            let found = folders(text, controller, root);
            found.iter().map(|f| f.display().to_string()).collect()
        };
        let two = of("0::/a/b\n", "memory");
        assert_eq!(two[..2], ["/sys/fs/cgroup/a/b", "/sys/fs/cgroup/a"]);
        assert!(two.contains(&"/sys/fs/cgroup".to_owned()));
        let one = of("4:cpu,cpuacct:/x\n3:memory:/y\n", "cpu");
        assert_eq!(one[0], "/sys/fs/cgroup/cpu,cpuacct/x");
        assert!(one.iter().all(|folder| !folder.contains("memory")));
        assert_eq!(of("nonsense", "cpu"), [""; 0]);
    }
}
