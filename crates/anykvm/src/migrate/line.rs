//! A connection to the other side, or a file. If nothing moves for a while, the other side counts as gone.

use std::fs::{File, OpenOptions, Permissions};
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::stream::{self, MessageKind, StreamError};
use crate::endpoint::Endpoint;

/// How long nothing may move before the other side counts as gone.
const STALL_MAX: Duration = Duration::from_secs(20);
/// How often a side that waits looks whether it has to give up.
const LOOK: Duration = Duration::from_millis(100);

#[derive(Debug)]
enum Wire {
    Unix(UnixStream),
    Tcp(TcpStream),
    File(File),
}

/// A connection or a file.
pub(super) struct Line {
    wire: Wire,
    /// Returns true if the user has cancelled the migration.
    is_cancelled: Box<dyn Fn() -> bool + Send>,
    /// The temporary and the final path of a file, which gets the final one only when it is complete.
    unfinished: Option<(PathBuf, PathBuf)>,
    /// Number of bytes written.
    pub(super) sent: u64,
    /// How long reading waits for the other side; `None`: for ever.
    pub(super) patience: Option<Duration>,
}

impl Line {
    /// Opens a connection to where a machine goes.
    pub(super) fn to(
        place: &Endpoint,
        is_cancelled: Box<dyn Fn() -> bool + Send>,
    ) -> io::Result<Self> {
        let mut unfinished = None;
        let wire = match place {
            Endpoint::Unix(path) => Wire::Unix(UnixStream::connect(path)?),
            Endpoint::Tcp(address) => Wire::Tcp(TcpStream::connect(address)?),
            Endpoint::File(path) => {
                let mut name = path.clone().into_os_string();
                name.push(".partial");
                let partial = PathBuf::from(name);
                // The file has all of the guest's memory, so other users may not read it.
                let file = OpenOptions::new()
                    .write(true)
                    .create(true)
                    .truncate(true)
                    .mode(0o600)
                    .open(&partial)?;
                unfinished = Some((partial, path.clone()));
                Wire::File(file)
            }
        };
        Self::new(wire, is_cancelled, unfinished, Some(STALL_MAX))
    }

    /// Waits for a connection from where a machine comes.
    pub(super) fn from(place: &Endpoint) -> io::Result<Self> {
        let wire = match place {
            Endpoint::Unix(path) => {
                let listener = listen(path)?;
                let accepted = listener.accept();
                // One machine comes. Nobody else is to connect.
                let _ = std::fs::remove_file(path);
                Wire::Unix(accepted?.0)
            }
            Endpoint::Tcp(address) => Wire::Tcp(TcpListener::bind(address)?.accept()?.0),
            Endpoint::File(path) => Wire::File(File::open(path)?),
        };
        // A source may be busy with its guest between rounds, so reading waits for ever.
        Self::new(wire, Box::new(|| false), None, None)
    }

    fn new(
        wire: Wire,
        is_cancelled: Box<dyn Fn() -> bool + Send>,
        unfinished: Option<(PathBuf, PathBuf)>,
        patience: Option<Duration>,
    ) -> io::Result<Self> {
        match &wire {
            Wire::Unix(socket) => {
                socket.set_write_timeout(Some(LOOK))?;
                socket.set_read_timeout(Some(LOOK))?;
            }
            Wire::Tcp(socket) => {
                socket.set_nodelay(true)?;
                socket.set_write_timeout(Some(LOOK))?;
                socket.set_read_timeout(Some(LOOK))?;
            }
            Wire::File(_) => {}
        }
        Ok(Self {
            wire,
            is_cancelled,
            unfinished,
            sent: 0,
            patience,
        })
    }

    /// Returns true if the other end is a file.
    pub(super) fn is_file(&self) -> bool {
        matches!(self.wire, Wire::File(_))
    }

    /// Returns the reason that the other side has sent, if it gave up.
    pub(super) fn last_words(&mut self) -> Option<StreamError> {
        self.is_cancelled = Box::new(|| false);
        self.patience = Some(LOOK);
        let mut words = Vec::new();
        match stream::receive(self, &mut words) {
            Ok(MessageKind::Failed) => Some(StreamError::Refused(
                String::from_utf8_lossy(&words).into_owned(),
            )),
            _ => None,
        }
    }

    /// Completes a file: it gets its final name when it is on the medium.
    pub(super) fn finish(&mut self) -> io::Result<()> {
        if let Wire::File(file) = &self.wire {
            file.sync_all()?;
        }
        if let Some((partial, path)) = &self.unfinished {
            std::fs::rename(partial, path)?;
        }
        self.unfinished = None;
        Ok(())
    }

    /// Repeats an operation until something moves.
    fn patiently(
        &mut self,
        mut once: impl FnMut(&mut Wire) -> io::Result<usize>,
        patience: Option<Duration>,
    ) -> io::Result<usize> {
        let since = Instant::now();
        loop {
            if (self.is_cancelled)() {
                return Err(io::Error::other("cancelled"));
            }
            match once(&mut self.wire) {
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::WouldBlock
                            | io::ErrorKind::TimedOut
                            | io::ErrorKind::Interrupted
                    ) =>
                {
                    if patience.is_some_and(|patience| since.elapsed() > patience) {
                        return Err(io::Error::new(
                            io::ErrorKind::TimedOut,
                            "the other side does not answer",
                        ));
                    }
                }
                done => return done,
            }
        }
    }
}

impl Write for Line {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.patiently(
            |wire| match wire {
                Wire::Unix(socket) => socket.write(bytes),
                Wire::Tcp(socket) => socket.write(bytes),
                Wire::File(file) => file.write(bytes),
            },
            Some(STALL_MAX),
        )?;
        self.sent = self.sent.saturating_add(written as u64);
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Read for Line {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let patience = self.patience;
        self.patiently(
            |wire| match wire {
                Wire::Unix(socket) => socket.read(bytes),
                Wire::Tcp(socket) => socket.read(bytes),
                Wire::File(file) => file.read(bytes),
            },
            patience,
        )
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        if let Some((partial, _)) = &self.unfinished {
            let _ = std::fs::remove_file(partial);
        }
    }
}

/// Listens at a path, at which an earlier process may have left its socket. Other users may not connect.
pub(super) fn listen(path: &Path) -> io::Result<UnixListener> {
    let listener = bind(path)?;
    std::fs::set_permissions(path, Permissions::from_mode(0o600))?;
    Ok(listener)
}

fn bind(path: &Path) -> io::Result<UnixListener> {
    match UnixListener::bind(path) {
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
            let is_socket = std::fs::metadata(path).is_ok_and(|m| m.file_type().is_socket());
            if !is_socket || UnixStream::connect(path).is_ok() {
                return Err(error);
            }
            std::fs::remove_file(path)?;
            UnixListener::bind(path)
        }
        other => other,
    }
}
