//! Which paths are `/dev/kvm`.

use libc::{c_char, c_int};

/// Returns true if `path`, looked up in the folder `dir` as `openat(2)` does, is `/dev/kvm`, and `/dev/kvm` is anykvm
/// in this process.
///
/// # Safety
///
/// `path` is null or a C string.
pub(crate) unsafe fn is_kvm(dir: c_int, path: *const c_char) -> bool {
    if path.is_null() {
        return false;
    }
    // SAFETY: a C string by this function's contract.
    let path = unsafe { std::ffi::CStr::from_ptr(path) }.to_bytes();
    if !path.ends_with(b"kvm") {
        return false;
    }
    let found = if path.starts_with(b"/") {
        parts(path).eq([b"dev".as_slice(), b"kvm"])
    } else {
        parts(path).eq([b"kvm".as_slice()]) && is_dev(dir)
    };
    found && crate::is_active() && !crate::trace::is_real()
}

/// Returns the names in a path. Repeated slashes and "." have no meaning.
fn parts(path: &[u8]) -> impl Iterator<Item = &[u8]> {
    path.split(|byte| *byte == b'/')
        .filter(|part| !part.is_empty() && *part != b".")
}

/// Returns true if relative paths are looked up in `/dev`.
fn is_dev(dir: c_int) -> bool {
    let folder = if dir == libc::AT_FDCWD {
        std::env::current_dir()
    } else {
        std::fs::read_link(format!("/proc/self/fd/{dir}"))
    };
    folder.is_ok_and(|folder| folder.as_os_str() == "/dev")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spellings_of_the_path() {
        let rows: [(&[u8], bool); 6] = [
            (b"/dev/kvm", true),
            (b"//dev///kvm", true),
            (b"/dev/./kvm", true),
            (b"/dev/kvm/x", false),
            (b"/dev/vhost-kvm", false),
            (b"/tmp/dev/kvm", false),
        ];
        for (path, want) in rows {
            let is = parts(path).eq([b"dev".as_slice(), b"kvm"]);
            assert_eq!(is, want, "{}", String::from_utf8_lossy(path));
        }
    }

    #[test]
    fn folders() {
        let dev = std::fs::File::open("/dev").unwrap();
        let etc = std::fs::File::open("/etc").unwrap();
        use std::os::fd::AsRawFd;
        assert!(is_dev(dev.as_raw_fd()));
        assert!(!is_dev(etc.as_raw_fd()));
        assert!(!is_dev(-1));
    }
}
