//! What a thread has of its own while the program runs: GS points to it.

use std::cell::Cell;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::prepared::Prepared;

/// Bytes of one thread's block.
const SIZE: usize = 4096;
/// Threads at a time.
const MAX: usize = 1 << 15;

/// First byte of the blocks, for [`super::entry::signal`].
pub(super) static BLOCKS: AtomicUsize = AtomicUsize::new(0);
/// Bytes of the blocks.
pub(super) static BLOCKS_SIZE: AtomicUsize = AtomicUsize::new(0);

/// A thread's block. `entry` addresses its fields by their offsets.
#[derive(Debug)]
#[repr(C)]
pub(super) struct ThreadBlock {
    /// Its own address.
    pub(super) this: usize,
    /// The thread is in our code: signals wait.
    pub(super) in_host: u8,
    /// Syscall user dispatch looks here: 1, system calls raise SIGSYS; 0, they do not.
    pub(super) selector: u8,
    /// Signals wait with all blocked: `mask` is to be restored.
    pub(super) pending: u8,
    /// The thread's child of vfork(2) is running.
    pub(super) borrowed: u8,
    /// Handlers of the program that run in the middle of our code.
    pub(super) inner: u8,
    /// The program called on a stack for signals: signals are blocked, and `blocked` was the mask.
    pub(super) is_blocked: u8,
    /// FS for our code.
    pub(super) host_fs: usize,
    /// Where our stack begins when the program calls.
    pub(super) host_stack: usize,
    /// The mask that the program has.
    pub(super) mask: u64,
    /// FS of the program when it called.
    pub(super) program_fs: usize,
    /// What set_tid_address(2) was told.
    pub(super) clear_tid: usize,
    /// Stack pointer to return to from the thread's start; 0 for the main thread.
    pub(super) base: usize,
    /// Where the program goes on after vfork(2), in the child and in its parent.
    pub(super) borrowed_return: usize,
    /// Begin and length of the stack for signals on which a handler of the program began last.
    pub(super) signal_stack: [usize; 2],
    /// What prctl(2) is told for a child of vfork(2): the thunks' address and length.
    pub(super) thunks: [usize; 2],
    /// The child's registers meanwhile.
    pub(super) saved: [usize; 5],
    /// The mask before `is_blocked`.
    pub(super) blocked: u64,
    /// Registers while signals are blocked.
    pub(super) scratch: [usize; 7],
    /// What the thread's calls of execve(2) that are not over have prepared.
    pub(super) prepared: Vec<Prepared>,
}

static FREE: Mutex<Free> = Mutex::new(Free {
    used: 0,
    list: Vec::new(),
});

struct Free {
    used: usize,
    list: Vec<usize>,
}

thread_local! {
    /// The calling thread's block; null in threads that are not the program's.
    static CURRENT: Cell<*mut ThreadBlock> = const { Cell::new(std::ptr::null_mut()) };
}

/// A block for the calling thread, whose calls begin at `host_stack` on our stack.
pub(super) fn acquire(host_stack: usize) -> Option<*mut ThreadBlock> {
    let mut free = FREE
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner);
    if BLOCKS.load(Ordering::Relaxed) == 0 {
        let mapping = host::Mapping::anonymous(MAX * SIZE).ok()?;
        BLOCKS.store(mapping.as_ptr() as usize, Ordering::Relaxed);
        BLOCKS_SIZE.store(MAX * SIZE, Ordering::Relaxed);
        std::mem::forget(mapping);
    }
    let at = match free.list.pop() {
        Some(at) => at,
        None if free.used < MAX => {
            free.used += 1;
            BLOCKS.load(Ordering::Relaxed) + (free.used - 1) * SIZE
        }
        None => return None,
    };
    drop(free);
    let host_fs: usize;
    // SAFETY: reads a register; FSGSBASE was checked before anything was launched.
    unsafe {
        std::arch::asm!("rdfsbase {}", out(reg) host_fs, options(nomem, nostack, preserves_flags));
    };
    let block = at as *mut ThreadBlock;
    // SAFETY: inside the mapping, and nobody else's.
    unsafe {
        block.write(ThreadBlock {
            this: at,
            in_host: 1,
            selector: 0,
            pending: 0,
            borrowed: 0,
            inner: 0,
            is_blocked: 0,
            host_fs,
            host_stack: host_stack & !63,
            mask: 0,
            program_fs: 0,
            clear_tid: 0,
            base: 0,
            borrowed_return: 0,
            signal_stack: [0; 2],
            thunks: [0; 2],
            saved: [0; 5],
            blocked: 0,
            scratch: [0; 7],
            prepared: Vec::new(),
        });
    }
    CURRENT.set(block);
    Some(block)
}

/// Gives the calling thread's block back.
pub(super) fn release(block: *mut ThreadBlock) {
    CURRENT.set(std::ptr::null_mut());
    // SAFETY: the calling thread's own, until it is in the list.
    unsafe { (*block).prepared = Vec::new() };
    let mut free = FREE
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner);
    free.list.push(block as usize);
}

/// The calling thread's block; null in threads that are not the program's.
pub(super) fn current() -> *mut ThreadBlock {
    CURRENT.get()
}
