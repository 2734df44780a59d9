//! [`Files`]: what a VMM without a Debian package is given to run.

use std::{path::PathBuf, process::Command};

/// The files of a run.
pub(super) struct Files {
    pub(super) anykvm: PathBuf,
    pub(super) program: PathBuf,
    /// Debian's kernel, and the ELF file in it.
    pub(super) kernel: PathBuf,
    pub(super) vmlinux: PathBuf,
    pub(super) initrd: PathBuf,
    pub(super) disk: PathBuf,
    pub(super) dir: PathBuf,
}

impl Files {
    /// Returns a command of the VMM under `anykvm exec`, in the run's folder.
    pub(super) fn command(&self) -> Command {
        let mut command = Command::new(&self.anykvm);
        command.args(["exec", "--"]).arg(&self.program);
        command.current_dir(&self.dir);
        command
    }
}
