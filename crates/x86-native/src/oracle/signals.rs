//! Exceptions of tested code arrive as signals.

use std::{io, ptr, sync::atomic::Ordering};

use super::{
    ACTIVE, AREA, AREA_SIZE, GPR, Mode, RFLAGS, Trap, selectors, sequences::FINISH, write,
};

/// Vector (or all ones if there was no exception), error code, CR2, RIP.
static mut TRAP: (u64, u64, u64, u64) = NONE;
const NONE: (u64, u64, u64, u64) = (u64::MAX, 0, 0, 0);

/// Forgets the last exception.
pub(super) fn clear() {
    // SAFETY: single-threaded by the oracle's lock; the handler, the only other
    // accessor, runs on this thread while a block does.
    unsafe { TRAP = NONE };
}

/// Returns the exception since [`clear`], and the address at which it was raised.
pub(super) fn taken() -> (Option<Trap>, Option<u64>) {
    // SAFETY: single-threaded by the oracle's lock; the handler, the only other accessor, runs on
    // this thread while a block does.
    let (vector, error_code, gva, rip) = unsafe { TRAP };
    if vector == u64::MAX {
        return (None, None);
    }
    let trap = Trap {
        vector: vector as u8,
        error_code,
        gva,
    };
    (Some(trap), Some(rip))
}

/// Installs the handler. It runs on a stack of its own, because RSP is the block's.
pub(super) fn install() -> io::Result<()> {
    let signals = [
        libc::SIGSEGV,
        libc::SIGBUS,
        libc::SIGFPE,
        libc::SIGILL,
        libc::SIGTRAP,
    ];
    // SAFETY: a fresh alternate stack that is never freed, and a handler that
    // is async-signal-safe (memory copies only).
    unsafe {
        let size = 1 << 16;
        let stack = libc::mmap(
            ptr::null_mut(),
            size,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        );
        let alt = libc::stack_t {
            ss_sp: stack,
            ss_flags: 0,
            ss_size: size,
        };
        if stack == libc::MAP_FAILED || libc::sigaltstack(&alt, ptr::null_mut()) != 0 {
            return Err(io::Error::last_os_error());
        }
        for s in signals {
            let mut action: libc::sigaction = core::mem::zeroed();
            action.sa_sigaction = handler as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_NODEFER;
            if libc::sigaction(s, &action, ptr::null_mut()) != 0 {
                return Err(io::Error::last_os_error());
            }
        }
    }
    Ok(())
}

/// Order of the general registers in the signal frame.
const FRAME: [libc::c_int; 16] = [
    libc::REG_RAX,
    libc::REG_RCX,
    libc::REG_RDX,
    libc::REG_RBX,
    libc::REG_RSP,
    libc::REG_RBP,
    libc::REG_RSI,
    libc::REG_RDI,
    libc::REG_R8,
    libc::REG_R9,
    libc::REG_R10,
    libc::REG_R11,
    libc::REG_R12,
    libc::REG_R13,
    libc::REG_R14,
    libc::REG_R15,
];

extern "C" fn handler(
    signal: libc::c_int,
    _info: *mut libc::siginfo_t,
    context: *mut libc::c_void,
) {
    // The kernel leaves AC as the block had it.
    // SAFETY: clears AC and the arithmetic flags.
    unsafe { core::arch::asm!("push 2", "popfq") };
    // SAFETY: the kernel passes a valid ucontext; the state page is mapped
    // while ACTIVE; the statics belong to the thread that holds the lock.
    unsafe {
        let uc = &mut *context.cast::<libc::ucontext_t>();
        let g = &mut uc.uc_mcontext.gregs;
        if !ACTIVE.load(Ordering::SeqCst) {
            // The signal does not come from tested code. The default action handles it when the instruction is executed
            // again.
            libc::signal(signal, libc::SIG_DFL);
            return;
        }
        for (i, r) in FRAME.iter().enumerate() {
            write(GPR + 8 * i as u64, &g[*r as usize].to_le_bytes());
        }
        write(RFLAGS, &g[libc::REG_EFL as usize].to_le_bytes());
        let frame = uc.uc_mcontext.fpregs.cast::<u8>();
        write(AREA, core::slice::from_raw_parts(frame, AREA_SIZE));
        TRAP = (
            g[libc::REG_TRAPNO as usize] as u64,
            g[libc::REG_ERR as usize] as u64,
            g[libc::REG_CR2 as usize] as u64,
            g[libc::REG_RIP as usize] as u64,
        );
        g[libc::REG_RIP as usize] = FINISH as i64;
        // The low 16 bits are CS: the block may be 32-bit code.
        let segments = &mut g[libc::REG_CSGSFS as usize];
        *segments = *segments & !0xffff | i64::from(selectors(Mode::Bits64)[1]);
        // The block may have left any flags.
        g[libc::REG_EFL as usize] = 0x202;
    }
}
