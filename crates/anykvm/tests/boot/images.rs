//! What goes into a guest: overlays, folders as its root, and what is left of them outside.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::guest::{File, kernel};
use crate::linux::{linux, run, run_without_input};

/// A folder that is removed when this is dropped.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("anykvm-{name}-{}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn path(&self) -> &str {
        self.0.to_str().unwrap()
    }

    fn script(&self, path: &str, text: &str) {
        let path = self.0.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, text).unwrap();
        fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Makes a root whose shell is a static busybox under another name, and whose `ls` and `tar` are its own.
fn root(name: &str) -> Folder {
    let folder = Folder::new(name);
    let busybox = ["/bin/busybox", "/usr/bin/busybox"].map(Path::new);
    let busybox = busybox.into_iter().find(|path| path.exists()).unwrap();
    fs::create_dir_all(folder.0.join("bin")).unwrap();
    fs::copy(busybox, folder.0.join("bin/sh")).unwrap();
    folder.script("usr/bin/ls", "#!/bin/sh\necho the root\\'s ls: $*\n");
    folder.script("opt/tool", "#!/bin/sh\necho the root\\'s tool\n");
    symlink("/opt/tool", folder.0.join("bin/tar")).unwrap();
    folder
}

#[test]
fn programs_of_the_root_come_first() {
    let root = root("own-programs");
    for (command, want) in [
        (&["ls", "-l", "a b"][..], "the root's ls: -l a b\n"),
        (&["tar"], "the root's tool\n"),
        (&["sh", "-c", "echo $0 $PWD"], "/bin/sh /\n"),
        (&["/opt/tool"], "the root's tool\n"),
    ] {
        let outcome = run_without_input(&mut linux(&["--root", root.path()], command));
        assert_eq!(outcome.status, Some(0), "{command:?} {outcome:?}");
        assert_eq!(outcome.text(), want, "{command:?}");
    }
    let shell = run(
        &mut linux(&["--root", root.path()], &[]),
        b"/usr/bin/ls x; exit 4\n",
    );
    assert_eq!(
        (shell.status, shell.text().as_str()),
        (Some(4), "the root's ls: x\n")
    );
    let missing = run_without_input(&mut linux(&["--root", root.path()], &["no-such-program"]));
    assert_eq!(missing.status, Some(127), "{missing:?}");
}

#[test]
fn a_roots_own_init_takes_over() {
    let root = root("own-init");
    root.script(
        "sbin/first",
        "#!/bin/sh\necho pid $$ of $(cat /proc/1/comm)\nread x\necho got $x\necho o >/proc/sysrq-trigger\nwhile :; do :; done\n",
    );
    let options = ["--root", root.path(), "--append", "init=/sbin/first"];
    let outcome = run(&mut linux(&options, &[]), b"typed\n");
    assert_eq!(outcome.status, Some(0), "{outcome:?}");
    let text = outcome.text();
    assert!(
        text.contains("pid 1 of first") && text.contains("got typed"),
        "{text}"
    );
}

#[test]
fn an_overlays_programs_come_first_and_bring_what_they_need() {
    let folder = Folder::new("overlay");
    folder.script("ls", "#!/bin/sh\necho another ls\n");
    let overlay = format!("{}/ls:/usr/bin/ls", folder.path());
    let outcome = run_without_input(&mut linux(&["--overlay", &overlay], &["ls"]));
    assert_eq!(outcome.text(), "another ls\n", "{outcome:?}");
    let program = "use POSIX; print floor(41.5) + 1, qq(\\n)";
    let mut command = linux(
        &["--overlay", "/usr/bin/perl"],
        &["perl", "-MList::Util", "-e", program],
    );
    let outcome = run_without_input(&mut command);
    assert_eq!(outcome.text(), "42\n", "{outcome:?}");
}

#[test]
fn a_kernel_without_its_modules_says_where_they_were_looked_for() {
    let folder = Folder::new("modules");
    // The kernel that `anykvm` found, under a name that does not tell its version.
    let outcome = run_without_input(&mut linux(&[], &["uname", "-r"]));
    let release = outcome.text().trim().to_owned();
    let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let cache =
        cache.unwrap_or_else(|| Path::new(&std::env::var_os("HOME").unwrap()).join(".cache"));
    let places = [cache.join("anykvm/kernel/boot"), "/boot".into()];
    let image = places.map(|place| place.join(format!("vmlinuz-{release}")));
    let image = image.iter().find(|path| path.exists()).unwrap();
    let copy = folder.0.join("bzImage");
    fs::copy(image, &copy).unwrap();
    let root = root("no-modules");
    if Path::new("/lib/modules").join(&release).exists() {
        // The modules are found there, as they should be.
        return;
    }
    let options = ["--kernel", copy.to_str().unwrap(), "--root", root.path()];
    let outcome = run_without_input(&mut linux(&options, &["true"]));
    assert_eq!(outcome.status, Some(125), "{outcome:?}");
    let want = format!(
        "no virtio_blk in this kernel, so it sees no disk; modules for {release} are looked for in "
    );
    assert!(outcome.stderr.contains(&want), "{outcome:?}");
    // Without virtio a command has its streams all the same.
    let mut command = linux(&["--kernel", copy.to_str().unwrap()], &["cat"]);
    let outcome = run(&mut command, b"bytes\x00\x04\x16\xff");
    assert_eq!(outcome.status, Some(0), "{outcome:?}");
    assert_eq!(outcome.stdout, b"bytes\x00\x04\x16\xff");
}

/// A signal while the root is copied: nothing runs on, nothing is left.
#[test]
fn signals_during_the_copy_leave_nothing() {
    let folder = Folder::new("copied");
    let temporary = Folder::new("temporary");
    for n in 0..40 {
        fs::write(folder.0.join(n.to_string()), vec![n; 8 << 20]).unwrap();
    }
    let kernel: File = kernel(|a| a.ud2().unwrap());
    for (signal, number) in [(Signal::INT, 2), (Signal::TERM, 15), (Signal::HUP, 1)] {
        let mut child = linux(&["--root", folder.path(), "--kernel", kernel.path()], &[])
            .env("TMPDIR", temporary.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let copier = find_child(child.id(), "mke2fs");
        kill_process(Pid::from_child(&child), signal).unwrap();
        let status = child.wait().unwrap();
        use std::os::unix::process::ExitStatusExt;
        assert_eq!(status.signal(), Some(number));
        let deadline = Instant::now() + Duration::from_secs(10);
        while is_alive(copier) {
            assert!(Instant::now() < deadline, "mke2fs runs on");
            std::thread::sleep(Duration::from_millis(10));
        }
        assert_eq!(fs::read_dir(&temporary.0).unwrap().count(), 0);
    }
}

fn find_child(parent: u32, name: &str) -> u32 {
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        for entry in fs::read_dir("/proc").unwrap().flatten() {
            let Ok(stat) = fs::read_to_string(entry.path().join("stat")) else {
                continue;
            };
            let (start, rest) = stat.rsplit_once(')').unwrap();
            let is_ours = rest.split_whitespace().nth(1) == Some(&parent.to_string());
            if is_ours && start.ends_with(name) {
                return start.split(' ').next().unwrap().parse().unwrap();
            }
        }
        assert!(Instant::now() < deadline, "no {name}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Returns true if `pid` runs. A process that has ended may still wait for somebody to ask for its status.
fn is_alive(pid: u32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/stat"))
        .is_ok_and(|stat| !stat.rsplit_once(')').unwrap().1.starts_with(" Z"))
}

/// Nothing in the kernel keeps a guest's programs from it here, so it takes no time for that unless it is asked to.
#[test]
fn the_kernel_is_told_of_mitigations() {
    for (options, wants) in [
        (&[][..], "mitigations=off\n"),
        (&["--mitigations", "auto"], ""),
    ] {
        let script = "grep -o 'mitigations=[^ ]*' /proc/cmdline; exit 0";
        let outcome = run_without_input(&mut linux(options, &["sh", "-c", script]));
        assert_eq!(outcome.status, Some(0), "{options:?} {outcome:?}");
        assert_eq!(outcome.text(), wants, "{options:?} {outcome:?}");
    }
}
