//! Guests without a kernel under QEMU's TCG: a Multiboot kernel in C, which announces each part of its work, and the end, by a
//! byte on the debug port. The host's clock is taken.

use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::error::BootError;

const LIMIT: Duration = Duration::from_secs(60);

/// A guest.
#[derive(Clone, Copy, Debug)]
pub(super) struct Guest {
    /// In C.
    pub(super) source: &'static str,
    /// QEMU's options for its devices.
    pub(super) devices: &'static [&'static str],
    pub(super) parts: usize,
}

impl Guest {
    /// How long each part takes.
    pub(super) fn times(&self, qemu: &Path) -> Result<Vec<Duration>, BootError> {
        let folder = std::env::temp_dir().join(format!("anykvm-bare-{}", std::process::id()));
        std::fs::create_dir_all(&folder).map_err(BootError::host("cannot make a folder"))?;
        let result = self.run_in(&folder, qemu);
        // What is left there disturbs nobody.
        let _ = std::fs::remove_dir_all(&folder);
        result
    }

    fn run_in(&self, folder: &Path, qemu: &Path) -> Result<Vec<Duration>, BootError> {
        let (source, program) = (folder.join("guest.c"), folder.join("guest"));
        std::fs::write(&source, self.source).map_err(BootError::host("cannot write"))?;
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
            .args(["-device", "isa-debug-exit,iobase=0xf4,iosize=4"])
            .args(self.devices)
            .arg("-kernel")
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
                // Firmware writes to the same port.
                Ok(byte) if byte == b'\x01' + times.len() as u8 => times.push(begin.elapsed()),
                Ok(_) => {}
                Err(_) => break,
            }
            if times.len() > self.parts || begin.elapsed() > LIMIT {
                break;
            }
        }
        // It ends by itself, or is not needed any more.
        let _ = child.kill();
        let _ = child.wait();
        if times.len() != self.parts + 1 {
            return Err(BootError::NoImage(format!(
                "the guest of QEMU has done {} of {} parts",
                times.len().saturating_sub(1),
                self.parts
            )));
        }
        let pairs = times.iter().zip(times.iter().skip(1));
        Ok(pairs.map(|(from, to)| *to - *from).collect())
    }
}
