//! Filters of system calls that the program installs for itself.
//!
//! Such filters apply to our code, too. So each filter gets a few lines in front that let through what we need
//! ourselves, and nothing that reaches beyond the process. Calls for memory and descriptors are let through by the
//! address of the caller, which a filter sees: a program may have all of its own `mmap` raise SIGSYS. In a launched
//! program our callers are our text and our C library's. A preloaded program shares the C library with us, so there
//! only calls through [`host::system`] are ours.

use std::ops::Range;
use std::path::Path;
use std::sync::OnceLock;

use libc::{c_long, sock_filter, sock_fprog};

use crate::actions;
use crate::launcher::{self, PR_SET_SYSCALL_USER_DISPATCH};
use crate::next::system_call;

const SECCOMP_SET_MODE_FILTER: usize = 1;
const SECCOMP_MODE_FILTER: usize = 2;
const ALLOW: u32 = 0x7fff_0000;
const AUDIT_ARCH_X86_64: u32 = 0xc000_003e;
/// Offsets in `struct seccomp_data`.
const NUMBER: u32 = 0;
const ARCHITECTURE: u32 = 4;
const RIP: u32 = 8;
const RIP_HIGH: u32 = 12;
const FIRST_ARGUMENT: u32 = 16;
const THIRD_ARGUMENT: u32 = 32;

/// Maximum length of a filter that the kernel accepts.
const LONGEST: usize = 4096;

/// Calls of the launcher that are let through whatever their arguments.
const LAUNCHERS: [c_long; 7] = [
    libc::SYS_restart_syscall,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_getpid,
    libc::SYS_gettid,
    libc::SYS_munmap,
    libc::SYS_exit,
];

/// The same in a preloaded program. Locks of Rust's library sleep by a function of the C library. The kernel makes
/// restart_syscall(2) for a thread that was stopped while it slept with a timeout (SIGSTOP, a debugger) and goes on;
/// the call restarts nothing but that sleep. Our wrappers of handlers return by rt_sigreturn(2).
const ALWAYS: [c_long; 3] = [
    libc::SYS_futex,
    libc::SYS_restart_syscall,
    libc::SYS_rt_sigreturn,
];

/// Calls that are let through if our own code makes them.
const OWN: [c_long; 29] = [
    libc::SYS_mmap,
    libc::SYS_mremap,
    libc::SYS_mprotect,
    libc::SYS_madvise,
    libc::SYS_futex,
    libc::SYS_memfd_create,
    libc::SYS_getrlimit,
    libc::SYS_ftruncate,
    libc::SYS_fstat,
    libc::SYS_fcntl,
    libc::SYS_eventfd2,
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_wait,
    libc::SYS_close,
    libc::SYS_getrandom,
    libc::SYS_read,
    libc::SYS_preadv2,
    libc::SYS_write,
    libc::SYS_poll,
    // Calls that the launcher may make, whoever else makes them.
    libc::SYS_munmap,
    libc::SYS_rt_sigprocmask,
    libc::SYS_membarrier,
    libc::SYS_sched_yield,
    libc::SYS_rt_sigpending,
    // The C library makes a new thread; the program asks for one by another call.
    libc::SYS_clone3,
    libc::SYS_rseq,
    libc::SYS_set_robust_list,
    libc::SYS_sigaltstack,
];
/// Ranges of our own code in a launched program: this file's text and the C library's.
static TEXTS: OnceLock<Vec<Range<usize>>> = OnceLock::new();

/// Notes these ranges. To be called before anything of the program is in this process.
pub(crate) fn note_texts() {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let own = std::env::current_exe().unwrap_or_default();
    let texts = maps.lines().filter_map(|line| text(line, &own));
    // This is called once, so the value has not been set before.
    let _ = TEXTS.set(texts.collect());
}

/// Returns the range of a line of /proc/self/maps, if it is the code of this file or of the C library. The range must
/// lie within 4 GiB, so that half of an address says whether the address is in it.
fn text(line: &str, own: &Path) -> Option<Range<usize>> {
    let (words, path) = line.split_at(line.find('/')?);
    let mut words = words.split_ascii_whitespace();
    let (begin, end) = words.next()?.split_once('-')?;
    let path = Path::new(path);
    let name = path.file_name()?.as_encoded_bytes();
    let is_ours = path == own || name.starts_with(b"libc.so") || name.starts_with(b"libc-");
    let is_code = is_ours && words.next()?.contains('x');
    let begin = usize::from_str_radix(begin, 16).ok()?;
    let end = usize::from_str_radix(end, 16).ok()?;
    (is_code && begin < end && begin >> 32 == (end - 1) >> 32).then_some(begin..end)
}

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

const fn unless_above(code: u32, value: u32, skip: u8) -> sock_filter {
    line(libc::BPF_JMP | code | libc::BPF_K, 0, skip, value)
}

const fn allow() -> sock_filter {
    line(libc::BPF_RET | libc::BPF_K, 0, 0, ALLOW)
}

/// A call, the offset of an argument, and the value of the argument with which the call is let through.
type Checked = (c_long, u32, u32);

/// Returns the calls that the launcher makes with certain arguments.
fn checked(process: u32) -> [Checked; 5] {
    let dispatch = PR_SET_SYSCALL_USER_DISPATCH as u32;
    [
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
    ]
}

/// Returns the lines in front of the program's own.
fn preface(always: &[c_long], checked: &[Checked], texts: &[Range<usize>]) -> Vec<sock_filter> {
    let mut lines = vec![load(NUMBER)];
    for &number in always {
        lines.extend([unless_equal(number as u32, 1), allow()]);
    }
    for &(number, argument, value) in checked {
        lines.extend([
            unless_equal(number as u32, 4),
            load(argument),
            unless_equal(value, 1),
            allow(),
            load(NUMBER),
        ]);
    }
    // A jump over more lines would be too far.
    let mut own = vec![load(NUMBER)];
    for number in OWN {
        own.extend([unless_equal(number as u32, 1), allow()]);
    }
    let rest = own.len() as u8;
    for text in texts.iter().take(3) {
        lines.extend([
            load(RIP_HIGH),
            unless_equal((text.start >> 32) as u32, rest + 4),
            load(RIP),
            unless_above(libc::BPF_JGE, text.start as u32, rest + 2),
            // The instruction pointer that a filter sees is behind the call.
            unless_above(libc::BPF_JGT, (text.end - 1) as u32, 1),
            line(libc::BPF_JMP | libc::BPF_JA, 0, 0, rest.into()),
        ]);
        lines.extend_from_slice(&own);
    }
    let len = lines.len() as u8;
    // In another architecture, the same numbers stand for other calls.
    lines.splice(
        0..0,
        [load(ARCHITECTURE), unless_equal(AUDIT_ARCH_X86_64, len)],
    );
    lines
}

/// Reads a structure of the program, if it is readable.
fn take<T: Copy>(at: usize) -> Option<T> {
    let last = at.checked_add(size_of::<T>() - 1)?;
    let is_there = host::probe::is_readable(at as u64) && host::probe::is_readable(last as u64);
    // SAFETY: the memory is readable, and the types that are read here are integers and pointers.
    is_there.then(|| unsafe { (at as *const T).read_unaligned() })
}

/// Returns the lines of the filter that the call installs. `None` if the filter is not valid: the kernel says what is
/// wrong with it.
fn given(number: c_long, a: &[usize; 6]) -> Option<Vec<sock_filter>> {
    let is_filter = match number {
        libc::SYS_prctl => a[0] == libc::PR_SET_SECCOMP as usize && a[1] == SECCOMP_MODE_FILTER,
        _ => a[0] == SECCOMP_SET_MODE_FILTER,
    };
    if !is_filter {
        return None;
    }
    let given = take::<sock_fprog>(a[2])?;
    let (first, count) = (given.filter as usize, usize::from(given.len));
    let line = |index| take::<sock_filter>(first.wrapping_add(index * size_of::<sock_filter>()));
    let is_possible = (1..=LONGEST).contains(&count);
    is_possible
        .then(|| (0..count).map(line).collect())
        .flatten()
}

/// Installs the program's lines behind ours; or the program's alone, if both are too long together.
unsafe fn install(
    ours: Vec<sock_filter>,
    theirs: &[sock_filter],
    number: c_long,
    mut a: [usize; 6],
) -> isize {
    let is_for_all =
        number == libc::SYS_seccomp && a[1] & libc::SECCOMP_FILTER_FLAG_TSYNC as usize != 0;
    let mut lines = ours;
    lines.extend_from_slice(theirs);
    let fits = lines.len() <= LONGEST;
    // A thread that begins later may have inherited the filter.
    if is_for_all || !host::service_thread::is_served() {
        if fits {
            host::service_thread::forbid_files();
        } else {
            host::service_thread::forbid_calls();
        }
    }
    let filter = sock_fprog {
        len: lines.len() as u16,
        filter: lines.as_mut_ptr(),
    };
    if fits {
        a[2] = &raw const filter as usize;
    }
    // SAFETY: the program's arguments, and a filter that lives until the kernel has copied it.
    unsafe { system_call(number, a) }
}

/// Does prctl(2) and seccomp(2) of a launched program. `None` if the program is to make the call itself.
pub(crate) unsafe fn launched(number: c_long, a: [usize; 6]) -> Option<isize> {
    let theirs = given(number, &a)?;
    let texts = TEXTS.get().map_or(&[][..], Vec::as_slice);
    let ours = preface(&LAUNCHERS, &checked(std::process::id()), texts);
    if let Some(launcher) = launcher::get() {
        (launcher.stop_rewriting)();
    }
    // SAFETY: the caller's arguments.
    Some(unsafe { install(ours, &theirs, number, a) })
}

/// Does the same for a preloaded program.
pub(crate) unsafe fn preloaded(number: c_long, a: [usize; 6]) -> Option<isize> {
    if !crate::is_preloaded() {
        return None;
    }
    let theirs = given(number, &a)?;
    let ours = preface(&ALWAYS, &[], &[host::system::site()]);
    actions::filtered();
    // SAFETY: the caller's arguments.
    Some(unsafe { install(ours, &theirs, number, a) })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns what a filter answers to a call.
    fn verdict(
        lines: &[sock_filter],
        architecture: u32,
        (number, first): (c_long, u32),
        rip: usize,
    ) -> Option<u32> {
        let mut at = 0;
        let mut a = 0;
        loop {
            let l = lines.get(at)?;
            at += 1;
            match u32::from(l.code) {
                code if code == libc::BPF_LD | libc::BPF_W | libc::BPF_ABS => {
                    a = match l.k {
                        NUMBER => number as u32,
                        RIP => rip as u32,
                        RIP_HIGH => (rip >> 32) as u32,
                        ARCHITECTURE => architecture,
                        _ => first,
                    };
                }
                code if code == libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K => {
                    at += usize::from(if a == l.k { l.jt } else { l.jf });
                }
                code if code == libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K => {
                    at += usize::from(if a >= l.k { l.jt } else { l.jf });
                }
                code if code == libc::BPF_JMP | libc::BPF_JGT | libc::BPF_K => {
                    at += usize::from(if a > l.k { l.jt } else { l.jf });
                }
                code if code == libc::BPF_JMP | libc::BPF_JA => at += l.k as usize,
                _ => return Some(l.k),
            }
        }
    }

    #[test]
    fn only_what_is_ours_is_allowed_in_front() {
        const FILE: usize = 0x5555_4000_1000;
        const LIBRARY: usize = 0x7fff_e000_0000;
        let texts = [FILE..FILE + 0x1000, LIBRARY..LIBRARY + 0x2000];
        let lines = preface(&LAUNCHERS, &checked(77), &texts);
        let program = 0x40_1000;
        let rows = [
            (libc::SYS_getpid, 0, program, Some(ALLOW)),
            (libc::SYS_tgkill, 77, program, Some(ALLOW)),
            (libc::SYS_tgkill, 78, program, None),
            (libc::SYS_tgkill, 78, FILE, None),
            (libc::SYS_prctl, 59, program, Some(ALLOW)),
            (libc::SYS_prctl, 22, program, None),
            (libc::SYS_openat, 77, program, None),
            (libc::SYS_openat, 77, LIBRARY, None),
            (libc::SYS_mmap, 0, program, None),
            (libc::SYS_mmap, 0, FILE - 1, None),
            (libc::SYS_mmap, 0, FILE, Some(ALLOW)),
            (libc::SYS_mmap, 0, FILE + 0xfff, Some(ALLOW)),
            (libc::SYS_mmap, 0, FILE + 0x1000, None),
            (libc::SYS_mmap, 0, LIBRARY + 0x1fff, Some(ALLOW)),
            (libc::SYS_mmap, 0, LIBRARY + 0x2000, None),
            (libc::SYS_mmap, 0, LIBRARY + (1 << 32), None),
            (libc::SYS_memfd_create, 0, LIBRARY, Some(ALLOW)),
        ];
        for (number, first, rip, want) in rows {
            let got = verdict(&lines, AUDIT_ARCH_X86_64, (number, first), rip);
            assert_eq!(got, want, "{number} {first} {rip:#x}");
        }
        assert_eq!(verdict(&lines, 0x4000_0003, (39, 0), FILE), None);
    }

    #[test]
    fn a_preloaded_program_shares_locks_and_what_the_kernel_does_for_it() {
        let site = host::system::site();
        let lines = preface(&ALWAYS, &[], std::slice::from_ref(&site));
        let (ours, other) = (site.start, take::<usize> as *const () as usize);
        let rows = [
            (libc::SYS_futex, other, Some(ALLOW)),
            (libc::SYS_restart_syscall, other, Some(ALLOW)),
            (libc::SYS_rt_sigreturn, other, Some(ALLOW)),
            (libc::SYS_epoll_wait, ours, Some(ALLOW)),
            (libc::SYS_munmap, ours, Some(ALLOW)),
            (libc::SYS_rt_sigprocmask, ours, Some(ALLOW)),
            (libc::SYS_openat, ours, None),
            (libc::SYS_execve, ours, None),
            (libc::SYS_munmap, ours - 1, None),
            (libc::SYS_munmap, ours + 1, None),
            (libc::SYS_read, other, None),
        ];
        for (number, rip, want) in rows {
            let got = verdict(&lines, AUDIT_ARCH_X86_64, (number, 0), rip);
            assert_eq!(got, want, "{number} {rip:#x}");
        }
    }

    #[test]
    fn what_is_no_filter_is_left_to_the_kernel() {
        let mut program = [allow()];
        let good = sock_fprog {
            len: 1,
            filter: program.as_mut_ptr(),
        };
        let none = sock_fprog { len: 0, ..good };
        let bad = sock_fprog {
            filter: std::ptr::without_provenance_mut(8),
            ..good
        };
        let call = |operation: usize, program: usize| {
            let arguments = [operation, 0, program, 0, 0, 0];
            given(libc::SYS_seccomp, &arguments).map(|lines| lines.len())
        };
        assert_eq!(call(1, &raw const good as usize), Some(1));
        assert_eq!(call(1, &raw const none as usize), None);
        assert_eq!(call(1, &raw const bad as usize), None);
        assert_eq!(call(1, 0), None);
        assert_eq!(call(1, usize::MAX - 3), None);
        assert_eq!(call(2, &raw const good as usize), None);
        let prctl = [22, 2, &raw const good as usize, 0, 0, 0];
        assert!(given(libc::SYS_prctl, &prctl).is_some());
        let mut program = [allow(); LONGEST + 1];
        let long = sock_fprog {
            len: program.len() as u16,
            filter: program.as_mut_ptr(),
        };
        assert_eq!(call(1, &raw const long as usize), None);
    }

    #[test]
    fn code_of_files_is_found() {
        let file = "7f00aa001000-7f00aa003000 r-xp 00001000 fe:00 1234   /lib/libc.so.6";
        let own = Path::new("/opt/a program");
        assert_eq!(text(file, own), Some(0x7f00_aa00_1000..0x7f00_aa00_3000));
        let file = "5500aa001000-5500aa003000 r-xp 00001000 fe:00 1234   /opt/a program";
        assert_eq!(text(file, own), Some(0x5500_aa00_1000..0x5500_aa00_3000));
        for other in [
            "7f00aa001000-7f00aa003000 r-xp 00001000 fe:00 1234   /lib/libm.so.6",
            "7f00aa001000-7f00aa003000 r--p 00001000 fe:00 1234   /lib/libc.so.6",
            "7ffd00001000-7ffd00003000 r-xp 00000000 00:00 0      [vdso]",
            "7efffffff000-7f0100003000 r-xp 00001000 fe:00 1234   /lib/libc.so.6",
            "",
        ] {
            assert_eq!(text(other, own), None, "{other}");
        }
        note_texts();
        let here = note_texts as *const () as usize;
        assert!(TEXTS.get().unwrap().iter().any(|text| text.contains(&here)));
    }
}
