//! Which file descriptor is which KVM object: the process's only registry.
//!
//! The table maps descriptor numbers to objects. With `fstat(2)` it checks that a number still means the same file, so
//! a descriptor that was closed, reused or duplicated without notice is recognised. An object lives as long as a number
//! in the table, a Rust owner (`anykvm-ioctls`) or another object (a vCPU holds its VM) refers to it.

use std::collections::BTreeMap;
use std::ffi::CStr;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use host::BriefLock;

use crate::device::Device;
use crate::errno::{Errno, Result};
use crate::fork;
use crate::internal;
use crate::memfd::{self, FileIdentity};
use crate::vcpu::Vcpu;
use crate::vm::Vm;

/// Name of the system descriptor's file. Its link in `/proc` begins with it.
pub(crate) const SYSTEM_NAME: &CStr = c"anykvm:system";
const SYSTEM_LINK: &str = "/memfd:anykvm:system";

/// An object, of one of the four types of descriptor that KVM has.
#[derive(Clone, Debug)]
pub enum Object {
    /// The system, as `open("/dev/kvm")` gives.
    System,
    /// From KVM_CREATE_VM.
    Vm(Arc<Vm>),
    /// From KVM_CREATE_VCPU.
    Vcpu(Arc<Vcpu>),
    /// From KVM_CREATE_DEVICE.
    Device(Arc<Device>),
}

#[derive(Debug)]
struct Entry {
    object: Object,
    identity: FileIdentity,
}

type Table = BTreeMap<RawFd, Entry>;

static OBJECTS: RwLock<Table> = RwLock::new(Table::new());

/// vCPUs that have run, each at the remainder of its descriptor: what the table says of them, without its lock, whose
/// word would go from core to core at every exit of each vCPU. Nothing has a destructor for threads here: to register
/// one takes system calls that a VMM's filter may forbid.
static RECENT: [Recent; 64] = [const { Recent(BriefLock::new(None)) }; 64];

/// In a cache line of its own.
#[derive(Debug)]
#[repr(align(64))]
struct Recent(BriefLock<Option<(RawFd, Arc<Vcpu>)>>);

/// Locks the table. No code panics while it holds the lock, so a poisoned table is still consistent.
fn table() -> RwLockReadGuard<'static, Table> {
    OBJECTS.read().unwrap_or_else(PoisonError::into_inner)
}

fn table_mut() -> RwLockWriteGuard<'static, Table> {
    let table = OBJECTS.write().unwrap_or_else(PoisonError::into_inner);
    // The table still has these objects, so none ends here.
    for Recent(vcpu) in &RECENT {
        *vcpu.lock() = None;
    }
    table
}

/// Creates a descriptor without mappable memory for `object`.
pub(crate) fn publish(object: Object, name: &CStr, close_on_exec: bool) -> Result<OwnedFd> {
    let fd = memfd::create(name, 0, close_on_exec)?;
    register(&fd, object)?;
    Ok(fd)
}

/// Makes an existing file the descriptor of `object`.
pub(crate) fn register(fd: &OwnedFd, object: Object) -> Result<()> {
    let identity = memfd::identity(fd.as_raw_fd())?;
    let mut stale = Vec::new();
    {
        let mut table = table_mut();
        // Here at the latest, objects end whose descriptors were closed without notice.
        let gone: Vec<RawFd> = table
            .iter()
            .filter(|(number, entry)| memfd::identity(**number) != Ok(entry.identity))
            .map(|(number, _)| *number)
            .collect();
        for number in gone {
            stale.extend(table.remove(&number));
        }
        stale.extend(table.insert(fd.as_raw_fd(), Entry { object, identity }));
    }
    // Dropped after the lock is released: the end of a VM joins its threads.
    drop(stale);
    Ok(())
}

/// Every close of a descriptor is reported to [`forget`].
static TRUSTED: AtomicBool = AtomicBool::new(false);

/// Makes lookups trust the table from now on, without asking the kernel: system call filters may not allow that on a
/// vCPU's thread.
pub fn trust_reports() {
    TRUSTED.store(true, Ordering::Relaxed);
}

/// Returns the object behind `fd`: EBADF if it is not open, ENOTTY if it is some other file.
pub fn lookup(fd: RawFd) -> Result<Object> {
    if TRUSTED.load(Ordering::Relaxed)
        && let Some(entry) = table().get(&fd)
    {
        return Ok(entry.object.clone());
    }
    let identity = memfd::identity(fd)?;
    match table().get(&fd) {
        Some(entry) if entry.identity == identity => return Ok(entry.object.clone()),
        _ => {}
    }
    let (object, stale) = adopt_duplicate(fd)?;
    // Dropped after the locks are released, as in `register`.
    drop(stale);
    Ok(object)
}

/// Adds a duplicate that is seen for the first time. From now on it keeps the object alive by itself. Also returns the
/// entry that the table had for the number.
fn adopt_duplicate(fd: RawFd) -> Result<(Object, Option<Entry>)> {
    let other = Errno::new(libc::ENOTTY);
    let internal = internal::numbers();
    let mut table = table_mut();
    // Asked under the lock: by now the number may be that of a new object, whether in the table or not.
    let identity = memfd::identity(fd)?;
    if internal.contains(&fd) {
        return Err(other);
    }
    let same = match table.get(&fd) {
        Some(entry) if entry.identity == identity => return Ok((entry.object.clone(), None)),
        _ => table.values().find(|entry| entry.identity == identity),
    };
    let object = same.map(|entry| entry.object.clone()).ok_or(other)?;
    let stale = table.insert(
        fd,
        Entry {
            object: object.clone(),
            identity,
        },
    );
    Ok((object, stale))
}

/// Returns the object that the table has for `fd`, without a system call.
pub(crate) fn known(fd: RawFd) -> Option<Object> {
    table().get(&fd).map(|entry| entry.object.clone())
}

/// Returns the vCPU behind `fd` for KVM_RUN, without a system call. Does not notice if the number was closed without
/// [`forget`] and reused for another file.
pub(crate) fn lookup_vcpu_unchecked(fd: RawFd) -> Option<Arc<Vcpu>> {
    let Recent(recent) = &RECENT[usize::try_from(fd).ok()? % RECENT.len()];
    // Nobody waits: the lock may be that of a thread which a fork has not copied.
    if let Some(held) = recent.try_lock()
        && let Some((number, vcpu)) = &*held
        && *number == fd
    {
        return Some(Arc::clone(vcpu));
    }
    let table = table();
    let Object::Vcpu(vcpu) = &table.get(&fd)?.object else {
        return None;
    };
    if let Some(mut held) = recent.try_lock() {
        *held = Some((fd, Arc::clone(vcpu)));
    }
    Some(Arc::clone(vcpu))
}

/// Closes one of anykvm's descriptors.
///
/// # Errors
///
/// EBADF if the number is not such a descriptor, or was closed already.
pub fn close(fd: RawFd) -> Result<()> {
    let bad = Errno::new(libc::EBADF);
    let identity = memfd::identity(fd)?;
    let gone = {
        let mut table = table_mut();
        match table.get(&fd) {
            Some(entry) if entry.identity == identity => table.remove(&fd),
            _ => None,
        }
    };
    let entry = gone.ok_or(bad)?;
    // SAFETY: the number was in the table for this very file, and only the caller that removed the entry comes here;
    // code that closes it otherwise reports that first.
    drop(unsafe { OwnedFd::from_raw_fd(fd) });
    // Dropped after the lock is released: the end of a VM joins its threads.
    drop(entry);
    Ok(())
}

/// Returns the numbers for which the table has objects, whether or not they are open.
pub fn known_descriptors() -> Vec<RawFd> {
    table().keys().copied().collect()
}

/// Tells the table that `fd` is about to be closed.
pub fn forget(fd: RawFd) {
    forget_range(fd, fd);
}

/// Tells the table that all descriptors from `first` to `last` are about to be closed.
pub fn forget_range(first: RawFd, last: RawFd) {
    // In the common case, that the descriptor is not anykvm's, no exclusive lock is taken.
    if first > last || table().range(first..=last).next().is_none() || fork::in_child() {
        return;
    }
    let mut gone = Vec::new();
    {
        let mut table = table_mut();
        let numbers: Vec<RawFd> = table.range(first..=last).map(|(fd, _)| *fd).collect();
        for number in numbers {
            gone.extend(table.remove(&number));
        }
    }
    // Dropped after the lock is released: the end of a VM joins its threads.
    drop(gone);
}

/// Tells the table that `new` has just become a duplicate of `old`, another number: it keeps the object alive. What it
/// was before has been closed.
pub fn duplicated(old: RawFd, new: RawFd) {
    forget(new);
    if table().contains_key(&old) && !fork::in_child() {
        // If the number has become another file meanwhile, the lookup is right for that, too.
        let _ = lookup(new);
    }
}

/// Takes over a system descriptor that was left open across `execve(2)`.
pub(crate) fn adopt(fd: RawFd) -> Result<Object> {
    let identity = memfd::identity(fd)?;
    // SAFETY: it is open, and only borrowed to read its link in /proc.
    let path = memfd::path(unsafe { BorrowedFd::borrow_raw(fd) })?;
    if !path.to_string_lossy().starts_with(SYSTEM_LINK) {
        return Err(Errno::new(libc::ENOTTY));
    }
    let object = Object::System;
    let stale = table_mut().insert(
        fd,
        Entry {
            object: object.clone(),
            identity,
        },
    );
    drop(stale);
    Ok(object)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn errno_of(fd: RawFd) -> i32 {
        lookup(fd).map(drop).unwrap_err().get()
    }

    #[test]
    fn other_files_are_enotty_and_closed_ones_ebadf() {
        assert_eq!(errno_of(-2), libc::EBADF);
        let file = std::fs::File::open("/dev/null").unwrap();
        assert_eq!(errno_of(file.as_raw_fd()), libc::ENOTTY);
    }

    #[test]
    fn duplicates_reach_the_object_also_after_the_first_is_closed() {
        let first = publish(Object::System, c"kvm", true).unwrap();
        let second = first.try_clone().unwrap();
        assert!(matches!(lookup(second.as_raw_fd()), Ok(Object::System)));
        forget(first.as_raw_fd());
        drop(first);
        assert!(matches!(lookup(second.as_raw_fd()), Ok(Object::System)));
    }

    #[test]
    fn a_number_reused_by_another_file_is_not_the_object() {
        let fd = publish(Object::System, c"kvm", true).unwrap();
        let other = std::fs::File::open("/dev/null").unwrap();
        // SAFETY: both are open; the copy replaces a descriptor that this test owns.
        assert!(unsafe { libc::dup2(other.as_raw_fd(), fd.as_raw_fd()) } >= 0);
        assert_eq!(errno_of(fd.as_raw_fd()), libc::ENOTTY);
    }

    #[test]
    fn numbers_that_become_other_objects_while_they_are_looked_up_stay_theirs() {
        let first = publish(Object::System, c"kvm", true).unwrap();
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    for step in 1..8 {
                        let _ = lookup(first.as_raw_fd() + step);
                    }
                }
            });
            // Makes duplicates without notice.
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    drop(first.try_clone());
                }
            });
            let mut results = Vec::new();
            for _ in 0..20_000 {
                let fd = publish(Object::System, c"kvm", true).unwrap();
                results.push(close(std::os::fd::IntoRawFd::into_raw_fd(fd)));
            }
            is_over.store(true, Ordering::Relaxed);
            assert!(results.iter().all(Result::is_ok));
        });
    }
}
