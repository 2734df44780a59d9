//! KVM_GET_STATS_FD: a file with a header, an identity, descriptors and live values
//! (KVM API document, 4.133).
//!
//! The file is a memfd, whose values are updated through a mapping. Each call returns a read-only descriptor with a
//! position of its own.

use std::ffi::CString;
use std::mem::size_of;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use hypervisor::{StatKind, StatsSink};
use kvm_bindings::*;

use crate::errno::{Errno, Result};
use crate::memfd;
use crate::run_page::PAGE_SIZE;

/// KVM_STATS_NAME_SIZE.
const NAME_SIZE: usize = 48;
const HEADER: usize = 24;
const DESCRIPTOR: usize = 16 + NAME_SIZE;

/// The file and anykvm's mapping of it.
#[derive(Debug)]
pub(crate) struct StatsFile {
    file: OwnedFd,
    values: Arc<Values>,
}

/// The values, in the mapping of the whole file.
#[derive(Debug)]
struct Values {
    start: NonNull<u8>,
    /// Length of the mapping in bytes.
    len: usize,
    offset: usize,
    count: usize,
}

// SAFETY: shared memory that belongs to no thread; the values are accessed atomically.
unsafe impl Send for Values {}
// SAFETY: shared memory that belongs to no thread; the values are accessed atomically.
unsafe impl Sync for Values {}

impl Values {
    fn store(&self, values: &[u64]) {
        for (i, value) in values.iter().take(self.count).enumerate() {
            // SAFETY: inside the mapping (`StatsFile::new` makes it long enough) and aligned to eight
            // bytes, as the mapping and the offsets are.
            let slot =
                unsafe { AtomicU64::from_ptr(self.start.as_ptr().add(self.offset + 8 * i).cast()) };
            slot.store(*value, Ordering::Relaxed);
        }
    }
}

impl Drop for Values {
    fn drop(&mut self) {
        // SAFETY: our own mapping, to which no reference outlives `self`.
        unsafe { host::system::unmap(self.start.cast(), self.len) };
    }
}

struct Sink(Arc<Values>);

impl StatsSink for Sink {
    fn store(&self, values: &[u64]) {
        self.0.store(values);
    }
}

impl StatsFile {
    /// Makes a file named `identity` with these statistics.
    pub(crate) fn new(identity: &str, stats: &[(&str, StatKind)]) -> Result<Self> {
        let bytes = contents(identity, stats);
        let offset = bytes.len();
        let len = (offset + 8 * stats.len()).next_multiple_of(PAGE_SIZE);
        let name = CString::new(identity).map_err(|_| Errno::new(libc::EINVAL))?;
        let file = memfd::create(&name, len, true)?;
        // The memory stays, because the file's size is sealed.
        let start = host::system::map_shared(file.as_fd(), 0, len)?;
        let values = Arc::new(Values {
            start,
            len,
            offset,
            count: stats.len(),
        });
        // SAFETY: fewer bytes than the mapping, which is nobody else's yet.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), start.as_ptr(), bytes.len()) };
        Ok(Self { file, values })
    }

    /// Returns the sink that updates the values.
    pub(crate) fn sink(&self) -> Box<dyn StatsSink> {
        Box::new(Sink(Arc::clone(&self.values)))
    }

    /// Returns a descriptor for the VMM.
    pub(crate) fn open(&self) -> Result<OwnedFd> {
        let fd = self.file.as_fd();
        let path = CString::new(format!("/proc/self/fd/{}", fd.as_raw_fd()))
            .map_err(|_| Errno::new(libc::EINVAL))?;
        // SAFETY: `path` is a C string that outlives the call.
        let opened = unsafe { libc::open(path.as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC) };
        if opened >= 0 {
            // SAFETY: the descriptor was just created and belongs to nobody else.
            return Ok(unsafe { OwnedFd::from_raw_fd(opened) });
        }
        // Without /proc the descriptor shares its position with others.
        Ok(fd.try_clone_to_owned()?)
    }
}

/// Returns header, identity and descriptors: everything before the values.
fn contents(identity: &str, stats: &[(&str, StatKind)]) -> Vec<u8> {
    let id_offset = HEADER;
    let descriptors = id_offset + NAME_SIZE;
    let data = descriptors + DESCRIPTOR * stats.len();
    let mut bytes = Vec::with_capacity(data);
    let header = [0, NAME_SIZE, stats.len(), id_offset, descriptors, data];
    for field in header {
        bytes.extend_from_slice(&(field as u32).to_le_bytes());
    }
    bytes.extend_from_slice(&name(identity));
    for (i, (label, kind)) in stats.iter().enumerate() {
        let (flags, exponent) = match kind {
            StatKind::Count => (KVM_STATS_TYPE_CUMULATIVE, 0i16),
            StatKind::Nanoseconds => (KVM_STATS_TYPE_CUMULATIVE | KVM_STATS_UNIT_SECONDS, -9),
            StatKind::Flag => (KVM_STATS_TYPE_INSTANT | KVM_STATS_UNIT_BOOLEAN, 0),
            StatKind::Now => (KVM_STATS_TYPE_INSTANT, 0),
        };
        bytes.extend_from_slice(&flags.to_le_bytes());
        bytes.extend_from_slice(&exponent.to_le_bytes());
        // One value.
        bytes.extend_from_slice(&1u16.to_le_bytes());
        bytes.extend_from_slice(&((i * size_of::<u64>()) as u32).to_le_bytes());
        bytes.extend_from_slice(&0u32.to_le_bytes());
        bytes.extend_from_slice(&name(label));
    }
    bytes
}

/// Returns a name's field, which ends with a zero.
fn name(text: &str) -> [u8; NAME_SIZE] {
    let mut field = [0; NAME_SIZE];
    for (to, from) in field.iter_mut().take(NAME_SIZE - 1).zip(text.bytes()) {
        *to = from;
    }
    field
}
