//! `ioctl`, `prctl`, `vfork` and `syscall`.

use std::panic::{AssertUnwindSafe, catch_unwind};

use libc::{c_char, c_int, c_long, c_ulong};

use crate::next::{answer, next, system_call_c};
use crate::path::is_kvm;
use crate::{actions, cancel, descriptors, files, filter, launcher, memory, shown, spawn, trace};

/// KVM's type in an ioctl number (KVMIO).
const KVM_TYPE: c_ulong = 0xae;

/// Makes the KVM call of that number, if `fd` is one of ours. `None` if it is somebody else's.
fn kvm_ioctl(fd: c_int, number: c_ulong, argument: usize) -> Option<c_int> {
    if number >> 8 & 0xff != KVM_TYPE {
        return None;
    }
    let section = kvm_abi::signals::Section::enter();
    let call = || kvm_abi::ioctl(fd, number as u32, argument as u64);
    // A panic in our code must not unwind into C.
    let result = catch_unwind(AssertUnwindSafe(call))
        .unwrap_or_else(|_| Err(kvm_abi::Errno::new(libc::EIO)));
    drop(section);
    if result.is_ok()
        && let Some(launcher) = launcher::get()
    {
        watch(launcher, number as u32);
    }
    let is_foreign =
        result == Err(kvm_abi::Errno::new(libc::ENOTTY)) && kvm_abi::lookup(fd).is_err();
    (!is_foreign).then(|| answer(result))
}

/// Has more of a launched program's system calls come to us, after the KVM calls that make that necessary.
fn watch(launcher: &launcher::Launcher, number: u32) {
    use kvm_abi::numbers::{KVM_IRQFD, KVM_SET_USER_MEMORY_REGION, KVM_SET_USER_MEMORY_REGION2};
    match number {
        KVM_IRQFD => (launcher.watch)(&[libc::SYS_write]),
        KVM_SET_USER_MEMORY_REGION | KVM_SET_USER_MEMORY_REGION2 => {
            (launcher.watch)(&memory::CALLS);
        }
        _ => {}
    }
}

/// The C library's function of this name.
///
/// # Safety
///
/// The requirements of that function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn ioctl(fd: c_int, number: c_ulong, argument: usize) -> c_int {
    if number >> 8 & 0xff == KVM_TYPE && cancel::is_asynchronous() {
        cancel::hold(fd);
        // SAFETY: the caller's arguments.
        let result = unsafe { control(fd, number, argument) };
        cancel::finish();
        // If the thread ends here, no frame of ours is left on its stack.
        cancel::let_go();
        return result;
    }
    // SAFETY: the caller's arguments.
    unsafe { control(fd, number, argument) }
}

/// `ioctl(2)`.
///
/// # Safety
///
/// The requirements of that function.
unsafe fn control(fd: c_int, number: c_ulong, argument: usize) -> c_int {
    let call = || {
        if let Some(result) = kvm_ioctl(fd, number, argument) {
            return result;
        }
        let arguments = [fd as usize, number as usize, argument, 0, 0, 0];
        // SAFETY: the caller's arguments.
        unsafe { system_call_c(libc::SYS_ioctl, arguments) as c_int }
    };
    if number >> 8 & 0xff == KVM_TYPE
        && let Some(trace) = trace::wanted()
    {
        return trace.call(fd, number, argument, call);
    }
    call()
}

/// The C library's function of this name.
///
/// # Safety
///
/// The requirements of that function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn syscall(
    number: c_long,
    a: usize,
    b: usize,
    c: usize,
    d: usize,
    e: usize,
    f: usize,
) -> c_long {
    // SAFETY: the caller's arguments.
    match unsafe { special(number, [a, b, c, d, e, f]) } {
        Some(result) => result,
        // SAFETY: the caller's arguments.
        None => unsafe { system_call_c(number, [a, b, c, d, e, f]) },
    }
}

/// Opens a file of ours in place of the machine's. `None` if there is none.
///
/// # Safety
///
/// `path` is null or a C string.
unsafe fn open_shown(path: *const c_char, flags: c_int) -> Option<c_int> {
    // SAFETY: this function's contract.
    let file = unsafe { shown::wanted(path, flags) }?;
    shown::open(file, flags)
}

/// Makes a system call that is, or may be, ours. Returns its result as the C library has it; `None` if the call is not
/// ours.
///
/// # Safety
///
/// The requirements of the call; its paths can be read.
pub(crate) unsafe fn special(number: c_long, arguments: [usize; 6]) -> Option<c_long> {
    let [a, b, c, d, e, _] = arguments;
    let path = |argument: usize| argument as *const c_char;
    let list = |argument: usize| argument as *const *const c_char;
    // SAFETY: the caller's arguments, of the types that the calls have.
    let result = unsafe {
        match number {
            libc::SYS_ioctl => Some(control(a as c_int, b as c_ulong, c)),
            libc::SYS_open if is_kvm(libc::AT_FDCWD, path(a)) => Some(files::open_kvm(b as c_int)),
            libc::SYS_openat if is_kvm(a as c_int, path(b)) => Some(files::open_kvm(c as c_int)),
            // The flags are the first field of struct open_how.
            libc::SYS_openat2 if c != 0 && is_kvm(a as c_int, path(b)) => {
                Some(files::open_kvm((c as *const u64).read_unaligned() as c_int))
            }
            libc::SYS_open => open_shown(path(a), b as c_int),
            libc::SYS_openat => open_shown(path(b), c as c_int),
            libc::SYS_access if is_kvm(libc::AT_FDCWD, path(a)) => {
                Some(files::access_kvm(b as c_int))
            }
            libc::SYS_faccessat | libc::SYS_faccessat2 if is_kvm(a as c_int, path(b)) => {
                Some(files::access_kvm(c as c_int))
            }
            libc::SYS_stat | libc::SYS_lstat if is_kvm(libc::AT_FDCWD, path(a)) => {
                Some(files::stat_kvm(b as *mut libc::stat))
            }
            libc::SYS_newfstatat if is_kvm(a as c_int, path(b)) => {
                Some(files::stat_kvm(c as *mut libc::stat))
            }
            libc::SYS_statx if is_kvm(a as c_int, path(b)) => {
                Some(files::statx_kvm(e as *mut libc::statx))
            }
            libc::SYS_close => {
                descriptors::closing(a as u32, a as u32);
                None
            }
            libc::SYS_close_range => {
                return Some(descriptors::close_range(a as u32, b as u32, c as c_int).into());
            }
            libc::SYS_dup => return Some(descriptors::dup(a as c_int).into()),
            libc::SYS_dup2 => return Some(descriptors::dup2(a as c_int, b as c_int).into()),
            libc::SYS_dup3 => {
                return Some(descriptors::dup3(a as c_int, b as c_int, c as c_int).into());
            }
            libc::SYS_mmap => match mapping(arguments) {
                Some(address) => return Some(address as c_long),
                None => return memory::special(number, arguments),
            },
            _ if memory::CALLS.contains(&number) => return memory::special(number, arguments),
            libc::SYS_write if descriptors::is_injected(a as c_int, b, c) => {
                Some(descriptors::EVENT as c_int)
            }
            libc::SYS_seccomp | libc::SYS_prctl => {
                let result = filter::preloaded(number, arguments)?;
                return Some(crate::next::as_c(result));
            }
            libc::SYS_execve => {
                return Some(spawn::execve(path(a), list(b), list(c)).into());
            }
            libc::SYS_execveat => {
                let flags = e as c_int;
                return Some(spawn::execveat(a as c_int, path(b), list(c), list(d), flags).into());
            }
            libc::SYS_rt_sigaction => return Some(actions::raw(a as c_int, b, c, d).into()),
            _ => None,
        }
    };
    if let Some(result) = result {
        return Some(result.into());
    }
    // These calls may give another number to a descriptor of ours.
    let is_duplication =
        number == libc::SYS_fcntl && matches!(b as c_int, libc::F_DUPFD | libc::F_DUPFD_CLOEXEC);
    // SAFETY: the caller's arguments.
    unsafe {
        let link = match number {
            libc::SYS_open => path(a),
            libc::SYS_openat => path(b),
            _ => std::ptr::null(),
        };
        if is_duplication {
            let new = system_call_c(number, arguments) as c_int;
            return Some(descriptors::duplicated(a as c_int, new).into());
        }
        if !link.is_null() && files::may_be_link(link) {
            let new = system_call_c(number, arguments) as c_int;
            return Some(files::opened(link, new).into());
        }
    }
    None
}

/// Makes a mapping of a vCPU's descriptor that takes more than to map its file. Returns the address, or -1 and sets
/// errno; `None` for all other mappings, which the caller makes.
fn mapping(arguments: [usize; 6]) -> Option<usize> {
    let [address, len, protection, flags, fd, offset] = arguments;
    let (protection, flags, fd) = (protection as c_int, flags as c_int, fd as c_int);
    if flags & libc::MAP_ANONYMOUS != 0 || fd < 0 {
        return None;
    }
    let section = kvm_abi::signals::Section::enter();
    let is_shared = matches!(
        flags & libc::MAP_TYPE,
        libc::MAP_SHARED | libc::MAP_SHARED_VALIDATE
    );
    let is_plain = is_shared && protection & libc::PROT_EXEC == 0;
    let patch = match kvm_abi::judge_mapping(fd, len, offset, is_plain) {
        kvm_abi::Verdict::Good => return None,
        kvm_abi::Verdict::Bad => return Some(crate::next::fail(libc::EINVAL) as usize),
        kvm_abi::Verdict::Patched(patch) => patch,
    };
    let number = libc::SYS_mmap;
    // SAFETY: the caller's arguments.
    let mapped = unsafe {
        system_call_c(
            number,
            [
                address,
                len,
                protection as usize,
                flags as usize,
                fd as usize,
                offset,
            ],
        )
    };
    if mapped != -1 {
        let flags = libc::MAP_SHARED | libc::MAP_FIXED;
        // SAFETY: the page belongs to the mapping that was just made, whose owner does not know it yet. If the call
        // fails, the vCPU has a ring to which nothing is ever written.
        unsafe {
            crate::next::system_call(
                number,
                [
                    mapped as usize + patch.at,
                    patch.len,
                    protection as usize,
                    flags as usize,
                    patch.fd as usize,
                    patch.offset,
                ],
            )
        };
    }
    drop(section);
    Some(mapped as usize)
}

macro_rules! mmap {
    ($($name:ident)*) => { $(
        /// The C library's function of this name.
        ///
        /// # Safety
        ///
        /// The requirements of that function.
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C" fn $name(
            address: usize,
            len: usize,
            protection: c_int,
            flags: c_int,
            fd: c_int,
            offset: usize,
        ) -> usize {
            let arguments = [address, len, protection as usize, flags as usize, fd as usize, offset];
            if let Some(address) = mapping(arguments) {
                return address;
            }
            // SAFETY: the caller's arguments.
            match unsafe { memory::special(libc::SYS_mmap, arguments) } {
                Some(address) => address as usize,
                None => next!($name(
                    address => usize,
                    len => usize,
                    protection => c_int,
                    flags => c_int,
                    fd => c_int,
                    offset => usize,
                ) -> usize),
            }
        }
    )* };
}

mmap! { mmap mmap64 }

/// The C library's function of this name.
///
/// # Safety
///
/// The requirements of that function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn prctl(
    option: c_int,
    a: usize,
    b: usize,
    c: usize,
    d: usize,
) -> c_int {
    let (number, arguments) = (libc::SYS_prctl, [option as usize, a, b, c, d, 0]);
    // SAFETY: the caller's arguments.
    unsafe {
        match filter::preloaded(number, arguments) {
            Some(result) => crate::next::as_c(result) as c_int,
            None => system_call_c(number, arguments) as c_int,
        }
    }
}

/// The C library's function of this name. The child, which shares its parent's memory, is marked, so that what it
/// closes stays open in its parent.
///
/// The return address is kept in a register, as the child's stack is the parent's.
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn vfork() -> c_int {
    std::arch::naked_asm!(
        "pop rdi",
        "mov eax, {number}",
        "syscall",
        "push rdi",
        "mov rdi, rax",
        "sub rsp, 8",
        "call {returned}",
        "add rsp, 8",
        "ret",
        number = const libc::SYS_vfork,
        returned = sym vforked,
    )
}

/// Handles both returns of `vfork`, with the kernel's result.
extern "C" fn vforked(result: isize) -> c_int {
    kvm_abi::set_borrowed(result == 0);
    if result < 0 {
        crate::next::fail(-result as c_int)
    } else {
        result as c_int
    }
}
