//! [`Prepared`]: what the kernel reads for a call of execve(2).

use std::ffi::CString;

use libc::c_char;

use super::image;
use crate::program;

/// Arguments that a program can have.
pub(super) const MOST: usize = 1 << 20;

/// A call of execve(2) that the program is about to make with other arguments than its own, and what the kernel reads for it:
/// kept until the call has failed.
#[derive(Debug)]
pub(super) struct Prepared {
    /// What the program had in RDI, RSI and RDX.
    pub(super) own: [usize; 3],
    /// What it has there now.
    pub(super) given: [usize; 3],
    /// Where it goes on.
    pub(super) target: usize,
    /// The call is a child's, which has borrowed the program's memory.
    pub(super) is_borrowed: bool,
    pub(super) path: CString,
    pub(super) arguments: Vec<*const c_char>,
    pub(super) environment: Option<Environment>,
    /// Keeps a file without a name open.
    pub(super) _opened: program::Opened,
}

/// An environment in which LD_PRELOAD names the library.
#[derive(Debug)]
pub(super) struct Environment {
    list: Vec<*const c_char>,
    _variable: CString,
}

impl Environment {
    /// `None` if the list cannot be read, which the kernel says then.
    pub(super) fn with_library(envp: usize) -> Option<Self> {
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

    pub(super) fn address(&self) -> usize {
        self.list.as_ptr() as usize
    }
}
