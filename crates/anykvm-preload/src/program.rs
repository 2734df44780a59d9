//! What kind of program an executable file is, and how it is started.

use std::ffi::{CString, OsStr, OsString};
use std::fs::File;
use std::io::Read;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// What an executable file is to the loader.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProgramKind {
    /// A program that is loaded by this program interpreter.
    Dynamic(PathBuf),
    /// A program without an interpreter.
    Static,
    /// A script: a file that starts with `#!`, an interpreter, and the interpreter's first argument.
    Script {
        /// The program.
        interpreter: PathBuf,
        /// All words behind the interpreter, as one argument.
        argument: Option<OsString>,
    },
    /// An ELF file for another machine.
    Foreign,
    /// Something else.
    Unknown,
}

/// Returns true for the program interpreter of the C library that this library is linked with.
pub fn is_glibc(loader: &Path) -> bool {
    loader
        .file_name()
        .is_some_and(|name| name.as_bytes().starts_with(b"ld-linux-x86-64"))
}

/// Looks at the head of an executable file.
///
/// # Errors
///
/// Those of reading it.
pub fn kind(path: &Path) -> std::io::Result<ProgramKind> {
    const ENOUGH: u64 = 1 << 20;
    let mut head = Vec::new();
    File::open(path)?.take(ENOUGH).read_to_end(&mut head)?;
    Ok(kind_of(&head))
}

fn kind_of(head: &[u8]) -> ProgramKind {
    if let Some(line) = head.strip_prefix(b"#!") {
        let line = line.split(|b| *b == b'\n').next().unwrap_or_default();
        let line = line.trim_ascii();
        let end = line.iter().position(u8::is_ascii_whitespace);
        let (word, rest) = line.split_at(end.unwrap_or(line.len()));
        let rest = rest.trim_ascii();
        if word.is_empty() {
            return ProgramKind::Unknown;
        }
        return ProgramKind::Script {
            interpreter: PathBuf::from(OsStr::from_bytes(word)),
            argument: (!rest.is_empty()).then(|| OsStr::from_bytes(rest).to_owned()),
        };
    }
    if !head.starts_with(b"\x7fELF") {
        return ProgramKind::Unknown;
    }
    elf_kind(head).unwrap_or(ProgramKind::Foreign)
}

/// Returns the kind of an ELF file. `None` if it is not for x86-64, or ends too soon.
fn elf_kind(head: &[u8]) -> Option<ProgramKind> {
    const CLASS_64: u8 = 2;
    const MACHINE_X86_64: u16 = 62;
    const PT_INTERP: u32 = 3;
    let u16_at = |at: usize| Some(u16::from_le_bytes(head.get(at..at + 2)?.try_into().ok()?));
    let u32_at = |at: usize| Some(u32::from_le_bytes(head.get(at..at + 4)?.try_into().ok()?));
    let u64_at = |at: usize| {
        let bytes = head.get(at..at.checked_add(8)?)?;
        usize::try_from(u64::from_le_bytes(bytes.try_into().ok()?)).ok()
    };
    if *head.get(4)? != CLASS_64 || u16_at(18)? != MACHINE_X86_64 {
        return None;
    }
    let (table, size, count) = (u64_at(32)?, u16_at(54)?, u16_at(56)?);
    for index in 0..usize::from(count) {
        let at = table.checked_add(index * usize::from(size))?;
        if at.checked_add(40)? > head.len() {
            return None;
        }
        if u32_at(at)? == PT_INTERP {
            let begin = u64_at(at + 8)?;
            let path = head.get(begin..begin.checked_add(u64_at(at + 32)?)?)?;
            let path = path.strip_suffix(b"\0").unwrap_or(path);
            return Some(ProgramKind::Dynamic(PathBuf::from(OsStr::from_bytes(path))));
        }
    }
    Some(ProgramKind::Static)
}

/// Returns the program that a shell would find.
pub fn find(name: &OsStr) -> Option<PathBuf> {
    if name.as_bytes().contains(&b'/') {
        return Some(PathBuf::from(name));
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .map(|folder| folder.join(name))
        .find(|file| mode(file).is_some_and(|mode| mode & 0o111 != 0))
}

/// Returns the permissions of an ordinary file.
fn mode(file: &Path) -> Option<u32> {
    let data = file.metadata().ok()?;
    data.is_file().then(|| data.permissions().mode())
}

/// A path by which the next program of this process reaches an open file.
#[derive(Debug)]
pub(crate) struct Opened {
    pub(crate) path: PathBuf,
    /// The descriptor that the path leads to if the file has no name. It stays open.
    _link: Option<OwnedFd>,
}

/// Returns the file's name if it still leads to the file, else the name of a descriptor. `None` if the descriptor is
/// not open.
pub(crate) fn of_descriptor(fd: RawFd) -> Option<Opened> {
    let link = PathBuf::from(format!("/proc/self/fd/{fd}"));
    let file = |path: &Path| {
        let data = path.metadata().ok()?;
        Some((data.dev(), data.ino()))
    };
    let this = file(&link)?;
    let name = link.read_link().ok()?;
    if name.is_absolute() && file(&name) == Some(this) {
        return Some(Opened {
            path: name,
            _link: None,
        });
    }
    // The descriptor itself may be closed when the program begins.
    // SAFETY: a system call without pointers.
    let number = unsafe { libc::fcntl(fd, libc::F_DUPFD, 0) };
    if number < 0 {
        return None;
    }
    // SAFETY: the kernel has just made it.
    let duplicate = unsafe { OwnedFd::from_raw_fd(number) };
    Some(Opened {
        path: PathBuf::from(format!("/proc/self/fd/{number}")),
        _link: Some(duplicate),
    })
}

/// Returns what execveat(2) means by a path. `None` if only the kernel can tell.
pub(crate) fn of_path_at(fd: RawFd, path: &Path, flags: i32) -> Option<Opened> {
    if flags & !libc::AT_EMPTY_PATH != 0 {
        return None;
    }
    if path.as_os_str().is_empty() {
        return (flags & libc::AT_EMPTY_PATH != 0).then(|| of_descriptor(fd))?;
    }
    if path.is_absolute() || fd == libc::AT_FDCWD {
        return Some(Opened {
            path: path.to_owned(),
            _link: None,
        });
    }
    let mut opened = of_descriptor(fd)?;
    opened.path.push(path);
    Some(opened)
}

/// Returns true for a program that gets capabilities from its file. The kernel then tells the dynamic loader to ignore
/// libraries that the environment names (AT_SECURE).
pub fn gains_capabilities(file: &Path) -> bool {
    const NAME: &std::ffi::CStr = c"security.capability";
    let Ok(path) = CString::new(file.as_os_str().as_bytes()) else {
        return false;
    };
    // SAFETY: two strings; the size alone is asked for.
    let size = unsafe { libc::getxattr(path.as_ptr(), NAME.as_ptr(), std::ptr::null_mut(), 0) };
    // SAFETY: calls without pointers.
    let gains_nothing = unsafe {
        // Root has all capabilities, and a process with no_new_privs gets none.
        libc::getuid() == 0 || libc::prctl(libc::PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0) == 1
    };
    size > 0 && !gains_nothing
}

/// Maximum number of scripts that interpret each other.
pub const MAX_SCRIPTS: usize = 4;

/// Returns the program that the kernel would start for a file (for a script, its interpreter), and its kind.
fn started(file: &Path) -> Option<(PathBuf, ProgramKind)> {
    let mut file = file.to_owned();
    for _ in 0..=MAX_SCRIPTS {
        // Programs that run with another user's rights are left alone.
        if mode(&file).is_none_or(|mode| mode & 0o6000 != 0 || mode & 0o111 == 0) {
            return None;
        }
        match kind(&file).ok()? {
            ProgramKind::Script { interpreter, .. } => file = interpreter,
            kind => return Some((file, kind)),
        }
    }
    None
}

/// Returns true for an x86-64 program that a preloaded library would not reach: one that is statically linked, made for
/// another C library, or has capabilities of its own. Also returns true for a script that such a program interprets.
pub fn needs_launcher(file: &Path) -> bool {
    match started(file) {
        Some((_, ProgramKind::Static)) => true,
        Some((file, ProgramKind::Dynamic(loader))) => {
            !is_glibc(&loader) || gains_capabilities(&file)
        }
        _ => false,
    }
}

/// Returns true for whatever can be launched.
pub fn can_be_launched(file: &Path) -> bool {
    matches!(
        started(file),
        Some((_, ProgramKind::Static | ProgramKind::Dynamic(_)))
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;

    #[test]
    fn descriptors_have_paths() {
        let at = |fd, path: &str, flags| of_path_at(fd, Path::new(path), flags).map(|o| o.path);
        let named = File::open("/proc/self/exe").unwrap();
        let folder = File::open("/usr").unwrap();
        let own = std::env::current_exe().unwrap();
        assert_eq!(of_descriptor(named.as_raw_fd()).unwrap().path, own);
        assert_eq!(at(named.as_raw_fd(), "", libc::AT_EMPTY_PATH), Some(own));
        assert_eq!(at(named.as_raw_fd(), "", 0), None);
        assert_eq!(at(-1, "", libc::AT_EMPTY_PATH), None);
        assert_eq!(at(-1, "/bin/sh", 0), Some(PathBuf::from("/bin/sh")));
        let below = Some(PathBuf::from("/usr/bin/env"));
        assert_eq!(at(folder.as_raw_fd(), "bin/env", 0), below);
        let no_follow = libc::AT_SYMLINK_NOFOLLOW;
        assert_eq!(at(folder.as_raw_fd(), "bin/env", no_follow), None);
        assert_eq!(at(libc::AT_FDCWD, "a/b", 0), Some(PathBuf::from("a/b")));
        // The file has no name.
        let memory = host::Memfd::new(c"program", 1).unwrap().into_fd();
        let opened = of_descriptor(memory.as_raw_fd()).unwrap();
        assert_ne!(opened.path, Path::new("/memfd:program (deleted)"));
        assert_eq!(opened.path.metadata().unwrap().len(), 1);
    }

    #[test]
    fn kinds_of_files() {
        let own = kind(Path::new("/proc/self/exe")).unwrap();
        assert!(
            matches!(own, ProgramKind::Dynamic(ref loader) if is_glibc(loader)),
            "{own:?}"
        );
        let script = |interpreter: &str, argument: Option<&str>| ProgramKind::Script {
            interpreter: interpreter.into(),
            argument: argument.map(OsString::from),
        };
        let with_words = kind_of(b"#! /usr/bin/env -S a b \necho");
        assert_eq!(with_words, script("/usr/bin/env", Some("-S a b")));
        assert_eq!(kind_of(b"#!/bin/sh"), script("/bin/sh", None));
        assert_eq!(kind_of(b"#!\n"), ProgramKind::Unknown);
        assert_eq!(kind_of(b"hello"), ProgramKind::Unknown);
        assert_eq!(kind_of(b"\x7fELF\x01"), ProgramKind::Foreign);
        assert_eq!(kind_of(b"\x7fELF\x02"), ProgramKind::Foreign);
    }
}
