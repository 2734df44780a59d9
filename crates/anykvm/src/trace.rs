//! `anykvm trace`: starts a VMM whose KVM calls are written down, a line of JSON each.
//!
//! The library that `anykvm exec` puts into the VMM writes the lines, on anykvm or, with `--real`, on
//! the machine's own `/dev/kvm`, where it only looks on.

use std::{
    ffi::OsString,
    path::{Path, PathBuf},
};

use crate::{cli::TraceArgs, error::BootError, exec};

/// Read by the library: when the trace began, on what, and where it goes.
const VARIABLE: &str = "ANYKVM_TRACE";

/// Replaces this process by the VMM; returns only if that is not possible.
pub(crate) fn trace(args: &TraceArgs) -> Result<(u8, Option<String>), BootError> {
    let vmm = exec::Vmm::prepare(&args.command, false).map_err(BootError::Usage)?;
    let name = vmm.program.display();
    let output = create(&args.output).map_err(BootError::Usage)?;
    let device = if args.real { "real" } else { "anykvm" };
    let mut value = OsString::from(format!("{}:{device}:", host::clock::monotonic_ns()));
    value.push(&output);
    let what = if args.real {
        "the machine's own /dev/kvm".to_owned()
    } else {
        format!("anykvm {} in place of /dev/kvm", crate::cli::VERSION)
    };
    crate::stdio::say(&format!(
        "{name} runs with {what}; its KVM calls go to {}",
        output.display()
    ));
    Err(BootError::Usage(vmm.start(Some((VARIABLE, value)))))
}

/// An empty file at an absolute path, as the VMM may change its folder.
fn create(path: &Path) -> Result<PathBuf, String> {
    let cannot = |e: std::io::Error| format!("{}: {e}", path.display());
    std::fs::File::create(path).map_err(cannot)?;
    path.canonicalize().map_err(cannot)
}
