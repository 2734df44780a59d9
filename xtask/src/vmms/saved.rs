//! VMs that are saved while they compute, and go on in another process of the VMM.
//!
//! The guest counts (`ticks`). After it was restored, it has to go on where it was.

use std::{
    fs,
    io::{Read, Write},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    process::{Child, Stdio},
    time::{Duration, Instant},
};

use super::{files::Files, guest};

const SECONDS: Duration = Duration::from_secs(120);

/// A running VMM, with its control socket and what its guest prints.
struct Running {
    child: Child,
    socket: PathBuf,
    console: PathBuf,
}

impl Drop for Running {
    fn drop(&mut self) {
        // The process may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Running {
    /// Starts the VMM. `console`: the file to which the VMM itself writes the guest's output, if not to its own output.
    fn start(
        files: &Files,
        name: &str,
        arguments: &[&str],
        console: Option<PathBuf>,
    ) -> Result<Self, String> {
        let socket = files.dir.join(format!("{name}.socket"));
        let log = files.dir.join(format!("{name}.log"));
        let output = fs::File::create(&log).map_err(|e| format!("{}: {e}", log.display()))?;
        let errors = output.try_clone().map_err(|e| e.to_string())?;
        let child = files
            .command()
            .args(arguments)
            .arg(&socket)
            .stdin(Stdio::null())
            .stdout(output)
            .stderr(errors)
            .spawn()
            .map_err(|e| e.to_string())?;
        let console = console.unwrap_or(log);
        let running = Self {
            child,
            socket,
            console,
        };
        running.until("no control socket", || {
            UnixStream::connect(&running.socket).is_ok()
        })?;
        Ok(running)
    }

    fn until(&self, missing: &str, is_there: impl Fn() -> bool) -> Result<(), String> {
        let start = Instant::now();
        while !is_there() {
            if start.elapsed() > SECONDS {
                let text = fs::read_to_string(&self.console).unwrap_or_default();
                let from = text.len().saturating_sub(500);
                let tail = text.get(from..).unwrap_or_default();
                return Err(format!("{missing}; {tail}"));
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        Ok(())
    }

    /// Waits for the guest's tick number `number`.
    fn tick(&self, number: u32) -> Result<(), String> {
        let line = format!("tick {number}\r");
        let plain = format!("tick {number}\n");
        self.until(&format!("no tick {number}"), || {
            let text = fs::read(&self.console).unwrap_or_default();
            let text = String::from_utf8_lossy(&text);
            text.contains(&line) || text.contains(&plain)
        })
    }

    /// Sends a request to the control socket.
    fn ask(&self, method: &str, path: &str, body: &str) -> Result<(), String> {
        let head = format!(
            "{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n\
             Content-Length: {}\r\n\r\n{body}",
            body.len()
        );
        let answer = || -> std::io::Result<String> {
            let mut stream = UnixStream::connect(&self.socket)?;
            stream.set_read_timeout(Some(SECONDS))?;
            stream.write_all(head.as_bytes())?;
            let mut bytes = [0; 4096];
            let len = stream.read(&mut bytes)?;
            Ok(String::from_utf8_lossy(bytes.get(..len).unwrap_or_default()).into_owned())
        };
        let answer = answer().map_err(|e| format!("{method} {path}: {e}"))?;
        if answer.starts_with("HTTP/1.1 20") {
            Ok(())
        } else {
            Err(format!("{method} {path}: {answer}"))
        }
    }
}

fn boot_arguments() -> String {
    format!("{} ticks", guest::COMMAND_LINE)
}

/// Takes a full snapshot and one of the changes since, and restores both.
pub(super) fn firecracker(files: &Files) -> Result<(), String> {
    let first = Running::start(files, "first", &["--id", "first", "--api-sock"], None)?;
    let source = format!(
        r#"{{"kernel_image_path":"{}","initrd_path":"{}","boot_args":"{}"}}"#,
        files.vmlinux.display(),
        files.initrd.display(),
        boot_arguments()
    );
    let machine = r#"{"vcpu_count":2,"mem_size_mib":512,"track_dirty_pages":true}"#;
    first.ask("PUT", "/machine-config", machine)?;
    first.ask("PUT", "/boot-source", &source)?;
    first.ask("PUT", "/actions", r#"{"action_type":"InstanceStart"}"#)?;
    first.tick(3)?;
    let snapshot = |kind: &str| {
        format!(r#"{{"snapshot_type":"{kind}","snapshot_path":"state","mem_file_path":"memory"}}"#)
    };
    first.ask("PATCH", "/vm", r#"{"state":"Paused"}"#)?;
    first.ask("PUT", "/snapshot/create", &snapshot("Full"))?;
    first.ask("PATCH", "/vm", r#"{"state":"Resumed"}"#)?;
    first.tick(6)?;
    first.ask("PATCH", "/vm", r#"{"state":"Paused"}"#)?;
    first.ask("PUT", "/snapshot/create", &snapshot("Diff"))?;
    let ticks = last_tick(&first.console)?;
    drop(first);
    let second = Running::start(files, "second", &["--id", "second", "--api-sock"], None)?;
    let load = r#"{"snapshot_path":"state","mem_backend":{"backend_type":"File","backend_path":"memory"},"resume_vm":true}"#;
    second.ask("PUT", "/snapshot/load", load)?;
    goes_on(&second, ticks)
}

/// Takes a snapshot, and restores it.
pub(super) fn cloud_hypervisor(files: &Files) -> Result<(), String> {
    let console = files.dir.join("console");
    let serial = format!("file={}", console.display());
    let kernel = files.vmlinux.display().to_string();
    let initrd = files.initrd.display().to_string();
    let line = boot_arguments();
    let arguments = [
        "--kernel",
        &kernel,
        "--initramfs",
        &initrd,
        "--cmdline",
        &line,
        "--cpus",
        "boot=2",
        "--memory",
        "size=512M",
        "--serial",
        &serial,
        "--console",
        "off",
        "--api-socket",
    ];
    let first = Running::start(files, "first", &arguments, Some(console.clone()))?;
    first.tick(3)?;
    let folder = files.dir.join("saved");
    fs::create_dir_all(&folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    let url = format!("file://{}", folder.display());
    first.ask("PUT", "/api/v1/vm.pause", "")?;
    let destination = format!(r#"{{"destination_url":"{url}"}}"#);
    first.ask("PUT", "/api/v1/vm.snapshot", &destination)?;
    let ticks = last_tick(&console)?;
    drop(first);
    let restore = format!("source_url={url}");
    let arguments = ["--restore", &restore, "--api-socket"];
    let second = Running::start(files, "second", &arguments, Some(console))?;
    let start = Instant::now();
    // The VM exists when the snapshot has been read.
    while let Err(why) = second.ask("PUT", "/api/v1/vm.resume", "") {
        if start.elapsed() > SECONDS {
            return Err(why);
        }
        std::thread::sleep(Duration::from_millis(200));
    }
    goes_on(&second, ticks)
}

fn last_tick(console: &Path) -> Result<u32, String> {
    let text = fs::read(console).map_err(|e| format!("{}: {e}", console.display()))?;
    let text = String::from_utf8_lossy(&text);
    let ticks = text.lines().filter_map(|l| l.trim().strip_prefix("tick "));
    ticks
        .filter_map(|number| number.parse().ok())
        .next_back()
        .ok_or_else(|| "the guest has not counted".to_owned())
}

/// Checks that the guest goes on counting, and has not begun a second time.
fn goes_on(vmm: &Running, ticks: u32) -> Result<(), String> {
    vmm.tick(ticks + 10)?;
    let text = fs::read(&vmm.console).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let begins = text.lines().filter(|l| l.trim() == "tick 0").count();
    if begins > 1 || text.contains("GUEST-IS-BAD") || text.contains("Kernel panic") {
        return Err("the guest began again".to_owned());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_tick_is_found() {
        let path = std::env::temp_dir().join(format!("ticks-{}", std::process::id()));
        fs::write(&path, "tick 1\r\ntick 2\r\n[  1.0] x\r\ntick 1").unwrap();
        assert_eq!(last_tick(&path), Ok(1));
        fs::write(&path, "nothing\n").unwrap();
        assert!(last_tick(&path).is_err());
        fs::remove_file(&path).unwrap();
    }
}
