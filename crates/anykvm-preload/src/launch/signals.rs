//! Signals of a launched program. [`super::entry::signal`] is called first.

use libc::{c_int, c_void, siginfo_t};

use super::block::{self, ThreadBlock};
use super::{entry, thunks};
use crate::actions;
use crate::next::system_call;

/// si_code of a SIGSYS that syscall user dispatch has raised.
const SYS_USER_DISPATCH: c_int = 2;

/// Handles a signal that has interrupted the program. Returns the handler that the program has set, 0 for none.
///
/// It runs with the program's FS, so nothing here uses thread-local storage.
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
        begin_again(context.cast());
        let handler = actions::handler_of(signal, info);
        if handler != 0 {
            note_stack(context.cast());
        }
        handler
    }
}

/// The kernel makes a call of vfork(2) again that a signal has interrupted; after a handler it is watched as all others are, so
/// that has to be said once more, too.
unsafe fn begin_again(context: *mut libc::ucontext_t) {
    /// More than there is in front of the call.
    const NEAR: usize = 32;
    let begin = entry::borrow as *const () as usize;
    // SAFETY: the kernel's structure; what was about to be executed can be read.
    unsafe {
        let rip = &mut (*context).uc_mcontext.gregs[libc::REG_RIP as usize];
        let at = *rip as usize;
        if at.wrapping_sub(begin) < NEAR && (at as *const [u8; 2]).read() == [0x0f, 0x05] {
            *rip = begin as i64;
        }
    }
}

/// Notes the signal stack of a handler of the program that begins, as our code needs it if the handler makes a call.
unsafe fn note_stack(context: *const libc::ucontext_t) {
    // SAFETY: the kernel's structure; while the program runs GS is the thread's block, of which the
    // first word is the address.
    unsafe {
        let stack = (*context).uc_stack;
        let begin = stack.ss_sp.addr();
        if context.addr().wrapping_sub(begin) < stack.ss_size {
            let block: *mut ThreadBlock;
            std::arch::asm!("mov {}, gs:[0]", out(reg) block, options(nostack, readonly, preserves_flags));
            (*block).signal_stack = [begin, stack.ss_size];
        }
    }
}

/// The program's signal stack, taken away while a handler on it is in our code. Our code has another stack, so the
/// kernel would begin the next handler at the end of the signal stack, over the first one.
pub(super) struct StackAside(libc::stack_t);

impl StackAside {
    /// Takes the signal stack away, and lets signals in again. `None` if the program is not on such a stack, or is to
    /// keep it: then signals stay blocked until the way out.
    pub(super) fn new(block: &mut ThreadBlock, is_kept: bool) -> Option<Self> {
        if std::mem::take(&mut block.is_blocked) == 0 {
            return None;
        }
        if is_kept {
            restore_on_the_way_out(block, block.blocked);
            return None;
        }
        let none = libc::stack_t {
            ss_sp: std::ptr::null_mut(),
            ss_flags: libc::SS_DISABLE,
            ss_size: 0,
        };
        let mut old = none;
        let is_aside = set_stack(&none, Some(&mut old));
        set_mask(block.blocked);
        is_aside.then_some(Self(old))
    }

    /// Gives the signal stack back. Signals are blocked until the program's stack pointer is on it.
    pub(super) fn put_back(self, block: &mut ThreadBlock) {
        let mask = set_mask(kvm_abi::signals::DEFERRABLE);
        set_stack(&self.0, None);
        restore_on_the_way_out(block, mask);
    }
}

/// Signals are blocked, and the mask is this one once the program's stack is the current one, unless a signal that
/// waits has said so before.
fn restore_on_the_way_out(block: &mut ThreadBlock, mask: u64) {
    // SAFETY: the thread's own, which a signal may have written.
    if unsafe { (&raw const block.pending).read_volatile() } == 0 {
        block.mask = mask;
        block.pending = 1;
    }
}

/// Does sigaltstack(2). Returns true if it worked.
fn set_stack(stack: &libc::stack_t, old: Option<&mut libc::stack_t>) -> bool {
    let old = old.map_or(0, |old| std::ptr::from_mut(old).addr());
    let arguments = [std::ptr::from_ref(stack).addr(), old, 0, 0, 0, 0];
    // SAFETY: structures of the C library's, which are the kernel's.
    unsafe { system_call(libc::SYS_sigaltstack, arguments) == 0 }
}

/// Sets the thread's mask of blocked signals. Returns the one before.
fn set_mask(mask: u64) -> u64 {
    let mut old = 0u64;
    let arguments = [
        libc::SIG_SETMASK as usize,
        (&raw const mask).addr(),
        (&raw mut old).addr(),
        size_of::<u64>(),
        0,
        0,
    ];
    // SAFETY: the kernel's signal set is eight bytes.
    unsafe { system_call(libc::SYS_rt_sigprocmask, arguments) };
    old
}

/// Handles a signal that has interrupted our code. FS is ours.
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
        // A fault in our code, on behalf of the program, is the program's.
        let handler = actions::handler_of(signal, info);
        if handler != 0 {
            in_the_middle(signal, info, context, handler, block);
        }
    }
}

/// Runs the program's handler of a fault while our own code waits. Calls of the handler begin below it on our stack.
unsafe fn in_the_middle(
    signal: c_int,
    info: *mut siginfo_t,
    context: *mut c_void,
    handler: usize,
    block: *mut ThreadBlock,
) {
    /// More than this function and what it calls have on the stack.
    const ROOM: usize = 4096;
    let here = (&raw const signal).addr();
    // SAFETY: the kernel's structure, and the thread's own block.
    unsafe {
        let interrupted = (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs
            [libc::REG_RSP as usize] as usize;
        let before = (*block).host_stack;
        // The handler is on our stack, or else on a signal stack of the program.
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

/// Sends to the process a signal that came to a thread of ours before it had blocked signals.
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
