//! Copies from and to addresses that may be wrong, without a system call.
//!
//! As in a kernel, the copy is one instruction, and the handler of SIGSEGV and SIGBUS ([`recover`]),
//! which whoever wraps the VMM's handlers calls first, makes the copy return when it was that one.

use std::sync::atomic::{AtomicBool, Ordering};

/// A handler that calls [`recover`] is installed, and stays so.
static CAUGHT: AtomicBool = AtomicBool::new(false);

/// Says that SIGSEGV and SIGBUS go to [`recover`] from now on.
pub fn set_caught() {
    CAUGHT.store(true, Ordering::Release);
}

/// Bytes from the start of `copy_bytes` in which the copying instruction begins.
const COPYING: usize = 4;

/// Copies; 0 when done, and 1 if `recover` ended it.
#[unsafe(naked)]
unsafe extern "C" fn copy_bytes(to: *mut u8, from: *const u8, len: usize) -> u32 {
    std::arch::naked_asm!("mov rcx, rdx", "rep movsb", "xor eax, eax", "ret")
}

/// Where `copy_bytes` goes on after a fault.
#[unsafe(naked)]
extern "C" fn ended() -> u32 {
    std::arch::naked_asm!("mov eax, 1", "ret")
}

/// Copies `len` bytes: whether all could be. `None` if nobody would catch a fault.
pub(crate) fn copy(from: *const u8, to: *mut u8, len: usize) -> Option<bool> {
    if !CAUGHT.load(Ordering::Acquire) {
        return None;
    }
    // Above is no user's memory, and such an address would be another kind of fault.
    let is_user = |at: *const u8| {
        (at as usize)
            .checked_add(len)
            .is_some_and(|end| end >> 47 == 0)
    };
    // SAFETY: one of the two is our own memory of that length; the other one is the VMM's to give,
    // and a fault ends the copy.
    Some(is_user(from) && is_user(to) && unsafe { copy_bytes(to, from, len) } == 0)
}

/// For a handler of SIGSEGV and SIGBUS: true if the fault was that of a copy, which now returns.
///
/// # Safety
///
/// To be called in a signal handler with the context that the kernel passed to it.
pub unsafe fn recover(signal: libc::c_int, context: *mut libc::c_void) -> bool {
    if signal != libc::SIGSEGV && signal != libc::SIGBUS {
        return false;
    }
    // SAFETY: the kernel's structure.
    let registers = unsafe { &mut (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs };
    let rip = &mut registers[libc::REG_RIP as usize];
    let begin = copy_bytes as *const () as usize;
    let is_copy = (begin..begin + COPYING).contains(&(*rip as usize));
    if is_copy {
        *rip = ended as *const () as i64;
    }
    is_copy
}

#[cfg(test)]
mod tests {
    use super::*;

    extern "C" fn handler(
        signal: libc::c_int,
        _: *mut libc::siginfo_t,
        context: *mut libc::c_void,
    ) {
        // SAFETY: the kernel's arguments.
        if !unsafe { recover(signal, context) } {
            // SAFETY: ends the process.
            unsafe { libc::abort() };
        }
    }

    #[test]
    fn copies_end_at_faults() {
        // SAFETY: a handler of the right type, for the faults of this process.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = handler as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
            libc::sigaction(libc::SIGSEGV, &raw const action, std::ptr::null_mut());
        }
        set_caught();
        let (from, mut to) = ([1u8, 2, 3], [0u8; 3]);
        assert_eq!(copy(from.as_ptr(), to.as_mut_ptr(), 3), Some(true));
        assert_eq!(to, from);
        assert_eq!(copy(8 as *const u8, to.as_mut_ptr(), 3), Some(false));
        assert_eq!(copy(from.as_ptr(), 8 as *mut u8, 3), Some(false));
        assert_eq!(
            copy(usize::MAX as *const u8, to.as_mut_ptr(), 3),
            Some(false)
        );
        assert_eq!(
            copy((1 << 63) as *const u8, to.as_mut_ptr(), 3),
            Some(false)
        );
    }
}
