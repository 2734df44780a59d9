//! The guest of the VMMs: an initramfs with busybox, the modules that the cases need, and a script that checks the
//! machine; and what the script checks against.

use std::{
    collections::BTreeMap,
    fs,
    io::{Read, Write},
    net::{Ipv4Addr, TcpListener},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use testkit::boot::Outcome;

use crate::tool::tool;

/// The kernel's command line.
pub(super) const COMMAND_LINE: &str = "console=ttyS0 quiet panic=-1 nokaslr";
/// The line that the guest prints last if everything was as expected.
pub(super) const GOOD: &str = "GUEST-IS-GOOD";

/// Drivers of the cases' devices, with those that they depend on. A kernel need not have all of them.
const MODULES: &[&str] = &[
    "virtio_pci",
    "virtio_mmio",
    "virtio_blk",
    "xen_blkfront",
    "virtio_scsi",
    "sd_mod",
    "ata_piix",
    "ahci",
    "nvme",
    "virtio_net",
    "virtio_rng",
    "virtio_balloon",
    "msr",
    "9pnet_virtio",
    "9p",
];

/// Size of `data.img` in bytes.
const DATA: usize = 4 << 20;
/// Number of bytes that the server sends.
const SERVED: usize = 100 << 20;

/// Returns bytes without structure, which are the same for the same seed.
fn bytes(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed;
    let mut out = Vec::with_capacity(len);
    while out.len() < len {
        // Marsaglia's xorshift.
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        out.extend_from_slice(&state.to_le_bytes());
    }
    out.truncate(len);
    out
}

/// Returns the disk's content.
pub(super) fn data() -> Vec<u8> {
    bytes(0x1234_5678_9abc_def1, DATA)
}

/// A server that sends the same bytes to every client, over HTTP.
pub(super) struct Server {
    port: u16,
}

impl Server {
    pub(super) fn start() -> Result<Self, String> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(|e| e.to_string())?;
        let port = listener.local_addr().map_err(|e| e.to_string())?.port();
        // The thread ends with the process. A client may close its connection early.
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let mut client = client;
                let _ = client.read(&mut [0; 4096]);
                let head = format!("HTTP/1.0 200 OK\r\nContent-Length: {SERVED}\r\n\r\n");
                let _ = client.write_all(head.as_bytes());
                let _ = client.write_all(&bytes(SERVED as u64, SERVED));
            }
        });
        Ok(Self { port })
    }

    pub(super) fn port(&self) -> u16 {
        self.port
    }
}

/// Compiles a C program for guests.
pub(super) fn compiled(source: &str, dir: &Path) -> Result<Vec<u8>, String> {
    let program = dir.join("program");
    let file = program.with_extension("c");
    fs::write(&file, source).map_err(|e| format!("{}: {e}", file.display()))?;
    let mut gcc = Command::new("gcc");
    tool(gcc.args(["-O2", "-static", "-o"]).args([&program, &file]))?;
    fs::read(&program).map_err(|e| format!("{}: {e}", program.display()))
}

/// Writes the initramfs of a case, for a machine with so many processors and MiB. Returns its path.
pub(super) fn initramfs(
    kernel: &Path,
    dir: &Path,
    check: &str,
    (cpus, mem_mib): (u32, u64),
    writer: Option<&[u8]>,
) -> Result<PathBuf, String> {
    let busybox = fs::read("/bin/busybox").map_err(|e| format!("/bin/busybox: {e}"))?;
    let mut archive = Archive::default();
    for folder in ["bin", "dev", "m", "mnt", "proc", "sys"] {
        archive.folder(folder);
    }
    archive.file("bin/busybox", &busybox, 0o755);
    archive.file("dev/console", &[], 0);
    if let Some(program) = writer {
        archive.file("bin/writer", program, 0o755);
    }
    let mut insert = String::new();
    for (number, module) in modules(kernel, MODULES)?.iter().enumerate() {
        let content = fs::read(module).map_err(|e| format!("{}: {e}", module.display()))?;
        archive.file(&format!("m/{number}"), &content, 0o644);
        insert += &format!("insmod /m/{number}\n");
    }
    // The kernel takes a tenth of the memory for itself, and more of a small one.
    let least = (mem_mib - mem_mib / 10).saturating_sub(40) << 10;
    let sum = |data: &[u8]| host_sum(data);
    let script = format!(
        "#!/bin/busybox sh\n\
         /bin/busybox --install -s /bin; export PATH=/bin\n\
         mount -t proc p /proc; mount -t sysfs s /sys; mount -t devtmpfs d /dev\n\
         {insert}\
         sum() {{ sha256sum | cut -c1-64; }}\n\
         same() {{ [ \"$1\" = \"$2\" ] || {{ echo \"not the same: $1 $2\"; return 1; }}; }}\n\
         data={data}; served={served}\n\
         check() {{\n  same $(nproc) {cpus} || return 1\n\
         [ $(sed -n 's/^MemTotal: *\\([0-9]*\\) kB/\\1/p' /proc/meminfo) -ge {least} ] || return 1\n\
         n=0; while [ $n -lt {cpus} ]; do taskset -c $n sh -c 'i=0; while [ $i -lt 300 ]; do i=$((i + 1)); done' || return 1; n=$((n + 1)); done\n\
         ! dmesg | grep -E 'unchecked MSR access|cut here' || return 1\n\
         {check}\n}}\n\
         . /run-script\n",
        data = sum(&data()),
        served = sum(&bytes(SERVED as u64, SERVED)),
    );
    archive.file("init", script.as_bytes(), 0o755);
    archive.file("run-script", RUN.as_bytes(), 0o644);
    let path = dir.join("initramfs");
    fs::write(&path, archive.end()).map_err(|e| format!("{}: {e}", path.display()))?;
    Ok(path)
}

/// What the guest does, by the kernel's command line: check and power off; `ticks`: count;
/// `live=MIB,PAGES`: write memory on each processor, and count; `again`: check and reboot; `grows`: say how many processors there are.
const RUN: &str = "\
case $(cat /proc/cmdline) in
*live=*) how=$(sed 's/.*live=\\([0-9]*\\),\\([0-9]*\\).*/\\1 \\2/' /proc/cmdline)
    n=1; while [ $n -lt $(nproc) ]; do writer $how $n & n=$((n + 1)); done
    writer $how 0; echo GUEST-IS-BAD;;
*grows*) while true; do for c in /sys/devices/system/cpu/cpu*/online; do [ $(cat $c) = 1 ] || echo 1 >$c; done
    taskset -c $(($(nproc) - 1)) echo processors $(nproc); sleep 0.2; done;;
*ticks*) sed -n 's/^\\([0-9a-f]*\\) . \\(hrtimer_nanosleep\\|ksys_write\\|jiffies\\)$/SYMBOL \\2 \\1/p' /proc/kallsyms
    i=0; while true; do echo tick $i; i=$((i + 1)); sleep 0.1; done;;
esac
if check; then echo GUEST-IS-GOOD; else echo GUEST-IS-BAD; dmesg | tail -20; fi
case $(cat /proc/cmdline) in
*again*) reboot -f;;
esac
[ -d /sys/firmware/acpi ] || reboot -f
poweroff -f
";

/// Returns the SHA-256 of bytes, by the host's program.
fn host_sum(data: &[u8]) -> String {
    let mut child = Command::new("sha256sum");
    child.stdin(Stdio::piped()).stdout(Stdio::piped());
    let Ok(mut child) = child.spawn() else {
        return String::new();
    };
    if let Some(mut input) = child.stdin.take() {
        // If bytes are missing, the sum differs.
        let _ = input.write_all(data);
    }
    let output = child
        .wait_with_output()
        .map(|o| o.stdout)
        .unwrap_or_default();
    String::from_utf8_lossy(&output).chars().take(64).collect()
}

/// Returns the files of these modules, each behind those that it depends on. A kernel need not have them.
pub(crate) fn modules(kernel: &Path, names: &[&str]) -> Result<Vec<PathBuf>, String> {
    let release = crate::debian::release(kernel);
    let root = kernel.parent().and_then(Path::parent).unwrap_or(kernel);
    let mut known = BTreeMap::new();
    find(&root.join("lib/modules").join(release), &mut known);
    let mut out = Vec::new();
    for name in names {
        add(name, &known, &mut out)?;
    }
    Ok(out)
}

fn find(folder: &Path, known: &mut BTreeMap<String, PathBuf>) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() {
            find(&path, known);
        } else if path.extension().is_some_and(|e| e == "ko") {
            let name = path.file_stem().unwrap_or_default().to_string_lossy();
            known.insert(name.replace('-', "_"), path);
        }
    }
}

fn add(
    name: &str,
    known: &BTreeMap<String, PathBuf>,
    out: &mut Vec<PathBuf>,
) -> Result<(), String> {
    let Some(path) = known.get(name) else {
        // The module is built in, or does not exist.
        return Ok(());
    };
    if out.contains(path) {
        return Ok(());
    }
    let content = fs::read(path).map_err(|e| format!("{}: {e}", path.display()))?;
    const KEY: &[u8] = b"\0depends=";
    let depends = content.windows(KEY.len()).position(|w| w == KEY);
    let list = depends
        .and_then(|at| content.get(at + KEY.len()..))
        .unwrap_or_default();
    let list = list.split(|b| *b == 0).next().unwrap_or_default();
    for dependency in String::from_utf8_lossy(list).split(',') {
        add(&dependency.replace('-', "_"), known, out)?;
    }
    out.push(path.clone());
    Ok(())
}

/// A cpio archive in the kernel's "newc" format.
#[derive(Default)]
pub(crate) struct Archive {
    bytes: Vec<u8>,
    count: u32,
}

impl Archive {
    /// Adds a folder.
    pub(crate) fn folder(&mut self, name: &str) {
        self.entry(name, 0o040_755, &[], (0, 0));
    }

    /// Adds a file; without permissions, the console device.
    pub(crate) fn file(&mut self, name: &str, content: &[u8], permissions: u32) {
        if permissions == 0 {
            self.entry(name, 0o020_600, &[], (5, 1));
        } else {
            self.entry(name, 0o100_000 | permissions, content, (0, 0));
        }
    }

    fn entry(&mut self, name: &str, mode: u32, content: &[u8], device: (u32, u32)) {
        self.count += 1;
        let fields = [
            self.count,
            mode,
            0,
            0,
            1,
            0,
            content.len() as u32,
            0,
            0,
            device.0,
            device.1,
            name.len() as u32 + 1,
            0,
        ];
        self.bytes.extend_from_slice(b"070701");
        for field in fields {
            self.bytes
                .extend_from_slice(format!("{field:08X}").as_bytes());
        }
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend_from_slice(content);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }

    /// Returns the archive's bytes.
    pub(crate) fn end(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, &[], (0, 0));
        self.bytes
    }
}

/// Returns an error unless the guest has checked its machine, found everything right, and powered off.
pub(super) fn verdict(outcome: &Outcome) -> Result<(), String> {
    let text = outcome.text();
    let tail: Vec<&str> = text.lines().rev().take(15).collect();
    let tail: Vec<&str> = tail.into_iter().rev().collect();
    let words = format!("{}\n{}", tail.join("\n"), outcome.last_words(10));
    if outcome.timed_out {
        return Err(format!("did not end in time\n{words}"));
    }
    if outcome.status != Some(0) || !text.contains(GOOD) {
        return Err(format!("status {:?}\n{words}", outcome.status));
    }
    if !outcome.last_words(1000).contains("in place of /dev/kvm") {
        return Err(format!(
            "anykvm exec did not say that it runs the VMM\n{words}"
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn only_a_content_guest_of_anykvm_passes() {
        let outcome = |status, out: &str, err: &str| Outcome {
            status,
            stdout: out.into(),
            stderr: err.into(),
            time: Duration::ZERO,
            timed_out: false,
        };
        let said = "anykvm: q runs with anykvm 1 in place of /dev/kvm\n";
        assert!(verdict(&outcome(Some(0), "x\nGUEST-IS-GOOD\n", said)).is_ok());
        assert!(verdict(&outcome(Some(0), "GUEST-IS-BAD\n", said)).is_err());
        assert!(verdict(&outcome(Some(1), "GUEST-IS-GOOD\n", said)).is_err());
        assert!(verdict(&outcome(Some(0), "GUEST-IS-GOOD\n", "")).is_err());
    }

    #[test]
    fn the_archive_ends_as_the_kernel_wants() {
        let mut archive = Archive::default();
        archive.file("init", b"x", 0o755);
        let bytes = archive.end();
        assert_eq!(bytes.len() % 4, 0);
        assert!(bytes.windows(10).any(|w| w == b"TRAILER!!!"));
        assert_eq!(host_sum(b"").len(), 64);
    }
}
