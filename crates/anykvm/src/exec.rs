//! `anykvm exec`: starts a VMM in which `/dev/kvm` is anykvm.
//!
//! A dynamically linked program gets this very file as a preloaded library. What cannot work is
//! refused before it starts, since a program without the library would use a real `/dev/kvm`.

use std::{
    ffi::{OsStr, OsString},
    fs::File,
    io::Read,
    os::unix::{ffi::OsStrExt, fs::PermissionsExt, process::CommandExt},
    path::{Path, PathBuf},
    process::Command,
};

use crate::{cli::ExecArgs, error::BootError};

const PRELOAD: &str = "LD_PRELOAD";
/// Interpreter lines that lead to each other.
const MAX_SCRIPTS: usize = 4;

/// Replaces this process by the VMM; returns only if that is not possible.
pub(crate) fn exec(args: &ExecArgs) -> Result<(u8, Option<String>), BootError> {
    let mut command = prepare(&args.command).map_err(BootError::Usage)?;
    let name = command.get_program().display().to_string();
    if !args.quiet {
        let version = env!("CARGO_PKG_VERSION");
        eprintln!("anykvm: {name} runs with anykvm {version} in place of /dev/kvm");
    }
    let error = command.exec();
    Err(BootError::Usage(format!("cannot start {name}: {error}")))
}

/// The VMM with the library in it.
pub(crate) fn prepare(command: &[OsString]) -> Result<Command, String> {
    let (name, arguments) = command.split_first().ok_or("no program was named")?;
    let program = find(name)?;
    check(&program)?;
    let mut command = Command::new(&program);
    command.arg0(name).args(arguments);
    command.env(PRELOAD, preload(std::env::var_os(PRELOAD))?);
    Ok(command)
}

/// The program as a shell would find it.
pub(crate) fn find(name: &OsStr) -> Result<PathBuf, String> {
    if name.as_bytes().contains(&b'/') {
        return Ok(PathBuf::from(name));
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .map(|folder| folder.join(name))
        .find(|file| {
            file.metadata()
                .is_ok_and(|m| m.is_file() && m.permissions().mode() & 0o111 != 0)
        })
        .ok_or_else(|| format!("{}: no such program in PATH", name.display()))
}

/// LD_PRELOAD with this file first, so that another library's `ioctl` comes after ours.
fn preload(others: Option<OsString>) -> Result<OsString, String> {
    let own = std::env::current_exe().map_err(|e| format!("cannot find my own file: {e}"))?;
    if own
        .as_os_str()
        .as_bytes()
        .iter()
        .any(|b| b": \t\n".contains(b))
    {
        return Err(format!(
            "LD_PRELOAD cannot name {}: please move it to a path without spaces and colons",
            own.display()
        ));
    }
    let mut list = own.into_os_string();
    if let Some(others) = others.filter(|others| !others.is_empty()) {
        list.push(":");
        list.push(others);
    }
    Ok(list)
}

/// What an executable file is to the loader.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Loaded by this program interpreter.
    Dynamic(PathBuf),
    /// Without one.
    Static,
    /// Starts with `#!` and this program.
    Script(PathBuf),
    /// An ELF file for another machine.
    Foreign,
    /// Something else.
    Unknown,
}

/// Refuses what would start without the library.
pub(crate) fn check(program: &Path) -> Result<(), String> {
    let mut file = program.to_path_buf();
    for _ in 0..MAX_SCRIPTS {
        let name = file.display();
        let mode = file
            .metadata()
            .map_err(|e| format!("{name}: {e}"))?
            .permissions()
            .mode();
        if mode & 0o6000 != 0 {
            return Err(format!(
                "{name} is set-user-ID or set-group-ID, and such programs are started without \
                 foreign libraries"
            ));
        }
        match kind(&file).map_err(|e| format!("{name}: {e}"))? {
            Kind::Dynamic(loader) if is_glibc(&loader) => return Ok(()),
            Kind::Dynamic(loader) => {
                return Err(format!(
                    "{name} is made for another C library than anykvm ({})",
                    loader.display()
                ));
            }
            Kind::Static => {
                return Err(format!(
                    "{name} is statically linked, which anykvm exec does not support yet: \
                     please use a dynamically linked build"
                ));
            }
            Kind::Foreign => return Err(format!("{name} is not a 64-bit x86 program")),
            Kind::Unknown => return Err(format!("{name} is not a program")),
            Kind::Script(interpreter) => file = interpreter,
        }
    }
    Err(format!("{}: too many interpreters", program.display()))
}

fn is_glibc(loader: &Path) -> bool {
    loader
        .file_name()
        .is_some_and(|name| name.as_bytes().starts_with(b"ld-linux-x86-64"))
}

/// Looks at the head of an executable file.
pub(crate) fn kind(path: &Path) -> std::io::Result<Kind> {
    const ENOUGH: u64 = 1 << 20;
    let mut head = Vec::new();
    File::open(path)?.take(ENOUGH).read_to_end(&mut head)?;
    Ok(kind_of(&head))
}

fn kind_of(head: &[u8]) -> Kind {
    if let Some(line) = head.strip_prefix(b"#!") {
        let line = line.split(|b| *b == b'\n').next().unwrap_or_default();
        let mut words = line
            .split(|b| b.is_ascii_whitespace())
            .filter(|word| !word.is_empty());
        return words.next().map_or(Kind::Unknown, |word| {
            Kind::Script(PathBuf::from(OsStr::from_bytes(word)))
        });
    }
    if !head.starts_with(b"\x7fELF") {
        return Kind::Unknown;
    }
    elf_kind(head).unwrap_or(Kind::Foreign)
}

/// `None` for a file that is not for x86-64 or that ends too soon.
fn elf_kind(head: &[u8]) -> Option<Kind> {
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
            return Some(Kind::Dynamic(PathBuf::from(OsStr::from_bytes(path))));
        }
    }
    Some(Kind::Static)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_of_files() {
        let own = kind(Path::new("/proc/self/exe")).unwrap();
        assert!(
            matches!(own, Kind::Dynamic(ref loader) if is_glibc(loader)),
            "{own:?}"
        );
        assert_eq!(
            kind_of(b"#! /bin/sh -e\necho"),
            Kind::Script(PathBuf::from("/bin/sh"))
        );
        assert_eq!(kind_of(b"#!\n"), Kind::Unknown);
        assert_eq!(kind_of(b"hello"), Kind::Unknown);
        assert_eq!(kind_of(b"\x7fELF\x01"), Kind::Foreign);
        assert_eq!(kind_of(b"\x7fELF\x02"), Kind::Foreign);
    }

    #[test]
    fn an_existing_preload_stays() {
        let list = preload(Some("/lib/other.so".into())).unwrap();
        let list = list.to_str().unwrap();
        assert!(list.ends_with(":/lib/other.so"), "{list}");
        assert!(
            !preload(Some(OsString::new()))
                .unwrap()
                .to_str()
                .unwrap()
                .ends_with(':')
        );
    }

    #[test]
    fn programs_are_found_in_path() {
        assert_eq!(find(OsStr::new("./x")), Ok(PathBuf::from("./x")));
        assert!(find(OsStr::new("sh")).is_ok());
        assert!(find(OsStr::new("no-such-program-here")).is_err());
    }
}
