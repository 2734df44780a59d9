//! `anykvm exec`: starts a VMM in which `/dev/kvm` is anykvm.
//!
//! A dynamically linked program gets this very file as a preloaded library. Others are launched: they are loaded into
//! this process, which watches their system calls. A program that cannot be run with anykvm is refused before it
//! starts, because it would use a real `/dev/kvm`.

use std::{
    ffi::{OsStr, OsString},
    os::unix::{ffi::OsStrExt, fs::PermissionsExt, process::CommandExt},
    path::{Path, PathBuf},
    process::Command,
};

use anykvm_preload::{
    launch,
    program::{self, ProgramKind, is_glibc, kind},
};

use crate::{cli::ExecArgs, error::BootError, stdio::say};

const PRELOAD: &str = "LD_PRELOAD";

/// Replaces this process by the VMM. Returns only if that is impossible.
pub(crate) fn exec(args: &ExecArgs) -> Result<(u8, Option<String>), BootError> {
    let vmm = Vmm::prepare(&args.command, args.launch).map_err(BootError::Usage)?;
    if !args.quiet {
        let version = crate::cli::VERSION;
        let name = vmm.program.display();
        say(&format!(
            "{name} runs with anykvm {version} in place of /dev/kvm"
        ));
        if vmm.loses_capabilities {
            say(&format!(
                "it runs without the capabilities of its file (getcap {name})"
            ));
        }
    }
    Err(BootError::Usage(vmm.start(None)))
}

/// A VMM that can be started.
#[derive(Debug)]
pub(crate) struct Vmm {
    pub(crate) program: PathBuf,
    name: OsString,
    arguments: Vec<OsString>,
    way: Way,
    /// True if the program's file gives it capabilities, which it loses here.
    loses_capabilities: bool,
}

/// How a program is connected to anykvm.
#[derive(Debug, PartialEq, Eq)]
enum Way {
    /// With this LD_PRELOAD.
    Preload(OsString),
    /// By [`launch`]. `all`: all programs that it starts are launched as well.
    Launch { all: bool },
}

impl Vmm {
    /// Looks at a program. `always`: the program, and what it starts, is launched even if that is not needed.
    pub(crate) fn prepare(command: &[OsString], always: bool) -> Result<Self, String> {
        let (name, arguments) = command.split_first().ok_or("no program was named")?;
        let mut program = find(name)?;
        let (mut name, mut arguments) = (name.clone(), arguments.to_vec());
        let started = check(&program)?;
        let way = if started.needs_launcher || always {
            // Only the kernel knows what a script is, so the launcher gets the interpreter.
            for (interpreter, argument) in started.interpreters {
                arguments.insert(0, program.into());
                arguments.splice(0..0, argument);
                name = interpreter.clone().into();
                program = interpreter;
            }
            Way::Launch { all: always }
        } else {
            Way::Preload(preload(std::env::var_os(PRELOAD))?)
        };
        Ok(Self {
            program,
            name,
            arguments,
            way,
            loses_capabilities: started.has_capabilities,
        })
    }

    /// Replaces this process by the VMM, with this variable in its environment. Returns why that is impossible.
    pub(crate) fn start(&self, variable: Option<(&str, OsString)>) -> String {
        let error = match &self.way {
            Way::Preload(list) => Command::new(&self.program)
                .arg0(&self.name)
                .args(&self.arguments)
                .env(PRELOAD, list)
                .envs(variable)
                .exec(),
            Way::Launch { all } => {
                launch::launch(&self.program, &self.name, &self.arguments, variable, *all)
            }
        };
        format!("cannot start {}: {error}", self.program.display())
    }
}

/// Returns the program that a shell would find.
pub(crate) fn find(name: &OsStr) -> Result<PathBuf, String> {
    program::find(name).ok_or_else(|| format!("{}: no such program in PATH", name.display()))
}

/// Returns LD_PRELOAD with this file first, so that another library's `ioctl` comes after ours.
fn preload(others: Option<OsString>) -> Result<OsString, String> {
    let own = std::env::current_exe().map_err(|e| format!("cannot find my own file: {e}"))?;
    if own
        .as_os_str()
        .as_bytes()
        .iter()
        .any(|b| b": \t\n".contains(b))
    {
        return Err(format!(
            "LD_PRELOAD cannot name {}: please move it to a path without spaces and colons",
            own.display()
        ));
    }
    let mut list = own.into_os_string();
    if let Some(others) = others.filter(|others| !others.is_empty()) {
        list.push(":");
        list.push(others);
    }
    Ok(list)
}

/// The program that starts when a file is executed.
#[derive(Debug, Default)]
pub(crate) struct Started {
    /// True if the preloaded library does not reach the program.
    pub(crate) needs_launcher: bool,
    /// True if that is because the program's file gives it capabilities.
    pub(crate) has_capabilities: bool,
    /// The interpreters of a script, each with the argument that it gets before the script's path: the file's own
    /// first, then that interpreter's own, and so on.
    pub(crate) interpreters: Vec<(PathBuf, Option<OsString>)>,
}

/// Looks at the program that would start. Refuses a program that would start without anykvm.
pub(crate) fn check(program: &Path) -> Result<Started, String> {
    let mut started = Started::default();
    let mut file = program.to_path_buf();
    for _ in 0..=program::MAX_SCRIPTS {
        let name = file.display();
        let mode = file
            .metadata()
            .map_err(|e| format!("{name}: {e}"))?
            .permissions()
            .mode();
        if mode & 0o6000 != 0 {
            return Err(format!(
                "{name} is set-user-ID or set-group-ID, and such programs are started without \
                 foreign libraries"
            ));
        }
        match kind(&file).map_err(|e| format!("{name}: {e}"))? {
            ProgramKind::Dynamic(loader) => {
                started.has_capabilities = program::gains_capabilities(&file);
                started.needs_launcher = !is_glibc(&loader) || started.has_capabilities;
                return Ok(started);
            }
            ProgramKind::Static => {
                started.has_capabilities = program::gains_capabilities(&file);
                started.needs_launcher = true;
                return Ok(started);
            }
            ProgramKind::Foreign => return Err(format!("{name} is not a 64-bit x86 program")),
            ProgramKind::Unknown => return Err(format!("{name} is not a program")),
            ProgramKind::Script {
                interpreter,
                argument,
            } => {
                file.clone_from(&interpreter);
                started.interpreters.push((interpreter, argument));
            }
        }
    }
    Err(format!("{}: too many interpreters", program.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_existing_preload_stays() {
        let list = preload(Some("/lib/other.so".into())).unwrap();
        let list = list.to_str().unwrap();
        assert!(list.ends_with(":/lib/other.so"), "{list}");
        assert!(
            !preload(Some(OsString::new()))
                .unwrap()
                .to_str()
                .unwrap()
                .ends_with(':')
        );
    }

    #[test]
    fn programs_are_found_in_path() {
        assert_eq!(find(OsStr::new("./x")), Ok(PathBuf::from("./x")));
        assert!(find(OsStr::new("sh")).is_ok());
        assert!(find(OsStr::new("no-such-program-here")).is_err());
    }
}
