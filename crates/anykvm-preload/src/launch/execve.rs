//! execve(2): other programs that the program starts.

use std::ffi::{CStr, CString, OsStr};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use libc::{c_char, c_long};

use super::answer::Answer;
use super::image;
use crate::next::system_call;
use crate::program;

/// Maximum number of a program's arguments.
const MOST: usize = 1 << 20;

/// Does execve(2) and execveat(2). Programs that the preload library does not reach are launched; the others get the
/// library in their environment.
pub(super) unsafe fn execve(number: c_long, a: [usize; 6]) -> Answer {
    let (path_at, argv, envp) = if number == libc::SYS_execve {
        (a[0], a[1], a[2])
    } else {
        (a[1], a[2], a[3])
    };
    let Some(mut path) = image::path(path_at) else {
        return Answer::Kernel;
    };
    if let Some(own) = image::own_name(path.to_bytes()) {
        path = own.to_owned();
    }
    let (fd, flags) = if number == libc::SYS_execve {
        (libc::AT_FDCWD, 0)
    } else {
        (a[0] as i32, a[4] as i32)
    };
    // A file without a name has to stay open.
    let named = Path::new(OsStr::from_bytes(path.to_bytes()));
    let Some(opened) = program::of_path_at(fd, named, flags) else {
        return Answer::Kernel;
    };
    let Some(path) = c_path(&opened.path) else {
        return Answer::Kernel;
    };
    let file = Path::new(OsStr::from_bytes(path.to_bytes()));
    let always = super::launches_all();
    let is_launched = if always {
        program::can_be_launched(file)
    } else {
        program::needs_launcher(file)
    };
    if !is_launched {
        let with_library = Environment::with_library(envp);
        let envp = with_library.as_ref().map_or(envp, Environment::address);
        let arguments = [path.as_ptr() as usize, argv, envp, 0, 0, 0];
        // SAFETY: the program's arguments.
        return Answer::Is(unsafe { system_call(libc::SYS_execve, arguments) });
    }
    let Some(own) = image::launcher() else {
        return Answer::Kernel;
    };
    let mut strings: Vec<*const c_char> = vec![own.as_ptr()];
    let fixed: [&CStr; 2] = [c"exec", c"--quiet"];
    strings.extend(fixed.iter().map(|word| word.as_ptr()));
    if always {
        strings.push(c"--launch".as_ptr());
    }
    strings.push(c"--".as_ptr());
    strings.push(path.as_ptr());
    // The first argument is the program's name for itself.
    let mut at = argv;
    for index in 0..MOST {
        let Some(string) = (if argv == 0 { Some(0) } else { image::take(at) }) else {
            return Answer::Is(-(libc::EFAULT as isize));
        };
        if string == 0 {
            break;
        }
        if index > 0 {
            strings.push(string as *const c_char);
        }
        at += size_of::<usize>();
    }
    strings.push(std::ptr::null());
    let arguments = [
        own.as_ptr() as usize,
        strings.as_ptr() as usize,
        envp,
        0,
        0,
        0,
    ];
    // SAFETY: lists that end with null, of strings that live until the call is over.
    Answer::Is(unsafe { system_call(libc::SYS_execve, arguments) })
}

/// An environment in which LD_PRELOAD names the library.
struct Environment {
    list: Vec<*const c_char>,
    _variable: CString,
}

impl Environment {
    /// Makes the environment. `None` if the list cannot be read: the kernel says so then.
    fn with_library(envp: usize) -> Option<Self> {
        const NAME: &[u8] = b"LD_PRELOAD=";
        let own = image::launcher()?.to_bytes();
        let mut variable = [NAME, own].concat();
        let mut list = Vec::new();
        let mut at = envp;
        while envp != 0 && list.len() < MOST {
            let string = image::take(at)?;
            if string == 0 {
                break;
            }
            let is_preload = image::starts_with(string, NAME);
            if is_preload {
                let others = image::path(string)?;
                let others = &others.to_bytes()[NAME.len()..];
                if others.starts_with(own) {
                    return None;
                }
                variable.push(b':');
                variable.extend_from_slice(others);
            } else {
                list.push(string as *const c_char);
            }
            at += size_of::<usize>();
        }
        let variable = CString::new(variable).ok()?;
        list.push(variable.as_ptr());
        list.push(std::ptr::null());
        Some(Self {
            list,
            _variable: variable,
        })
    }

    fn address(&self) -> usize {
        self.list.as_ptr() as usize
    }
}

/// Returns the path as C has it. `None` if it has a zero in it.
pub(super) fn c_path(path: &Path) -> Option<CString> {
    CString::new(path.as_os_str().as_bytes()).ok()
}
