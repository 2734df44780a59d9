//! `anykvm trace`: starts a VMM, each KVM call of which is recorded as a line of JSON.
//!
//! The library that `anykvm exec` puts into the VMM writes the lines. With `--real` the VMM uses the machine's own
//! `/dev/kvm`, and the library only records.

use std::{
    ffi::OsString,
    path::{Path, PathBuf},
};

use crate::{cli::TraceArgs, error::BootError, exec};

/// The variable that the library reads: when the trace began, on which device, and where it goes.
const VARIABLE: &str = "ANYKVM_TRACE";

/// Replaces this process by the VMM. Returns only if that is impossible.
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

/// Makes an empty file. Returns its absolute path, as the VMM may change its folder.
fn create(path: &Path) -> Result<PathBuf, String> {
    let cannot = |e: std::io::Error| format!("{}: {e}", path.display());
    std::fs::File::create(path).map_err(cannot)?;
    path.canonicalize().map_err(cannot)
}
