//! Confines a thread to almost no system calls: seccomp(2), filter mode.
//!
//! Allowed are calls that sleep and wake (futex, and restart_syscall, by which the kernel resumes a sleep after the
//! process was stopped), that notify another thread or process (write of eight bytes, as to an eventfd), and that end
//! (exit, exit_group). Any other call ends the process by SIGSYS. So memory must come from
//! [`crate::allocator::reserve`], and clocks from the vDSO.

use std::{io, mem::offset_of};

/// The thread is in an ordinary process, whose other threads the filter does not affect.
const ALLOWED: [libc::c_long; 4] = [
    libc::SYS_futex,
    libc::SYS_restart_syscall,
    libc::SYS_exit,
    libc::SYS_exit_group,
];
/// AUDIT_ARCH_X86_64.
const ARCH: u32 = 0xc000_003e;

const fn load(offset: usize) -> libc::sock_filter {
    line(
        libc::BPF_LD | libc::BPF_W | libc::BPF_ABS,
        0,
        0,
        offset as u32,
    )
}

/// If the loaded word is `value`, skips `yes` instructions; otherwise continues with the next instruction.
const fn equal(value: u32, yes: u8) -> libc::sock_filter {
    line(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, yes, 0, value)
}

const fn end(verdict: u32) -> libc::sock_filter {
    line(libc::BPF_RET | libc::BPF_K, 0, 0, verdict)
}

const fn line(code: u32, jt: u8, jf: u8, k: u32) -> libc::sock_filter {
    libc::sock_filter {
        code: code as u16,
        jt,
        jf,
        k,
    }
}

/// Installs the filter for the calling thread, for good. All signals are blocked, because a handler would return by a
/// system call.
///
/// # Errors
/// Those of `prctl`: no filters in this kernel, or not allowed here.
pub fn confine() -> io::Result<()> {
    let count = offset_of!(libc::seccomp_data, args) + 2 * size_of::<u64>();
    let program = [
        load(offset_of!(libc::seccomp_data, arch)),
        equal(ARCH, 1),
        end(libc::SECCOMP_RET_KILL_PROCESS),
        load(offset_of!(libc::seccomp_data, nr)),
        equal(ALLOWED[0] as u32, 8),
        equal(ALLOWED[1] as u32, 7),
        equal(ALLOWED[2] as u32, 6),
        equal(ALLOWED[3] as u32, 5),
        equal(libc::SYS_write as u32, 1),
        end(libc::SECCOMP_RET_KILL_PROCESS),
        load(count),
        equal(8, 1),
        end(libc::SECCOMP_RET_KILL_PROCESS),
        end(libc::SECCOMP_RET_ALLOW),
    ];
    crate::signal::block_all();
    let filter = libc::sock_fprog {
        len: program.len() as u16,
        filter: program.as_ptr().cast_mut(),
    };
    // SAFETY: integer arguments; then a program that outlives the call, which copies it.
    let result = unsafe {
        match libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) {
            0 => libc::prctl(
                libc::PR_SET_SECCOMP,
                libc::SECCOMP_MODE_FILTER,
                &raw const filter,
            ),
            other => other,
        }
    };
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the signal that ended a child which confines itself and then calls `what`; 0 if the child exited.
    fn ended_by(what: fn()) -> libc::c_int {
        // SAFETY: the child makes a few system calls and exits.
        unsafe {
            let child = libc::fork();
            if child == 0 {
                if confine().is_err() {
                    libc::_exit(1);
                }
                what();
                libc::syscall(libc::SYS_exit_group, 0);
            }
            let mut status = 0;
            assert_eq!(libc::waitpid(child, &raw mut status, 0), child);
            if libc::WIFSIGNALED(status) {
                libc::WTERMSIG(status)
            } else {
                assert_eq!(libc::WEXITSTATUS(status), 0);
                0
            }
        }
    }

    #[test]
    fn only_a_few_calls_are_left() {
        static WORD: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(1);
        let allowed: [fn(); 4] = [
            || {},
            || assert_eq!(crate::futex::wake(&WORD, 1), 0),
            // SAFETY: nothing was interrupted: EINTR.
            || unsafe { assert!(libc::syscall(libc::SYS_restart_syscall) < 0) },
            // SAFETY: eight bytes, which a bad descriptor does not take.
            || unsafe { assert!(libc::write(-1, [0u8; 8].as_ptr().cast(), 8) < 0) },
        ];
        for what in allowed {
            assert_eq!(ended_by(what), 0);
        }
        let refused: [fn(); 4] = [
            // SAFETY: no such call changes anything.
            || unsafe { assert!(libc::write(-1, [0u8; 8].as_ptr().cast(), 7) < 0) },
            // SAFETY: no such call changes anything.
            || unsafe { assert!(libc::getppid() > 0) },
            // SAFETY: no such call changes anything.
            || unsafe { assert!(libc::munmap(std::ptr::null_mut(), 0) < 0) },
            // The number of another ABI (x32).
            // SAFETY: no such call changes anything.
            || unsafe { assert!(libc::syscall(0x4000_0000 | libc::SYS_futex, 0, 0, 0) < 0) },
        ];
        for what in refused {
            assert_eq!(ended_by(what), libc::SIGSYS);
        }
    }
}
