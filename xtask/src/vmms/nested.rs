//! The cases of old processors as hosts: anykvm runs in a guest whose processor lacks what later ones have.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use testkit::boot::run_limited;

use super::{LIMIT, Setup, guest::Archive};
use crate::tool::tool;

/// What the guest in the guest says: a sum, and a number that is rounded by floating point.
const ANSWER: &str = "INNER-GUEST 42 3.1416";

const INIT: &str = "\
#!/bin/busybox sh
/bin/busybox --install -s /bin
export PATH=/bin HOME=/ LD_LIBRARY_PATH=/lib64
mount -t proc p /proc; mount -t sysfs s /sys; mount -t devtmpfs d /dev
/anykvm boot --kernel /kernel --busybox /bin/busybox --mem 256M -- \\
    sh -c 'echo INNER-GUEST $((6 * 7)) $(printf %.4f 3.14159)'
echo STATUS $?
poweroff -f
";

pub(super) fn boots_a_guest(setup: &Setup, arguments: &[&str]) -> Result<(), String> {
    let initrd = setup.dir.join("nested-initramfs");
    fs::write(&initrd, archive(setup)?).map_err(|e| format!("{}: {e}", initrd.display()))?;
    let mut command = setup.command(arguments);
    command.args(["-serial", "stdio", "-no-reboot"]);
    command.arg("-kernel").arg(&setup.kernel);
    command.arg("-initrd").arg(&initrd);
    command.args(["-append", "console=ttyS0 quiet"]);
    let outcome = run_limited(&mut command, LIMIT).map_err(|e| e.to_string())?;
    let text = outcome.text();
    if outcome.status == Some(0) && text.contains(ANSWER) && text.contains("STATUS 0") {
        return Ok(());
    }
    Err(format!("{}\n{}", text.trim_end(), outcome.last_words(5)))
}

/// Returns an initramfs with busybox, the kernel, and anykvm with its libraries.
fn archive(setup: &Setup) -> Result<Vec<u8>, String> {
    let mut archive = Archive::default();
    for folder in ["bin", "dev", "lib64", "proc", "sys", "tmp"] {
        archive.folder(folder);
    }
    archive.file("dev/console", &[], 0);
    archive.file("init", INIT.as_bytes(), 0o755);
    let mut add = |from: &Path, to: &str| {
        let content = fs::read(from).map_err(|e| format!("{}: {e}", from.display()))?;
        archive.file(to, &content, 0o755);
        Ok::<_, String>(())
    };
    add(Path::new("/bin/busybox"), "bin/busybox")?;
    add(&setup.kernel, "kernel")?;
    add(&setup.anykvm, "anykvm")?;
    for library in libraries(&setup.anykvm)? {
        let name = library.file_name().unwrap_or_default();
        add(&library, &format!("lib64/{}", name.to_string_lossy()))?;
    }
    Ok(archive.end())
}

/// Returns the files of a program's libraries, the loader among them.
fn libraries(program: &Path) -> Result<Vec<PathBuf>, String> {
    let list = tool(Command::new("ldd").arg(program))?;
    let words = list.split_whitespace();
    Ok(words
        .filter(|word| word.starts_with('/'))
        .map(PathBuf::from)
        .collect())
}
