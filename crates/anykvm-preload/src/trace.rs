//! `anykvm trace`: a line of JSON for each KVM call, on anykvm or on a real device.
//!
//! The command names the file in the environment. A line is composed on the stack and written by one call, so that
//! lines of several threads and processes do not mix. Nothing is allocated, because a VMM's signal handler may make
//! calls too.

use std::ffi::CStr;
use std::fmt::{self, Write};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use kvm_abi::trace::{When, write_argument, write_call, write_exit};
use kvm_abi::{FdKind, Object};
use libc::{c_int, c_ulong};

use crate::next::system_call;

/// `START:DEVICE:FILE`: nanoseconds of CLOCK_MONOTONIC at which the trace began, `real` or `anykvm`.
const VARIABLE: &CStr = c"ANYKVM_TRACE";
/// Maximum length of a line in bytes. A longer line is cut off and says so.
const LINE: usize = 12 << 10;
/// Maximum number of vCPU descriptors of a real device whose kvm_run is read.
const MAPPED: usize = 1024;
/// Size of kvm_run and of the data of port accesses.
const RUN_SIZE: usize = 2 * 4096;
const KVM_RUN: c_ulong = kvm_abi::numbers::KVM_RUN as c_ulong;

/// Where the trace goes.
#[derive(Debug)]
pub(crate) struct Trace {
    file: c_int,
    start_ns: u64,
    is_real: bool,
}

static TRACE: OnceLock<Option<Trace>> = OnceLock::new();
/// Addresses of kvm_run by descriptor, on a real device.
static RUNS: [AtomicU64; MAPPED] = [const { AtomicU64::new(0) }; MAPPED];

/// Returns the trace, if one is wanted.
pub(crate) fn wanted() -> Option<&'static Trace> {
    TRACE.get_or_init(open).as_ref()
}

/// Returns true if `/dev/kvm` is to be the machine's own.
pub(crate) fn is_real() -> bool {
    wanted().is_some_and(|trace| trace.is_real)
}

fn open() -> Option<Trace> {
    // SAFETY: a C string; the environment is not changed by anykvm.
    let value = unsafe { libc::getenv(VARIABLE.as_ptr()) };
    if value.is_null() {
        return None;
    }
    // SAFETY: getenv gives a C string.
    let value = unsafe { CStr::from_ptr(value) }.to_str().ok()?;
    let mut parts = value.splitn(3, ':');
    let start_ns = parts.next()?.parse().ok()?;
    let is_real = match parts.next()? {
        "real" => true,
        "anykvm" => false,
        _ => return None,
    };
    let path = parts.next()?;
    // The path is the rest of the value.
    let path = path.as_ptr() as usize;
    let flags = libc::O_WRONLY | libc::O_APPEND | libc::O_CREAT | libc::O_CLOEXEC;
    // The file is opened by the system call, because our own `open` asks whether there is a trace.
    // SAFETY: a C string.
    let opened = unsafe {
        system_call(
            libc::SYS_openat,
            [libc::AT_FDCWD as usize, path, flags as usize, 0o644, 0, 0],
        )
    };
    if opened < 0 {
        return None;
    }
    // The descriptor gets a high number, as VMMs may count on low ones.
    const HIGH: usize = 512;
    let duplicate = [
        opened as usize,
        libc::F_DUPFD_CLOEXEC as usize,
        HIGH,
        0,
        0,
        0,
    ];
    // SAFETY: integers.
    let file = unsafe { system_call(libc::SYS_fcntl, duplicate) };
    if file >= 0 {
        // SAFETY: our own descriptor.
        unsafe { system_call(libc::SYS_close, [opened as usize, 0, 0, 0, 0, 0]) };
    }
    Some(Trace {
        file: if file < 0 { opened } else { file } as c_int,
        start_ns,
        is_real,
    })
}

fn now_ns() -> u64 {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: the structure is writable.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// A line that is being composed.
struct Line {
    bytes: [u8; LINE],
    len: usize,
}

impl Write for Line {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        // The end of the line needs room, too.
        const END: usize = 128;
        if text.len() > (LINE - END).saturating_sub(self.len) {
            return Err(fmt::Error);
        }
        self.push(text.as_bytes());
        Ok(())
    }
}

impl Line {
    fn push(&mut self, text: &[u8]) {
        if let Some(place) = self.bytes.get_mut(self.len..self.len + text.len()) {
            place.copy_from_slice(text);
            self.len += text.len();
        }
    }

    /// Writes a part of the line. Returns false, with nothing written, if there is no room for it.
    fn try_part(&mut self, write: impl FnOnce(&mut Self) -> fmt::Result) -> bool {
        let begin = self.len;
        let fits = write(self).is_ok();
        if !fits {
            self.len = begin;
        }
        fits
    }
}

impl Trace {
    /// Makes a KVM call and writes its line.
    pub(crate) fn call(
        &self,
        fd: c_int,
        number: c_ulong,
        argument: usize,
        make: impl FnOnce() -> c_int,
    ) -> c_int {
        let Some(kind) = kind_of(fd) else {
            return make();
        };
        let at = now_ns();
        let mut line = Line {
            bytes: [0; LINE],
            len: 0,
        };
        // A part that does not fit is left out as a whole.
        let mut is_cut = false;
        let _ = self.begin(&mut line, at, fd, kind, number);
        is_cut |= !line
            .try_part(|line| write_argument(line, number as u32, argument as u64, When::Before));
        let result = make();
        // SAFETY: the thread's own errno.
        let errno = unsafe { *libc::__errno_location() };
        let took = now_ns() - at;
        is_cut |= !line.try_part(|line| write_result(line, result, errno));
        if result >= 0 {
            is_cut |= !line
                .try_part(|line| write_argument(line, number as u32, argument as u64, When::After));
        }
        if number == KVM_RUN
            && (result >= 0 || matches!(errno, libc::EINTR | libc::EFAULT))
            && let Some(run) = run_of(fd)
        {
            is_cut |= !line.try_part(|line| write_exit(line, run));
        }
        if is_cut {
            line.push(b",\"cut\":true");
        }
        line.try_part(|line| write!(line, ",\"ns\":{took}"));
        line.push(b"}\n");
        // SAFETY: these are the line's bytes. If the disk is full, the trace has gaps.
        unsafe { libc::write(self.file, line.bytes.as_ptr().cast(), line.len) };
        // SAFETY: the C library's errno of this thread.
        unsafe { *libc::__errno_location() = errno };
        result
    }

    fn begin(
        &self,
        line: &mut Line,
        at: u64,
        fd: c_int,
        kind: FdKind,
        number: c_ulong,
    ) -> fmt::Result {
        let time = at.saturating_sub(self.start_ns);
        let (seconds, rest) = (time / 1_000_000_000, time % 1_000_000_000);
        // SAFETY: no arguments, cannot fail.
        let (process, thread) = unsafe { (libc::getpid(), libc::gettid()) };
        write!(
            line,
            "{{\"time\":{seconds}.{rest:09},\"pid\":{process},\"tid\":{thread},\"fd\":{fd},"
        )?;
        write_call(line, kind, number as u32)
    }
}

fn write_result(line: &mut Line, result: c_int, errno: c_int) -> fmt::Result {
    write!(line, ",\"result\":{result}")?;
    if result >= 0 {
        return Ok(());
    }
    match kvm_abi::Errno::new(errno).static_name() {
        Some(name) => write!(line, ",\"errno\":\"{name}\""),
        None => write!(line, ",\"errno\":{errno}"),
    }
}

/// Returns the address of a vCPU's kvm_run.
fn run_of(fd: c_int) -> Option<u64> {
    if let Ok(Object::Vcpu(vcpu)) = kvm_abi::lookup(fd) {
        return Some(vcpu.run_address());
    }
    let known = RUNS.get(usize::try_from(fd).ok()?)?;
    let address = known.load(Ordering::Relaxed);
    if address != 0 {
        return Some(address);
    }
    // The mapping has kvm_run and the page with the data of port accesses.
    // SAFETY: a new mapping at an address of the kernel's choice.
    let mapped = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            RUN_SIZE,
            libc::PROT_READ,
            libc::MAP_SHARED,
            fd,
            0,
        )
    };
    if mapped == libc::MAP_FAILED {
        return None;
    }
    known.store(mapped as u64, Ordering::Relaxed);
    Some(mapped as u64)
}

/// Notes that these descriptors are about to be closed.
pub(crate) fn closing(first: c_int, last: c_int) {
    if !TRACE.get().is_some_and(Option::is_some) {
        return;
    }
    let first = usize::try_from(first).unwrap_or(0);
    for run in RUNS
        .iter()
        .take((last.max(0) as usize).saturating_add(1))
        .skip(first)
    {
        let address = run.swap(0, Ordering::Relaxed);
        if address != 0 {
            // SAFETY: this is our own mapping. A call that still runs on it would be the VMM's use after close.
            unsafe { libc::munmap(address as *mut _, RUN_SIZE) };
        }
    }
}

/// Returns the descriptor's kind, for one of ours or of a kernel's KVM.
fn kind_of(fd: c_int) -> Option<FdKind> {
    match kvm_abi::lookup(fd) {
        Ok(Object::System) => return Some(FdKind::System),
        Ok(Object::Vm(_)) => return Some(FdKind::Vm),
        Ok(Object::Vcpu(_)) => return Some(FdKind::Vcpu),
        Ok(Object::Device(_)) => return Some(FdKind::Device),
        Err(_) => {}
    }
    let mut path = Path::default();
    write!(path, "/proc/self/fd/{fd}\0").ok()?;
    let mut link = [0u8; 64];
    // SAFETY: a C string, and a buffer of that length.
    let len = unsafe {
        libc::readlink(
            path.bytes.as_ptr().cast(),
            link.as_mut_ptr().cast(),
            link.len(),
        )
    };
    let link = link.get(..usize::try_from(len).ok()?)?;
    let is = |prefix: &[u8]| link.starts_with(prefix);
    if is(b"/dev/kvm") {
        Some(FdKind::System)
    } else if is(b"anon_inode:kvm-vm") {
        Some(FdKind::Vm)
    } else if is(b"anon_inode:kvm-vcpu") {
        Some(FdKind::Vcpu)
    } else if is(b"anon_inode:kvm-") {
        Some(FdKind::Device)
    } else {
        None
    }
}

/// A short path on the stack.
#[derive(Default)]
struct Path {
    bytes: [u8; 32],
    len: usize,
}

impl Write for Path {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let place = self.bytes.get_mut(self.len..self.len + text.len());
        place.ok_or(fmt::Error)?.copy_from_slice(text.as_bytes());
        self.len += text.len();
        Ok(())
    }
}
