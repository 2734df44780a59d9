//! The initramfs: busybox, an init that runs a shell or the user's command, and overlays.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::closure::closure;
use super::cpio::Archive;
use super::modules::Module;
use crate::error::BootError;

/// What the guest's first process does.
#[derive(Debug)]
pub(crate) struct Init<'a> {
    /// Empty: a shell.
    pub(crate) command: &'a [String],
    /// The command has our terminal rather than three separate streams.
    pub(crate) is_interactive: bool,
    /// Rows and columns of that terminal.
    pub(crate) size: Option<(u16, u16)>,
    /// The device file of the shell, or of the command's output.
    pub(crate) console: &'a str,
    /// The command, or the shell, runs on the disk with this serial number.
    pub(crate) root_serial: Option<&'a str>,
    /// Kernel modules to load first, in this order.
    pub(crate) modules: Vec<Module>,
}

/// `--overlay PATH[:GUESTPATH]`.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Overlay {
    host: PathBuf,
    guest: String,
}

impl Overlay {
    /// A file keeps its path by default; a folder's content goes to the guest's root.
    pub(crate) fn parse(text: &str) -> Result<Self, BootError> {
        let (host, guest) = match text.rsplit_once(':') {
            Some((host, guest)) if guest.starts_with('/') => (host, Some(guest.to_owned())),
            _ => (text, None),
        };
        let unreadable = |source| BootError::Unreadable {
            what: "overlay",
            path: host.into(),
            source,
        };
        let path = std::path::absolute(host).map_err(unreadable)?;
        let is_folder = fs::metadata(&path).map_err(unreadable)?.is_dir();
        let guest = guest.unwrap_or_else(|| {
            if is_folder {
                "/".into()
            } else {
                path.to_string_lossy().into_owned()
            }
        });
        Ok(Self { host: path, guest })
    }
}

/// The archive, uncompressed: the kernel unpacks it faster than it could decompress it.
pub(crate) fn build(
    busybox: &Path,
    init: &Init<'_>,
    overlays: &[Overlay],
) -> Result<Vec<u8>, BootError> {
    let mut archive = Archive::default();
    for module in &init.modules {
        archive.file(&module.guest_path(), 0o644, &module.bytes);
    }
    fill(archive, busybox, script(init).as_bytes(), overlays)
}

/// The same with another script as `/init`.
pub(crate) fn pack(
    busybox: &Path,
    init: &[u8],
    overlays: &[Overlay],
) -> Result<Vec<u8>, BootError> {
    fill(Archive::default(), busybox, init, overlays)
}

fn fill(
    mut archive: Archive,
    busybox: &Path,
    init: &[u8],
    overlays: &[Overlay],
) -> Result<Vec<u8>, BootError> {
    for folder in [
        "dev", "proc", "sys", "tmp", "root", "run", "etc", "mnt", "var",
    ] {
        archive.folder(folder, 0o755);
    }
    // The kernel opens it for init before devtmpfs is mounted.
    archive.device("/dev/console", 0o600, 5, 1);
    archive.file("/init", 0o755, init);
    for overlay in overlays {
        add(&mut archive, &overlay.host, &overlay.guest)?;
    }
    archive.file("/etc/passwd", 0o644, b"root:x:0:0:root:/root:/bin/sh\n");
    archive.file("/etc/group", 0o644, b"root:x:0:\n");
    archive.file("/etc/hosts", 0o644, b"127.0.0.1 localhost\n");
    archive.file("/bin/busybox", 0o755, &read("busybox", busybox)?);
    for applet in applets(busybox)? {
        // An overlay's own program is preferred.
        let path = format!("/bin/{applet}");
        if !archive.contains(&format!("/usr{path}")) {
            archive.link(&path, "busybox");
        }
    }
    Ok(archive.finish())
}

fn applets(busybox: &Path) -> Result<Vec<String>, BootError> {
    let output = Command::new(busybox)
        .arg("--list")
        .output()
        .map_err(BootError::host("cannot run busybox --list"))?;
    let text = String::from_utf8_lossy(&output.stdout);
    let applets: Vec<String> = text.lines().map(str::to_owned).collect();
    if !output.status.success() || !applets.iter().any(|a| a == "sh") {
        return Err(BootError::NoImage(format!(
            "{} is not a busybox with a shell",
            busybox.display()
        )));
    }
    Ok(applets)
}

/// A file or tree, with the libraries of its programs. Devices and sockets are left out.
fn add(archive: &mut Archive, host: &Path, guest: &str) -> Result<(), BootError> {
    let unreadable = |source| BootError::Unreadable {
        what: "overlay",
        path: host.into(),
        source,
    };
    let meta = fs::symlink_metadata(host).map_err(unreadable)?;
    let mode = meta.permissions().mode() & 0o7777;
    if meta.is_dir() {
        archive.folder(guest, mode);
        let mut names: Vec<_> = fs::read_dir(host)
            .and_then(Iterator::collect::<Result<Vec<_>, _>>)
            .map_err(unreadable)?
            .into_iter()
            .map(|entry| entry.file_name())
            .collect();
        names.sort();
        for name in names {
            let guest = format!("{guest}/{}", name.to_string_lossy());
            add(archive, &host.join(&name), &guest)?;
        }
    } else if meta.is_symlink() {
        let target = fs::read_link(host).map_err(unreadable)?;
        archive.link(guest, &target.to_string_lossy());
        // A link named alone (/usr/bin/python3) brings what it points to.
        let target = host.parent().unwrap_or(Path::new("/")).join(target);
        let target_guest = Path::new(guest)
            .parent()
            .unwrap_or(Path::new("/"))
            .join(fs::read_link(host).map_err(unreadable)?);
        let target_guest = target_guest.to_string_lossy();
        if target.is_file() && !archive.contains(&target_guest) {
            add(archive, &target, &target_guest)?;
        }
    } else if meta.is_file() {
        let bytes = fs::read(host).map_err(unreadable)?;
        archive.file(guest, mode, &bytes);
        for library in closure(host, &bytes) {
            let path = library.to_string_lossy();
            if !archive.contains(&path) {
                // The name it is looked for by, with the content that is behind links.
                let content = read("shared library", &library)?;
                archive.file(&path, 0o755, &content);
            }
        }
    }
    Ok(())
}

fn read(what: &'static str, path: &Path) -> Result<Vec<u8>, BootError> {
    fs::read(path).map_err(|source| BootError::Unreadable {
        what,
        path: path.into(),
        source,
    })
}

/// COM1 is the console or the command's standard output, COM2 the kernel's messages and its
/// standard error, COM3 its standard input, COM4 the control port (`devices/control.rs`).
fn script(init: &Init<'_>) -> String {
    let mut script = String::from(
        "#!/bin/busybox sh
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root TERM=${TERM:-linux}
mount -t devtmpfs dev /dev
mount -t proc proc /proc
mount -t sysfs sys /sys
mkdir -p /dev/pts /dev/shm
mount -t devpts pts /dev/pts
ln -s /proc/self/fd /dev/fd
hostname anykvm
ip link set lo up 2>/dev/null
",
    );
    for module in &init.modules {
        script.push_str(&format!("insmod {}\n", module.guest_path()));
    }
    script.push_str("exec 9>/dev/ttyS3\nstty -F /dev/ttyS3 raw -echo\n");
    let chroot = match init.root_serial {
        Some(serial) => {
            script.push_str(&mount_root(serial));
            "chroot /newroot "
        }
        None => "",
    };
    let console = init.console;
    if let Some((rows, columns)) = init.size {
        // Held open: some consoles forget their size when the last user closes them.
        script.push_str(&format!(
            "exec 5<>{console}\nstty rows {rows} cols {columns} <&5\n"
        ));
    }
    let words: Vec<String> = init.command.iter().map(|word| shell_quote(word)).collect();
    let words = format!("{chroot}{}", words.join(" "));
    if init.command.is_empty() {
        script.push_str(&format!(
            "echo ready >&9\nsetsid -c {chroot}sh -l <{console} >{console} 2>&1 5<&- 9>&-\n"
        ));
    } else if init.is_interactive {
        script.push_str(&format!(
            "echo ready >&9\nsetsid -c -w {words} <{console} >{console} 2>&1 5<&- 9>&-\n"
        ));
    } else {
        script.push_str(&format!(
            "exec 6</dev/ttyS2 7>{console} 8>/dev/ttyS1
stty -F {console} raw -echo
stty -F /dev/ttyS1 raw -echo
stty -F /dev/ttyS2 raw -echo icanon iexten crtscts eof '^D' lnext '^V' intr undef quit undef kill undef erase undef werase undef rprnt undef susp undef start undef stop undef eol undef eol2 undef
echo ready >&9
{words} <&6 >&7 2>&8 6<&- 7>&- 8>&- 9>&-
"
        ));
    }
    // An image that is written to is left clean.
    let unmount = match init.root_serial {
        Some(_) => "mount -o remount,ro /newroot 2>/dev/null\n",
        None => "",
    };
    // stty waits until the port has sent everything.
    script.push_str(&format!(
        "status=$?
sync
{unmount}stty -F {console} -echo
stty -F /dev/ttyS1 -echo
echo exit $status >&9
while :; do sleep 1; done
"
    ));
    script
}

/// Mounts the disk with this serial number, with the kernel's file systems in it. What goes wrong
/// ends the guest with status 125.
fn mount_root(serial: &str) -> String {
    format!(
        "root=
for disk in /sys/block/vd*; do
    [ \"$(cat $disk/serial)\" = {serial} ] && root=/dev/${{disk##*/}}
done
mkdir /newroot
if ! mount $root /newroot; then
    echo 'the root file system cannot be mounted' >/dev/ttyS1
    stty -F /dev/ttyS1 -echo
    echo exit 125 >&9
    while :; do sleep 1; done
fi
mkdir -p /newroot/dev /newroot/proc /newroot/sys /newroot/tmp
for folder in dev proc sys; do mount --rbind /$folder /newroot/$folder; done
"
    )
}

/// One word for `sh`, whatever is in it.
fn shell_quote(word: &str) -> String {
    format!("'{}'", word.replace('\'', "'\\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_survive_the_shell() {
        let words = ["a b", "it's", "$HOME", "", "\\", "\"", "*", "a\nb"];
        let quoted: Vec<String> = words.iter().map(|w| shell_quote(w)).collect();
        let output = Command::new("sh")
            .arg("-c")
            .arg(format!("printf '%s\\0' {}", quoted.join(" ")))
            .output()
            .unwrap();
        let want: String = words.iter().map(|w| format!("{w}\0")).collect();
        assert_eq!(String::from_utf8_lossy(&output.stdout), want);
    }

    #[test]
    fn the_script_is_one_that_a_shell_accepts() {
        let command = ["echo".to_owned(), "it's".to_owned()];
        for (command, is_interactive) in [(&[][..], true), (&command, true), (&command, false)] {
            let script = script(&Init {
                command,
                is_interactive,
                size: Some((24, 80)),
                console: "/dev/hvc0",
                root_serial: Some("x"),
                modules: vec![Module {
                    name: "virtio".into(),
                    bytes: Vec::new(),
                }],
            });
            let status = Command::new("sh")
                .args(["-n", "-c", &script])
                .status()
                .unwrap();
            assert!(status.success(), "{script}");
        }
    }

    #[test]
    fn overlays_of_files_bring_their_libraries() {
        let overlay = Overlay::parse("/bin/sh:/opt/sh").unwrap();
        let mut archive = Archive::default();
        let host = fs::canonicalize(&overlay.host).unwrap();
        add(&mut archive, &host, &overlay.guest).unwrap();
        assert!(archive.contains("/opt/sh"));
        assert!(archive.contains("/lib64/ld-linux-x86-64.so.2"));
        assert!(Overlay::parse("/nonexistent").is_err());
    }
}
