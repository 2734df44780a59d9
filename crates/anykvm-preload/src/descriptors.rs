//! Descriptors that are opened, duplicated and closed: a KVM object lives as long as one of its numbers.

use libc::{c_int, c_uint, c_void};

use crate::next::{next, system_call_c};

/// Returns true if a write to this descriptor is one to an irqfd, and the interrupt has been injected.
pub(crate) fn is_injected(fd: c_int, buffer: usize, count: usize) -> bool {
    use kvm_abi::signals::Section;
    // In a launched program each system call is a section.
    let is_busy = if crate::is_launched() {
        Section::is_nested()
    } else {
        Section::is_active()
    };
    // A signal handler in the middle of a KVM call makes the system call, because its thread may hold our locks.
    kvm_abi::is_irqfd(fd) && !is_busy && kvm_abi::write_irqfd(fd, buffer, count)
}

/// Notes a descriptor that may be a duplicate of one of ours.
pub(crate) fn noticed(fd: c_int) {
    let _section = kvm_abi::signals::Section::enter();
    // An error says that it is not ours.
    let _ = kvm_abi::lookup(fd);
}

/// Notes that `new` is a duplicate of `old`, unless it is an error. Returns `new`.
pub(crate) fn duplicated(old: c_int, new: c_int) -> c_int {
    if new >= 0 && new != old {
        let _section = kvm_abi::signals::Section::enter();
        kvm_abi::duplicated(old, new);
    }
    new
}

/// Notes that these descriptors are about to be closed.
pub(crate) fn closing(first: c_uint, last: c_uint) {
    let _section = kvm_abi::signals::Section::enter();
    let number = |fd: c_uint| c_int::try_from(fd).unwrap_or(c_int::MAX);
    kvm_abi::forget_irqfds(number(first), number(last));
    kvm_abi::forget_range(number(first), number(last));
    crate::trace::closing(number(first), number(last));
}

/// Notes that `new` is about to become a duplicate of `old`.
fn replacing(old: c_int, new: c_int) {
    if old != new {
        let _section = kvm_abi::signals::Section::enter();
        kvm_abi::forget_irqfds(new, new);
    }
}

/// The C library's function of this name.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn close(fd: c_int) -> c_int {
    if fd >= 0 {
        closing(fd.cast_unsigned(), fd.cast_unsigned());
    }
    next!(close(fd => c_int) -> c_int)
}

/// The C library's function of this name.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int {
    const CLOSE_RANGE_CLOEXEC: c_int = 4;
    if flags & CLOSE_RANGE_CLOEXEC == 0 {
        closing(first, last);
    }
    let arguments = [first as usize, last as usize, flags as usize, 0, 0, 0];
    // SAFETY: integers.
    unsafe { system_call_c(libc::SYS_close_range, arguments) as c_int }
}

/// The C library's function of this name.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn closefrom(first: c_int) {
    closing(first.max(0).cast_unsigned(), c_uint::MAX);
    next!(closefrom(first => c_int) -> c_int);
}

/// The C library's function of this name.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn dup(fd: c_int) -> c_int {
    // SAFETY: an integer.
    let new = unsafe { system_call_c(libc::SYS_dup, [fd as usize, 0, 0, 0, 0, 0]) };
    duplicated(fd, new as c_int)
}

/// The C library's function of this name.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn dup2(old: c_int, new: c_int) -> c_int {
    replacing(old, new);
    // SAFETY: integers.
    let fd = unsafe { system_call_c(libc::SYS_dup2, [old as usize, new as usize, 0, 0, 0, 0]) };
    duplicated(old, fd as c_int)
}

/// The C library's function of this name.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn dup3(old: c_int, new: c_int, flags: c_int) -> c_int {
    replacing(old, new);
    let arguments = [old as usize, new as usize, flags as usize, 0, 0, 0];
    // SAFETY: integers.
    let fd = unsafe { system_call_c(libc::SYS_dup3, arguments) };
    duplicated(old, fd as c_int)
}

macro_rules! fcntl {
    ($($name:ident)*) => { $(
        /// The C library's function of this name.
        ///
        /// # Safety
        ///
        /// The requirements of that function.
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C" fn $name(fd: c_int, command: c_int, argument: usize) -> c_int {
            let result = next!($name(
                fd => c_int,
                command => c_int,
                argument => usize,
            ) -> c_int);
            match command {
                libc::F_DUPFD | libc::F_DUPFD_CLOEXEC => duplicated(fd, result),
                _ => result,
            }
        }
    )* };
}

fcntl! { fcntl fcntl64 }

/// Number of bytes that a write to an eventfd takes.
pub(crate) const EVENT: isize = 8;

/// The C library's function of this name.
///
/// # Safety
///
/// The requirements of that function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn write(fd: c_int, buffer: *const c_void, count: usize) -> isize {
    if is_injected(fd, buffer as usize, count) {
        return EVENT;
    }
    next!(write(fd => c_int, buffer => *const c_void, count => usize) -> isize)
}

/// The C library's function of this name.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn eventfd_write(fd: c_int, value: u64) -> c_int {
    if is_injected(fd, &raw const value as usize, size_of::<u64>()) {
        return 0;
    }
    next!(eventfd_write(fd => c_int, value => u64) -> c_int)
}
