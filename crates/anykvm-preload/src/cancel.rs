//! Threads that may be cancelled at any instruction (PTHREAD_CANCEL_ASYNCHRONOUS) and make KVM calls.
//!
//! The kernel ends such a thread when its system call is interrupted. Here that would end it in the middle of our code,
//! with our locks held. So during a KVM call the thread is cancelled late: KVM_RUN is told to end, and the C library is
//! asked again behind the call, where the stack has no frame of ours.

use std::cell::Cell;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvm_abi::{Object, Vcpu, signals::Section};
use libc::{c_int, c_void, pthread_t};

use crate::next::{Next, next};

/// `pthread.h`'s values.
const DEFERRED: c_int = 0;
const ASYNCHRONOUS: c_int = 1;

thread_local! {
    /// True if the program has made this thread cancellable at any instruction.
    static IS_ASYNCHRONOUS: Cell<bool> = const { Cell::new(false) };
}

/// Threads that may be cancelled at any instruction, and those that have been cancelled.
struct Threads {
    /// Threads in KVM calls on vCPUs.
    callers: Vec<(pthread_t, Arc<Vcpu>)>,
    /// Threads that have been cancelled, perhaps while such a call began. If another thread gets the same number later,
    /// its first call ends early.
    cancelled: Vec<pthread_t>,
}

static THREADS: Mutex<Threads> = Mutex::new(Threads {
    callers: Vec::new(),
    cancelled: Vec::new(),
});

fn threads() -> MutexGuard<'static, Threads> {
    THREADS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the calling thread.
fn this() -> pthread_t {
    // SAFETY: no arguments, cannot fail.
    unsafe { libc::pthread_self() }
}

/// Returns true if the calling thread may be cancelled at any instruction.
#[inline]
pub(crate) fn is_asynchronous() -> bool {
    IS_ASYNCHRONOUS.get()
}

/// The C library's function. It is looked up before a thread can first be cancelled, as a thread must not be cancelled
/// in the middle of the dynamic linker.
static SET_TYPE: Next = Next::new(c"pthread_setcanceltype");

type SetType = unsafe extern "C-unwind" fn(c_int, *mut c_int) -> c_int;

fn set_type() -> Option<SetType> {
    let address = SET_TYPE.address();
    // SAFETY: the function of that name has this type.
    (!address.is_null()).then(|| unsafe { std::mem::transmute::<*mut c_void, SetType>(address) })
}

/// Begins a KVM call of the calling thread: it cannot be cancelled at any instruction from here on.
pub(crate) fn hold(fd: c_int) {
    if let Some(set_type) = set_type() {
        // SAFETY: the function takes a null pointer.
        unsafe { set_type(DEFERRED, std::ptr::null_mut()) };
    }
    let _section = Section::enter();
    if let Ok(Object::Vcpu(vcpu)) = kvm_abi::lookup(fd) {
        let mut threads = threads();
        let at = threads.cancelled.iter().position(|t| *t == this());
        if let Some(at) = at {
            threads.cancelled.swap_remove(at);
            vcpu.hypervisor().kick();
        }
        threads.callers.push((this(), vcpu));
    }
}

/// Ends the KVM call. [`let_go`] comes next.
pub(crate) fn finish() {
    let _section = Section::enter();
    let gone = {
        let mut threads = threads();
        let at = threads.callers.iter().rposition(|(t, _)| *t == this());
        at.map(|at| threads.callers.swap_remove(at))
    };
    drop(gone);
}

/// Makes the thread cancellable again. If somebody has cancelled it, it ends here, through the caller's frames.
#[inline(always)]
pub(crate) fn let_go() {
    if let Some(set_type) = set_type() {
        // SAFETY: this is the C library's function, with a value that it knows. Nothing here has a destructor that
        // would be skipped if the thread ends.
        unsafe { set_type(ASYNCHRONOUS, std::ptr::null_mut()) };
    }
}

/// The C library's function of this name.
///
/// # Safety
///
/// The requirements of that function. It has no destructors to run if the thread ends here.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn pthread_setcanceltype(
    value: c_int,
    old: *mut c_int,
) -> c_int {
    let Some(set_type) = set_type() else {
        return libc::ENOSYS;
    };
    if matches!(value, DEFERRED | ASYNCHRONOUS) {
        IS_ASYNCHRONOUS.set(value == ASYNCHRONOUS);
    }
    // SAFETY: the caller's arguments.
    unsafe { set_type(value, old) }
}

/// The C library's function of this name. It also makes KVM_RUN of the thread end.
///
/// The C library comes first. A thread that has begun a call by then, and so is not cancelled by a signal, is either
/// among the callers below, or finds itself among the cancelled in [`hold`]. In the other order a call that is short
/// could use up the note before the C library has cancelled anything, and the next call would wait for ever.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn pthread_cancel(thread: pthread_t) -> c_int {
    let result = next!(pthread_cancel(thread => pthread_t) -> c_int);
    let _section = Section::enter();
    let found: Vec<Arc<Vcpu>> = {
        let mut threads = threads();
        let theirs = threads.callers.iter().filter(|(t, _)| *t == thread);
        let found = theirs.map(|(_, vcpu)| Arc::clone(vcpu)).collect();
        if !threads.cancelled.contains(&thread) {
            threads.cancelled.push(thread);
        }
        found
    };
    for vcpu in found {
        vcpu.hypervisor().kick();
    }
    result
}
