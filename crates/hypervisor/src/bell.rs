//! [`Bell`]: what a doorbell does, and the table by which a guest's write finds its doorbell.

use std::cell::Cell;
use std::sync::{Arc, Mutex, PoisonError};

use host::EventFd;
use io_bus::IoBus;

use crate::{Error, Result};

/// Called with the value written, on the vCPU's thread.
pub type Subscriber = Box<dyn Fn(u64) + Send + Sync>;

/// What a doorbell does.
pub(crate) enum Bell {
    /// Adds one to an eventfd.
    Event {
        id: Identity,
        event: EventFd,
        /// Held to ask whether the counter is full, if writers of this eventfd block then: only one writer at a time
        /// may ask.
        asks: Option<Mutex<()>>,
    },
    /// Calls into the VMM.
    Subscriber(Subscriber),
}

impl core::fmt::Debug for Bell {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(match self {
            Self::Event { .. } => "Event",
            Self::Subscriber(_) => "Subscriber",
        })
    }
}

thread_local! {
    /// True while this thread, which is a vCPU's, calls a subscriber.
    static CALLING: Cell<bool> = const { Cell::new(false) };
}

impl Bell {
    pub(crate) fn eventfd(fd: i32) -> Result<Self> {
        let event = EventFd::duplicate(fd).map_err(not_an_eventfd)?;
        Ok(Self::Event {
            id: Identity::of(&event, fd),
            asks: event.blocks().then(|| Mutex::new(())),
            event,
        })
    }

    /// True if the host says that both ring the same eventfd.
    pub(crate) fn is_same_eventfd(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Event { id, .. }, Self::Event { id: other, .. }) => id.is_surely(*other),
            _ => false,
        }
    }

    /// Rings the doorbell. Never blocks: a full counter is a signal already, and a missing reader is the VMM's
    /// business.
    #[inline]
    pub(crate) fn ring(&self, value: u64) {
        match self {
            Self::Event { event, asks, .. } => {
                let _turn = match asks {
                    None => None,
                    Some(turn) => {
                        let turn = turn.lock().unwrap_or_else(PoisonError::into_inner);
                        if !event.has_room() {
                            return;
                        }
                        Some(turn)
                    }
                };
                let _ = event.signal(1);
            }
            Self::Subscriber(call) => {
                CALLING.set(true);
                call(value);
                CALLING.set(false);
            }
        }
    }
}

/// Names an eventfd by its counter's number, which is unique on the host. If the host does not tell that number, or may
/// not be asked any more, the VMM's descriptor number stands in, which may have become another eventfd's.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Identity {
    id: Option<u64>,
    fd: i32,
}

impl Identity {
    /// Returns the identity of `event`, which is the VMM's descriptor `fd`.
    pub(crate) fn of(event: &EventFd, fd: i32) -> Self {
        let id = event.id();
        Self { id, fd }
    }

    pub(crate) fn is(self, other: Self) -> bool {
        match (self.id, other.id) {
            (Some(id), Some(other)) => id == other,
            _ => self.fd == other.fd,
        }
    }
}

impl Identity {
    /// True if the host says that both are the same eventfd.
    pub(crate) fn is_surely(self, other: Self) -> bool {
        self.id.is_some() && self.id == other.id
    }
}

/// Maps an error to EBADF for a number that is not open, to EINVAL for a file that is no eventfd, and to EMFILE if there
/// is no number for a duplicate.
pub(crate) fn not_an_eventfd(error: std::io::Error) -> Error {
    /// ENFILE, EMFILE.
    const NO_MORE: [i32; 2] = [23, 24];
    match error.raw_os_error() {
        _ if error.kind() == std::io::ErrorKind::InvalidInput => Error::InvalidArgument,
        Some(errno) if NO_MORE.contains(&errno) => Error::TooManyFiles,
        _ => Error::BadFd,
    }
}

/// The doorbells and coalesced zones of a VM, as vCPUs read them. In-kernel chips are not in it.
pub(crate) type IoTable = IoBus<(), Arc<Bell>>;

/// True if the calling thread is a vCPU's that is in the middle of a subscriber's call.
pub(crate) fn is_calling() -> bool {
    CALLING.get()
}
