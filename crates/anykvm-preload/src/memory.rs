//! System calls that change what the process can access, such as mprotect(2) and munmap(2).
//!
//! A kernel notifies KVM of such a change before it makes it. Here the caller's call passes through, and
//! [`kvm_abi::host_memory`] is notified first. Nearly all of these calls concern memory of no guest, and go on at once.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};

use kvm_abi::host_memory::{self, MemoryChange};
use kvm_abi::signals::Section;
use libc::{c_int, c_long};

use crate::next::{as_c, fail, system_call, system_call_c};

/// The calls that pass through here, except mmap(2), which others look at as well.
pub(crate) const CALLS: [c_long; 10] = [
    libc::SYS_munmap,
    libc::SYS_mprotect,
    libc::SYS_pkey_mprotect,
    libc::SYS_mremap,
    libc::SYS_madvise,
    libc::SYS_remap_file_pages,
    libc::SYS_ftruncate,
    libc::SYS_truncate,
    libc::SYS_shmat,
    libc::SYS_shmdt,
];

/// Advice that makes accesses raise SIGSEGV (Linux 6.13).
const MADV_GUARD_INSTALL: usize = 102;
/// Flag with which shmat(2) replaces what is mapped at the address.
const SHM_REMAP: usize = 0o40000;
/// The range of a change of which the place is unknown: a file may be mapped anywhere.
const ANYWHERE: Range<u64> = 0..u64::MAX;

/// Returns the memory that a call with these arguments may unmap, or change the rights of.
fn changed(number: c_long, a: [usize; 6]) -> Option<Range<u64>> {
    let range = |start: usize, len: usize| Some(start as u64..start.saturating_add(len) as u64);
    match number {
        libc::SYS_munmap
        | libc::SYS_mprotect
        | libc::SYS_pkey_mprotect
        | libc::SYS_remap_file_pages => range(a[0], a[1]),
        libc::SYS_mmap if a[3] as c_int & libc::MAP_FIXED != 0 => range(a[0], a[1]),
        // The mapping may become shorter, or move and replace what is mapped there.
        libc::SYS_mremap if a[3] as c_int & libc::MREMAP_FIXED != 0 => {
            let end = a[0].saturating_add(a[1]).max(a[4].saturating_add(a[2]));
            Some(a[0].min(a[4]) as u64..end as u64)
        }
        libc::SYS_mremap => range(a[0], a[1]),
        libc::SYS_madvise if matches!(a[2], MADV_GUARD_INSTALL | HWPOISON) => range(a[0], a[1]),
        libc::SYS_ftruncate if becomes_shorter(a[0], a[1]) => Some(ANYWHERE),
        libc::SYS_truncate | libc::SYS_shmdt => Some(ANYWHERE),
        libc::SYS_shmat if a[2] & SHM_REMAP != 0 => Some(ANYWHERE),
        _ => None,
    }
}

/// Advice that makes memory count as broken, for tests.
const HWPOISON: usize = libc::MADV_HWPOISON as usize;

/// Returns true unless the descriptor's file certainly has at most `len` bytes.
fn becomes_shorter(fd: usize, len: usize) -> bool {
    let mut status = std::mem::MaybeUninit::<libc::stat>::zeroed();
    let arguments = [fd, status.as_mut_ptr() as usize];
    // SAFETY: the kernel fills the structure.
    let known = unsafe { host::system::call(libc::SYS_fstat, arguments) };
    // SAFETY: integers, which are zero where the kernel has not filled them.
    let size = unsafe { status.assume_init() }.st_size;
    known.is_err() || size > len as i64
}

/// Announces the change. In the middle of a KVM call nothing is announced: calls there are our own, about our own
/// memory.
fn begin(number: c_long, arguments: [usize; 6]) -> kvm_abi::Result<Option<MemoryChange>> {
    // In a launched program each system call is a section.
    let is_busy = if crate::is_launched() {
        Section::is_nested()
    } else {
        Section::is_active()
    };
    match changed(number, arguments) {
        Some(range) if !is_busy => {
            host_memory::begin(range.start, range.end.saturating_sub(range.start))
        }
        _ => Ok(None),
    }
}

/// Makes a call that changes memory of a guest, with the C library's result. `None` if it does not change any: the
/// caller has to make it.
///
/// # Safety
///
/// The requirements of the call.
pub(crate) unsafe fn special(number: c_long, arguments: [usize; 6]) -> Option<c_long> {
    if !host_memory::is_any() {
        return None;
    }
    // A panic in our code must not unwind into C.
    let begun = catch_unwind(AssertUnwindSafe(|| begin(number, arguments)));
    let change = match begun.unwrap_or_else(|_| Err(kvm_abi::Errno::new(libc::ENOMEM))) {
        Ok(change) => change?,
        Err(errno) => return Some(fail(errno.get()).into()),
    };
    // SAFETY: the caller's arguments.
    let result = unsafe { system_call(number, arguments) };
    // Handlers of signals that have waited run here, so errno is set last.
    drop(change);
    Some(as_c(result))
}

/// Does what [`special`] does, or makes the call itself.
unsafe fn call(number: c_long, arguments: [usize; 6]) -> c_long {
    // SAFETY: the caller's arguments.
    unsafe { special(number, arguments).unwrap_or_else(|| system_call_c(number, arguments)) }
}

macro_rules! functions {
    ($($name:ident = $number:ident ( $($argument:ident),* ) -> $result:ty;)*) => { $(
        /// The C library's function of this name.
        ///
        /// # Safety
        ///
        /// The requirements of that function.
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C" fn $name($($argument: usize),*) -> $result {
            let mut arguments = [0; 6];
            for (to, from) in arguments.iter_mut().zip([$($argument),*]) {
                *to = from;
            }
            // SAFETY: the caller's arguments.
            unsafe { call(libc::$number, arguments) as $result }
        }
    )* };
}

functions! {
    munmap = SYS_munmap(address, len) -> c_int;
    mprotect = SYS_mprotect(address, len, protection) -> c_int;
    pkey_mprotect = SYS_pkey_mprotect(address, len, protection, key) -> c_int;
    mremap = SYS_mremap(address, len, new_len, flags, new_address) -> usize;
    madvise = SYS_madvise(address, len, advice) -> c_int;
    ftruncate = SYS_ftruncate(fd, len) -> c_int;
    ftruncate64 = SYS_ftruncate(fd, len) -> c_int;
    truncate = SYS_truncate(path, len) -> c_int;
    truncate64 = SYS_truncate(path, len) -> c_int;
    shmat = SYS_shmat(id, address, flags) -> usize;
    shmdt = SYS_shmdt(address) -> c_int;
}
