//! Signals that arrive while a thread is inside a KVM call.
//!
//! A kernel runs a signal handler when the system call is over: KVM_RUN ends with EINTR first. Here the call is
//! ordinary code of the process, so a handler would run in the middle of it while the thread holds anykvm's locks, and
//! KVM_RUN would continue afterwards. Therefore code that wraps the VMM's handlers (the preload library) calls
//! [`defer`] first. Inside a [`Section`] this sends the signal to the thread once more with all signals blocked, tells
//! KVM_RUN to end, and has the mask restored when the section ends. The kernel then delivers the signal, with
//! everything that belongs to it, where it would have done so after a system call.
//!
//! Once the VMM has installed a system call filter ([`set_filtered`]), which may not allow sending a signal, the signal
//! is remembered, and its handler is called at the end of the section.
//!
//! Everything here is async-signal-safe: thread-locals without destructors and system calls.

use std::cell::{Cell, UnsafeCell};
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, compiler_fence};

use crate::process;

/// The variables of a thread that KVM_RUN uses. They are in one structure, because finding a thread-local variable
/// takes a call.
pub(crate) struct Thread {
    /// The vCPU whose KVM_RUN the thread executes.
    pub(crate) current: Cell<*const hypervisor::Vcpu>,
    /// A signal was deferred, and all signals are blocked until the section ends.
    deferred: Cell<bool>,
    /// Signals that are remembered, a bit each.
    remembered: AtomicU64,
}

impl Thread {
    /// True if a signal waits for the end of the thread's section.
    pub(crate) fn is_deferred(&self) -> bool {
        self.deferred.get() || self.remembered.load(Ordering::Relaxed) != 0
    }
}

thread_local! {
    pub(crate) static THREAD: Thread = const {
        Thread {
            current: Cell::new(std::ptr::null()),
            deferred: Cell::new(false),
            remembered: AtomicU64::new(0),
        }
    };
    /// Number of nested sections that the thread is in.
    static DEPTH: Cell<u32> = const { Cell::new(0) };
    /// The signal mask that the thread gets when the section ends.
    static MASK: Cell<u64> = const { Cell::new(0) };
    /// The mask of KVM_SET_SIGNAL_MASK is in force.
    static RUN_MASK: Cell<bool> = const { Cell::new(false) };
    /// Details of the signals that are remembered.
    static DETAILS: UnsafeCell<[MaybeUninit<libc::siginfo_t>; 64]> =
        const { UnsafeCell::new([MaybeUninit::uninit(); 64]) };
}

/// Makes the KVM_RUN that the calling thread is in, if any, return EINTR soon.
///
/// Async-signal-safe. KVM_RUN of a kernel ends with EINTR when a signal with a handler
/// arrives. Here the handler runs in the middle of KVM_RUN, and nothing tells KVM_RUN of
/// it while the guest computes; handlers that were installed to interrupt KVM_RUN call this.
pub fn interrupt_current_thread() {
    let current = THREAD.with(|thread| thread.current.get());
    if !current.is_null() {
        // SAFETY: the pointer is set while the vCPU's `Interruptible` borrows it, and it is
        // this thread that is inside that scope.
        unsafe { (*current).kick() };
    }
}

/// The program has installed a system call filter.
static FILTERED: AtomicBool = AtomicBool::new(false);
/// The function that calls the VMM's handlers: a [`Handler`], or null.
static HANDLER: AtomicUsize = AtomicUsize::new(0);

/// Calls the VMM's handler of a signal with these details.
pub type Handler = fn(libc::c_int, &mut libc::siginfo_t);

/// Notes that a system call filter is installed: from now on only `rt_sigprocmask`, `futex` and memory calls are made
/// in a VMM's threads, and `handler` is called for signals that were deferred.
pub fn set_filtered(handler: Handler) {
    HANDLER.store(handler as usize, Ordering::Relaxed);
    process::id();
    FILTERED.store(true, Ordering::Release);
}

pub(crate) fn is_filtered() -> bool {
    FILTERED.load(Ordering::Acquire)
}

/// Signals that instructions raise. They cannot wait: if they were blocked, they would end the process.
const SYNCHRONOUS: u64 = bit(libc::SIGSEGV)
    | bit(libc::SIGBUS)
    | bit(libc::SIGFPE)
    | bit(libc::SIGILL)
    | bit(libc::SIGTRAP)
    | bit(libc::SIGSYS);

/// All signals that can be deferred.
pub const DEFERRABLE: u64 = !SYNCHRONOUS;

const fn bit(signal: libc::c_int) -> u64 {
    1 << (signal - 1)
}

/// While this lives, signals of the calling thread are deferred.
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

    /// True if the calling thread is in a section.
    #[inline]
    pub fn is_active() -> bool {
        DEPTH.get() != 0
    }

    /// True if the calling thread is in more than one section: in a handler that runs in the middle of a KVM call.
    #[inline]
    pub fn is_nested() -> bool {
        DEPTH.get() > 1
    }
}

impl Drop for Section {
    #[inline]
    fn drop(&mut self) {
        compiler_fence(Ordering::SeqCst);
        let depth = DEPTH.get() - 1;
        DEPTH.set(depth);
        compiler_fence(Ordering::SeqCst);
        // A signal after this point is not in a section, and so is not deferred.
        if depth == 0 && THREAD.with(|t| t.deferred.get()) {
            THREAD.with(|t| t.deferred.set(false));
            set_mask(MASK.get());
        }
        if depth == 0 {
            handle_remembered();
        }
    }
}

/// Calls the handlers of the signals that were remembered during the section.
#[inline]
fn handle_remembered() {
    while THREAD.with(|t| t.remembered.load(Ordering::Relaxed)) != 0 {
        handle_one();
    }
}

#[cold]
fn handle_one() {
    let signal = THREAD.with(|thread| {
        let set = &thread.remembered;
        let signal = set.load(Ordering::Relaxed).trailing_zeros();
        // A handler that interrupts this code may take remembered signals, too.
        let taken = set.fetch_and(!(1 << signal), Ordering::Relaxed);
        (taken & 1 << signal != 0).then_some(signal as usize)
    });
    let Some(signal) = signal else { return };
    // SAFETY: `remember` filled the entry before it set the bit, and fills none while the thread
    // is in no section.
    let mut details = DETAILS.with(|all| unsafe { (*all.get())[signal].assume_init() });
    let handler = HANDLER.load(Ordering::Relaxed);
    if handler != 0 {
        // SAFETY: `set_filtered` stored a `Handler`.
        let handler: Handler = unsafe { std::mem::transmute(handler) };
        handler(signal as libc::c_int + 1, &mut details);
    }
}

/// Remembers a signal until the section ends. As with standard signals, one that comes twice counts once.
unsafe fn remember(signal: libc::c_int, info: *const libc::siginfo_t) {
    let index = (signal - 1) as usize & 63;
    THREAD.with(|thread| {
        let set = &thread.remembered;
        if set.load(Ordering::Relaxed) & 1 << index == 0 {
            // SAFETY: the kernel's structure, and the thread's own array, which nobody reads
            // inside a section.
            DETAILS.with(|all| unsafe { (*all.get())[index] = MaybeUninit::new(*info) });
            set.fetch_or(1 << index, Ordering::Relaxed);
        }
    });
}

/// Begins a section of a launched program, whose mask is not restored where the section ends. `deferred` returns
/// whether a signal is deferred already; `inner` says that the thread is in a handler that runs in the middle of
/// another section.
pub fn begin(deferred: impl FnOnce() -> bool, inner: bool) {
    if inner {
        DEPTH.set(DEPTH.get() + 1);
    } else {
        THREAD.with(|t| t.deferred.set(false));
        DEPTH.set(1);
        compiler_fence(Ordering::SeqCst);
        // Asked last: a signal that came before this has been noted there, too.
        if deferred() {
            THREAD.with(|t| t.deferred.set(true));
        }
    }
    compiler_fence(Ordering::SeqCst);
}

/// Ends such a section. Returns the mask to restore, if a signal is deferred.
pub fn end() -> Option<u64> {
    compiler_fence(Ordering::SeqCst);
    DEPTH.set(DEPTH.get().saturating_sub(1));
    THREAD.with(|t| t.deferred.get()).then(|| MASK.get())
}

/// Notes that `mask` must be restored at the end, as if a signal had been deferred.
pub fn restore_later(mask: u64) {
    MASK.set(mask);
    THREAD.with(|t| t.deferred.set(true));
}

/// True if a signal waits for the end of the calling thread's section.
pub(crate) fn is_deferred() -> bool {
    THREAD.with(Thread::is_deferred)
}

/// Signals that are ignored, or have a handler, which is wrapped.
static HANDLED: AtomicU64 = AtomicU64::new(0);

/// Notes whether the program has something other than the default action for a signal.
pub fn set_handled(signal: libc::c_int, is_handled: bool) {
    let bit = 1 << ((signal - 1) & 63);
    if is_handled {
        HANDLED.fetch_or(bit, Ordering::Relaxed);
    } else {
        HANDLED.fetch_and(!bit, Ordering::Relaxed);
    }
}

/// The mask of KVM_SET_SIGNAL_MASK, in force while KVM_RUN lasts.
#[derive(Debug)]
pub(crate) struct RunMask {
    outside: u64,
    /// Some signals that the mask allows stay blocked, so KVM_RUN must check for them.
    pub(crate) asks: bool,
}

impl RunMask {
    /// Unblocks the signals that `mask` does not block; those that are pending are deferred at once. `None` outside of
    /// a section, where handlers are not wrapped.
    pub(crate) fn enter(mask: u64) -> Option<Self> {
        Section::is_active().then(|| {
            RUN_MASK.set(true);
            let outside = set_mask(DEFERRABLE);
            // In a kernel, KVM_RUN would end before a signal that is blocked outside could end the process by its
            // default action.
            let fatal = outside & !mask & !HANDLED.load(Ordering::Relaxed);
            set_mask(mask | fatal);
            Self {
                outside,
                asks: fatal != 0,
            }
        })
    }
}

impl Drop for RunMask {
    fn drop(&mut self) {
        set_mask(self.outside);
        RUN_MASK.set(false);
        // The section restores the VMM's mask, not the one that a signal interrupted. What is
        // blocked outside stays pending, as with KVM.
        MASK.set(self.outside);
    }
}

/// Called by a handler that wraps the VMM's. Returns true if the thread is inside a KVM call, which then ends soon; the
/// signal comes again after it.
///
/// # Safety
///
/// Called in a signal handler, with the arguments that the kernel passed to it.
pub unsafe fn defer(
    signal: libc::c_int,
    info: *mut libc::siginfo_t,
    context: *mut libc::c_void,
) -> bool {
    if DEPTH.get() == 0 {
        return false;
    }
    // Signals that only KVM_SET_SIGNAL_MASK allows must be pending afterwards, so they are sent again, not remembered.
    // SAFETY: the kernel's structure.
    if is_filtered() && !RUN_MASK.get() && !unsafe { is_fault(signal, info) } {
        interrupt_current_thread();
        // SAFETY: the kernel's structure.
        unsafe { remember(signal, info) };
        return true;
    }
    // SAFETY: what the kernel passed.
    unsafe { defer_always(signal, info, context) }.is_some()
}

/// True if an instruction raised the signal.
unsafe fn is_fault(signal: libc::c_int, info: *const libc::siginfo_t) -> bool {
    // SAFETY: the kernel's structure.
    unsafe { (*info).si_code > 0 && SYNCHRONOUS & bit(signal) != 0 }
}

/// Defers a signal unless an instruction raised it. Returns the mask to restore.
///
/// # Safety
///
/// As for [`defer`].
pub unsafe fn defer_always(
    signal: libc::c_int,
    info: *mut libc::siginfo_t,
    context: *mut libc::c_void,
) -> Option<u64> {
    // SAFETY: the kernel's structure.
    if unsafe { is_fault(signal, info) } {
        return None;
    }
    // SAFETY: the kernel's structure.
    let code = unsafe { (*info).si_code };
    interrupt_current_thread();
    // Blocked in the handler as well: with SA_NODEFER it would be entered again at once.
    set_mask(!SYNCHRONOUS);
    // SAFETY: the kernel's structure; its signal set is the first eight bytes of the field.
    unsafe {
        let mask = (&raw mut (*context.cast::<libc::ucontext_t>()).uc_sigmask).cast::<u64>();
        MASK.set(mask.read());
        mask.write(!SYNCHRONOUS);
    }
    THREAD.with(|t| t.deferred.set(true));
    // SAFETY: the kernel's structure, which is valid until the handler returns.
    unsafe { send_again(signal, info, code) };
    Some(MASK.get())
}

/// Makes the signal pending for the calling thread.
///
/// The details are sent along if they may matter and filters allow that call. tgkill(2), the only one that filters of
/// vCPU threads allow, is enough for a signal of pthread_kill(3).
unsafe fn send_again(signal: libc::c_int, info: *mut libc::siginfo_t, code: libc::c_int) {
    // SAFETY: plain system calls; the kernel only reads `info`.
    unsafe {
        let (process, thread) = (process::id(), thread_id());
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

/// Offset from the thread pointer at which the C library keeps the thread's id; 0 if it is not known.
static THREAD_ID: AtomicUsize = AtomicUsize::new(0);

/// Finds out what [`defer`] may not ask the kernel for once there is a system call filter.
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
    process::id();
}

/// Updates the stored thread id, in a child of a fork that the C library does not know of.
pub fn set_thread_id() {
    let offset = THREAD_ID.load(Ordering::Relaxed);
    if offset != 0 {
        // SAFETY: `prepare` found the thread's id there; the only thread is this one.
        unsafe {
            let id = libc::gettid();
            std::arch::asm!("mov fs:[{1}], {0:e}", in(reg) id, in(reg) offset, options(nostack, preserves_flags));
        }
    }
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

/// Sets the thread's mask in the kernel's format; returns the previous one.
fn set_mask(mask: u64) -> u64 {
    let mut old = 0u64;
    // SAFETY: both are eight bytes, as the call is told. glibc's own function would refuse
    // to block its internal signals. With these arguments it cannot fail.
    let _ = unsafe {
        host::system::call(
            libc::SYS_rt_sigprocmask,
            [
                libc::SIG_SETMASK as usize,
                &raw const mask as usize,
                &raw mut old as usize,
                size_of::<u64>(),
            ],
        )
    };
    old
}
