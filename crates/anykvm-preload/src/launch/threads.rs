//! Threads and children of the program, and how they end.
//!
//! Each thread of the program is also a thread of our C library, which gives it our thread-local storage and our stack.
//! The program's own are those that it passes to clone(2).

use std::alloc::Layout;
use std::sync::atomic::{AtomicU32, Ordering};

use libc::{c_int, c_void};

use super::answer::Answer;
use super::block::{self, ThreadBlock};
use super::entry::{self, Frame};
use super::{execve, image, running, thunks};
use crate::next::system_call;

/// Size of our own stack of each thread. A page takes memory once it is used.
pub(super) const STACK: usize = 1 << 20;
const SYSCALL_LEN: usize = 2;

/// Has the kernel raise SIGSYS for the calling thread's system calls while its selector says so.
pub(super) fn watch(block: *mut ThreadBlock) -> isize {
    const ON: usize = 1;
    let (begin, len) = thunks::range();
    // SAFETY: the block outlives the watch.
    let selector = unsafe { &raw mut (*block).selector } as usize;
    let option = crate::launcher::PR_SET_SYSCALL_USER_DISPATCH as usize;
    // SAFETY: the kernel reads the selector from now on; the block that has it outlives the watch.
    unsafe { system_call(libc::SYS_prctl, [option, ON, begin, len, selector, 0]) }
}

fn unwatch() {
    let option = crate::launcher::PR_SET_SYSCALL_USER_DISPATCH as usize;
    // SAFETY: no pointers.
    unsafe { system_call(libc::SYS_prctl, [option, 0, 0, 0, 0, 0]) };
}

fn block_signals() -> u64 {
    let (all, mut old) = (u64::MAX, 0u64);
    let how = libc::SIG_SETMASK as usize;
    let arguments = [how, &raw const all as usize, &raw mut old as usize, 8, 0, 0];
    // SAFETY: two signal sets.
    unsafe { system_call(libc::SYS_rt_sigprocmask, arguments) };
    old
}

fn set_signals(mask: u64) {
    let how = libc::SIG_SETMASK as usize;
    // SAFETY: a signal set.
    unsafe {
        system_call(
            libc::SYS_rt_sigprocmask,
            [how, &raw const mask as usize, 0, 8, 0, 0],
        )
    };
}

/// Does clone(2), with its five arguments.
pub(super) unsafe fn clone(a: [usize; 6], frame: &mut Frame, block: &mut ThreadBlock) -> Answer {
    let flags = a[0] as c_int;
    if flags & libc::CLONE_VM == 0 {
        // SAFETY: the program's arguments.
        return unsafe { fork(a, frame, block) };
    }
    if flags & libc::CLONE_THREAD != 0 {
        return thread(a, frame, block);
    }
    if flags & libc::CLONE_VFORK == 0 || block.borrowed != 0 {
        // A process that shares our memory would need an FS and a stack of ours.
        return Answer::Is(-(libc::EINVAL as isize));
    }
    execve::forget_children(block);
    block.borrowed_return = frame.target + SYSCALL_LEN;
    block.thunks = thunks::range().into();
    frame.target = entry::borrow as *const () as usize;
    Answer::Kernel
}

/// The state that a new thread begins with.
struct Start {
    frame: Frame,
    vectors: usize,
    mask: u64,
    clear_tid: usize,
    /// Addresses to which the kernel would write the thread's id.
    tid_at: [usize; 2],
    /// The thread's id, which the thread sets when it is ready.
    tid: AtomicU32,
}

/// Returns the layout of memory for vector registers.
fn vectors_layout() -> Layout {
    const ALIGN: usize = 64;
    let size = entry::XSAVE_SIZE.load(Ordering::Relaxed).max(1);
    Layout::from_size_align(size, ALIGN).unwrap_or(Layout::new::<u64>())
}

/// Returns where [`entry::enter`] has put the vector registers.
fn vectors_of(frame: &Frame) -> usize {
    (std::ptr::from_ref(frame).addr() - entry::XSAVE_SIZE.load(Ordering::Relaxed)) & !63
}

fn thread(a: [usize; 6], parent: &Frame, block: &mut ThreadBlock) -> Answer {
    let flags = a[0] as c_int;
    let mut frame = *parent;
    frame.rax = 0;
    frame.target += SYSCALL_LEN;
    if a[1] != 0 {
        frame.rsp = a[1];
    }
    if flags & libc::CLONE_SETTLS != 0 {
        frame.fs = a[4];
    }
    let has = |flag: c_int, at: usize| if flags & flag != 0 { at } else { 0 };
    let layout = vectors_layout();
    // SAFETY: the size is not zero; the parent's registers are in an area of that size.
    let vectors = unsafe {
        let vectors = std::alloc::alloc(layout);
        if vectors.is_null() {
            return Answer::Is(-(libc::EAGAIN as isize));
        }
        vectors.copy_from_nonoverlapping(vectors_of(parent) as *const u8, layout.size());
        vectors
    };
    // The new thread has nothing to handle a signal with before it says so.
    let kernel_mask = block_signals();
    let mut start = Start {
        frame,
        vectors: vectors as usize,
        mask: if block.pending != 0 {
            block.mask
        } else {
            kernel_mask
        },
        clear_tid: has(libc::CLONE_CHILD_CLEARTID, a[3]),
        tid_at: [
            has(libc::CLONE_PARENT_SETTID, a[2]),
            has(libc::CLONE_CHILD_SETTID, a[3]),
        ],
        tid: AtomicU32::new(0),
    };
    running::begin();
    // SAFETY: the attributes are initialised and destroyed here; `start` lives until the thread has
    // taken what it needs.
    let error = unsafe {
        let mut attributes: libc::pthread_attr_t = std::mem::zeroed();
        libc::pthread_attr_init(&raw mut attributes);
        libc::pthread_attr_setdetachstate(&raw mut attributes, libc::PTHREAD_CREATE_DETACHED);
        libc::pthread_attr_setstacksize(&raw mut attributes, STACK);
        let mut id = 0;
        let argument = (&raw mut start).cast();
        let error = libc::pthread_create(&raw mut id, &raw const attributes, run, argument);
        libc::pthread_attr_destroy(&raw mut attributes);
        error
    };
    if error == 0 {
        while start.tid.load(Ordering::Acquire) == 0 {
            host::futex::wait(&start.tid, 0, None);
        }
    } else {
        running::end();
        // SAFETY: allocated above, and no thread has it.
        unsafe { std::alloc::dealloc(vectors, layout) };
    }
    set_signals(kernel_mask);
    if error == 0 {
        Answer::Is(start.tid.load(Ordering::Acquire) as isize)
    } else {
        Answer::Is(-(error as isize))
    }
}

/// A thread, in our C library's eyes.
extern "C" fn run(start: *mut c_void) -> *mut c_void {
    /// More than is on the stack below before the program runs.
    const ROOM: usize = 8192;
    let start = start.cast::<Start>();
    // SAFETY: the parent waits until it is told the id.
    let (mut frame, vectors, mask, clear_tid, tid_at) = unsafe {
        let s = &*start;
        (s.frame, s.vectors, s.mask, s.clear_tid, s.tid_at)
    };
    let block = block::acquire((&raw const frame).addr() - ROOM);
    let tid = host::thread::tid();
    for at in tid_at {
        if at != 0 {
            image::give32(at, tid.cast_unsigned());
        }
    }
    if let Some(block) = block {
        // SAFETY: this thread's own.
        unsafe {
            (*block).clear_tid = clear_tid;
            (*block).mask = mask;
            (*block).pending = 1;
        }
        watch(block);
    }
    // SAFETY: the parent waits for this, and `start` is not used afterwards.
    unsafe {
        let ready = &raw const (*start).tid;
        (*ready).store(tid.cast_unsigned(), Ordering::Release);
        host::futex::wake(&*ready, 1);
    }
    if let Some(block) = block {
        // SAFETY: the frame is a copy of the parent's, and the registers' area too. It returns by
        // `finish`.
        unsafe { entry::run_thread(&raw mut frame, block, vectors) };
        unwatch();
        // SAFETY: GS is not used from here on.
        unsafe {
            std::arch::asm!("wrgsbase {}", in(reg) 0usize, options(nostack, preserves_flags));
        };
        block::release(block);
    }
    // SAFETY: the parent's allocation, which is this thread's since.
    unsafe { std::alloc::dealloc(vectors as *mut u8, vectors_layout()) };
    std::ptr::null_mut()
}

/// exit(2): the thread ends, as our C library has it, but for the last words that the kernel would
/// write for the program.
pub(super) unsafe fn exit(_status: usize, block: &mut ThreadBlock) -> Answer {
    if block.borrowed != 0 {
        return Answer::Kernel;
    }
    let is_main = block.base == 0;
    if !is_main {
        block_signals();
    }
    if block.clear_tid != 0 {
        const FUTEX_WAKE: usize = 1;
        image::give32(block.clear_tid, 0);
        // SAFETY: an address for the kernel.
        unsafe { system_call(libc::SYS_futex, [block.clear_tid, FUTEX_WAKE, 1, 0, 0, 0]) };
        block.clear_tid = 0;
    }
    if is_main {
        return Answer::Kernel;
    }
    running::end();
    kvm_abi::signals::end();
    Answer::Exit
}

/// A child with memory of its own.
unsafe fn fork(a: [usize; 6], frame: &mut Frame, block: &mut ThreadBlock) -> Answer {
    let flags = a[0] as c_int;
    let simple = libc::CLONE_CHILD_SETTID | libc::CLONE_CHILD_CLEARTID | libc::CLONE_PARENT_SETTID;
    // SAFETY: the child goes on here with a copy of everything, and needs nothing of other threads.
    let child = unsafe {
        if flags & !simple == libc::SIGCHLD {
            let child = libc::fork();
            if child < 0 {
                return Answer::Is(-(*libc::__errno_location() as isize));
            }
            if child > 0 && flags & libc::CLONE_PARENT_SETTID != 0 {
                image::give32(a[2], child.cast_unsigned());
            }
            child as isize
        } else {
            host::fork::before();
            let kernel_flags = flags & !(libc::CLONE_SETTLS | libc::CLONE_CHILD_CLEARTID);
            let child = system_call(
                libc::SYS_clone,
                [kernel_flags as usize, 0, a[2], a[3], 0, 0],
            );
            if child == 0 {
                host::fork::in_child();
                kvm_abi::signals::set_thread_id();
            } else {
                host::fork::in_parent();
            }
            child
        }
    };
    if child != 0 {
        return Answer::Is(child);
    }
    running::begin_child();
    block.base = 0;
    let tid = host::thread::tid().cast_unsigned();
    if flags & libc::CLONE_CHILD_SETTID != 0 {
        image::give32(a[3], tid);
    }
    block.clear_tid = if flags & libc::CLONE_CHILD_CLEARTID != 0 {
        a[3]
    } else {
        0
    };
    if flags & libc::CLONE_SETTLS != 0 {
        frame.fs = a[4];
    }
    if a[1] != 0 {
        frame.rsp = a[1];
    }
    watch(block);
    Answer::Is(0)
}
