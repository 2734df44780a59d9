//! The host kernel's statements about vulnerabilities of its processor (kernel document "sysfs-devices-system-cpu",
//! `vulnerabilities`).

use crate::service_thread::FILES;

/// Returns the kernel's line about a vulnerability, named as its file; `None` if there is no such file, or it may not
/// be read.
pub fn vulnerability(name: &str) -> Option<String> {
    let path = format!("/sys/devices/system/cpu/vulnerabilities/{name}");
    let text = FILES.pass(|| std::fs::read_to_string(path))?.ok()?;
    Some(text.trim().to_owned())
}
