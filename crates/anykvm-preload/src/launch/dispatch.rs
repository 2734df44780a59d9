//! System calls of a launched program that we may have to answer.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;

use libc::{c_int, c_long};

use super::answer::Answer;
use super::block::ThreadBlock;
use super::entry::Frame;
use super::{entry, execve, image, signals, threads};
use crate::next::system_call;
use crate::{actions, calls, filter, shown};

/// Bytes of a `syscall` instruction.
const SYSCALL_LEN: usize = 2;
/// The kernel's answer to a call that does not exist.
const NO_SUCH_CALL: isize = -(libc::ENOSYS as isize);
const KVM_RUN: usize = 0xae80;

/// Called by [`super::entry::enter`].
pub(super) unsafe extern "C" fn dispatch(frame: *mut Frame, block: *mut ThreadBlock) {
    // SAFETY: both belong to the thread, and nothing else uses them while the program waits.
    let (frame, block) = unsafe { (&mut *frame, &mut *block) };
    let arguments = [
        frame.rdi, frame.rsi, frame.rdx, frame.r10, frame.r8, frame.r9,
    ];
    kvm_abi::set_borrowed(block.borrowed != 0);
    let pending = &raw const block.pending;
    // SAFETY: the word belongs to the thread; a signal may write it at any moment.
    kvm_abi::signals::begin(|| unsafe { pending.read_volatile() } != 0, block.inner != 0);
    if frame.rax != libc::SYS_ioctl as usize || frame.rsi != KVM_RUN {
        // Threads that our code makes inherit the value of GS.
        // SAFETY: our code does not use GS, and the way out sets it.
        unsafe {
            std::arch::asm!("wrgsbase {}", in(reg) 0usize, options(nostack, preserves_flags));
        };
    }
    let number = frame.rax as c_long;
    // These calls leave the signal stack in place: a child needs it, and what the program itself then does is done on it.
    let is_kept = matches!(
        number,
        libc::SYS_clone
            | libc::SYS_clone3
            | libc::SYS_fork
            | libc::SYS_vfork
            | libc::SYS_execve
            | libc::SYS_execveat
            | libc::SYS_exit
    );
    let aside = signals::StackAside::new(block, is_kept);
    // A panic in our code must not unwind into assembly code.
    let answer = catch_unwind(AssertUnwindSafe(|| {
        // SAFETY: the program's arguments.
        unsafe { answer(number, arguments, frame, block) }
    }))
    .unwrap_or(Answer::Is(-(libc::EIO as isize)));
    if let Some(aside) = aside {
        aside.put_back(block);
    }
    match answer {
        Answer::Is(result) => {
            frame.rax = result as usize;
            frame.target += SYSCALL_LEN;
        }
        Answer::Kernel => {}
        // SAFETY: nothing on this stack has a destructor.
        Answer::Exit => unsafe { entry::finish(block.base) },
    }
    if let Some(mask) = kvm_abi::signals::end() {
        block.mask = mask;
        block.pending = 1;
    }
}

unsafe fn answer(
    number: c_long,
    a: [usize; 6],
    frame: &mut Frame,
    block: &mut ThreadBlock,
) -> Answer {
    // SAFETY: the program's arguments, as the calls have them.
    unsafe {
        match number {
            libc::SYS_arch_prctl => arch_prctl(a, frame),
            libc::SYS_brk => Answer::Is(brk(a[0]) as isize),
            // Programs go on with clone(2) if this one does not exist.
            libc::SYS_clone3 | libc::SYS_rseq => Answer::Is(NO_SUCH_CALL),
            libc::SYS_clone => threads::clone(a, frame, block),
            libc::SYS_fork => threads::clone([libc::SIGCHLD as usize, 0, 0, 0, 0, 0], frame, block),
            libc::SYS_vfork => {
                let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD;
                threads::clone([flags as usize, 0, 0, 0, 0, 0], frame, block)
            }
            libc::SYS_exit => threads::exit(a[0], block),
            libc::SYS_set_tid_address => {
                block.clear_tid = a[0];
                Answer::Is(system_call(libc::SYS_gettid, [0; 6]))
            }
            libc::SYS_execve | libc::SYS_execveat => execve::execve(number, a, frame, block),
            entry::EXECVE_FAILED => execve::failed(frame, block),
            libc::SYS_prctl if a[0] == crate::launcher::PR_SET_SYSCALL_USER_DISPATCH as usize => {
                Answer::Is(-(libc::EINVAL as isize))
            }
            libc::SYS_prctl | libc::SYS_seccomp => {
                filter::launched(number, a).map_or(Answer::Kernel, Answer::Is)
            }
            libc::SYS_readlink => image::readlink(a[0], a[1], a[2]),
            libc::SYS_readlinkat => image::readlink(a[1], a[2], a[3]),
            libc::SYS_rt_sigaction => Answer::Is(actions::launched(a)),
            libc::SYS_rt_sigprocmask => set_mask(a, block),
            _ => calls_of_kvm(number, a),
        }
    }
}

/// Does for a call what the preload library does for `syscall`, but with the kernel's results.
unsafe fn calls_of_kvm(number: c_long, a: [usize; 6]) -> Answer {
    // A path has to be readable before we look at it.
    let path = match number {
        libc::SYS_open | libc::SYS_stat | libc::SYS_lstat | libc::SYS_access => Some(a[0]),
        libc::SYS_openat
        | libc::SYS_openat2
        | libc::SYS_newfstatat
        | libc::SYS_statx
        | libc::SYS_faccessat
        | libc::SYS_faccessat2 => Some(a[1]),
        _ => None,
    };
    if let Some(path) = path {
        let Some(path) = image::path(path) else {
            return Answer::Kernel;
        };
        let name = path.to_bytes();
        let is_file = matches!(
            number,
            libc::SYS_open | libc::SYS_openat | libc::SYS_openat2
        );
        if is_file && let Some(program) = image::own_name(name) {
            let mut a = a;
            a[usize::from(number != libc::SYS_open)] = program.as_ptr() as usize;
            // SAFETY: the program's other arguments.
            return Answer::Is(unsafe { system_call(number, a) });
        }
        let is_fd = is_file && (name.starts_with(b"/proc/") || name.starts_with(b"/dev/fd/"));
        if !name.ends_with(b"kvm") && !is_fd && !shown::is_module_s(name) {
            return Answer::Kernel;
        }
    }
    // SAFETY: the program's arguments.
    match unsafe { calls::special(number, a) } {
        Some(-1) => {
            // SAFETY: our thread's errno.
            Answer::Is(-(unsafe { *libc::__errno_location() } as isize))
        }
        Some(result) => Answer::Is(result as isize),
        None => Answer::Kernel,
    }
}

/// Does arch_prctl(2). FS is set on the way out; GS is ours.
unsafe fn arch_prctl(a: [usize; 6], frame: &mut Frame) -> Answer {
    const SET_GS: usize = 0x1001;
    const SET_FS: usize = 0x1002;
    const GET_FS: usize = 0x1003;
    const GET_GS: usize = 0x1004;
    match a[0] {
        SET_FS if a[1] >> 47 == 0 => {
            frame.fs = a[1];
            Answer::Is(0)
        }
        SET_FS | SET_GS => Answer::Is(-(libc::EPERM as isize)),
        GET_FS | GET_GS => {
            let value = if a[0] == GET_FS { frame.fs } else { 0 };
            if image::give(a[1], value) {
                Answer::Is(0)
            } else {
                Answer::Is(-(libc::EFAULT as isize))
            }
        }
        _ => Answer::Kernel,
    }
}

/// The program's heap. The process's own heap is ours.
#[derive(Debug)]
pub(super) struct Heap {
    pub(super) begin: usize,
    pub(super) end: usize,
    pub(super) limit: usize,
}

/// Address space for the program's brk(2).
pub(super) static HEAP: Mutex<Heap> = Mutex::new(Heap {
    begin: 0,
    end: 0,
    limit: 0,
});

fn brk(wanted: usize) -> usize {
    let mut heap = HEAP
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner);
    if wanted < heap.begin || wanted > heap.limit {
        return heap.end;
    }
    let first = wanted.next_multiple_of(host::PAGE_SIZE);
    if first < heap.end {
        // Memory that is added again later has to be zero.
        // SAFETY: memory that the program has given up.
        unsafe {
            let len = heap.end.next_multiple_of(host::PAGE_SIZE) - first;
            libc::madvise(first as *mut libc::c_void, len, libc::MADV_DONTNEED);
        }
    }
    heap.end = wanted;
    wanted
}

/// SIGSYS is never blocked: system calls outside of thunks raise it.
const SIGSYS: u64 = 1 << (libc::SIGSYS - 1);

/// Does rt_sigprocmask(2), also for a mask that waits to be restored.
fn set_mask(a: [usize; 6], block: &mut ThreadBlock) -> Answer {
    const SIZE: usize = size_of::<u64>();
    let error = |errno: c_int| Answer::Is(-(errno as isize));
    if a[3] != SIZE {
        return error(libc::EINVAL);
    }
    let mut set = 0u64;
    if a[1] != 0 {
        let Some(given) = image::take(a[1]) else {
            return error(libc::EFAULT);
        };
        set = given as u64;
    }
    let kernel = |how: c_int, set: u64| {
        let mut old = 0u64;
        let arguments = [
            how as usize,
            &raw const set as usize,
            &raw mut old as usize,
            SIZE,
            0,
            0,
        ];
        // SAFETY: two signal sets.
        unsafe { system_call(libc::SYS_rt_sigprocmask, arguments) };
        old
    };
    let change: fn(u64, u64) -> u64 = match a[0] as c_int {
        libc::SIG_BLOCK => |old, set| old | set,
        libc::SIG_UNBLOCK => |old, set| old & !set,
        libc::SIG_SETMASK => |_, set| set,
        _ if a[1] == 0 => |old, _| old,
        _ => return error(libc::EINVAL),
    };
    let old = if block.pending != 0 {
        block.mask
    } else if a[1] == 0 {
        kernel(libc::SIG_BLOCK, 0)
    } else {
        kernel(libc::SIG_SETMASK, kvm_abi::signals::DEFERRABLE)
    };
    let is_given = a[2] == 0 || image::give(a[2], old as usize);
    if a[1] == 0 {
        return if is_given {
            Answer::Is(0)
        } else {
            error(libc::EFAULT)
        };
    }
    let new = change(old, set);
    // The mask is restored where everything is the program's again. That lets in signals that were pending.
    block.mask = new & !SIGSYS;
    kvm_abi::signals::restore_later(block.mask);
    block.pending = 1;
    if is_given {
        Answer::Is(0)
    } else {
        error(libc::EFAULT)
    }
}
