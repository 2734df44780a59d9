//! The program's own filters of system calls.
//!
//! They hold for our code too, so each gets a few lines in front: what the launcher itself needs, and
//! nothing that reaches beyond the process.

use libc::{c_long, sock_filter, sock_fprog};

use super::dispatch::Answer;
use super::{image, thunks};
use crate::next::system_call;

const SECCOMP_SET_MODE_FILTER: usize = 1;
const SECCOMP_MODE_FILTER: usize = 2;
const ALLOW: u32 = 0x7fff_0000;
const AUDIT_ARCH_X86_64: u32 = 0xc000_003e;
/// Offsets in `struct seccomp_data`.
const NUMBER: u32 = 0;
const ARCHITECTURE: u32 = 4;
const FIRST_ARGUMENT: u32 = 16;
const THIRD_ARGUMENT: u32 = 32;

/// Calls of ours, whatever their arguments.
const ALWAYS: [c_long; 6] = [
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_getpid,
    libc::SYS_gettid,
    libc::SYS_munmap,
    libc::SYS_exit,
];

const fn line(code: u32, jt: u8, jf: u8, k: u32) -> sock_filter {
    sock_filter {
        code: code as u16,
        jt,
        jf,
        k,
    }
}

const fn load(offset: u32) -> sock_filter {
    line(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, offset)
}

const fn unless_equal(value: u32, skip: u8) -> sock_filter {
    line(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, skip, value)
}

const fn allow() -> sock_filter {
    line(libc::BPF_RET | libc::BPF_K, 0, 0, ALLOW)
}

/// What comes before the program's own lines.
fn preface(process: u32) -> Vec<sock_filter> {
    let mut lines = vec![load(NUMBER)];
    for number in ALWAYS {
        lines.extend([unless_equal(number as u32, 1), allow()]);
    }
    let dispatch = super::PR_SET_SYSCALL_USER_DISPATCH as u32;
    let argument_is = [
        (libc::SYS_tgkill, FIRST_ARGUMENT, process),
        (libc::SYS_rt_tgsigqueueinfo, FIRST_ARGUMENT, process),
        (libc::SYS_prctl, FIRST_ARGUMENT, dispatch),
        (
            libc::SYS_madvise,
            THIRD_ARGUMENT,
            libc::MADV_DONTNEED as u32,
        ),
        (
            libc::SYS_madvise,
            THIRD_ARGUMENT,
            host::memfd::MADV_COLLAPSE as u32,
        ),
    ];
    for (number, argument, value) in argument_is {
        lines.extend([
            unless_equal(number as u32, 4),
            load(argument),
            unless_equal(value, 1),
            allow(),
            load(NUMBER),
        ]);
    }
    let len = lines.len() as u8;
    // Numbers of another architecture are other calls.
    lines.splice(
        0..0,
        [load(ARCHITECTURE), unless_equal(AUDIT_ARCH_X86_64, len)],
    );
    lines
}

/// prctl(2) and seccomp(2).
pub(super) unsafe fn install(number: c_long, a: [usize; 6]) -> Answer {
    let is_filter = match number {
        libc::SYS_prctl => a[0] == libc::PR_SET_SECCOMP as usize && a[1] == SECCOMP_MODE_FILTER,
        _ => a[0] == SECCOMP_SET_MODE_FILTER,
    };
    if !is_filter {
        return Answer::Kernel;
    }
    let Some(given) = image::take_as::<sock_fprog>(a[2]) else {
        return Answer::Kernel;
    };
    // SAFETY: the bytes of the program's structure, of integers and a pointer.
    let given = unsafe { given.assume_init() };
    let mut lines = preface(std::process::id());
    for index in 0..usize::from(given.len) {
        let at = given.filter as usize + index * size_of::<sock_filter>();
        let Some(next) = image::take_as::<sock_filter>(at) else {
            return Answer::Kernel;
        };
        // SAFETY: as above.
        lines.push(unsafe { next.assume_init() });
    }
    let Ok(len) = u16::try_from(lines.len()) else {
        return Answer::Kernel;
    };
    let ours = sock_fprog {
        len,
        filter: lines.as_mut_ptr(),
    };
    let mut arguments = a;
    arguments[2] = &raw const ours as usize;
    thunks::stop_rewriting();
    // SAFETY: the program's arguments, and a filter that lives until the kernel has copied it.
    Answer::Is(unsafe { system_call(number, arguments) })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs a filter on a call.
    fn verdict(lines: &[sock_filter], architecture: u32, number: u32, first: u32) -> Option<u32> {
        let mut at = 0;
        let mut a = 0;
        loop {
            let l = lines.get(at)?;
            at += 1;
            match u32::from(l.code) {
                code if code == libc::BPF_LD | libc::BPF_W | libc::BPF_ABS => {
                    a = match l.k {
                        NUMBER => number,
                        ARCHITECTURE => architecture,
                        _ => first,
                    };
                }
                code if code == libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K => {
                    at += usize::from(if a == l.k { l.jt } else { l.jf });
                }
                _ => return Some(l.k),
            }
        }
    }

    #[test]
    fn only_what_is_ours_is_allowed_in_front() {
        let lines = preface(77);
        let rows = [
            (libc::SYS_getpid, 0, Some(ALLOW)),
            (libc::SYS_tgkill, 77, Some(ALLOW)),
            (libc::SYS_tgkill, 78, None),
            (libc::SYS_prctl, 59, Some(ALLOW)),
            (libc::SYS_prctl, 22, None),
            (libc::SYS_openat, 77, None),
        ];
        for (number, first, want) in rows {
            let got = verdict(&lines, AUDIT_ARCH_X86_64, number as u32, first);
            assert_eq!(got, want, "{number} {first}");
        }
        assert_eq!(verdict(&lines, 0x4000_0003, 39, 0), None);
    }
}
