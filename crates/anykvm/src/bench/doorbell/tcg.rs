//! Measures the same under QEMU's TCG. A guest without a kernel writes to a port and an address that no device has, and
//! to the notification register of a virtio device, whose ioeventfd wakes QEMU's main loop.

use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::error::BootError;

/// Number of rings of each kind in `tcg_guest.c`.
const RINGS: f64 = 200_000.0;
/// The tests in their order. The guest announces the begin of each, and the end, by a byte.
const TESTS: [&str; 3] = ["TCG: port", "TCG: MMIO", "TCG: virtio notification"];
const LIMIT: Duration = Duration::from_secs(60);

/// Returns the nanoseconds of each test, by the host's clock.
pub(super) fn measure(qemu: &Path) -> Result<Vec<(&'static str, f64)>, BootError> {
    let folder = std::env::temp_dir().join(format!("anykvm-doorbell-{}", std::process::id()));
    std::fs::create_dir_all(&folder).map_err(BootError::host("cannot make a folder"))?;
    let result = measure_in(&folder, qemu);
    // Files that cannot be removed do no harm.
    let _ = std::fs::remove_dir_all(&folder);
    result
}

fn measure_in(folder: &Path, qemu: &Path) -> Result<Vec<(&'static str, f64)>, BootError> {
    let (source, program) = (folder.join("guest.c"), folder.join("guest"));
    std::fs::write(&source, include_str!("tcg_guest.c"))
        .map_err(BootError::host("cannot write"))?;
    let mut gcc = Command::new("gcc");
    gcc.args([
        "-m32",
        "-O1",
        "-ffreestanding",
        "-fno-pic",
        "-fno-stack-protector",
    ])
    .args([
        "-fno-asynchronous-unwind-tables",
        "-mno-sse",
        "-nostdlib",
        "-static",
        "-no-pie",
    ])
    .args(["-Wl,-Ttext=0x100000", "-Wl,--build-id=none", "-o"])
    .arg(&program)
    .arg(&source);
    if !gcc.status().is_ok_and(|status| status.success()) {
        return Err(BootError::NoImage("gcc -m32 failed (package gcc)".into()));
    }
    let mut child = Command::new(qemu)
        .args(["-accel", "tcg", "-machine", "pc", "-cpu", "max", "-m", "64"])
        .args([
            "-nodefaults",
            "-display",
            "none",
            "-no-reboot",
            "-debugcon",
            "stdio",
        ])
        .args(["-device", "virtio-rng-pci,disable-modern=on"])
        .args(["-device", "isa-debug-exit,iobase=0xf4,iosize=4", "-kernel"])
        .arg(&program)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(BootError::host("cannot start QEMU"))?;
    let out = child.stdout.take();
    let begin = Instant::now();
    let mut times = Vec::new();
    for byte in out.into_iter().flat_map(Read::bytes) {
        match byte {
            // The firmware writes to the same port.
            Ok(byte) if byte == b'\x01' + times.len() as u8 => times.push(begin.elapsed()),
            Ok(_) => {}
            Err(_) => break,
        }
        if times.len() > TESTS.len() || begin.elapsed() > LIMIT {
            break;
        }
    }
    // The process ends by itself, or is not needed any more.
    let _ = child.kill();
    let _ = child.wait();
    if times.len() != TESTS.len() + 1 {
        return Err(BootError::NoImage(format!(
            "the guest of QEMU has done {} of {} tests",
            times.len().saturating_sub(1),
            TESTS.len()
        )));
    }
    let pairs = times.iter().zip(times.iter().skip(1));
    let ns = pairs.map(|(from, to)| (*to - *from).as_secs_f64() * 1e9 / RINGS);
    Ok(TESTS.into_iter().zip(ns).collect())
}
