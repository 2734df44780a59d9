//! The initramfs: busybox, an init that runs a shell or the user's command, and overlays.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::closure::closure;
use super::cpio::Archive;
use super::init::{Init, script};
use super::interpreter::companions;
use crate::error::BootError;
use crate::terminal;

/// A file or folder of `--overlay PATH[:GUESTPATH]`.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Overlay {
    host: PathBuf,
    guest: String,
}

impl Overlay {
    /// Reads the option. Without a guest path, a file keeps its path, and a folder's content goes to the guest's root.
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

/// Makes the archive. It is not compressed, as the kernel unpacks it faster than it could decompress it.
pub(crate) fn build(
    busybox: &Path,
    init: &Init<'_>,
    overlays: &[Overlay],
) -> Result<Vec<u8>, BootError> {
    let mut archive = Archive::default();
    if !overlays.is_empty() {
        terminal::progress("packing what --overlay names");
    }
    for module in &init.modules {
        archive.file(&module.guest_path(), 0o644, &module.bytes);
    }
    fill(archive, busybox, script(init).as_bytes(), overlays)
}

/// Makes the archive with another script as `/init`.
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
    // The kernel opens this device for init before devtmpfs is mounted.
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
        // An overlay's own program takes precedence.
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

/// Adds a file or tree, with the libraries of its programs. Devices and sockets are left out.
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
        // A link that is named alone (/usr/bin/python3) brings its target with it.
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
        if mode & 0o111 != 0 && !is_library(host) {
            for companion in companions(host, &bytes) {
                let path = companion.to_string_lossy();
                if !archive.contains(&path) {
                    add(archive, &companion, &path)?;
                }
            }
        }
        for library in closure(host, &bytes) {
            let path = library.to_string_lossy();
            if !archive.contains(&path) {
                // The library gets the name it is looked for by, and the content that links lead to.
                let content = read("shared library", &library)?;
                archive.file(&path, 0o755, &content);
            }
        }
    }
    Ok(())
}

/// Returns true for a shared library. They may be executable, too.
fn is_library(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    name.ends_with(".so") || name.contains(".so.")
}

fn read(what: &'static str, path: &Path) -> Result<Vec<u8>, BootError> {
    fs::read(path).map_err(|source| BootError::Unreadable {
        what,
        path: path.into(),
        source,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

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
