//! `--disk`: a raw file, a block device or a qcow2 image, opened, checked and locked.

mod check;
mod format;
mod header;
mod option;
mod qcow2;
#[cfg(test)]
mod tests;

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{ErrorKind, Seek, SeekFrom};
use std::os::unix::fs::{FileExt, FileTypeExt};
use std::sync::Arc;

use rustix::fs::FallocateFlags;

pub(crate) use option::DiskOption;
pub(super) use option::SERIAL_MAX;

use crate::error::BootError;
use option::{Format, WORDS, advice};
use qcow2::Qcow2;

/// The unit in which virtio counts a disk.
pub(super) const SECTOR: u64 = 512;
/// A disk's lock, which passes from one process to another.
#[derive(Debug)]
pub(crate) struct DiskHold {
    file: File,
    image: Option<Arc<Qcow2>>,
    /// Length in bytes.
    pub(crate) len: u64,
    pub(crate) is_read_only: bool,
    pub(crate) serial: String,
    /// True if another process can open the disk, too.
    pub(crate) is_shared: bool,
}

impl DiskHold {
    /// Releases the disk, so that another process may have it. All that was written is there for whoever opens the
    /// file, but may be lost if the host crashes.
    pub(crate) fn give(&self) -> std::io::Result<()> {
        if let Some(image) = &self.image {
            image.end()?;
            image.below().try_for_each(File::unlock)?;
        }
        self.file.unlock()
    }

    /// Takes the disk. Returns false if another process has it.
    pub(crate) fn take(&self) -> std::io::Result<bool> {
        let mut is_free = is_locked(&self.file, self.is_read_only);
        if let Some(image) = &self.image {
            is_free &= image.below().all(|file| is_locked(file, true));
            if is_free {
                image.begin()?;
            }
        }
        Ok(is_free)
    }

    /// Ends the use of the disk: all that was written is in its file afterwards.
    pub(crate) fn end(&self) -> Result<(), BootError> {
        let ended = self.image.as_ref().map_or(Ok(()), |image| image.end());
        ended.map_err(|error| BootError::DiskLost {
            serial: self.serial.clone(),
            source: error,
        })
    }
}

/// Locks the file. Returns false if another process has it.
fn is_locked(file: &File, is_read_only: bool) -> bool {
    let locked = if is_read_only {
        file.try_lock_shared()
    } else {
        file.try_lock()
    };
    // On a file system without locks, no other user can be found.
    !matches!(locked, Err(TryLockError::WouldBlock))
}

/// An open disk.
#[derive(Debug)]
pub(crate) struct Disk {
    /// True if the disk is a file of the user's.
    is_shared: bool,
    file: File,
    /// The qcow2 image. `None` if the file's bytes are the disk's.
    image: Option<Arc<Qcow2>>,
    /// Length in bytes.
    pub(super) len: u64,
    pub(super) is_read_only: bool,
    pub(super) serial: String,
}

impl Disk {
    /// Opens the file. Refuses files that cannot be a disk, or belong to another running guest.
    pub(crate) fn open(option: &DiskOption, index: usize) -> Result<Self, BootError> {
        let bad = |reason| BootError::BadDisk {
            path: option.path.clone(),
            reason,
        };
        let disk = Self::open_unlocked(option, index)?;
        match disk.hold()?.take() {
            Ok(true) => Ok(disk),
            Ok(false) => Err(bad("in use by another process".into())),
            Err(error) => Err(bad(error.to_string())),
        }
    }

    /// Opens the file while another process still has it.
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
                    "{error} (what may follow a file's name is {WORDS}, not ,{word})"
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
        let image = match format_of(&file, len, option).map_err(|why| bad(&why))? {
            Format::Raw if option.backing.is_empty() => None,
            Format::Raw => return Err(bad("a raw disk rests on no other: ,backing= is for qcow2")),
            Format::Qcow2 => {
                let image = open_image(&file, option).map_err(|why| bad(&why))?;
                Some(Arc::new(image))
            }
        };
        let len = image.as_ref().map_or(len, |image| image.len);
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
            image,
            len,
            is_read_only: option.is_read_only,
            serial: serial.unwrap_or_else(|| format!("anykvm{index}")),
        })
    }

    /// Makes a disk of a file that nobody else has.
    pub(crate) fn own(mut file: File, serial: &str) -> Result<Self, BootError> {
        let len = file
            .seek(SeekFrom::End(0))
            .map_err(BootError::host("cannot use the copy of the root folder"))?;
        Ok(Self {
            is_shared: false,
            file,
            image: None,
            len,
            is_read_only: false,
            serial: serial.into(),
        })
    }

    /// Sets the serial number by which the guest knows the disk.
    pub(crate) fn call(&mut self, serial: &str) {
        self.serial = serial.into();
    }

    /// Returns the disk's lock, with its length and whether it is written to, for a target to check.
    pub(crate) fn hold(&self) -> Result<DiskHold, BootError> {
        let file = self
            .file
            .try_clone()
            .map_err(BootError::host("cannot use a disk twice"))?;
        Ok(DiskHold {
            file,
            image: self.image.clone(),
            len: self.len,
            is_read_only: self.is_read_only,
            serial: self.serial.clone(),
            is_shared: self.is_shared,
        })
    }

    /// Fills `data` with the bytes from `at` on.
    pub(super) fn read(&self, data: &mut [u8], at: u64) -> std::io::Result<()> {
        match &self.image {
            Some(image) => image.read(data, at),
            None => self.file.read_exact_at(data, at),
        }
    }

    /// Stores `data` from byte `at` on.
    pub(super) fn write(&self, data: &[u8], at: u64) -> std::io::Result<()> {
        match &self.image {
            Some(image) => image.write(data, at),
            None => self.file.write_all_at(data, at),
        }
    }

    /// Returns once everything that was written is on the medium.
    pub(super) fn flush(&self) -> std::io::Result<()> {
        match &self.image {
            Some(image) => image.flush(),
            None => self.file.sync_data(),
        }
    }

    /// Gives the space back. The content is undefined then (zeros, where the host supports that).
    pub(super) fn discard(&self, at: u64, len: u64) -> std::io::Result<()> {
        if let Some(image) = &self.image {
            return image.discard(at, len);
        }
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        match rustix::fs::fallocate(&self.file, flags, at, len) {
            // Discarding is a hint: a file system that does not support it does nothing.
            Err(rustix::io::Errno::OPNOTSUPP) => Ok(()),
            other => Ok(other?),
        }
    }

    /// Makes a range read as zeros. Keeps its space unless `unmaps`.
    pub(super) fn write_zeroes(&self, at: u64, len: u64, unmaps: bool) -> std::io::Result<()> {
        let done = match &self.image {
            Some(image) => image.write_zeroes(at, len, unmaps),
            None => self.zero_in_file(at, len, unmaps),
        };
        match done {
            Err(error) if error.kind() == ErrorKind::Unsupported => {}
            done => return done,
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

    fn zero_in_file(&self, at: u64, len: u64, unmaps: bool) -> std::io::Result<()> {
        let flags = if unmaps {
            FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE
        } else {
            FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE
        };
        Ok(rustix::fs::fallocate(&self.file, flags, at, len)?)
    }

    /// Opens any file.
    #[cfg(test)]
    pub(super) fn for_test(path: &std::path::Path, is_read_only: bool) -> Self {
        let option = DiskOption {
            is_read_only,
            ..DiskOption::new(path.into(), "test-disk")
        };
        // The worker of an earlier device may still have the file.
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

/// Returns the format in which the file is a disk.
fn format_of(file: &File, len: u64, option: &DiskOption) -> Result<Format, String> {
    if let Some(format) = option.format {
        return Ok(format);
    }
    let Some(format) = format::foreign(file, len) else {
        return Ok(Format::Raw);
    };
    if format == format::QCOW2 {
        return Ok(Format::Qcow2);
    }
    let advice = if format.starts_with("a compressed") || format.starts_with("an archive") {
        "unpack it first".to_owned()
    } else {
        advice(&option.path.to_string_lossy())
    };
    Err(format!(
        "this is {format}: {advice} (or add ,format=raw to --disk to use it as it is)"
    ))
}

fn open_image(file: &File, option: &DiskOption) -> Result<Qcow2, String> {
    let file = file.try_clone().map_err(|error| error.to_string())?;
    let backing = option.backing.iter().map(|path| qcow2::open_below(path));
    Qcow2::new(
        file,
        option.is_read_only,
        backing.collect::<Result<_, _>>()?,
    )
}
