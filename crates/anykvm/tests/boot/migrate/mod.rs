//! Guests that are paused, saved and moved: `--control`, `--incoming`, `anykvm migrate`.
//!
//! The guest counts. At each number it copies a file in memory, checks the copy, and writes the number to its disk. The
//! output of all processes together has each number once.

mod busy;
mod input;

use std::fs;
use std::io::Read;
use std::net::TcpListener;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crate::guest::wait;

const PATIENCE: Duration = Duration::from_secs(120);
/// Sectors of the disk that are written in turn.
const SECTORS: usize = 64;

fn script(ticks: u32) -> String {
    format!(
        "head -c 3000000 /dev/urandom >/tmp/a; s=$(md5sum </tmp/a); i=0
         while [ $i -lt {ticks} ]; do
             f=/tmp/b.$((i % 8)); cp /tmp/a $f; [ \"$(md5sum <$f)\" = \"$s\" ] || echo LOST $i
             echo $i | dd of=/dev/vda bs=512 seek=$((i % {SECTORS})) conv=notrunc,fsync 2>/dev/null
             echo tick $i; i=$((i + 1)); sleep .02
         done; exit 7"
    )
}

/// A folder of the test's own. Its disk is a raw file, or an image of the same content.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("anykvm-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir(&path).unwrap();
        fs::write(path.join("disk"), vec![0; 512 * SECTORS]).unwrap();
        Self(path)
    }

    /// Makes its disk a qcow2 image, or a raw file again.
    fn convert(&self, to: &str) {
        let whole = |arguments: &[&str]| {
            let status = Command::new("qemu-img").args(arguments).status();
            assert!(status.unwrap().success(), "{arguments:?}");
        };
        let (disk, new) = (self.path("disk"), self.path("new"));
        if to == "raw" {
            whole(&["check", "-q", "-f", "qcow2", &disk]);
        }
        whole(&["convert", "-O", to, &disk, &new]);
        fs::rename(new, disk).unwrap();
    }

    fn path(&self, name: &str) -> String {
        self.0.join(name).to_str().unwrap().to_owned()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A process with a guest, or one that waits for it.
struct Process {
    child: Child,
    folder: PathBuf,
    name: String,
}

impl Process {
    fn start(folder: &Folder, name: &str, options: &[&str], command: &[&str]) -> Self {
        let mut anykvm = Self::command(folder, name, options, command);
        anykvm.stdin(Stdio::null());
        Self::spawn(folder, name, &mut anykvm)
    }

    fn command(folder: &Folder, name: &str, options: &[&str], command: &[&str]) -> Command {
        let file =
            |suffix: &str| fs::File::create(folder.path(&format!("{name}.{suffix}"))).unwrap();
        let mut anykvm = Command::new(env!("CARGO_BIN_EXE_anykvm"));
        anykvm.args(["boot", "--control", &folder.path(&format!("{name}.sock"))]);
        anykvm.args(["--disk", &folder.path("disk")]).args(options);
        if !command.is_empty() {
            anykvm.arg("--").args(command);
        }
        anykvm.stdout(file("out")).stderr(file("err"));
        anykvm
    }

    fn spawn(folder: &Folder, name: &str, anykvm: &mut Command) -> Self {
        Self {
            child: anykvm.spawn().unwrap(),
            folder: folder.0.clone(),
            name: name.to_owned(),
        }
    }

    fn read(&self, suffix: &str) -> String {
        let path = self.folder.join(format!("{}.{suffix}", self.name));
        fs::read_to_string(path).unwrap()
    }

    fn ticks(&self) -> Vec<u32> {
        let said = self.read("out");
        let number = |line: &str| line.strip_prefix("tick ")?.parse().ok();
        said.lines().filter_map(number).collect()
    }

    /// Waits until the guest has said `tick`.
    fn wait_for_tick(&mut self, tick: u32) {
        let begin = Instant::now();
        while self.ticks().last().is_none_or(|last| *last < tick) {
            let ended = self.child.try_wait().unwrap();
            assert!(ended.is_none(), "{ended:?}: {}", self.read("err"));
            assert!(
                begin.elapsed() < PATIENCE,
                "no tick {tick}: {}",
                self.read("err")
            );
            thread::sleep(Duration::from_millis(10));
        }
    }

    /// Runs `anykvm migrate` for this guest.
    fn migrate(&self, options: &[&str]) -> Output {
        self.migrate_command(options).output().unwrap()
    }

    fn migrate_command(&self, options: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_anykvm"));
        let socket = self.folder.join(format!("{}.sock", self.name));
        command.arg("migrate").arg(socket).args(options);
        command
    }

    /// Runs `anykvm migrate`, which has to work, and returns what it printed.
    fn do_migrate(&self, options: &[&str]) -> String {
        let output = self.migrate(options);
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        assert!(
            output.status.success(),
            "{options:?}: {}",
            text(&output.stderr)
        );
        text(&output.stdout)
    }

    /// Runs `anykvm migrate`, which must fail with `want`, while the guest goes on.
    fn assert_stays(&mut self, options: &[&str], want: &str) {
        let output = self.migrate(options);
        self.assert_stayed(&output, want);
    }

    fn assert_stayed(&mut self, output: &Output, want: &str) {
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{stderr}");
        assert!(stderr.contains(want), "{want}: {stderr}");
        assert!(stderr.contains("the guest stays here"), "{stderr}");
        assert_eq!(self.do_migrate(&["--status"]), "running\n");
        let last = self.ticks().last().copied().unwrap_or(0);
        self.wait_for_tick(last + 3);
    }

    /// Waits for the process to end and returns its status.
    fn end(&mut self) -> Option<i32> {
        wait(&mut self.child)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Checks what all processes have said together, and what is on the disk.
fn judge(folder: &Folder, processes: &[&Process], ticks: u32) {
    let said: Vec<String> = processes.iter().map(|p| p.read("out")).collect();
    assert!(!said.concat().contains("LOST"), "{said:?}");
    let all: Vec<u32> = processes.iter().flat_map(|p| p.ticks()).collect();
    assert_eq!(all, (0..ticks).collect::<Vec<_>>());
    let disk = fs::read(folder.path("disk")).unwrap();
    for (n, sector) in disk.chunks(512).enumerate() {
        let last = (0..ticks as usize)
            .rev()
            .find(|i| i % SECTORS == n)
            .unwrap();
        let line = sector.split(|byte| *byte == b'\n').next().unwrap();
        assert_eq!(String::from_utf8_lossy(line), last.to_string());
    }
}

fn place(kind: &str, path: &str) -> String {
    format!("{kind}:{path}")
}

/// Tests moves into a file and out of it, and twice to a process that waits. The guest's disk, its memory and its
/// command's status go with it.
#[test]
fn a_guest_goes_on_elsewhere() {
    const TICKS: u32 = 150;
    let folder = Folder::new("moves");
    let script = script(TICKS);
    let options = ["--cpus", "2", "--mem", "192M"];
    let mut first = Process::start(&folder, "first", &options, &["sh", "-c", &script]);
    first.wait_for_tick(10);
    assert_eq!(first.do_migrate(&[]), "running\n");
    let saved = folder.path("saved");
    let report = first.do_migrate(&["--to", &place("file", &saved), "--verify"]);
    assert!(report.contains("downtime"), "{report}");
    assert_eq!(first.end(), Some(0));
    assert!(first.read("err").contains("the guest has gone to file:"));
    assert!(!Path::new(&folder.path("first.sock")).exists());

    spoilt_files_are_refused(&folder, &saved);
    let mut last = Process::start(
        &folder,
        "second",
        &["--incoming", &place("file", &saved)],
        &[],
    );
    last.wait_for_tick(30);
    let mut all = vec![first];
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr();
    let port = port.unwrap().port();
    let over_tcp = format!("127.0.0.1:{port}");
    for (name, kind, tick) in [("third", "unix", 50), ("fourth", "tcp", 70)] {
        let is_unix = kind == "unix";
        let way = if is_unix {
            folder.path("way")
        } else {
            over_tcp.clone()
        };
        let place = place(kind, &way);
        let next = Process::start(&folder, name, &["--incoming", &place], &[]);
        wait_for(|| {
            if is_unix {
                Path::new(&way).exists()
            } else {
                is_listening(port)
            }
        });
        last.do_migrate(&["--to", &place, "--verify"]);
        assert_eq!(last.end(), Some(0), "{}", last.read("err"));
        all.push(std::mem::replace(&mut last, next));
        last.wait_for_tick(tick);
    }
    assert_eq!(last.end(), Some(7), "{}", last.read("err"));
    all.push(last);
    judge(&folder, &all.iter().collect::<Vec<_>>(), TICKS);
}

/// A qcow2 image is written by one process until the guest has left it, and then by the next.
#[test]
fn a_guest_takes_its_image_along() {
    const TICKS: u32 = 90;
    let folder = Folder::new("image-moves");
    folder.convert("qcow2");
    let script = script(TICKS);
    let mut last = Process::start(&folder, "first", &["--mem", "192M"], &["sh", "-c", &script]);
    last.wait_for_tick(5);
    let way = folder.path("way");
    let mut all = Vec::new();
    for (name, tick) in [("second", 20), ("third", 40), ("fourth", 60)] {
        let place = place("unix", &way);
        let next = Process::start(&folder, name, &["--incoming", &place], &[]);
        wait_for_file(&way);
        last.do_migrate(&["--to", &place, "--verify"]);
        assert_eq!(last.end(), Some(0), "{}", last.read("err"));
        all.push(std::mem::replace(&mut last, next));
        last.wait_for_tick(tick);
    }
    assert_eq!(last.end(), Some(7), "{}", last.read("err"));
    all.push(last);
    folder.convert("raw");
    judge(&folder, &all.iter().collect::<Vec<_>>(), TICKS);
}

/// Checks that each spoilt file is refused with one line, and that nothing runs.
fn spoilt_files_are_refused(folder: &Folder, saved: &str) {
    let whole = fs::read(saved).unwrap();
    let mut flipped = whole.clone();
    let at = whole.len() / 2;
    flipped[at] ^= 1;
    let mut version = whole.clone();
    version[8] = 9;
    let rows: [(&[u8], &str); 5] = [
        (b"#!/bin/sh\nexit 0\n", "no saved guest"),
        (&whole[..at], "ends in the middle"),
        (&whole[..whole.len() - 1], "ends in the middle"),
        (&flipped, "checksum"),
        (&version, "another version"),
    ];
    let incoming = |file: &str, disk: &[&str]| {
        let mut anykvm = Command::new(env!("CARGO_BIN_EXE_anykvm"));
        anykvm
            .args(["boot", "--incoming", &place("file", file)])
            .args(disk);
        let output = anykvm.stdin(Stdio::null()).output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{stderr}");
        assert_eq!(stderr.lines().count(), 1, "{stderr}");
        stderr
    };
    let disk = folder.path("disk");
    for (bytes, want) in rows {
        let file = folder.path("spoilt");
        fs::write(&file, bytes).unwrap();
        let stderr = incoming(&file, &["--disk", &disk]);
        assert!(stderr.contains(want), "{want}: {stderr}");
    }
    let other = folder.path("other");
    fs::write(&other, [0; 1024]).unwrap();
    let stderr = incoming(saved, &["--disk", &other]);
    assert!(stderr.contains("is not the guest's"), "{stderr}");
    let stderr = incoming(saved, &[]);
    assert!(stderr.contains("1 disks"), "{stderr}");
    let stderr = incoming(&folder.path("nothing"), &[]);
    assert!(stderr.contains("No such file"), "{stderr}");
}

/// Whatever becomes of the other side, the guest goes on.
#[test]
fn a_guest_that_cannot_go_stays() {
    const TICKS: u32 = 100;
    let folder = Folder::new("stays");
    let script = script(TICKS);
    let options = ["--cpus", "2", "--mem", "192M"];
    let mut guest = Process::start(&folder, "guest", &options, &["sh", "-c", &script]);
    guest.wait_for_tick(3);
    let way = place("unix", &folder.path("way"));
    guest.assert_stays(&["--to", &way], "No such file");
    let nowhere = place("file", &folder.path("nowhere/saved"));
    guest.assert_stays(&["--to", &nowhere], "No such file");

    // A target without the guest's disk: both sides say so.
    let incoming = ["boot", "--incoming", &way];
    let mut target = Command::new(env!("CARGO_BIN_EXE_anykvm"));
    let target = target
        .args(incoming)
        .stdin(Stdio::null())
        .stderr(Stdio::piped());
    let target = target.spawn().unwrap();
    wait_for_file(&folder.path("way"));
    guest.assert_stays(&["--to", &way], "1 disks");
    let output = target.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("1 disks"));

    // A target that dies while the guest comes to it.
    let listener = UnixListener::bind(folder.path("dies")).unwrap();
    let dies = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.read_exact(&mut vec![0; 1 << 20]).unwrap();
    });
    guest.assert_stays(
        &["--to", &place("unix", &folder.path("dies"))],
        "roken pipe",
    );
    dies.join().unwrap();

    // A target that hangs: the first migration is cancelled, and of the second the client is killed.
    let listener = UnixListener::bind(folder.path("hangs")).unwrap();
    let hangs = place("unix", &folder.path("hangs"));
    let mut client = guest.migrate_command(&["--to", &hangs]);
    let client = client
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let silent = listener.accept().unwrap();
    wait_for(|| guest.do_migrate(&["--status"]) == "migrating\n");
    let output = guest.migrate(&["--pause"]);
    assert_eq!(output.status.code(), Some(1));
    guest.do_migrate(&["--cancel"]);
    let output = client.wait_with_output().unwrap();
    guest.assert_stayed(&output, "cancelled");
    drop(silent);
    let mut client = guest.migrate_command(&["--to", &hangs]).spawn().unwrap();
    let silent = listener.accept().unwrap();
    client.kill().unwrap();
    client.wait().unwrap();
    wait_for(|| guest.do_migrate(&["--status"]) == "running\n");
    drop(silent);

    stands_still(&mut guest);
    assert_eq!(guest.end(), Some(7), "{}", guest.read("err"));
    judge(&folder, &[&guest], TICKS);
}

/// Checks that a paused guest says nothing, also after a migration that failed.
fn stands_still(guest: &mut Process) {
    guest.do_migrate(&["--pause"]);
    guest.do_migrate(&["--pause"]);
    // What the guest said before may still be on its way.
    thread::sleep(Duration::from_millis(100));
    let ticks = guest.ticks();
    let nowhere = place("unix", &guest.folder.join("nobody").display().to_string());
    assert_eq!(guest.migrate(&["--to", &nowhere]).status.code(), Some(1));
    assert_eq!(guest.do_migrate(&["--status"]), "paused\n");
    thread::sleep(Duration::from_millis(300));
    assert_eq!(guest.ticks(), ticks);
    guest.do_migrate(&["--resume"]);
    let last = ticks.last().copied().unwrap_or(0);
    guest.wait_for_tick(last + 3);
}

/// Returns true if a process listens on `port`. A trial connection would be taken for the guest that is awaited.
fn is_listening(port: u16) -> bool {
    let line = format!(":{port:04X} 00000000:0000 0A");
    fs::read_to_string("/proc/net/tcp").unwrap().contains(&line)
}

fn wait_for_file(path: &str) {
    wait_for(|| Path::new(path).exists());
}

fn wait_for(is_so: impl Fn() -> bool) {
    let begin = Instant::now();
    while !is_so() {
        assert!(begin.elapsed() < PATIENCE);
        thread::sleep(Duration::from_millis(10));
    }
}
