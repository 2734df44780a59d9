//! Measures the same under QEMU's TCG. A guest without a kernel writes to a port and an address that no device has, and
//! to the notification register of a virtio device, whose ioeventfd wakes QEMU's main loop.

use std::path::Path;

use super::super::bare_tcg::Guest;
use crate::error::BootError;

/// Number of rings of each kind in `tcg_guest.c`.
const RINGS: f64 = 200_000.0;
/// The tests in their order.
const TESTS: [&str; 3] = ["TCG: port", "TCG: MMIO", "TCG: virtio notification"];
const GUEST: Guest = Guest {
    source: include_str!("tcg_guest.c"),
    devices: &["-device", "virtio-rng-pci,disable-modern=on"],
    parts: TESTS.len(),
};

/// Returns the nanoseconds of each test, by the host's clock.
pub(super) fn measure(qemu: &Path) -> Result<Vec<(&'static str, f64)>, BootError> {
    let times = GUEST.times(qemu)?;
    let ns = times.iter().map(|time| time.as_secs_f64() * 1e9 / RINGS);
    Ok(TESTS.into_iter().zip(ns).collect())
}
