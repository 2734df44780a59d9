//! Accesses to addresses that may be invalid, without a system call.
//!
//! As in a kernel, the access is one instruction, and a fault of it makes its function return. The handler of SIGSEGV
//! and SIGBUS must call [`recover`] for that; code that wraps the VMM's handlers calls it first.

use std::sync::atomic::{AtomicBool, Ordering};

/// A handler that calls [`recover`] is installed for good.
static CAUGHT: AtomicBool = AtomicBool::new(false);

/// Says that SIGSEGV and SIGBUS are passed to [`recover`] from now on.
pub fn set_caught() {
    CAUGHT.store(true, Ordering::Release);
}

/// The accessing instruction begins within this many bytes from the start of these functions.
const ACCESSING: usize = 4;

/// Copies bytes. Returns 0 when done, and 1 if [`recover`] ended it.
#[unsafe(naked)]
unsafe extern "C" fn copy_bytes(to: *mut u8, from: *const u8, len: usize) -> u32 {
    std::arch::naked_asm!("mov rcx, rdx", "rep movsb", "xor eax, eax", "ret")
}

/// Reads a byte. Returns 0 when done, and 1 if [`recover`] ended it.
#[unsafe(naked)]
unsafe extern "C" fn read_byte(from: *const u8) -> u32 {
    std::arch::naked_asm!("mov al, [rdi]", "xor eax, eax", "ret")
}

/// Writes to four bytes without changing them, atomically. Returns 0 when done, and 1 if [`recover`] ended it.
#[unsafe(naked)]
unsafe extern "C" fn write_nothing(to: *mut u32) -> u32 {
    std::arch::naked_asm!("lock or dword ptr [rdi], 0", "xor eax, eax", "ret")
}

/// Where these functions continue after a fault.
#[unsafe(naked)]
extern "C" fn ended() -> u32 {
    std::arch::naked_asm!("mov eax, 1", "ret")
}

/// True if the byte can be read. `None` if faults are not caught.
pub(crate) fn is_readable(address: u64) -> Option<bool> {
    // SAFETY: reading a byte of the process changes nothing, and a fault ends it.
    CAUGHT
        .load(Ordering::Acquire)
        .then(|| address >> 47 == 0 && unsafe { read_byte(address as *const u8) } == 0)
}

/// True if the aligned four bytes that contain the address can be written. `None` if faults are not caught.
pub(crate) fn is_writable(address: u64) -> Option<bool> {
    // SAFETY: the word keeps its value, in one atomic step, and a fault ends it.
    CAUGHT
        .load(Ordering::Acquire)
        .then(|| address >> 47 == 0 && unsafe { write_nothing((address & !3) as *mut u32) } == 0)
}

/// Copies `len` bytes; returns whether all were copied. `None` if faults are not caught.
///
/// # Safety
///
/// One of the two ranges is anykvm's own memory of that length; the other one is what a VMM has named.
pub unsafe fn copy(from: *const u8, to: *mut u8, len: usize) -> Option<bool> {
    if !CAUGHT.load(Ordering::Acquire) {
        return None;
    }
    // Above this limit there is no user memory, and an access would raise another kind of fault.
    let is_user = |at: *const u8| {
        (at as usize)
            .checked_add(len)
            .is_some_and(|end| end >> 47 == 0)
    };
    // SAFETY: one of the two ranges is anykvm's own memory of that length; the other one is the VMM's to give, and a
    // fault ends the copy.
    Some(is_user(from) && is_user(to) && unsafe { copy_bytes(to, from, len) } == 0)
}

/// Handles SIGSEGV and SIGBUS: returns true if the fault was in one of the functions here, which then returns.
///
/// # Safety
///
/// Called in a signal handler, with the context that the kernel passed to it.
pub unsafe fn recover(signal: libc::c_int, context: *mut libc::c_void) -> bool {
    if signal != libc::SIGSEGV && signal != libc::SIGBUS {
        return false;
    }
    // SAFETY: the kernel's structure.
    let registers = unsafe { &mut (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs };
    let rip = &mut registers[libc::REG_RIP as usize];
    let is_ours = [
        copy_bytes as *const () as usize,
        read_byte as *const () as usize,
        write_nothing as *const () as usize,
    ]
    .iter()
    .any(|begin| (*begin..begin + ACCESSING).contains(&(*rip as usize)));
    if is_ours {
        *rip = ended as *const () as i64;
    }
    is_ours
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
        let (ours, theirs) = (from.as_ptr(), to.as_mut_ptr());
        for (from, to, want) in [
            (8 as *const u8, theirs, false),
            (ours, 8 as *mut u8, false),
            (usize::MAX as *const u8, theirs, false),
            ((1usize << 63) as *const u8, theirs, false),
            (ours, theirs, true),
        ] {
            // SAFETY: arrays of three bytes, and addresses at which nothing is.
            assert_eq!(unsafe { copy(from, to, 3) }, Some(want));
        }
        assert_eq!(to, from);
        static CONSTANT: u32 = 5;
        let (variable, constant) = (
            (&raw const to).addr() as u64,
            (&raw const CONSTANT).addr() as u64,
        );
        for (address, want) in [
            (variable, (true, true)),
            (constant, (true, false)),
            (8, (false, false)),
            (1 << 63, (false, false)),
        ] {
            let is = (is_readable(address), is_writable(address));
            assert_eq!(is, (Some(want.0), Some(want.1)), "{address:#x}");
        }
    }
}
