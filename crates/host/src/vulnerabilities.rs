//! What the host's kernel says of its processor's weaknesses (kernel document "sysfs-devices-system-cpu",
//! `vulnerabilities`).

use crate::service_thread::FILES;

/// The line of a weakness, as the kernel names its file; nothing where there is no such file, or none may be read.
pub fn vulnerability(name: &str) -> Option<String> {
    let path = format!("/sys/devices/system/cpu/vulnerabilities/{name}");
    let text = FILES.pass(|| std::fs::read_to_string(path))?.ok()?;
    Some(text.trim().to_owned())
}
