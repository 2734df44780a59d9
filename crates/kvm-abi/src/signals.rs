//! Signals that arrive while a thread is inside a KVM call.
//!
//! A kernel runs a handler when the system call is over: KVM_RUN ends with EINTR first. Here the
//! call is ordinary code of the process, so a handler would run in the middle of it, with our
//! locks held, and KVM_RUN would go on afterwards. Therefore whoever wraps the VMM's handlers (the
//! preload library) asks [`defer`] first: inside a [`Section`] the signal is sent to the thread once
//! more with all signals blocked, KVM_RUN is told to end, and the mask is restored when the
//! section ends. The kernel then delivers the signal where it would have done so after a system
//! call, with everything that belongs to it.
//!
//! Everything here is async-signal-safe: thread-locals without destructors and system calls.

use std::cell::Cell;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicUsize, Ordering, compiler_fence};

use crate::fork;
use crate::vcpu::interrupt_current_thread;

thread_local! {
    /// Sections that the thread is in.
    static DEPTH: Cell<u32> = const { Cell::new(0) };
    /// A signal was deferred: all signals are blocked until the section ends.
    static DEFERRED: Cell<bool> = const { Cell::new(false) };
    /// The mask that the thread has then.
    static MASK: Cell<u64> = const { Cell::new(0) };
}

/// Signals that instructions raise: they cannot wait, and blocked they would end the process.
const SYNCHRONOUS: u64 = bit(libc::SIGSEGV)
    | bit(libc::SIGBUS)
    | bit(libc::SIGFPE)
    | bit(libc::SIGILL)
    | bit(libc::SIGTRAP)
    | bit(libc::SIGSYS);

const fn bit(signal: libc::c_int) -> u64 {
    1 << (signal - 1)
}

/// While it lives, signals of the calling thread are deferred.
#[derive(Debug)]
pub struct Section(PhantomData<*const ()>);

impl Section {
    /// Begins a section; sections nest.
    #[inline]
    pub fn enter() -> Self {
        DEPTH.set(DEPTH.get() + 1);
        compiler_fence(Ordering::SeqCst);
        Self(PhantomData)
    }

    /// True if the calling thread is in one.
    #[inline]
    pub fn is_active() -> bool {
        DEPTH.get() != 0
    }
}

impl Drop for Section {
    #[inline]
    fn drop(&mut self) {
        compiler_fence(Ordering::SeqCst);
        let depth = DEPTH.get() - 1;
        DEPTH.set(depth);
        compiler_fence(Ordering::SeqCst);
        // A signal after this point finds no section and is not deferred.
        if depth == 0 && DEFERRED.get() {
            DEFERRED.set(false);
            set_mask(MASK.get());
        }
    }
}

/// True if a signal waits for the end of the calling thread's section.
pub(crate) fn is_deferred() -> bool {
    DEFERRED.get()
}

/// KVM_SET_SIGNAL_MASK's mask while KVM_RUN lasts.
#[derive(Debug)]
pub(crate) struct RunMask {
    outside: u64,
}

impl RunMask {
    /// Lets the signals through that `mask` does not block; those that are pending are deferred
    /// at once. `None` outside of a section: there handlers are not wrapped.
    pub(crate) fn enter(mask: u64) -> Option<Self> {
        Section::is_active().then(|| Self {
            outside: set_mask(mask),
        })
    }
}

impl Drop for RunMask {
    fn drop(&mut self) {
        set_mask(self.outside);
        // The section restores the VMM's mask, not the one that a signal interrupted. What is
        // blocked outside stays pending, as with KVM.
        MASK.set(self.outside);
    }
}

/// For a handler that stands before the VMM's: true if the thread is inside a KVM call, which
/// then ends soon; the signal comes again after it.
///
/// # Safety
///
/// To be called in a signal handler with what the kernel passed to it.
pub unsafe fn defer(
    signal: libc::c_int,
    info: *mut libc::siginfo_t,
    context: *mut libc::c_void,
) -> bool {
    if DEPTH.get() == 0 {
        return false;
    }
    // SAFETY: the kernel's structure.
    let code = unsafe { (*info).si_code };
    if code > 0 && SYNCHRONOUS & bit(signal) != 0 {
        return false;
    }
    interrupt_current_thread();
    // Also in the handler, or with SA_NODEFER it would be entered again at once.
    set_mask(!SYNCHRONOUS);
    // SAFETY: the kernel's structure; its signal set is the first eight bytes of the field.
    unsafe {
        let mask = (&raw mut (*context.cast::<libc::ucontext_t>()).uc_sigmask).cast::<u64>();
        MASK.set(mask.read());
        mask.write(!SYNCHRONOUS);
    }
    DEFERRED.set(true);
    // SAFETY: as above.
    unsafe { send_again(signal, info, code) };
    true
}

/// Makes the signal pending for the calling thread.
///
/// With its details where they may matter: filters of vCPU threads know tgkill(2) only, and that
/// is enough for pthread_kill(3).
unsafe fn send_again(signal: libc::c_int, info: *mut libc::siginfo_t, code: libc::c_int) {
    // SAFETY: plain system calls; the kernel only reads `info`.
    unsafe {
        let (process, thread) = (fork::process(), thread_id());
        let queued = code != libc::SI_TKILL
            && libc::syscall(
                libc::SYS_rt_tgsigqueueinfo,
                process,
                thread,
                signal,
                info.cast_const(),
            ) == 0;
        if !queued {
            libc::syscall(libc::SYS_tgkill, process, thread, signal);
        }
    }
}

/// Where the C library keeps the thread's id, from the thread pointer on; 0 for not known.
static THREAD_ID: AtomicUsize = AtomicUsize::new(0);

/// Finds out what [`defer`] may not ask the kernel for under a filter of system calls.
pub fn prepare() {
    /// In `struct pthread` of glibc, whose layout debuggers depend on.
    const GLIBC: usize = 0x2d0;
    let id: i32;
    // SAFETY: inside the thread's descriptor, which is larger than that in every glibc.
    unsafe {
        std::arch::asm!("mov {0:e}, fs:[{1}]", out(reg) id, in(reg) GLIBC, options(nostack, readonly, preserves_flags));
    }
    // SAFETY: no arguments, cannot fail.
    if id == unsafe { libc::gettid() } {
        THREAD_ID.store(GLIBC, Ordering::Relaxed);
    }
    fork::generation();
}

fn thread_id() -> i32 {
    let offset = THREAD_ID.load(Ordering::Relaxed);
    if offset == 0 {
        // SAFETY: no arguments, cannot fail.
        return unsafe { libc::gettid() };
    }
    let id: i32;
    // SAFETY: `prepare` found the thread's id there.
    unsafe {
        std::arch::asm!("mov {0:e}, fs:[{1}]", out(reg) id, in(reg) offset, options(nostack, readonly, preserves_flags));
    }
    id
}

/// Sets the thread's mask in the kernel's form; the one before.
fn set_mask(mask: u64) -> u64 {
    let mut old = 0u64;
    // SAFETY: both are eight bytes, as the call is told. glibc's own function would refuse
    // to block its internal signals.
    unsafe {
        libc::syscall(
            libc::SYS_rt_sigprocmask,
            libc::SIG_SETMASK,
            &raw const mask,
            &raw mut old,
            size_of::<u64>(),
        )
    };
    old
}
