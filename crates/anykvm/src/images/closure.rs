//! The shared libraries that a program needs: its interpreter and DT_NEEDED, recursively.
//!
//! System V ABI, ELF: program headers and the dynamic section. Files are read, never executed.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// Where Debian and its relatives keep libraries.
const LIBRARY_FOLDERS: [&str; 7] = [
    "/lib/x86_64-linux-gnu",
    "/usr/lib/x86_64-linux-gnu",
    "/lib64",
    "/usr/lib64",
    "/usr/local/lib",
    "/lib",
    "/usr/lib",
];

/// What one ELF file needs.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Needs {
    pub(super) interpreter: Option<String>,
    libraries: Vec<String>,
    run_path: Option<String>,
}

/// Returns the paths of all libraries that the ELF file `bytes`, found at `path`, needs to run.
pub(super) fn closure(path: &Path, bytes: &[u8]) -> BTreeSet<PathBuf> {
    let mut found = BTreeSet::new();
    let mut queue = vec![(path.to_path_buf(), needs(bytes))];
    while let Some((path, needs)) = queue.pop() {
        let interpreter = needs.interpreter.as_ref().map(PathBuf::from);
        let libraries = needs
            .libraries
            .iter()
            .filter_map(|name| find(&path, name, needs.run_path.as_deref()));
        for library in interpreter.into_iter().chain(libraries) {
            if !found.insert(library.clone()) {
                continue;
            }
            // A library that cannot be read is missing in the guest, whose loader names it.
            if let Ok(bytes) = fs::read(&library) {
                queue.push((library, self::needs(&bytes)));
            }
        }
    }
    found
}

fn find(user: &Path, name: &str, run_path: Option<&str>) -> Option<PathBuf> {
    if name.contains('/') {
        return Some(PathBuf::from(name));
    }
    let origin = user.parent().unwrap_or(Path::new("/"));
    let run_paths = run_path.unwrap_or_default().split(':');
    run_paths
        .filter(|folder| !folder.is_empty())
        .map(|folder| folder.replace("$ORIGIN", &origin.to_string_lossy()))
        .chain(LIBRARY_FOLDERS.map(str::to_owned))
        .map(|folder| Path::new(&folder).join(name))
        .find(|path| path.exists())
}

/// Returns what an ELF file needs; nothing if the file is not a 64-bit little-endian ELF file.
pub(super) fn needs(bytes: &[u8]) -> Needs {
    parse(bytes).unwrap_or_default()
}

fn parse(bytes: &[u8]) -> Option<Needs> {
    if bytes.get(..6)? != b"\x7fELF\x02\x01" {
        return None;
    }
    let phoff = usize::try_from(u64_at(bytes, 0x20)?).ok()?;
    let phnum = usize::from(u16::from_le_bytes(bytes.get(0x38..0x3a)?.try_into().ok()?));
    let mut loads = Vec::new();
    let mut dynamic = None;
    let mut needs = Needs::default();
    for i in 0..phnum {
        let header = bytes.get(phoff.checked_add(i * 56)?..)?.get(..56)?;
        let field = |at| u64_at(header, at).and_then(|v| usize::try_from(v).ok());
        let (offset, vaddr, filesz) = (field(8)?, field(16)?, field(32)?);
        match u32::from_le_bytes(header.get(..4)?.try_into().ok()?) {
            1 => loads.push((vaddr, offset, filesz)),
            2 => dynamic = bytes.get(offset..offset.checked_add(filesz)?),
            3 => needs.interpreter = string(bytes, offset),
            _ => {}
        }
    }
    let entries: Vec<(u64, u64)> = dynamic
        .unwrap_or_default()
        .chunks_exact(16)
        .map_while(|entry| Some((u64_at(entry, 0)?, u64_at(entry, 8)?)))
        .take_while(|(tag, _)| *tag != 0)
        .collect();
    let Some((_, strtab)) = entries.iter().find(|(tag, _)| *tag == 5) else {
        return Some(needs);
    };
    let strtab = usize::try_from(*strtab).ok()?;
    let strtab = loads.iter().find_map(|(vaddr, offset, filesz)| {
        let into = strtab.checked_sub(*vaddr).filter(|into| into < filesz)?;
        offset.checked_add(into)
    })?;
    for (tag, value) in entries {
        let at = || string(bytes, strtab.checked_add(usize::try_from(value).ok()?)?);
        match tag {
            1 => needs.libraries.extend(at()),
            // DT_RPATH, DT_RUNPATH
            15 | 29 => needs.run_path = at(),
            _ => {}
        }
    }
    Some(needs)
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    let field = bytes.get(at..at.checked_add(8)?)?;
    Some(u64::from_le_bytes(field.try_into().ok()?))
}

fn string(bytes: &[u8], at: usize) -> Option<String> {
    let rest = bytes.get(at..)?;
    let end = rest.iter().position(|byte| *byte == 0)?;
    String::from_utf8(rest.get(..end)?.to_vec()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_test_program_needs_libc() {
        let path = std::env::current_exe().unwrap();
        let bytes = fs::read(&path).unwrap();
        let needs = needs(&bytes);
        assert!(needs.interpreter.unwrap().contains("ld-linux"));
        let found = closure(&path, &bytes);
        assert!(found.iter().any(|lib| lib.ends_with("libc.so.6")));
        assert!(found.iter().all(|lib| lib.exists()), "{found:?}");
    }

    #[test]
    fn damaged_files_need_nothing_and_do_no_harm() {
        let whole = fs::read(std::env::current_exe().unwrap()).unwrap();
        for len in (0..2048).step_by(7) {
            needs(&whole[..len]);
        }
        for at in 0..1024 {
            let mut damaged = whole[..whole.len().min(1 << 16)].to_vec();
            damaged[at] ^= 0xff;
            needs(&damaged);
        }
        assert_eq!(needs(b"#!/bin/sh"), Needs::default());
    }
}
