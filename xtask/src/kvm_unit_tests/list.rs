//! The suite's list, `x86/unittests.cfg`, which has a section for each entry.

use std::{fs, path::Path};

/// One entry.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) name: String,
    /// The program's file, in the list's folder.
    pub(super) file: String,
    /// The number of processors, as an expression for the shell.
    pub(super) smp: String,
    /// Words for the shell: for QEMU, and for the program.
    pub(super) parameters: String,
    pub(super) arguments: String,
    /// Time limit in seconds.
    pub(super) timeout: u64,
    groups: String,
    arch: String,
}

impl Entry {
    /// Returns true if the suite itself runs the entry only if it is named.
    pub(super) fn is_manual(&self) -> bool {
        self.groups.split_whitespace().any(|g| g == "nodefault")
    }

    /// Returns true if the entry is in a suite of so many bits.
    pub(super) fn is_for(&self, bits: u32) -> bool {
        match self.arch.as_str() {
            "x86_64" => bits == 64,
            "i386" => bits == 32,
            _ => true,
        }
    }
}

/// Returns the entries in order. Conditions on the host's own KVM are ignored, as there is none.
pub(super) fn parse(text: &str) -> Vec<Entry> {
    let mut entries: Vec<Entry> = Vec::new();
    for line in text.lines().map(str::trim) {
        if let Some(name) = line.strip_prefix('[').and_then(|l| l.strip_suffix(']')) {
            entries.push(Entry {
                name: name.to_owned(),
                smp: "1".to_owned(),
                ..Entry::default()
            });
            continue;
        }
        let Some((key, value)) = line.split_once('=') else {
            continue;
        };
        let (Some(entry), false) = (entries.last_mut(), line.starts_with('#')) else {
            continue;
        };
        let value = value.trim().to_owned();
        match key.trim() {
            "file" => entry.file = value,
            "smp" => entry.smp = value,
            "qemu_params" | "extra_params" => entry.parameters = value,
            "test_args" => entry.arguments = value,
            "timeout" => entry.timeout = value.trim_end_matches('s').parse().unwrap_or(0),
            "groups" => entry.groups = value,
            "arch" => entry.arch = value,
            _ => {}
        }
    }
    entries.retain(|e| !e.file.is_empty());
    entries
}

/// Returns for how many bits the suite in the folder was configured.
pub(super) fn bits(folder: &Path) -> Result<u32, String> {
    let path = folder.join("config.mak");
    let text = fs::read_to_string(&path)
        .map_err(|e| format!("{}: {e}; the suite is to be built there", path.display()))?;
    match text.lines().find_map(|l| l.strip_prefix("ARCH=")) {
        Some("x86_64") => Ok(64),
        Some("i386") => Ok(32),
        other => Err(format!("{}: built for {other:?}", path.display())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sections_become_entries() {
        let entries = parse(
            "# a comment\n[one]\nfile = a.flat\nsmp = $(($MAX_SMP))\ntest_args = '1 2'\n\n\
             [two]\nfile = b.flat\narch = i386\ngroups = x nodefault\ntimeout = 90s\n\
             qemu_params = -cpu max,+a=b\n#smp = 3\n[empty]\n",
        );
        assert_eq!(entries.len(), 2);
        assert_eq!(entries[0].name, "one");
        assert_eq!(entries[0].smp, "$(($MAX_SMP))");
        assert_eq!(entries[0].arguments, "'1 2'");
        assert!(!entries[0].is_manual() && entries[0].is_for(32) && entries[0].is_for(64));
        assert_eq!(entries[1].parameters, "-cpu max,+a=b");
        assert_eq!((entries[1].timeout, entries[1].smp.as_str()), (90, "1"));
        assert!(entries[1].is_manual() && entries[1].is_for(32) && !entries[1].is_for(64));
    }
}
