//! [`Files`]: what a VMM that Debian has no package of is given to run.

use std::{path::PathBuf, process::Command};

/// What a run has.
pub(super) struct Files {
    pub(super) anykvm: PathBuf,
    pub(super) program: PathBuf,
    /// Debian's, and the ELF file in it.
    pub(super) kernel: PathBuf,
    pub(super) vmlinux: PathBuf,
    pub(super) initrd: PathBuf,
    pub(super) disk: PathBuf,
    pub(super) dir: PathBuf,
}

impl Files {
    /// The VMM under `anykvm exec`, in the folder of its own.
    pub(super) fn command(&self) -> Command {
        let mut command = Command::new(&self.anykvm);
        command.args(["exec", "--"]).arg(&self.program);
        command.current_dir(&self.dir);
        command
    }
}
