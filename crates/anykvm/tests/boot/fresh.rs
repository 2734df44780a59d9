//! Machines that have nothing yet: no kernel, no busybox, no package lists, no network, no place for a cache.
//!
//! The machine is this one in namespaces of its own, where folders that have these things are empty.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::guest::kernel;

const ANYKVM: &str = env!("CARGO_BIN_EXE_anykvm");
/// As an ordinary user in the namespace.
const AS_USER: &str = "exec unshare --user --map-user=1000 --map-group=1000";

/// A folder of the test's, with what is put there for the machine to have.
struct Fresh {
    folder: PathBuf,
}

impl Fresh {
    fn new(name: &str) -> Self {
        let folder = std::env::temp_dir().join(format!("anykvm-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(folder.join("archives")).unwrap();
        fs::create_dir_all(folder.join("home")).unwrap();
        Self { folder }
    }

    /// Runs a line of shell as root of the machine; the status, and what was said.
    fn run(&self, line: &str) -> (Option<i32>, String) {
        let archives = self.folder.join("archives");
        let script = format!(
            "set -e; for f in /boot /var/lib/apt/lists /var/cache/apt; do mount -t tmpfs none $f; done
             mkdir /var/cache/apt/archives; mount --bind {} /var/cache/apt/archives
             for f in /bin/busybox /usr/bin/busybox; do [ ! -e $f ] || mount --bind /dev/null $f; done
             unset XDG_CACHE_HOME; export HOME={}; {line}",
            archives.display(),
            self.folder.join("home").display()
        );
        let output = Command::new("unshare")
            .args(["--user", "--map-root-user", "--mount", "--net", "timeout"])
            .args(["100", "sh", "-c", &script])
            .stdin(Stdio::null())
            .output()
            .expect("unshare is installed");
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        (output.status.code(), text)
    }

    /// A folder that neither root of the machine has nor who runs the test.
    fn foreign(&self) -> String {
        if !rustix::process::geteuid().is_root() {
            return "/".to_owned();
        }
        let folder = self.folder.join("foreign");
        fs::create_dir(&folder).unwrap();
        std::os::unix::fs::chown(&folder, Some(1234), Some(1234)).unwrap();
        folder.to_str().unwrap().to_owned()
    }

    /// A package as apt leaves it, with this file.
    fn package(&self, name: &str, path: &str, content: &[u8]) {
        self.package_that_depends(name, path, content, "");
    }

    /// The same, with the names of the packages that it depends on.
    fn package_that_depends(&self, name: &str, path: &str, content: &[u8], depends: &str) {
        let tree = self.folder.join("tree");
        let _ = fs::remove_dir_all(&tree);
        let file = tree.join(path);
        for folder in [file.parent().unwrap(), &tree.join("DEBIAN")] {
            fs::create_dir_all(folder).unwrap();
        }
        fs::write(&file, content).unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).unwrap();
        let depends = match depends {
            "" => String::new(),
            names => format!("Depends: {names}\n"),
        };
        let control = format!(
            "Package: {name}\nVersion: 1\nArchitecture: amd64\nMaintainer: nobody\n{depends}Description: a test\n"
        );
        fs::write(tree.join("DEBIAN/control"), control).unwrap();
        // dpkg-deb refuses what a umask may have left.
        fs::set_permissions(tree.join("DEBIAN"), fs::Permissions::from_mode(0o755)).unwrap();
        let deb = self.folder.join(format!("archives/{name}_1_amd64.deb"));
        let status = Command::new("dpkg-deb")
            .args(["--root-owner-group", "--build"])
            .args([&tree, &deb])
            .stdout(Stdio::null())
            .status()
            .expect("dpkg-deb is installed");
        assert!(status.success());
    }
}

impl Drop for Fresh {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.folder);
    }
}

/// Each row: the shell's line, and what the only line must contain.
fn assert_refused(machine: &Fresh, rows: &[(String, &[&str])]) {
    for (line, wants) in rows {
        let (status, text) = machine.run(line);
        assert_eq!(status, Some(2), "{line}: {text}");
        assert!(text.starts_with("anykvm: "), "{line}: {text}");
        assert_eq!(text.lines().count(), 1, "{line}: {text}");
        for want in *wants {
            assert!(text.contains(want), "no '{want}' from {line}: {text}");
        }
    }
}

#[test]
fn what_is_missing_is_said_with_a_way_to_get_it() {
    let machine = Fresh::new("fresh");
    let kernel = kernel(|a| a.ud2().unwrap());
    let kernel = kernel.path();
    let boot = format!("{ANYKVM} boot");
    let said: &[&str] = &["--kernel FILE", "/boot/vmlinuz-RELEASE"];
    let by_apt: &[&str] = &[
        "apt-cache says: E: ",
        "sudo apt-get update",
        "--kernel FILE",
    ];
    assert_refused(
        &machine,
        &[
            (
                format!("PATH=/nonexistent exec {boot}"),
                &["without apt (no Debian or Ubuntu)", "--kernel FILE"],
            ),
            (
                format!("PATH=/nonexistent exec {boot} --kernel {kernel}"),
                &[
                    "no static busybox",
                    "--busybox FILE",
                    "busybox-static",
                    "--initrd FILE",
                ],
            ),
            // Root has tried to get the lists, and says what apt said of both.
            (
                format!("exec {boot}"),
                &["apt-cache says: E: ", "apt-get says: E: "],
            ),
            (format!("exec {boot}"), said),
            (format!("{AS_USER} {boot} -- true"), by_apt),
            (
                format!("{AS_USER} {boot} --kernel {kernel} -- true"),
                &[
                    "no static busybox",
                    "apt-get says: E: ",
                    "sudo apt-get update",
                ],
            ),
        ],
    );
}

#[test]
fn a_cache_is_made_where_it_belongs_or_not_at_all() {
    let machine = Fresh::new("places");
    let home = machine.folder.join("home");
    let boot = format!("{ANYKVM} boot");
    let advice = "set XDG_CACHE_HOME to a folder for it";
    let place = format!("{}/.cache/anykvm", home.display());
    // As `sudo` leaves it.
    let foreign = machine.foreign();
    let read_only = format!("mount -t tmpfs -o ro none {0}; cd {0}", home.display());
    assert_refused(
        &machine,
        &[
            (
                format!("unset HOME; exec {boot}"),
                &["there is no HOME", advice],
            ),
            (
                format!("cd {}; HOME= exec {boot}", home.display()),
                &["there is no HOME", advice],
            ),
            // Not below the current folder.
            (
                format!("cd {}; HOME=x exec {boot}", home.display()),
                &["there is no HOME", advice],
            ),
            (
                format!("{read_only}; exec {boot}"),
                &[&place, "Read-only file system", advice],
            ),
            (
                format!("HOME={foreign} exec {boot}"),
                &["is another user's", advice],
            ),
            (
                format!(
                    "cd {0}; XDG_CACHE_HOME=/dev/null/x exec {boot}",
                    home.display()
                ),
                &["/dev/null/x/anykvm: Not a directory", advice],
            ),
        ],
    );
    assert_eq!(fs::read_dir(&home).unwrap().count(), 0);
    assert!(!Path::new("x").exists());
}

/// What apt has fetched before does without lists and network.
#[test]
fn packages_of_apts_own_cache_are_used() {
    let machine = Fresh::new("archives");
    let kernel = kernel(|a| a.ud2().unwrap());
    let kernel = fs::read(kernel.path()).unwrap();
    machine.package(
        "linux-image-6.9.1-2-cloud-amd64",
        "boot/vmlinuz-6.9.1-2-cloud-amd64",
        &kernel,
    );
    machine.package(
        "busybox-static",
        "bin/busybox",
        &fs::read("/bin/busybox").unwrap(),
    );
    let (status, text) = machine.run(&format!("exec {ANYKVM} boot --mem 64M -- true"));
    assert_eq!(status, Some(125), "{text}");
    assert!(text.contains("triple fault"), "{text}");
    let cache = machine.folder.join("home/.cache/anykvm");
    assert!(
        cache
            .join("kernel/boot/vmlinuz-6.9.1-2-cloud-amd64")
            .exists()
    );
    assert!(cache.join("busybox/bin/busybox").exists());
    assert_eq!(
        fs::read_dir(&cache).unwrap().count(),
        2,
        "nothing is left over"
    );
}

/// From Linux 6.19 on the kernel and its modules are in packages of their own.
#[test]
fn a_kernel_is_put_together_from_its_packages() {
    const RELEASE: &str = "7.2.1-cloud-amd64";
    let machine = Fresh::new("parts");
    let name = |part: &str| format!("linux-{part}-{RELEASE}");
    let depends = format!(
        "initramfs-tools | dracut, {} (= 1), {} (= 1)",
        name("binary"),
        name("modules")
    );
    machine.package_that_depends(&name("image"), "usr/share/doc/image", b"", &depends);
    let kernel = kernel(|a| a.ud2().unwrap());
    let kernel = fs::read(kernel.path()).unwrap();
    let modules = format!("usr/lib/modules/{RELEASE}");
    machine.package(&name("binary"), &format!("{modules}/vmlinuz"), &kernel);
    machine.package(&name("modules"), &format!("{modules}/modules.order"), b"");
    let (status, text) = machine.run(&format!("exec {ANYKVM} boot --mem 64M --no-initrd"));
    assert_eq!(status, Some(125), "{text}");
    assert!(text.contains("triple fault"), "{text}");
    let cache = machine.folder.join("home/.cache/anykvm/kernel");
    assert!(cache.join(format!("boot/vmlinuz-{RELEASE}")).exists());
    assert!(cache.join(modules).join("modules.order").exists());
}
