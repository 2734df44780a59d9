//! Signal handlers. Ours is installed in front of the VMM's, so that a signal during a KVM call waits for the call's
//! end (`kvm_abi::signals`).
//!
//! Handlers are wrapped from the first `open("/dev/kvm")` on, so a program that never opens it keeps its own. What a
//! program reads back is what it has set.

use std::hint::spin_loop;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use libc::{c_int, c_ulong, c_void, siginfo_t};

use crate::launcher;
use crate::next::{fail, next, system_call, system_call_c};

/// Number of signals.
const SIGNALS: usize = 64;
/// Signals of the C library's own, for cancellation and for set*id(2) in threads.
const INTERNAL: [c_int; 2] = [32, 33];
/// Signals whose handler is ours from the first `open("/dev/kvm")` on (`kvm_abi::faults`).
const FAULTS: [c_int; 2] = [libc::SIGSEGV, libc::SIGBUS];
/// Size of the kernel's signal set in bytes.
const SET: usize = size_of::<u64>();
const SA_RESTORER: u64 = 0x0400_0000;

/// `struct sigaction` as rt_sigaction(2) has it.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
struct Action {
    handler: usize,
    flags: u64,
    restorer: usize,
    mask: u64,
}

/// What the program has set for a signal whose handler is wrapped.
struct Wrapped {
    handler: AtomicUsize,
    flags: AtomicU64,
    restorer: AtomicUsize,
    lock: AtomicBool,
}

static WRAPPED: [Wrapped; SIGNALS] = [const {
    Wrapped {
        handler: AtomicUsize::new(0),
        flags: AtomicU64::new(0),
        restorer: AtomicUsize::new(0),
        lock: AtomicBool::new(false),
    }
}; SIGNALS];

/// The bit of SIGSYS, which system calls of a launched program raise.
const SIGSYS: u64 = 1 << (libc::SIGSYS - 1);

/// True once handlers are wrapped.
static ACTIVE: AtomicBool = AtomicBool::new(false);

/// The code that handlers return to. Unwinders know these very bytes.
#[unsafe(naked)]
extern "C" fn restorer() {
    std::arch::naked_asm!(".byte 0x48, 0xc7, 0xc0, 0x0f, 0, 0, 0, 0x0f, 0x05")
}

/// The handler that is called in place of the VMM's, and calls it.
unsafe extern "C" fn wrapper(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    // SAFETY: what the kernel passed.
    unsafe {
        if kvm_abi::faults::recover(signal, context)
            || kvm_abi::signals::defer(signal, info, context)
        {
            return;
        }
        call(signal, info, context);
    }
}

/// Calls the VMM's handler.
///
/// # Safety
///
/// To be called with what the kernel passes to a handler.
unsafe fn call(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel's structure.
    let handler = unsafe { handler_of(signal, info) };
    if handler == 0 {
        return;
    }
    // SAFETY: the program says that this is a handler; one without SA_SIGINFO takes
    // the first argument only.
    let handler: unsafe extern "C" fn(c_int, *mut siginfo_t, *mut c_void) =
        unsafe { std::mem::transmute(handler) };
    // SAFETY: as the kernel would have called it.
    unsafe { handler(signal, info, context) };
}

/// Returns the VMM's handler of a signal that has come. If there is none, does what that means and returns 0.
///
/// # Safety
///
/// To be called with what the kernel passes to a handler.
pub(crate) unsafe fn handler_of(signal: c_int, info: *mut siginfo_t) -> usize {
    let Some(wrapped) = WRAPPED.get((signal - 1) as usize) else {
        return 0;
    };
    let handler = wrapped.handler.load(Ordering::Acquire);
    if wrapped.flags.load(Ordering::Acquire) & libc::SA_RESETHAND as u64 != 0 {
        let default = Action {
            restorer: restorer_address(),
            flags: SA_RESTORER,
            ..Action::default()
        };
        // SAFETY: the structure and its size are the kernel's.
        unsafe { kernel_action(signal, &raw const default, std::ptr::null_mut()) };
    }
    if handler == libc::SIG_DFL || handler == libc::SIG_IGN {
        if is_always_wrapped(signal) {
            // SAFETY: the kernel's structure.
            unsafe { default_fault(signal, handler, info) };
        }
        return 0;
    }
    handler
}

/// Handles a fault, or the same signal sent by somebody, if the program has no handler for it.
unsafe fn default_fault(signal: c_int, handler: usize, info: *mut siginfo_t) {
    // SAFETY: the kernel's structure.
    let is_fault = unsafe { (*info).si_code } > 0;
    if !is_fault && handler == libc::SIG_IGN {
        return;
    }
    let default = Action {
        restorer: restorer_address(),
        flags: SA_RESTORER,
        ..Action::default()
    };
    // SAFETY: the structure is the kernel's. With the default action, the instruction faults once more when this
    // handler returns, and a signal that was sent is sent again.
    unsafe {
        kernel_action(signal, &raw const default, std::ptr::null_mut());
        if !is_fault {
            let process = system_call(libc::SYS_getpid, [0; 6]) as usize;
            let thread = system_call(libc::SYS_gettid, [0; 6]) as usize;
            let arguments = [process, thread, signal as usize, 0, 0, 0];
            system_call(libc::SYS_tgkill, arguments);
        }
    }
}

/// Calls the VMM's handler at the end of a KVM call, under a filter of system calls.
///
/// DEVIATION: it is called with the thread's own signal mask, on its own stack, and with a context in which there is
/// nothing.
fn call_late(signal: c_int, info: &mut siginfo_t) {
    // SAFETY: all zeros are a value of the structure, and the details are a signal's.
    unsafe {
        let mut context: libc::ucontext_t = std::mem::zeroed();
        call(signal, info, (&raw mut context).cast());
    }
}

/// Notes that a preloaded program installs a filter of system calls.
pub(crate) fn filtered() {
    kvm_abi::signals::set_filtered(call_late);
}

/// rt_sigaction(2).
unsafe fn kernel_action(signal: c_int, new: *const Action, old: *mut Action) -> isize {
    // SAFETY: the caller's pointers.
    unsafe {
        system_call(
            libc::SYS_rt_sigaction,
            [signal as usize, new as usize, old as usize, SET, 0, 0],
        )
    }
}

/// A signal's entry that is locked. The thread's signals are blocked meanwhile, so that no handler waits for an entry
/// that its own thread has locked.
struct Held<'a> {
    wrapped: &'a Wrapped,
    mask: u64,
}

impl<'a> Held<'a> {
    fn new(wrapped: &'a Wrapped) -> Self {
        let mask = swap_mask(u64::MAX);
        while wrapped.lock.swap(true, Ordering::Acquire) {
            spin_loop();
        }
        Self { wrapped, mask }
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.wrapped.lock.store(false, Ordering::Release);
        swap_mask(self.mask);
    }
}

fn swap_mask(mask: u64) -> u64 {
    let mut old = 0u64;
    let (new, old_at) = (&raw const mask as usize, &raw mut old as usize);
    // The call is made by our own instruction, so the program's filter need not allow it to the program.
    // SAFETY: two signal sets of the size that is passed. It cannot fail with them.
    let _ = unsafe {
        host::system::call(
            libc::SYS_rt_sigprocmask,
            [libc::SIG_SETMASK as usize, new, old_at, SET],
        )
    };
    old
}

fn wrapper_address() -> usize {
    launcher::get().map_or(wrapper as *const () as usize, |l| l.handler)
}

fn restorer_address() -> usize {
    launcher::get().map_or_else(|| restorer as *const () as usize, |l| (l.restorer)())
}

/// Returns true for signals whose handler is ours even if the program has none.
fn is_always_wrapped(signal: c_int) -> bool {
    FAULTS.contains(&signal) || signal == libc::SIGSYS && launcher::get().is_some()
}

fn is_handler(address: usize) -> bool {
    address != libc::SIG_DFL && address != libc::SIG_IGN
}

fn entry(signal: c_int) -> Option<&'static Wrapped> {
    // A launched program has a C library of its own, so these signals have no special meaning here.
    if INTERNAL.contains(&signal) && launcher::get().is_none() {
        return None;
    }
    WRAPPED.get(usize::try_from(signal).ok()?.checked_sub(1)?)
}

/// Sets and reads an action, with the program's handler in place of ours. Returns the kernel's result.
fn exchange(signal: c_int, new: Option<&Action>, old: &mut Action) -> isize {
    let Some(wrapped) = entry(signal) else {
        let new = new.map_or(std::ptr::null(), std::ptr::from_ref);
        // SAFETY: structures of the kernel's form.
        return unsafe { kernel_action(signal, new, old) };
    };
    let held = Held::new(wrapped);
    let (handler, flags, restorer) = (
        wrapped.handler.load(Ordering::Acquire),
        wrapped.flags.load(Ordering::Acquire),
        wrapped.restorer.load(Ordering::Acquire),
    );
    let mut ours = new.copied();
    if let Some(action) = &mut ours
        && (is_handler(action.handler) || is_always_wrapped(signal))
        && action.handler != wrapper_address()
    {
        wrapped.handler.store(action.handler, Ordering::Release);
        wrapped.flags.store(action.flags, Ordering::Release);
        wrapped.restorer.store(action.restorer, Ordering::Release);
        wrap(signal, action);
    }
    let becomes = new.map(|action| action.handler);
    let new = ours.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: structures of the kernel's form.
    let result = unsafe { kernel_action(signal, new, old) };
    if result < 0 {
        wrapped.handler.store(handler, Ordering::Release);
        wrapped.flags.store(flags, Ordering::Release);
        wrapped.restorer.store(restorer, Ordering::Release);
        drop(held);
        return result;
    }
    if let Some(handler) = becomes {
        kvm_abi::signals::set_handled(signal, handler != libc::SIG_DFL);
    }
    if old.handler == wrapper_address() {
        // All flags are the program's except that which siginterrupt(3) changes without this function.
        const RESTART: u64 = libc::SA_RESTART as u64;
        old.flags = flags & !RESTART | old.flags & RESTART;
        old.handler = handler;
        old.restorer = restorer;
    }
    drop(held);
    result
}

/// Makes an action call [`wrapper`].
fn wrap(signal: c_int, action: &mut Action) {
    action.handler = wrapper_address();
    action.flags |= libc::SA_SIGINFO as u64 | SA_RESTORER;
    // The flag is kept from the kernel, as the signal may be sent twice: the wrapper resets the action itself.
    action.flags &= !(libc::SA_RESETHAND as u64);
    action.restorer = restorer_address();
    if launcher::get().is_some() {
        action.mask &= !SIGSYS;
        if signal == libc::SIGSYS {
            action.flags |= libc::SA_ONSTACK as u64 | libc::SA_NODEFER as u64;
        }
    }
}

/// Wraps the handlers that the program has, and all that it sets from now on.
pub(crate) fn wrap_all() {
    if ACTIVE.swap(true, Ordering::AcqRel) {
        return;
    }
    kvm_abi::signals::prepare();
    kvm_abi::trust_reports();
    for signal in 1..=SIGNALS as c_int {
        if entry(signal).is_none() {
            continue;
        }
        let mut action = Action::default();
        // SAFETY: a structure of the kernel's form.
        let known = unsafe { kernel_action(signal, std::ptr::null(), &raw mut action) } == 0;
        let is_wanted = is_handler(action.handler) || is_always_wrapped(signal);
        if known && is_wanted && action.handler != wrapper_address() {
            let mut old = Action::default();
            exchange(signal, Some(&action), &mut old);
        }
    }
    kvm_abi::faults::set_caught();
}

/// Prepares a launched program, before it starts: it has no handlers, and all that it will set are wrapped.
pub(crate) fn wrap_for_launch() {
    for signal in 1..=SIGNALS as c_int {
        let mut action = Action::default();
        // SAFETY: a structure of the kernel's form. Signals that have a handler get none, and SIGPIPE, which Rust's
        // start has ignored, gets its default action.
        unsafe {
            kernel_action(signal, std::ptr::null(), &raw mut action);
            if is_handler(action.handler) || signal == libc::SIGPIPE {
                action = Action::default();
                kernel_action(signal, &raw const action, std::ptr::null_mut());
            }
        }
    }
    wrap_all();
}

/// Does rt_sigaction(2) for a launched program. Returns the kernel's result.
pub(crate) fn launched(arguments: [usize; 6]) -> isize {
    let [signal, new_at, old_at, size, ..] = arguments;
    let fault = -(libc::EFAULT as isize);
    if size != SET {
        return -(libc::EINVAL as isize);
    }
    let mut new = Action::default();
    let to = (&raw mut new).cast::<u8>();
    // SAFETY: `to` is a structure of ours.
    let read = || unsafe { kvm_abi::faults::copy(new_at as *const u8, to, size_of::<Action>()) };
    if new_at != 0 && read() != Some(true) {
        return fault;
    }
    let mut old = Action::default();
    let result = exchange(signal as c_int, (new_at != 0).then_some(&new), &mut old);
    let from = (&raw const old).cast::<u8>();
    // SAFETY: `from` is a structure of ours.
    let write = || unsafe { kvm_abi::faults::copy(from, old_at as *mut u8, size_of::<Action>()) };
    if result == 0 && old_at != 0 && write() != Some(true) {
        return fault;
    }
    result
}

/// Does rt_sigaction(2) for a call through `syscall`.
///
/// # Safety
///
/// `new` and `old` are null or addresses of the kernel's structure.
pub(crate) unsafe fn raw(signal: c_int, new: usize, old: usize, size: usize) -> c_int {
    if !ACTIVE.load(Ordering::Acquire) || size != SET {
        // SAFETY: the caller's arguments.
        return unsafe {
            system_call_c(
                libc::SYS_rt_sigaction,
                [signal as usize, new, old, size, 0, 0],
            )
        } as c_int;
    }
    // SAFETY: the caller's structures.
    unsafe {
        let action = (new != 0).then(|| (new as *const Action).read_unaligned());
        let mut before = Action::default();
        let result = exchange(signal, action.as_ref(), &mut before);
        if result < 0 {
            return fail(-result as c_int);
        }
        if old != 0 {
            (old as *mut Action).write_unaligned(before);
        }
    }
    0
}

/// The C library's function of this name.
///
/// # Safety
///
/// The requirements of that function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn sigaction(
    signal: c_int,
    new: *const libc::sigaction,
    old: *mut libc::sigaction,
) -> c_int {
    if !ACTIVE.load(Ordering::Acquire) || entry(signal).is_none() {
        return next!(sigaction(
            signal => c_int,
            new => *const libc::sigaction,
            old => *mut libc::sigaction,
        ) -> c_int);
    }
    // SAFETY: the caller's structures. The C library's signal set begins with the kernel's.
    unsafe {
        let action = (!new.is_null()).then(|| Action {
            handler: (*new).sa_sigaction,
            flags: (*new).sa_flags as u32 as u64,
            restorer: 0,
            mask: (&raw const (*new).sa_mask).cast::<u64>().read(),
        });
        let mut before = Action::default();
        // The kernel wants a restorer even for a default or ignored action, which returns from nothing.
        let result = exchange(signal, action.as_ref(), &mut before);
        if result < 0 {
            return fail(-result as c_int);
        }
        if !old.is_null() {
            (*old).sa_sigaction = before.handler;
            (*old).sa_flags = (before.flags & !SA_RESTORER) as c_int;
            (*old).sa_restorer = None;
            let mask = (&raw mut (*old).sa_mask).cast::<u64>();
            mask.write_bytes(0, size_of::<libc::sigset_t>() / size_of::<u64>());
            mask.write(before.mask);
        }
    }
    0
}

/// Does signal(3) with these flags.
fn set_handler(signal: c_int, handler: usize, flags: c_int) -> usize {
    let own = 1u64.checked_shl((signal - 1) as u32).unwrap_or(0);
    let is_masked = flags & libc::SA_NODEFER == 0;
    let action = Action {
        handler,
        flags: flags as u64,
        restorer: 0,
        mask: if is_masked { own } else { 0 },
    };
    let mut before = Action::default();
    let result = exchange(signal, Some(&action), &mut before);
    if result < 0 {
        fail(-result as c_int);
        return libc::SIG_ERR;
    }
    before.handler
}

macro_rules! signal {
    ($($name:ident $flags:expr;)*) => { $(
        /// The C library's function of this name.
        ///
        /// # Safety
        ///
        /// The requirements of that function.
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C" fn $name(signal: c_int, handler: usize) -> usize {
            let ours = ACTIVE.load(Ordering::Acquire)
                && handler != libc::SIG_ERR
                && entry(signal).is_some();
            if ours {
                return set_handler(signal, handler, $flags);
            }
            next!($name(signal => c_int, handler => usize) -> usize)
        }
    )* };
}

signal! {
    signal libc::SA_RESTART;
    bsd_signal libc::SA_RESTART;
    ssignal libc::SA_RESTART;
    __sysv_signal libc::SA_RESETHAND | libc::SA_NODEFER;
    sysv_signal libc::SA_RESETHAND | libc::SA_NODEFER;
}

const _: () = assert!(size_of::<c_ulong>() == SET);
