//! Names for profilers: which addresses are translated code, and of which guest address.
//!
//! Each write is a system call, so names are only written while someone measures.

use std::{
    fs::File,
    io::Write,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

/// The file of names. All vCPUs of the process write to one.
#[derive(Debug)]
pub(crate) struct Perf {
    kind: Profiler,
    file: Mutex<File>,
    blocks: AtomicU64,
}

/// The format in which a profiler reads names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Profiler {
    /// `/tmp/perf-PID.map` (tools/perf/Documentation/jit-interface.txt).
    Map,
    /// `jit-PID.dump` in the working directory, for `perf inject --jit` (jitdump-specification.txt).
    Dump,
}

/// Returns the process's file, which the first vCPU that asks opens. Calls `tell` with the reason if it cannot be
/// opened.
pub(crate) fn open(kind: Profiler, tell: fn(&str)) -> Option<&'static Perf> {
    static PERF: std::sync::OnceLock<Option<Perf>> = std::sync::OnceLock::new();
    PERF.get_or_init(|| create(kind, tell)).as_ref()
}

fn create(kind: Profiler, tell: fn(&str)) -> Option<Perf> {
    let pid = std::process::id();
    let path = match kind {
        Profiler::Map => format!("/tmp/perf-{pid}.map"),
        Profiler::Dump => format!("jit-{pid}.dump"),
    };
    let mut file = File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(true)
        .open(&path)
        .map_err(|e| tell(&format!("{path}: {e}")))
        .ok()?;
    if kind == Profiler::Dump {
        file.write_all(&header(pid)).ok()?;
        host::code_buffer::mark_for_profiler(&file);
    }
    Some(Perf {
        kind,
        file: Mutex::new(file),
        blocks: AtomicU64::new(0),
    })
}

const MAGIC: u32 = 0x4a69_5444;
const EM_X86_64: u32 = 62;
const JIT_CODE_LOAD: u32 = 0;

fn header(pid: u32) -> Vec<u8> {
    let mut h = Vec::new();
    for v in [MAGIC, 1, 40, EM_X86_64, 0, pid] {
        h.extend(v.to_le_bytes());
    }
    h.extend(host::clock::monotonic_ns().to_le_bytes());
    h.extend(0_u64.to_le_bytes());
    h
}

fn load(id: u64, pid: u32, tid: u32, address: u64, name: &str, code: &[u8]) -> Vec<u8> {
    let mut r = Vec::new();
    let size = 16 + 40 + name.len() + 1 + code.len();
    r.extend(JIT_CODE_LOAD.to_le_bytes());
    r.extend((size as u32).to_le_bytes());
    r.extend(host::clock::monotonic_ns().to_le_bytes());
    r.extend(pid.to_le_bytes());
    r.extend(tid.to_le_bytes());
    for v in [address, address, code.len() as u64, id] {
        r.extend(v.to_le_bytes());
    }
    r.extend(name.bytes());
    r.push(0);
    r.extend(code);
    r
}

impl Perf {
    /// Writes a record: the code of the block at `rip` is at `address` from now on.
    pub(crate) fn note(&self, rip: u64, address: u64, code: &[u8]) {
        let name = format!("guest:{rip:x}");
        let id = self.blocks.fetch_add(1, Ordering::Relaxed);
        let record = match self.kind {
            Profiler::Map => format!("{address:x} {:x} {name}\n", code.len()).into_bytes(),
            Profiler::Dump => {
                let pid = std::process::id();
                load(id, pid, host::thread::tid() as u32, address, &name, code)
            }
        };
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        // A failed write, as on a full disk, costs names and leaves the guest alone.
        let _ = file.write_all(&record);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_as_long_as_they_say() {
        let h = header(7);
        assert_eq!(h.len(), 40);
        assert_eq!(h[8..12], 40_u32.to_le_bytes());
        let r = load(3, 7, 8, 0x1000, "guest:ab", &[0x90; 5]);
        assert_eq!(r.len(), 16 + 40 + 9 + 5);
        assert_eq!(r[4..8], (r.len() as u32).to_le_bytes());
        assert_eq!(r[16..20], 7_u32.to_le_bytes());
        assert_eq!(r[24..32], 0x1000_u64.to_le_bytes());
    }
}
