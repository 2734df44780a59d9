//! Signals of a launched program ([`super::entry::signal`] comes first).

use libc::{c_int, c_void, siginfo_t};

use super::block::{self, Block};
use super::{entry, thunks};
use crate::actions;
use crate::next::system_call;

/// si_code of SIGSYS: by syscall user dispatch.
const SYS_USER_DISPATCH: c_int = 2;

/// The program was interrupted: gives the handler that it has set, 0 for none.
///
/// It runs with the program's FS: nothing here uses thread-local storage.
pub(super) unsafe extern "C" fn in_program(
    signal: c_int,
    info: *mut siginfo_t,
    context: *mut c_void,
) -> usize {
    // SAFETY: what the kernel passed.
    unsafe {
        if signal == libc::SIGSYS && (*info).si_code == SYS_USER_DISPATCH {
            let registers = &mut (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs;
            let rip = &mut registers[libc::REG_RIP as usize];
            *rip = thunks::of(*rip as usize) as i64;
            return 0;
        }
        actions::handler_of(signal, info)
    }
}

/// Our code was interrupted, with our FS.
pub(super) unsafe extern "C" fn in_host(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    // SAFETY: what the kernel passed.
    unsafe {
        if kvm_abi::faults::recover(signal, context) {
            return;
        }
        let block = block::current();
        if block.is_null() {
            pass_on(signal, info, context);
            return;
        }
        if let Some(mask) = kvm_abi::signals::defer_always(signal, info, context) {
            (*block).mask = mask;
            (*block).pending = 1;
            return;
        }
        // A fault in the middle.
        let handler = actions::handler_of(signal, info);
        if handler != 0 {
            in_the_middle(signal, info, context, handler, block);
        }
    }
}

/// The program's handler of a fault runs while our own code waits; its calls begin below.
unsafe fn in_the_middle(
    signal: c_int,
    info: *mut siginfo_t,
    context: *mut c_void,
    handler: usize,
    block: *mut Block,
) {
    /// More than this function and what it calls have on the stack.
    const ROOM: usize = 4096;
    let here = (&raw const signal).addr();
    // SAFETY: the kernel's structure, and the thread's own block.
    unsafe {
        let interrupted = (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs
            [libc::REG_RSP as usize] as usize;
        let before = (*block).host_stack;
        // Our stack, if the handler is on it; it may be on a stack of the program's for signals.
        let is_ours =
            here < before && here >= interrupted.saturating_sub(1 << 16) && here < interrupted;
        let lowest = if is_ours { here } else { interrupted };
        (*block).host_stack = (lowest - ROOM) & !63;
        let program_fs = (*block).program_fs;
        (*block).inner += 1;
        entry::call_in_the_middle(signal, info, context, handler, block);
        (*block).inner -= 1;
        (*block).program_fs = program_fs;
        (*block).host_stack = before;
    }
}

/// A thread of ours that did not block signals in time: the process gets it once more.
unsafe fn pass_on(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel's structures; its signal set is eight bytes.
    unsafe {
        let mask = (&raw mut (*context.cast::<libc::ucontext_t>()).uc_sigmask).cast::<u64>();
        mask.write(u64::MAX);
        let arguments = [
            libc::getpid() as usize,
            signal as usize,
            info as usize,
            0,
            0,
            0,
        ];
        system_call(libc::SYS_rt_sigqueueinfo, arguments);
    }
}
