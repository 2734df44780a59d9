//! qcow2 images, by the crate `imago`.
//!
//! An image names no file that is opened: what it rests on is named by the user, layer for layer. So whoever makes an image, or a guest that writes one on
//! its raw disk, has no file of the host's by it.

use std::fs::File;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Mutex;

use imago::file::File as Storage;
use imago::raw::Raw;
use imago::{DenyImplicitOpenGate, FormatAccess, FormatDriverBuilder};

use super::check::check;
use super::header::Header;
use super::option::Format;
use crate::lock::lock;

/// A stack of images.
type Access = FormatAccess<Storage>;

/// A file, and what it is.
#[derive(Debug)]
struct Layer {
    file: File,
    format: Format,
}

impl Layer {
    fn open(&self, below: Option<Access>, writes: bool) -> io::Result<Access> {
        let storage = Storage::try_from(self.file.try_clone()?)?;
        let gate = DenyImplicitOpenGate::default();
        if self.format == Format::Raw {
            return Ok(FormatAccess::new(Raw::builder(storage).open(gate)?));
        }
        let header = Header::read(&self.file).map_err(io::Error::other)?;
        if writes {
            check(&self.file, &header.tables).map_err(|why| {
                io::Error::other(format!(
                    "its tables are damaged, so that it can only be read (,ro): {why}; repair it with qemu-img check -r all"
                ))
            })?;
        }
        let image = imago::qcow2::Qcow2::builder(storage)
            .write(writes)
            .backing(below)
            .data_file(None);
        Ok(FormatAccess::new(image.open(gate)?))
    }
}

/// An image on what it rests on.
#[derive(Debug)]
pub(super) struct Qcow2 {
    /// The image first.
    layers: Vec<Layer>,
    is_read_only: bool,
    /// Bytes of the disk.
    pub(super) len: u64,
    /// While the disk is ours. What it knows of the image's tables would be wrong after another process has had it.
    access: Mutex<Option<Access>>,
}

impl Qcow2 {
    /// An image, which is not yet ours, on the files that the user names.
    pub(super) fn new(file: File, is_read_only: bool, backing: Vec<File>) -> Result<Self, String> {
        let mut header = Header::read(&file)?;
        let len = header.len;
        let mut layers = vec![Layer {
            file,
            format: Format::Qcow2,
        }];
        for file in backing {
            if header.backing.take().is_none() {
                return Err("there is a ,backing= too many".into());
            }
            let format = format_of(&file, header.backing_format.as_deref())?;
            if format == Format::Qcow2 {
                header = Header::read(&file)?;
            }
            layers.push(Layer { file, format });
        }
        if let Some(name) = header.backing {
            return Err(format!(
                "it rests on '{name}', and what an image rests on is used only where you name it: add ,backing={name}"
            ));
        }
        let image = Self {
            layers,
            is_read_only,
            len,
            access: Mutex::default(),
        };
        // Whether it can be opened, without a change.
        image.open(true).map_err(|error| error.to_string())?;
        Ok(image)
    }

    /// The disk is ours from now on.
    pub(super) fn begin(&self) -> io::Result<()> {
        let mut access = lock(&self.access);
        if access.is_none() {
            *access = Some(self.open(self.is_read_only)?);
        }
        Ok(())
    }

    /// All that was written is in the file, and nothing more will be.
    pub(super) fn end(&self) -> io::Result<()> {
        let mut access = lock(&self.access);
        if !self.is_read_only
            && let Some(open) = access.as_mut()
        {
            contained(|| open.flush())?;
        }
        *access = None;
        Ok(())
    }

    fn open(&self, is_read_only: bool) -> io::Result<Access> {
        contained(|| {
            let mut below = None;
            for (index, layer) in self.layers.iter().enumerate().rev() {
                below = Some(layer.open(below, index == 0 && !is_read_only)?);
            }
            below.ok_or_else(not_ours)
        })
    }

    /// Does something with the image. One that `imago` cannot go on with is left as it is.
    fn with<T>(&self, work: impl FnOnce(&mut Access) -> io::Result<T>) -> io::Result<T> {
        let mut access = lock(&self.access);
        let open = access.as_mut().ok_or_else(not_ours)?;
        let mut is_whole = false;
        let done = contained(|| {
            let done = work(open);
            is_whole = true;
            done
        });
        if !is_whole {
            // Its end would write back what it knows.
            access.take().map(std::mem::forget).unwrap_or_default();
        }
        done
    }

    pub(super) fn read(&self, data: &mut [u8], at: u64) -> io::Result<()> {
        self.with(|image| image.read(data, at))
    }

    pub(super) fn write(&self, data: &[u8], at: u64) -> io::Result<()> {
        self.with(|image| image.write(data, at))
    }

    pub(super) fn flush(&self) -> io::Result<()> {
        self.with(|image| {
            image.flush()?;
            image.sync()
        })
    }

    /// Frees the clusters that are wholly in the range.
    pub(super) fn discard(&self, at: u64, len: u64) -> io::Result<()> {
        match self.with(|image| image.discard_to_any(at, len)) {
            // Version 2 has no entry for that.
            Err(error) if error.kind() == io::ErrorKind::Unsupported => Ok(()),
            done => done,
        }
    }

    /// Makes a range read as zeros; [`io::ErrorKind::Unsupported`] if that takes writing them.
    pub(super) fn write_zeroes(&self, at: u64, len: u64, unmaps: bool) -> io::Result<()> {
        self.with(|image| {
            if unmaps {
                image.discard_to_zero(at, len)
            } else {
                image.write_zeroes(at, len)
            }
        })
    }

    /// The files that are only read: nobody may write them meanwhile.
    pub(super) fn below(&self) -> impl Iterator<Item = &File> {
        self.layers.iter().skip(1).map(|layer| &layer.file)
    }
}

/// Opens what an image rests on.
pub(super) fn open_below(path: &Path) -> Result<File, String> {
    let cannot = |error: io::Error| format!("what it rests on, {}: {error}", path.display());
    let kind = std::fs::metadata(path).map_err(cannot)?.file_type();
    // Opening others may wait.
    if !kind.is_file() && !std::os::unix::fs::FileTypeExt::is_block_device(&kind) {
        return Err(cannot(io::Error::other("not a file or block device")));
    }
    File::open(path).map_err(cannot)
}

/// What a layer is: as the image above it says, or what it looks like.
fn format_of(file: &File, said: Option<&str>) -> Result<Format, String> {
    match said {
        Some("raw" | "file" | "host_device") => Ok(Format::Raw),
        Some("qcow2") => Ok(Format::Qcow2),
        Some(other) => Err(format!("it rests on an image of the format '{other}'")),
        None => match super::format::foreign(file, u64::MAX) {
            Some(super::format::QCOW2) => Ok(Format::Qcow2),
            Some(other) => Err(format!("what it rests on is {other}")),
            None => Ok(Format::Raw),
        },
    }
}

fn not_ours() -> io::Error {
    io::Error::other("the disk is not in use here")
}

/// A panic is an error.
fn contained<T>(work: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|_| Err(io::Error::other(PANIC)))
}

/// What a panic is then called.
pub(super) const PANIC: &str = "the image cannot be worked on";
