//! The "newc" cpio format, which the kernel unpacks as an initramfs
//! (`Documentation/driver-api/early-userspace/buffer-format.rst`).

use std::collections::BTreeSet;

const S_IFDIR: u32 = 0o040_000;
const S_IFREG: u32 = 0o100_000;
const S_IFLNK: u32 = 0o120_000;
const S_IFCHR: u32 = 0o020_000;

/// An archive that is being made. Paths are absolute paths in the guest. Parent folders are added as needed.
#[derive(Debug, Default)]
pub(crate) struct Archive {
    bytes: Vec<u8>,
    inode: u32,
    present: BTreeSet<String>,
}

impl Archive {
    /// Adds a folder, unless it is there.
    pub(crate) fn folder(&mut self, path: &str, mode: u32) {
        let name = relative(path);
        if name.is_empty() || !self.claim(&name) {
            return;
        }
        self.entry(&name, S_IFDIR | mode, (0, 0), &[]);
    }

    /// Adds a file, unless the name is taken.
    pub(crate) fn file(&mut self, path: &str, mode: u32, content: &[u8]) {
        let name = relative(path);
        if self.claim(&name) {
            self.entry(&name, S_IFREG | mode, (0, 0), content);
        }
    }

    /// Adds a symbolic link.
    pub(crate) fn link(&mut self, path: &str, target: &str) {
        let name = relative(path);
        if self.claim(&name) {
            self.entry(&name, S_IFLNK | 0o777, (0, 0), target.as_bytes());
        }
    }

    /// Adds a character device.
    pub(crate) fn device(&mut self, path: &str, mode: u32, major: u32, minor: u32) {
        let name = relative(path);
        if self.claim(&name) {
            self.entry(&name, S_IFCHR | mode, (major, minor), &[]);
        }
    }

    /// Returns true if the path is in the archive.
    pub(crate) fn contains(&self, path: &str) -> bool {
        self.present.contains(&relative(path))
    }

    /// Returns the archive with its trailer.
    pub(crate) fn finish(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, (0, 0), &[]);
        self.bytes
    }

    /// Adds the parent folders. Returns false if the name is taken.
    fn claim(&mut self, name: &str) -> bool {
        if self.present.contains(name) {
            return false;
        }
        if let Some((parent, _)) = name.rsplit_once('/') {
            self.folder(parent, 0o755);
        }
        self.present.insert(name.to_owned())
    }

    fn entry(&mut self, name: &str, mode: u32, device: (u32, u32), content: &[u8]) {
        self.inode += 1;
        let len = u32::try_from(content.len()).unwrap_or(u32::MAX);
        let name_len = u32::try_from(name.len() + 1).unwrap_or(u32::MAX);
        // inode, mode, uid, gid, links, mtime, size, dev ×2, rdev ×2, name length, check
        let fields = [
            self.inode, mode, 0, 0, 1, 0, len, 0, 0, device.0, device.1, name_len, 0,
        ];
        self.bytes.extend(b"070701");
        for field in fields {
            self.bytes.extend(format!("{field:08x}").bytes());
        }
        self.bytes.extend(name.bytes());
        self.bytes.push(0);
        self.align();
        self.bytes.extend(content);
        self.align();
    }

    fn align(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

/// Returns the path relative to the root: "/a//b/./c/" becomes "a/b/c", and ".." cannot leave the root.
fn relative(path: &str) -> String {
    let mut parts = Vec::new();
    for part in path.split('/') {
        match part {
            "" | "." => {}
            ".." => {
                parts.pop();
            }
            part => parts.push(part),
        }
    }
    parts.join("/")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_normalised() {
        let rows = [
            ("/a//b/./c/", "a/b/c"),
            ("../x", "x"),
            ("/a/../b", "b"),
            ("/", ""),
        ];
        for (path, want) in rows {
            assert_eq!(relative(path), want);
        }
    }

    #[test]
    fn the_bytes_of_one_file() {
        let mut archive = Archive::default();
        archive.file("/ab", 0o755, b"hello");
        let bytes = archive.finish();
        let text = String::from_utf8_lossy(&bytes);
        assert!(text.starts_with(concat!(
            "070701", "00000001", "000081ed", "00000000", "00000000", "00000001", "00000000",
            "00000005", "00000000", "00000000", "00000000", "00000000", "00000003", "00000000",
            "ab\0"
        )));
        assert_eq!(&bytes[116..121], b"hello");
        assert_eq!(bytes.len() % 4, 0);
        assert!(text.contains("TRAILER!!!"));
    }

    #[test]
    fn parents_come_first_and_once() {
        let mut archive = Archive::default();
        archive.file("/a/b/c", 0o644, b"");
        archive.file("/a/b/d", 0o644, b"");
        archive.link("/a/b/c", "elsewhere");
        assert!(archive.contains("a/b"));
        let bytes = archive.finish();
        let text = String::from_utf8_lossy(&bytes);
        assert_eq!(text.matches("070701").count(), 5, "a, a/b, c, d, trailer");
        assert!(!text.contains("elsewhere"));
    }
}
