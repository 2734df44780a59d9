//! `--root`: a folder of the host, which is copied into a file system that the guest runs on, or a disk image that has
//! one.

use std::fs::{self, DirBuilder, File};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::Duration;

use crate::error::BootError;
use crate::{setup, terminal};

/// How often the progress of mke2fs is looked at.
const LOOK: Duration = Duration::from_millis(20);

/// Where `mke2fs` is for users whose PATH has no system programs.
const MKE2FS: [&str; 3] = ["/usr/sbin/mke2fs", "/sbin/mke2fs", "mke2fs"];
/// Free space for what the guest writes.
const SPARE: u64 = 1 << 30;
const SPARE_INODES: u64 = 1 << 16;
/// Maximum depth of a tree (PATH_MAX). Links are not followed.
const DEPTH_MAX: u32 = 2048;

/// What `--root` names.
#[derive(Debug)]
pub(crate) enum Root {
    /// A file system that was made of a folder. The file has no name, and is gone when it is closed.
    Copy(File),
    /// An image or device, which is written to.
    Image(PathBuf),
}

/// Opens an image, or copies a folder.
pub(crate) fn root(path: &Path) -> Result<Root, BootError> {
    let unreadable = |source| BootError::Unreadable {
        what: "root",
        path: path.into(),
        source,
    };
    let folder = fs::canonicalize(path).map_err(unreadable)?;
    if !folder.metadata().map_err(unreadable)?.is_dir() {
        return Ok(Root::Image(folder));
    }
    if folder == Path::new("/") {
        return Err(BootError::Usage(
            "--root /: the root of a running system cannot be copied; name another folder".into(),
        ));
    }
    let mut size = Size::default();
    measure(&folder, DEPTH_MAX, &mut size).map_err(unreadable)?;
    make(&folder, &size).map(Root::Copy)
}

/// Returns a file without a name, of which nothing is left however this process ends.
fn nameless() -> std::io::Result<File> {
    let private = std::env::temp_dir().join(format!("anykvm-root-{}", std::process::id()));
    let private = setup::Temporary::new(private);
    // Nobody else can put a file in the way there.
    DirBuilder::new().mode(0o700).create(private.path())?;
    File::options()
        .read(true)
        .write(true)
        .create_new(true)
        .open(private.path().join("image"))
}

#[derive(Debug, Default)]
struct Size {
    bytes: u64,
    inodes: u64,
}

fn measure(path: &Path, depth: u32, size: &mut Size) -> std::io::Result<()> {
    let meta = fs::symlink_metadata(path)?;
    size.inodes += 1;
    size.bytes = size
        .bytes
        .saturating_add(
            meta.len()
                .max(meta.blocks().saturating_mul(512))
                .min(1 << 40),
        )
        .saturating_add(4096);
    if meta.is_dir()
        && let Some(depth) = depth.checked_sub(1)
    {
        for entry in fs::read_dir(path)? {
            measure(&entry?.path(), depth, size)?;
        }
    }
    Ok(())
}

/// Makes a file system. The file is sparse: it takes as much space as its content.
fn make(folder: &Path, size: &Size) -> Result<File, BootError> {
    let failed = |reason: String| {
        BootError::NoImage(format!(
            "cannot copy the root folder {}: {reason}",
            folder.display()
        ))
    };
    let image = nameless().map_err(BootError::host("cannot make a temporary file"))?;
    // mke2fs opens the file by our descriptor.
    let path = format!("/proc/{}/fd/{}", std::process::id(), image.as_raw_fd());
    let mib = (size.bytes + size.bytes / 8 + SPARE) >> 20;
    let inodes = (size.inodes + SPARE_INODES).to_string();
    for program in MKE2FS {
        let mut command = Command::new(program);
        command
            .args(["-q", "-F", "-t", "ext4", "-m", "0", "-O", "^has_journal"])
            .args(["-E", "lazy_itable_init=1", "-N", &inodes, "-d"])
            .arg(folder)
            .arg(&path)
            .arg(format!("{mib}M"));
        let Ok(mut running) = setup::start(&mut command) else {
            continue;
        };
        while running.is_running() {
            let done = image.metadata().map_or(0, |meta| meta.blocks() * 512);
            let percent = (done * 100 / size.bytes.max(1)).min(99);
            let text = format!("copying {}: {percent} %", folder.display());
            terminal::progress_in_place(&text);
            thread::sleep(LOOK);
        }
        terminal::progress_in_place("");
        let output = running
            .output()
            .map_err(|error| failed(error.to_string()))?;
        if output.status.success() {
            return Ok(image);
        }
        let text = String::from_utf8_lossy(&output.stderr);
        let mut lines = text.lines().filter(|line| !line.trim().is_empty());
        return Err(failed(
            lines.next_back().unwrap_or("mke2fs failed").to_owned(),
        ));
    }
    Err(failed(
        "mke2fs is not installed (Debian's package e2fsprogs)".to_owned(),
    ))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    #[test]
    fn a_folder_becomes_a_file_system_that_nobody_else_sees() {
        let folder = std::env::temp_dir().join(format!("anykvm-roottest-{}", std::process::id()));
        fs::create_dir_all(folder.join("etc")).unwrap();
        fs::write(folder.join("etc/motd"), "hello").unwrap();
        let Root::Copy(file) = root(&folder).unwrap() else {
            panic!("a folder is copied");
        };
        let mut magic = [0; 2];
        file.read_exact_at(&mut magic, 1024 + 0x38).unwrap();
        assert_eq!(u16::from_le_bytes(magic), 0xef53, "ext4");
        assert!(file.metadata().unwrap().len().is_multiple_of(512));
        assert_eq!(file.metadata().unwrap().nlink(), 0);
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn what_cannot_be_a_root() {
        assert!(root(Path::new("/nonexistent")).is_err());
        assert!(root(Path::new("/")).is_err());
        let image = std::env::current_exe().unwrap();
        assert!(matches!(root(&image).unwrap(), Root::Image(_)));
    }
}
