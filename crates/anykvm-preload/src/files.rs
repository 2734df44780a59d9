//! `open`, `stat` and `access` in all their forms: a program finds `/dev/kvm` and may open it.

use libc::{c_char, c_int, c_uint, mode_t, stat as Stat, statx as Statx};

use crate::next::{answer, fail, next, system_call_c};
use crate::path::is_kvm;
use crate::{actions, shown};

/// Does `openat(2)` for `/dev/kvm`.
pub(crate) fn open_kvm(flags: c_int) -> c_int {
    if flags & libc::O_DIRECTORY != 0 {
        return fail(libc::ENOTDIR);
    }
    if flags & libc::O_CREAT != 0 && flags & libc::O_EXCL != 0 {
        return fail(libc::EEXIST);
    }
    if flags & libc::O_PATH != 0 {
        return place(flags);
    }
    actions::wrap_all();
    let section = kvm_abi::signals::Section::enter();
    let opened = kvm_abi::system::open(flags & libc::O_CLOEXEC != 0);
    drop(section);
    answer(opened.map(std::os::fd::IntoRawFd::into_raw_fd))
}

/// Opens `/dev/kvm` with O_PATH: a place in the file system, which a sandbox is told of (Landlock), and no descriptor
/// for calls. Where there is no such file, another device stands for it.
fn place(flags: c_int) -> c_int {
    let flags = flags & (libc::O_PATH | libc::O_CLOEXEC | libc::O_NOFOLLOW);
    let open = |path: &std::ffi::CStr| {
        let at = libc::AT_FDCWD as usize;
        let arguments = [at, path.as_ptr() as usize, flags as usize, 0, 0, 0];
        // SAFETY: a C string.
        unsafe { system_call_c(libc::SYS_openat, arguments) as c_int }
    };
    match open(c"/dev/kvm") {
        -1 => open(c"/dev/null"),
        fd => fd,
    }
}

/// Notes a new descriptor whose path may lead to an open descriptor of ours, as those in `/proc/self/fd` do.
///
/// # Safety
///
/// `path` is null or a C string.
pub(crate) unsafe fn opened(path: *const c_char, fd: c_int) -> c_int {
    // SAFETY: this function's contract.
    if fd >= 0 && unsafe { may_be_link(path) } {
        crate::descriptors::noticed(fd);
    }
    fd
}

/// Returns true for a path that may lead to an open descriptor.
///
/// # Safety
///
/// `path` is null or a C string.
pub(crate) unsafe fn may_be_link(path: *const c_char) -> bool {
    if path.is_null() {
        return false;
    }
    // SAFETY: a C string by this function's contract.
    let path = unsafe { std::ffi::CStr::from_ptr(path) }.to_bytes();
    path.starts_with(b"/proc/") || path.starts_with(b"/dev/fd/")
}

macro_rules! open {
    ($($name:ident ( $($fixed:ident : $type:ty),* ) $dir:expr;)*) => { $(
        /// The C library's function of this name.
        ///
        /// # Safety
        ///
        /// The requirements of that function.
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C" fn $name(
            $($fixed: $type,)*
            path: *const c_char,
            flags: c_int,
            mode: mode_t,
        ) -> c_int {
            // SAFETY: the caller's path.
            if unsafe { is_kvm($dir, path) } {
                return open_kvm(flags);
            }
            // SAFETY: the caller's path.
            if let Some(file) = unsafe { shown::wanted(path, flags) }
                && let Some(fd) = shown::open(file, flags)
            {
                return fd;
            }
            let fd = next!($name(
                $($fixed => $type,)*
                path => *const c_char,
                flags => c_int,
                mode => mode_t,
            ) -> c_int);
            // SAFETY: the caller's path.
            unsafe { opened(path, fd) }
        }
    )* };
}

open! {
    open() libc::AT_FDCWD;
    open64() libc::AT_FDCWD;
    openat(dir: c_int) dir;
    openat64(dir: c_int) dir;
    // _FORTIFY_SOURCE calls these for `open` without a mode.
    __open_2() libc::AT_FDCWD;
    __open64_2() libc::AT_FDCWD;
    __openat_2(dir: c_int) dir;
    __openat64_2(dir: c_int) dir;
}

/// Fills in what `stat(2)` says of a character device 10:232 that everybody may use.
pub(crate) unsafe fn stat_kvm(buffer: *mut Stat) -> c_int {
    if buffer.is_null() {
        return fail(libc::EFAULT);
    }
    // SAFETY: the caller's buffer for one structure, for which all zeros are a value.
    unsafe {
        let mut status: Stat = std::mem::zeroed();
        status.st_mode = libc::S_IFCHR | 0o666;
        status.st_nlink = 1;
        status.st_rdev = libc::makedev(10, 232);
        status.st_blksize = 4096;
        buffer.write(status);
    }
    0
}

/// Does what [`stat_kvm`] does, for `statx(2)`.
pub(crate) unsafe fn statx_kvm(buffer: *mut Statx) -> c_int {
    if buffer.is_null() {
        return fail(libc::EFAULT);
    }
    // SAFETY: the caller's buffer for one structure, for which all zeros are a value.
    unsafe {
        let mut status: Statx = std::mem::zeroed();
        status.stx_mask = libc::STATX_BASIC_STATS;
        status.stx_mode = (libc::S_IFCHR | 0o666) as u16;
        status.stx_nlink = 1;
        status.stx_rdev_major = 10;
        status.stx_rdev_minor = 232;
        status.stx_blksize = 4096;
        buffer.write(status);
    }
    0
}

macro_rules! stat {
    ($($name:ident ( $($before:ident : $type:ty),* ; $($after:ident : $after_type:ty),* ) $dir:expr;)*) => { $(
        /// The C library's function of this name.
        ///
        /// # Safety
        ///
        /// The requirements of that function.
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C" fn $name(
            $($before: $type,)*
            path: *const c_char,
            buffer: *mut Stat,
            $($after: $after_type,)*
        ) -> c_int {
            // SAFETY: the caller's path and buffer.
            unsafe {
                if is_kvm($dir, path) {
                    return stat_kvm(buffer);
                }
            }
            next!($name(
                $($before => $type,)*
                path => *const c_char,
                buffer => *mut Stat,
                $($after => $after_type,)*
            ) -> c_int)
        }
    )* };
}

stat! {
    stat(;) libc::AT_FDCWD;
    stat64(;) libc::AT_FDCWD;
    lstat(;) libc::AT_FDCWD;
    lstat64(;) libc::AT_FDCWD;
    fstatat(dir: c_int; flags: c_int) dir;
    fstatat64(dir: c_int; flags: c_int) dir;
    // Programs that were built with a C library before 2.33 call these.
    __xstat(version: c_int;) libc::AT_FDCWD;
    __xstat64(version: c_int;) libc::AT_FDCWD;
    __lxstat(version: c_int;) libc::AT_FDCWD;
    __lxstat64(version: c_int;) libc::AT_FDCWD;
    __fxstatat(version: c_int, dir: c_int; flags: c_int) dir;
    __fxstatat64(version: c_int, dir: c_int; flags: c_int) dir;
}

/// The C library's function of this name.
///
/// # Safety
///
/// The requirements of that function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn statx(
    dir: c_int,
    path: *const c_char,
    flags: c_int,
    mask: c_uint,
    buffer: *mut Statx,
) -> c_int {
    // SAFETY: the caller's path and buffer.
    unsafe {
        if is_kvm(dir, path) {
            return statx_kvm(buffer);
        }
    }
    next!(statx(
        dir => c_int,
        path => *const c_char,
        flags => c_int,
        mask => c_uint,
        buffer => *mut Statx,
    ) -> c_int)
}

/// Does `access(2)` for `/dev/kvm`, which is readable and writable but not executable.
pub(crate) fn access_kvm(mode: c_int) -> c_int {
    if mode & libc::X_OK != 0 {
        fail(libc::EACCES)
    } else {
        0
    }
}

macro_rules! access {
    ($($name:ident ( $($before:ident),* ; $($after:ident),* ) $dir:expr;)*) => { $(
        /// The C library's function of this name.
        ///
        /// # Safety
        ///
        /// The requirements of that function.
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C" fn $name(
            $($before: c_int,)*
            path: *const c_char,
            mode: c_int,
            $($after: c_int,)*
        ) -> c_int {
            // SAFETY: the caller's path.
            if unsafe { is_kvm($dir, path) } {
                return access_kvm(mode);
            }
            next!($name(
                $($before => c_int,)*
                path => *const c_char,
                mode => c_int,
                $($after => c_int,)*
            ) -> c_int)
        }
    )* };
}

access! {
    access(;) libc::AT_FDCWD;
    eaccess(;) libc::AT_FDCWD;
    euidaccess(;) libc::AT_FDCWD;
    faccessat(dir; flags) dir;
}
