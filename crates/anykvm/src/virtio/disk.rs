//! `--disk`: a raw file or block device, opened, checked and locked.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Seek, SeekFrom};
use std::os::unix::fs::{FileExt, FileTypeExt};
use std::path::PathBuf;
use std::str::FromStr;

use rustix::fs::FallocateFlags;

use crate::error::BootError;

/// What virtio counts disks in.
pub(super) const SECTOR: u64 = 512;
/// Bytes of a serial number.
pub(super) const SERIAL_MAX: usize = 20;

/// `PATH[,ro][,serial=NAME][,format=raw]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DiskOption {
    path: PathBuf,
    is_read_only: bool,
    serial: Option<String>,
    /// Whatever it looks like.
    is_raw: bool,
}

impl DiskOption {
    /// A disk that is written to.
    pub(crate) fn new(path: PathBuf, serial: &str) -> Self {
        Self {
            path,
            is_read_only: false,
            serial: Some(serial.into()),
            is_raw: false,
        }
    }
}

impl FromStr for DiskOption {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut option = Self {
            path: PathBuf::new(),
            is_read_only: false,
            serial: None,
            is_raw: false,
        };
        // From the end, so that a path may have commas before them.
        let mut rest = text;
        while let Some((before, word)) = rest.rsplit_once(',') {
            if ["ro", "readonly", "readonly=on", "ro=on"].contains(&word) {
                option.is_read_only = true;
            } else if ["rw", "readonly=off", "ro=off"].contains(&word) {
                option.is_read_only = false;
            } else if let Some(format) = word.strip_prefix("format=") {
                if format != "raw" {
                    return Err(format!("format={format}: {}", advice(&rest_of(before))));
                }
                option.is_raw = true;
            } else if let Some(serial) = word.strip_prefix("serial=") {
                if serial.len() > SERIAL_MAX || !serial.is_ascii() {
                    return Err(format!(
                        "the serial number '{serial}' is not {SERIAL_MAX} ASCII characters or less"
                    ));
                }
                option.serial = Some(serial.into());
            } else {
                break;
            }
            rest = before;
        }
        if rest.is_empty() {
            return Err("a file name is needed".into());
        }
        option.path = rest_of(rest).into();
        Ok(option)
    }
}

/// QEMU's way to name the file.
fn rest_of(text: &str) -> String {
    text.strip_prefix("file=").unwrap_or(text).to_owned()
}

/// What to do with an image of another format.
fn advice(path: &str) -> String {
    format!("only raw disks can be used; convert it: qemu-img convert -O raw {path} {path}.raw")
}

/// What of a disk goes from one process to another: its lock.
#[derive(Debug)]
pub(crate) struct DiskHold {
    file: File,
    /// Bytes.
    pub(crate) len: u64,
    pub(crate) is_read_only: bool,
    pub(crate) serial: String,
    /// Another process can open it, too.
    pub(crate) is_shared: bool,
}

impl DiskHold {
    /// Another process may have it.
    pub(crate) fn give(&self) {
        // All that was written is there for whoever opens the file; a reboot of the host is another matter.
        let _ = self.file.unlock();
    }

    /// It is ours: false if another process has it.
    pub(crate) fn take(&self) -> bool {
        let locked = if self.is_read_only {
            self.file.try_lock_shared()
        } else {
            self.file.try_lock()
        };
        !matches!(locked, Err(TryLockError::WouldBlock))
    }
}

/// An open disk.
#[derive(Debug)]
pub(crate) struct Disk {
    /// It is a file of the user's.
    is_shared: bool,
    file: File,
    /// Bytes.
    pub(super) len: u64,
    pub(super) is_read_only: bool,
    pub(super) serial: String,
}

impl Disk {
    /// Opens the file; refuses what cannot be a disk or is one of another running guest.
    pub(crate) fn open(option: &DiskOption, index: usize) -> Result<Self, BootError> {
        let disk = Self::open_unlocked(option, index)?;
        if !disk.hold()?.take() {
            return Err(BootError::BadDisk {
                path: option.path.clone(),
                reason: "in use by another process".into(),
            });
        }
        Ok(disk)
    }

    /// The same while another process still has it.
    pub(crate) fn open_unlocked(option: &DiskOption, index: usize) -> Result<Self, BootError> {
        let path = &option.path;
        let unreadable = |source| BootError::Unreadable {
            what: "disk",
            path: path.clone(),
            source,
        };
        let bad = |reason: &str| BootError::BadDisk {
            path: path.clone(),
            reason: reason.into(),
        };
        let kind = match std::fs::metadata(path) {
            Ok(meta) => meta.file_type(),
            Err(error) => {
                let text = path.to_string_lossy();
                let Some((_, word)) = text.rsplit_once(',') else {
                    return Err(unreadable(error));
                };
                return Err(bad(&format!(
                    "{error} (what may follow a file's name is ,ro ,serial=NAME and ,format=raw, \
                     not ,{word})"
                )));
            }
        };
        if !kind.is_file() && !kind.is_block_device() {
            return Err(bad("not a file or block device"));
        }
        let mut file = OpenOptions::new()
            .read(true)
            .write(!option.is_read_only)
            .open(path)
            .map_err(unreadable)?;
        let len = file.seek(SeekFrom::End(0)).map_err(unreadable)?;
        if !option.is_raw
            && let Some(format) = super::format::foreign(&file, len)
        {
            let advice = if format.starts_with("a compressed") || format.starts_with("an archive") {
                "unpack it first".to_owned()
            } else {
                advice(&path.to_string_lossy())
            };
            return Err(bad(&format!(
                "this is {format}: {advice} (or add ,format=raw to --disk to use it as it is)"
            )));
        }
        if len == 0 {
            return Err(bad("the disk is empty"));
        }
        if !len.is_multiple_of(SECTOR) {
            return Err(bad(&format!(
                "its size of {len} bytes is not a multiple of {SECTOR}"
            )));
        }
        let serial = option.serial.clone();
        Ok(Self {
            is_shared: true,
            file,
            len,
            is_read_only: option.is_read_only,
            serial: serial.unwrap_or_else(|| format!("anykvm{index}")),
        })
    }

    /// A file that is nobody else's.
    pub(crate) fn own(mut file: File, serial: &str) -> Result<Self, BootError> {
        let len = file
            .seek(SeekFrom::End(0))
            .map_err(BootError::host("cannot use the copy of the root folder"))?;
        Ok(Self {
            is_shared: false,
            file,
            len,
            is_read_only: false,
            serial: serial.into(),
        })
    }

    /// The serial number that the guest knows.
    pub(crate) fn call(&mut self, serial: &str) {
        self.serial = serial.into();
    }

    /// Its length and whether it is written to, for a target to check, and its file's lock.
    pub(crate) fn hold(&self) -> Result<DiskHold, BootError> {
        let file = self
            .file
            .try_clone()
            .map_err(BootError::host("cannot use a disk twice"))?;
        Ok(DiskHold {
            file,
            len: self.len,
            is_read_only: self.is_read_only,
            serial: self.serial.clone(),
            is_shared: self.is_shared,
        })
    }

    /// Fills `data` from byte `at`.
    pub(super) fn read(&self, data: &mut [u8], at: u64) -> std::io::Result<()> {
        self.file.read_exact_at(data, at)
    }

    /// Stores `data` from byte `at` on.
    pub(super) fn write(&self, data: &[u8], at: u64) -> std::io::Result<()> {
        self.file.write_all_at(data, at)
    }

    /// Returns when everything written is on the medium.
    pub(super) fn flush(&self) -> std::io::Result<()> {
        self.file.sync_data()
    }

    /// Gives the space back; the content is then undefined (zeros, where the host can do it).
    pub(super) fn discard(&self, at: u64, len: u64) -> std::io::Result<()> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        match rustix::fs::fallocate(&self.file, flags, at, len) {
            // A hint: a file system that cannot do it does nothing.
            Err(rustix::io::Errno::OPNOTSUPP) => Ok(()),
            other => Ok(other?),
        }
    }

    /// Makes a range read as zeros; keeps its space unless `unmaps`.
    pub(super) fn write_zeroes(&self, at: u64, len: u64, unmaps: bool) -> std::io::Result<()> {
        let flags = if unmaps {
            FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE
        } else {
            FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE
        };
        match rustix::fs::fallocate(&self.file, flags, at, len) {
            Err(rustix::io::Errno::OPNOTSUPP) => {}
            other => return Ok(other?),
        }
        let zeros = [0; 1 << 16];
        let (mut at, mut left) = (at, len);
        while left > 0 {
            let now = left.min(zeros.len() as u64);
            let slice = usize::try_from(now).ok().and_then(|now| zeros.get(..now));
            self.write(slice.unwrap_or_default(), at)?;
            at = at.saturating_add(now);
            left = left.saturating_sub(now);
        }
        Ok(())
    }

    /// Any file.
    #[cfg(test)]
    pub(super) fn for_test(path: &std::path::Path, is_read_only: bool) -> Self {
        let option = DiskOption {
            path: path.into(),
            is_read_only,
            serial: Some("test-disk".into()),
            is_raw: false,
        };
        // The worker of an earlier device may still have it.
        let mut opened = Self::open(&option, 0);
        for _ in 0..1000 {
            if opened.is_ok() {
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(5));
            opened = Self::open(&option, 0);
        }
        opened.unwrap()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options() {
        let disk = |path: &str, is_read_only, serial: Option<&str>| DiskOption {
            path: path.into(),
            is_read_only,
            serial: serial.map(str::to_owned),
            is_raw: false,
        };
        let raw = DiskOption {
            is_raw: true,
            ..disk("a", true, None)
        };
        let rows = [
            ("file=a,format=raw,readonly=on", Some(raw)),
            ("a,format=qcow2", None),
            ("a.img,readonly", Some(disk("a.img", true, None))),
            ("a.img", Some(disk("a.img", false, None))),
            ("a.img,ro", Some(disk("a.img", true, None))),
            ("a,b.img", Some(disk("a,b.img", false, None))),
            ("a,b,serial=x,ro", Some(disk("a,b", true, Some("x")))),
            ("x,serial=", Some(disk("x", false, Some("")))),
            ("", None),
            (",ro", None),
            ("x,serial=123456789012345678901", None),
        ];
        for (text, want) in rows {
            assert_eq!(text.parse().ok(), want, "{text}");
        }
    }
}
