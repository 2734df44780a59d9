//! Other programs that the program starts.

use std::ffi::{CStr, CString, OsStr};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use libc::{c_char, c_long};

use super::answer::Answer;
use super::block::ThreadBlock;
use super::entry::{self, Frame};
use super::image;
use super::prepared::{Environment, MOST, Prepared};
use crate::program;

/// execve(2) and execveat(2): programs that the preload library does not reach are launched, the
/// others have it in their environment.
pub(super) unsafe fn execve(
    number: c_long,
    a: [usize; 6],
    frame: &mut Frame,
    block: &mut ThreadBlock,
) -> Answer {
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
    let mut prepared = Prepared {
        own: [a[0], a[1], a[2]],
        given: [0; 3],
        target: frame.target,
        is_borrowed: block.borrowed != 0,
        path,
        arguments: Vec::new(),
        environment: None,
        _opened: opened,
    };
    if !is_launched {
        prepared.environment = Environment::with_library(envp);
        let envp = prepared
            .environment
            .as_ref()
            .map_or(envp, Environment::address);
        let path = prepared.path.as_ptr() as usize;
        return hand_over(prepared, [path, argv, envp], frame, block);
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
    strings.push(prepared.path.as_ptr());
    // The first is the program's name for itself.
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
    let arguments = [own.as_ptr() as usize, strings.as_ptr() as usize, envp];
    prepared.arguments = strings;
    hand_over(prepared, arguments, frame, block)
}

/// The program makes the call itself. Signals come in before, with nothing of ours in between: what waits in our code,
/// with all signals blocked, would not come to the other program either, which inherits the mask.
fn hand_over(
    mut prepared: Prepared,
    arguments: [usize; 3],
    frame: &mut Frame,
    block: &mut ThreadBlock,
) -> Answer {
    prepared.given = arguments;
    [frame.rdi, frame.rsi, frame.rdx] = arguments;
    frame.rax = libc::SYS_execve as usize;
    frame.target = entry::execute as *const () as usize;
    block.prepared.push(prepared);
    Answer::Kernel
}

/// The call has come back with an error, which is where its place was.
pub(super) fn failed(frame: &mut Frame, block: &mut ThreadBlock) -> Answer {
    // Others of the list are of handlers that have jumped away.
    let given = [frame.rdi, frame.rsi, frame.rdx];
    let found = block.prepared.iter().position(|p| p.given == given);
    let Some(found) = found else {
        return Answer::Is(-(libc::ENOSYS as isize));
    };
    let prepared = block.prepared.remove(found);
    [frame.rdi, frame.rsi, frame.rdx] = prepared.own;
    let error = frame.target as isize;
    frame.target = prepared.target;
    Answer::Is(error)
}

/// The thread has no child any more that has borrowed its memory.
pub(super) fn forget_children(block: &mut ThreadBlock) {
    block.prepared.retain(|prepared| !prepared.is_borrowed);
}

/// A path without zeros in it, as C has it.
pub(super) fn c_path(path: &Path) -> Option<CString> {
    CString::new(path.as_os_str().as_bytes()).ok()
}
