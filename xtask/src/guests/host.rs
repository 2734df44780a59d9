//! What the suite takes from the host: files with their libraries, and an i386 busybox.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use super::programs::{BUSYBOX_I386, MODULE};

/// Programs that are compiled on the host, and found below `$OPT`.
const C_PROGRAMS: [(&str, &str); 7] = [
    ("counted", include_str!("counted.c")),
    ("debuggee", include_str!("debuggee.c")),
    ("filters", include_str!("filters.c")),
    ("generated", include_str!("generated.c")),
    ("keys", include_str!("keys.c")),
    ("segments", include_str!("segments.c")),
    ("threads", include_str!("threads.c")),
];

/// Makes the folder of files that are not the host's own. Returns it.
pub(super) fn prepare() -> Result<PathBuf, String> {
    let opt = crate::build::cache().join("guests-opt");
    let busybox = opt.join(BUSYBOX_I386);
    if !busybox.exists() {
        let from = crate::debian::busybox_i386()?;
        fs::create_dir_all(&opt).map_err(|e| format!("{}: {e}", opt.display()))?;
        fs::copy(from, &busybox).map_err(|e| format!("{}: {e}", busybox.display()))?;
    }
    for (name, source) in C_PROGRAMS {
        let program = opt.join(name);
        compile(source, &program)?;
    }
    let module = opt.join(MODULE);
    if !module.exists() {
        let kernel = kernel()?;
        let release = crate::debian::release(&kernel);
        let folder = kernel
            .with_file_name("")
            .join("../lib/modules")
            .join(release);
        let from = folder.join("kernel/drivers/net").join(MODULE);
        fs::copy(&from, &module).map_err(|e| format!("{}: {e}", from.display()))?;
    }
    Ok(opt)
}

/// Returns the kernel that [`MODULE`] belongs to.
pub(super) fn kernel() -> Result<PathBuf, String> {
    crate::debian::kernel("linux-image-cloud-amd64", "kernel-cloud-amd64")
}

/// Compiles a C program that is not position-independent, so that its addresses are the same everywhere.
fn compile(source: &str, program: &Path) -> Result<(), String> {
    let file = program.with_extension("c");
    if program.exists() && fs::read_to_string(&file).is_ok_and(|text| text == source) {
        return Ok(());
    }
    fs::write(&file, source).map_err(|e| format!("{}: {e}", file.display()))?;
    let status = Command::new("gcc")
        .args(["-O1", "-g", "-no-pie", "-o"])
        .args([program, &file])
        .status()
        .map_err(|e| format!("gcc: {e}"))?;
    if status.success() {
        Ok(())
    } else {
        Err(format!("gcc cannot compile {}", file.display()))
    }
}

/// Returns the highest of the numbers that end names in this folder and come behind `prefix`.
fn newest(folder: &str, prefix: &str) -> Option<u32> {
    let entries = fs::read_dir(folder).ok()?.flatten();
    let names = entries.map(|entry| entry.file_name());
    let numbers = names.filter_map(|name| name.to_str()?.strip_prefix(prefix)?.parse().ok());
    numbers.max()
}

/// Returns the paths with `*` replaced by the names that exist, and `$PYTHON` and `$GCC` by the versions of Python and
/// GCC. All paths have to exist.
pub(super) fn expand(paths: &[&str]) -> Result<Vec<String>, String> {
    let python = format!("3.{}", newest("/usr/lib", "python3.").unwrap_or(0));
    let gcc = newest("/usr/lib/gcc/x86_64-linux-gnu", "").unwrap_or(0);
    let mut found = Vec::new();
    for path in paths {
        let path = path.replace("$PYTHON", &python);
        let path = path.replace("$GCC", &gcc.to_string());
        let Some((before, after)) = path.split_once('*') else {
            if !Path::new(&path).exists() {
                return Err(format!("{path}: not on this machine"));
            }
            found.push(path);
            continue;
        };
        let (folder, prefix) = before.rsplit_once('/').unwrap_or(("", before));
        let entries = fs::read_dir(folder).map_err(|e| format!("{folder}: {e}"))?;
        let mut names: Vec<String> = entries
            .filter_map(|e| Some(e.ok()?.file_name().to_string_lossy().into_owned()))
            .filter(|n| n.len() >= prefix.len() + after.len())
            .filter(|n| n.starts_with(prefix) && n.ends_with(after))
            .map(|n| format!("{folder}/{n}"))
            .filter(|p| Path::new(p).exists())
            .collect();
        if names.is_empty() {
            return Err(format!("{path}: nothing like it on this machine"));
        }
        names.sort();
        found.append(&mut names);
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::expand;

    #[test]
    fn a_star_stands_for_what_is_there() {
        let found = expand(&["/proc/self/stat*", "/proc/self/maps"]).unwrap();
        assert!(found.contains(&"/proc/self/status".to_owned()));
        assert!(found.contains(&"/proc/self/maps".to_owned()));
        assert!(expand(&["/proc/self/nothing*"]).is_err());
        assert!(expand(&["/nonexistent"]).is_err());
    }
}
