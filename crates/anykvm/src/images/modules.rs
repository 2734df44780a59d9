//! Kernel modules for the initramfs: found beside the kernel, in the order in which they load.
//!
//! A package that was only unpacked has no `modules.dep`. But each module says what it needs (`depends=` in its
//! `.modinfo` section).

use std::collections::BTreeMap;
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::error::BootError;

/// Maximum depth of the search in folders. Links are not followed.
const DEPTH_MAX: u32 = 16;

/// A module ready for `insmod`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Module {
    pub(super) name: String,
    /// The module's content, decompressed.
    pub(super) bytes: Vec<u8>,
}

impl Module {
    /// Returns the module's path in the initramfs.
    pub(super) fn guest_path(&self) -> String {
        format!("/lib/modules/{}.ko", self.name)
    }
}

/// Returns the modules named in `wanted` and all that they need, in the order in which they have to load. A module that
/// is not found counts as built in: if it is not, the kernel does without it, or the guest says what is missing.
pub(crate) fn modules(kernel: &Path, wanted: &[&str]) -> Result<Vec<Module>, BootError> {
    let Some(folder) = folder(kernel).filter(|_| !wanted.is_empty()) else {
        return Ok(Vec::new());
    };
    let mut files = BTreeMap::new();
    collect(&folder, DEPTH_MAX, &mut files);
    let mut loaded = Vec::new();
    for name in wanted {
        add(name, &files, &mut loaded, DEPTH_MAX)?;
    }
    Ok(loaded)
}

/// Returns what to tell a user whose kernel turns out to lack a module that was not found here.
pub(crate) fn missing_module(kernel: &Path, name: &str, loaded: &[Module]) -> Option<String> {
    if loaded.iter().any(|module| module.name == name) {
        return None;
    }
    let places = match folders(kernel) {
        Some((release, places)) => {
            let places: Vec<String> = places.iter().map(|p| p.display().to_string()).collect();
            format!(
                "modules for {release} are looked for in {}",
                places.join(" and ")
            )
        }
        None => "modules are looked for beside a kernel that is called vmlinuz-RELEASE, in \
                 ../lib/modules/RELEASE"
            .to_owned(),
    };
    Some(format!(
        "no {name} in this kernel, so it sees no disk; {places}"
    ))
}

/// Returns the kernel's release and the folders that may have its modules. `…/boot/vmlinuz-R` belongs to
/// `…/lib/modules/R`. If the release is known by the kernel's name or header, the machine's own modules may fit, too.
fn folders(kernel: &Path) -> Option<(String, Vec<PathBuf>)> {
    let kernel = fs::canonicalize(kernel).ok()?;
    let by_name = kernel
        .file_name()?
        .to_str()?
        .strip_prefix("vmlinuz-")
        .map(str::to_owned);
    let release = by_name.or_else(|| release_in_header(&kernel))?;
    let folder = kernel.parent()?;
    let mut roots = Vec::new();
    roots.extend(folder.parent());
    roots.push(Path::new("/"));
    let mut places = Vec::new();
    for root in roots {
        for modules in ["lib/modules", "usr/lib/modules"] {
            let place = root.join(modules).join(&release);
            if !places.contains(&place) {
                places.push(place);
            }
        }
    }
    Some((release, places))
}

/// Returns the release in a bzImage's header: it is at 0x200 plus the offset in 0x20e (Linux' boot protocol).
fn release_in_header(kernel: &Path) -> Option<String> {
    let mut start = vec![0; 1 << 16];
    let len = fs::File::open(kernel).ok()?.read(&mut start).ok()?;
    let start = start.get(..len)?;
    if start.get(0x202..0x206)? != b"HdrS" {
        return None;
    }
    let at = usize::from(u16::from_le_bytes(
        start.get(0x20e..0x210)?.try_into().ok()?,
    ));
    let text = start.get(at.checked_add(0x200)?..)?;
    let end = text.iter().position(|byte| !byte.is_ascii_graphic())?;
    let release = String::from_utf8(text.get(..end)?.to_vec()).ok()?;
    (at != 0 && !release.is_empty() && !release.contains('/')).then_some(release)
}

fn folder(kernel: &Path) -> Option<PathBuf> {
    let (_, places) = folders(kernel)?;
    places.into_iter().find(|place| place.is_dir())
}

fn collect(folder: &Path, depth: u32, files: &mut BTreeMap<String, PathBuf>) {
    let Some(depth) = depth.checked_sub(1) else {
        return;
    };
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            collect(&path, depth, files);
        } else if let Some((name, "" | ".xz" | ".zst" | ".gz")) = path
            .file_name()
            .and_then(|name| name.to_str())
            .and_then(|name| name.split_once(".ko"))
        {
            files.insert(name.replace('-', "_"), path);
        }
    }
}

fn add(
    name: &str,
    files: &BTreeMap<String, PathBuf>,
    loaded: &mut Vec<Module>,
    depth: u32,
) -> Result<(), BootError> {
    let name = name.replace('-', "_");
    let (Some(path), Some(depth)) = (files.get(&name), depth.checked_sub(1)) else {
        return Ok(());
    };
    if loaded.iter().any(|module| module.name == name) {
        return Ok(());
    }
    let bytes = read(path)?;
    for needed in needs(&bytes) {
        add(&needed, files, loaded, depth)?;
    }
    // The module is in the list already only if it needs itself.
    if loaded.iter().all(|module| module.name != name) {
        loaded.push(Module { name, bytes });
    }
    Ok(())
}

fn read(path: &Path) -> Result<Vec<u8>, BootError> {
    let unreadable = |source| BootError::Unreadable {
        what: "module",
        path: path.into(),
        source,
    };
    let program = match path.extension().and_then(|extension| extension.to_str()) {
        Some("xz") => "xz",
        Some("zst") => "zstd",
        Some("gz") => "gzip",
        _ => return fs::read(path).map_err(unreadable),
    };
    let output = Command::new(program)
        .arg("-dc")
        .arg(path)
        .output()
        .map_err(|error| {
            let text = format!("{program} cannot be run ({error}): please install it");
            unreadable(std::io::Error::other(text))
        })?;
    if output.status.success() {
        return Ok(output.stdout);
    }
    Err(unreadable(std::io::Error::other(format!(
        "{program} failed"
    ))))
}

/// Returns the names in the `depends=` string, which commas separate.
fn needs(module: &[u8]) -> Vec<String> {
    const KEY: &[u8] = b"\0depends=";
    let Some(at) = module.windows(KEY.len()).position(|bytes| bytes == KEY) else {
        return Vec::new();
    };
    let rest = module.get(at + KEY.len()..).unwrap_or_default();
    let names = rest.split(|byte| *byte == 0).next().unwrap_or_default();
    String::from_utf8_lossy(names)
        .split(',')
        .filter(|name| !name.is_empty())
        .map(str::to_owned)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(name: &str, files: &[(&str, &[u8])]) -> PathBuf {
        let root = std::env::temp_dir().join(format!("anykvm-{name}-{}", std::process::id()));
        for (path, content) in files {
            let path = root.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }
        root
    }

    #[test]
    fn what_is_needed_comes_first_and_once() {
        let root = tree(
            "modules",
            &[
                ("boot/vmlinuz-9.9", b""),
                (
                    "lib/modules/9.9/kernel/a/disk.ko",
                    b"x\0depends=ring,core-x\0y",
                ),
                ("lib/modules/9.9/kernel/a/ring.ko", b"x\0depends=core_x\0"),
                ("lib/modules/9.9/kernel/b/core-x.ko", b"x\0depends=\0"),
                // A circle of modules ends, and so does a string without an end.
                ("lib/modules/9.9/kernel/c/one.ko", b"\0depends=two"),
                ("lib/modules/9.9/kernel/c/two.ko", b"\0depends=one"),
                ("lib/modules/9.9/modules.order", b""),
            ],
        );
        let kernel = root.join("boot/vmlinuz-9.9");
        let names = |wanted: &[&str]| -> Vec<String> {
            let modules = modules(&kernel, wanted).unwrap();
            modules.into_iter().map(|module| module.name).collect()
        };
        assert_eq!(names(&["disk", "ring"]), ["core_x", "ring", "disk"]);
        assert_eq!(names(&["builtin"]), [""; 0]);
        assert_eq!(names(&["one"]).len(), 2);
        assert_eq!(modules(&root.join("boot/bzImage"), &["disk"]).unwrap(), []);
        fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn a_compressed_module_that_is_not_one_is_reported() {
        let root = tree("badmodule", &[("m.ko.gz", b"not gzip")]);
        assert!(read(&root.join("m.ko.gz")).is_err());
        fs::remove_dir_all(root).unwrap();
    }
}
