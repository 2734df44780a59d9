//! Files that describe the machine's own KVM, in place of which scripts and VMMs see ours: the processor's flag in
//! `/proc/cpuinfo`, if the processor shows neither VMX nor SVM, and parameters of the modules.

use std::borrow::Cow;

use libc::{c_char, c_int, c_void};

use crate::cpuid::{self, Vendor};
use crate::next::next;

const CPUINFO: &std::ffi::CStr = c"/proc/cpuinfo";
/// Parameters of the modules: guests have performance counters, and no local APIC is the processor's (AVIC, APICv).
const PARAMETERS: &[(&std::ffi::CStr, &[u8])] = &[
    (c"/sys/module/kvm/parameters/enable_pmu", b"Y\n"),
    (c"/sys/module/kvm_amd/parameters/avic", b"N\n"),
    (c"/sys/module/kvm_intel/parameters/enable_apicv", b"N\n"),
];

/// A file that is shown in place of the machine's.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Shown {
    /// `/proc/cpuinfo` with the flag of this vendor.
    Cpuinfo(Vendor),
    /// One of [`PARAMETERS`], which has this text.
    Parameter(&'static [u8]),
}

/// Returns the file that a program sees in place of this one, if it opens it to read only.
///
/// # Safety
///
/// `path` is null or a C string.
pub(crate) unsafe fn wanted(path: *const c_char, flags: c_int) -> Option<Shown> {
    if path.is_null() || flags & libc::O_ACCMODE != libc::O_RDONLY || flags & libc::O_PATH != 0 {
        return None;
    }
    if !crate::is_active() || crate::trace::is_real() {
        return None;
    }
    // SAFETY: a C string by this function's contract.
    let path = unsafe { std::ffi::CStr::from_ptr(path) };
    match path {
        _ if path == CPUINFO => cpuid::lacking().map(Shown::Cpuinfo),
        _ => {
            let found = PARAMETERS.iter().find(|(name, _)| *name == path);
            found.map(|(_, text)| Shown::Parameter(text))
        }
    }
}

/// Returns true for the name of a parameter of one of the modules.
pub(crate) fn is_module_s(name: &[u8]) -> bool {
    name.starts_with(b"/sys/module/kvm")
}

/// Opens the file. `None` if that is impossible: the machine's own file is used then.
pub(crate) fn open(shown: Shown, flags: c_int) -> Option<c_int> {
    let text: Cow<'_, [u8]> = match shown {
        Shown::Cpuinfo(Vendor::Intel) => with_flag(&read()?, b" vmx").into(),
        Shown::Cpuinfo(Vendor::Amd) => with_flag(&read()?, b" svm").into(),
        Shown::Parameter(text) => text.into(),
    };
    let keeps = flags & libc::O_CLOEXEC == 0;
    let name = c"anykvm".as_ptr() as usize;
    let close = if keeps { 0 } else { libc::MFD_CLOEXEC as usize };
    // SAFETY: a C string; then a buffer that lives for the call.
    unsafe {
        let fd = host::system::call(libc::SYS_memfd_create, [name, close]).ok()?;
        let mut at = 0;
        while at < text.len() {
            let arguments = [fd, text.as_ptr() as usize + at, text.len() - at, at];
            match host::system::call(libc::SYS_pwrite64, arguments) {
                Ok(n) if n > 0 => at += n,
                _ => {
                    let _ = host::system::call(libc::SYS_close, [fd]);
                    return None;
                }
            }
        }
        Some(fd as c_int)
    }
}

/// Reads the machine's own `/proc/cpuinfo` by system calls, because the C library's functions are ours here.
fn read() -> Option<Vec<u8>> {
    let at = libc::AT_FDCWD as usize;
    let flags = (libc::O_RDONLY | libc::O_CLOEXEC) as usize;
    let mut text = Vec::new();
    // SAFETY: a C string; then a buffer of that length.
    unsafe {
        let fd =
            host::system::call(libc::SYS_openat, [at, CPUINFO.as_ptr() as usize, flags]).ok()?;
        let mut piece = vec![0u8; 1 << 16];
        let read = loop {
            let arguments = [fd, piece.as_mut_ptr() as usize, piece.len()];
            match host::system::call(libc::SYS_read, arguments) {
                Ok(0) => break Some(text),
                Ok(n) => text.extend_from_slice(&piece[..n]),
                Err(_) => break None,
            }
        };
        let _ = host::system::call(libc::SYS_close, [fd]);
        read
    }
}

/// Returns the text with one more word in each line of flags.
fn with_flag(text: &[u8], flag: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(text.len() + 4096);
    for line in text.split_inclusive(|byte| *byte == b'\n') {
        let (body, end) = match line.strip_suffix(b"\n") {
            Some(body) => (body, &b"\n"[..]),
            None => (line, &b""[..]),
        };
        out.extend_from_slice(body);
        if body.starts_with(b"flags\t") {
            out.extend_from_slice(flag);
        }
        out.extend_from_slice(end);
    }
    out
}

macro_rules! fopen {
    ($($name:ident)*) => { $(
        /// The C library's function of this name, which opens files without `open`.
        ///
        /// # Safety
        ///
        /// The requirements of that function.
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C" fn $name(path: *const c_char, mode: *const c_char) -> *mut c_void {
            // SAFETY: the caller's strings.
            unsafe {
                let reads = !mode.is_null() && *mode == b'r' as c_char
                    && !std::ffi::CStr::from_ptr(mode).to_bytes().contains(&b'+');
                if reads && let Some(shown) = wanted(path, libc::O_RDONLY)
                    && let Some(fd) = open(shown, libc::O_CLOEXEC)
                {
                    return libc::fdopen(fd, mode).cast();
                }
            }
            next!($name(path => *const c_char, mode => *const c_char) -> *mut c_void)
        }
    )* };
}

fopen! { fopen fopen64 }

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_processor_has_the_flag() {
        let text = b"processor\t: 0\nflags\t\t: fpu vme\nbugs\t\t: a\n\nflags\t\t: fpu";
        let want = b"processor\t: 0\nflags\t\t: fpu vme svm\nbugs\t\t: a\n\nflags\t\t: fpu svm";
        assert_eq!(with_flag(text, b" svm"), want);
        assert_eq!(with_flag(b"", b" svm"), b"");
    }
}
