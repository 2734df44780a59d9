//! Kernels of a few instructions, and `anykvm boot` running them.

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use iced_x86::code_asm::CodeAssembler;

/// Where the kernels are loaded and entered, in 64-bit mode with the first 4 GiB mapped.
const BASE: u64 = 0x20_0000;
/// The time in which every guest must have ended.
pub(crate) const LIMIT: Duration = Duration::from_secs(60);

/// A file that is removed when this is dropped.
pub(crate) struct File(PathBuf);

impl File {
    pub(crate) fn new(name: &str, bytes: &[u8]) -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let unique = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("anykvm-test-{}-{unique}-{name}", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::write(&path, bytes).unwrap();
        Self(path)
    }

    pub(crate) fn path(&self) -> &str {
        self.0.to_str().unwrap()
    }
}

impl Drop for File {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Makes an ELF executable of the instructions that `write` assembles.
pub(crate) fn kernel(write: impl FnOnce(&mut CodeAssembler)) -> File {
    let mut assembler = CodeAssembler::new(64).unwrap();
    write(&mut assembler);
    let code = assembler.assemble(BASE).unwrap();
    File::new("kernel", &elf(62, &code))
}

/// Returns a static executable for `machine` with one segment.
pub(crate) fn elf(machine: u16, code: &[u8]) -> Vec<u8> {
    let mut elf = b"\x7fELF\x02\x01\x01".to_vec();
    elf.resize(16, 0);
    elf.extend(2u16.to_le_bytes()); // executable
    elf.extend(machine.to_le_bytes());
    elf.extend(1u32.to_le_bytes());
    for word in [BASE, 64, 0] {
        elf.extend(word.to_le_bytes()); // entry, program headers, no section headers
    }
    elf.extend(0u32.to_le_bytes());
    for half in [64u16, 56, 1, 64, 0, 0] {
        elf.extend(half.to_le_bytes());
    }
    elf.extend(1u32.to_le_bytes()); // PT_LOAD
    elf.extend(7u32.to_le_bytes());
    let len = code.len() as u64;
    for word in [120, BASE, BASE, len, len, 0x1000] {
        elf.extend(word.to_le_bytes());
    }
    elf.extend(code);
    elf
}

/// Returns `anykvm boot` with this kernel and nothing else.
pub(crate) fn boot(kernel: &File) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_anykvm"));
    command
        .args(["boot", "--kernel", kernel.path(), "--no-initrd", "--mem"])
        .arg("16M")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// Waits for the process and returns its exit status; kills it and panics when it does not end.
pub(crate) fn wait(child: &mut Child) -> Option<i32> {
    let deadline = Instant::now() + LIMIT;
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status.code();
        }
        if Instant::now() > deadline {
            child.kill().unwrap();
            child.wait().unwrap();
            panic!("anykvm did not end");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}
