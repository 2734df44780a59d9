//! qcow2 images, by the crate `imago`.
//!
//! No file is opened because an image names it: the user names the backing files, layer by layer. So neither the maker
//! of an image, nor a guest that writes one to its raw disk, gets a file of the host by it.

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

/// A file, and its format.
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

/// An image with its backing files.
#[derive(Debug)]
pub(super) struct Qcow2 {
    /// The layers, the image first.
    layers: Vec<Layer>,
    is_read_only: bool,
    /// Length of the disk in bytes.
    pub(super) len: u64,
    /// `imago`'s access, while the disk is ours. What it knows of the image's tables would be wrong after another
    /// process has had the disk.
    access: Mutex<Option<Access>>,
}

impl Qcow2 {
    /// Makes an image, which is not yet ours, with the backing files that the user names.
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
        // This checks that the image can be opened, without changing it.
        image.open(true).map_err(|error| error.to_string())?;
        Ok(image)
    }

    /// Begins the use of the disk, which is ours from now on.
    pub(super) fn begin(&self) -> io::Result<()> {
        let mut access = lock(&self.access);
        if access.is_none() {
            *access = Some(self.open(self.is_read_only)?);
        }
        Ok(())
    }

    /// Ends the use of the disk: all that was written is in the file, and nothing more will be.
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

    /// Does something with the image. If `imago` cannot go on with it, the image is left as it is.
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
            // If the access were dropped, it would write back what it knows.
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

    /// Makes a range read as zeros. Returns [`io::ErrorKind::Unsupported`] if the zeros would have to be written.
    pub(super) fn write_zeroes(&self, at: u64, len: u64, unmaps: bool) -> io::Result<()> {
        self.with(|image| {
            if unmaps {
                image.discard_to_zero(at, len)
            } else {
                image.write_zeroes(at, len)
            }
        })
    }

    /// Returns the backing files, which nobody may write to meanwhile.
    pub(super) fn below(&self) -> impl Iterator<Item = &File> {
        self.layers.iter().skip(1).map(|layer| &layer.file)
    }
}

/// Opens a backing file.
pub(super) fn open_below(path: &Path) -> Result<File, String> {
    let cannot = |error: io::Error| format!("what it rests on, {}: {error}", path.display());
    let kind = std::fs::metadata(path).map_err(cannot)?.file_type();
    // Opening another kind of file may block.
    if !kind.is_file() && !std::os::unix::fs::FileTypeExt::is_block_device(&kind) {
        return Err(cannot(io::Error::other("not a file or block device")));
    }
    File::open(path).map_err(cannot)
}

/// Returns a layer's format: the one that the image above it names, or the one that the file looks like.
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

/// Turns a panic into an error.
fn contained<T>(work: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|_| Err(io::Error::other(PANIC)))
}

/// The text of an error that was a panic.
pub(super) const PANIC: &str = "the image cannot be worked on";
