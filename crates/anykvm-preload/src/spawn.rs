//! `exec*` and `posix_spawn*`: programs that a preloaded program starts.
//!
//! The library reaches dynamically linked programs through the environment. A program that it does not reach would use
//! a real `/dev/kvm`, so `anykvm exec` starts it.

use std::ffi::{CStr, CString, OsStr};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use libc::{c_char, c_int};

use crate::next::next;
use crate::program;

/// A program and its arguments, as `anykvm exec` gets them.
#[derive(Debug)]
pub(crate) struct Launch {
    own: CString,
    /// The argument list, which ends with null. All strings but the first ones are the caller's.
    arguments: Vec<*const c_char>,
    _path: CString,
}

impl Launch {
    /// Returns what starts the program. `None` for a program that needs no launcher.
    ///
    /// # Safety
    ///
    /// `arguments` is null or a list of C strings that ends with null.
    pub(crate) unsafe fn of(path: &Path, arguments: *const *const c_char) -> Option<Self> {
        if !program::needs_launcher(path) {
            return None;
        }
        let own = CString::new(own_file()?.as_os_str().as_bytes()).ok()?;
        let path = CString::new(path.as_os_str().as_bytes()).ok()?;
        // The launcher removes the library from the program's environment.
        let fixed: [&CStr; 3] = [c"exec", c"--quiet", c"--"];
        let mut list = vec![own.as_ptr()];
        list.extend(fixed.iter().map(|word| word.as_ptr()));
        list.push(path.as_ptr());
        // The first argument is the program's name for itself.
        let mut at = 1;
        // SAFETY: a list that ends with null, by this function's contract.
        unsafe {
            if !arguments.is_null() && !(*arguments).is_null() {
                while !(*arguments.add(at)).is_null() {
                    list.push(*arguments.add(at));
                    at += 1;
                }
            }
        }
        list.push(std::ptr::null());
        Some(Self {
            own,
            arguments: list,
            _path: path,
        })
    }

    /// Returns the path of the `anykvm` program.
    pub(crate) fn program(&self) -> *const c_char {
        self.own.as_ptr()
    }

    /// Returns the arguments of `anykvm`.
    pub(crate) fn arguments(&self) -> *const *const c_char {
        self.arguments.as_ptr()
    }
}

/// Returns the program to start and its arguments: the caller's, unless there is something to launch.
fn started(
    launch: Option<&Launch>,
    path: *const c_char,
    arguments: *const *const c_char,
) -> (*const c_char, *const *const c_char) {
    launch.map_or((path, arguments), |l| (l.program(), l.arguments()))
}

/// Returns the file that this library was loaded from.
pub(crate) fn own_file() -> Option<PathBuf> {
    if !crate::is_preloaded() {
        return std::env::current_exe().ok();
    }
    // SAFETY: all zeros are a value of the structure; the address is in this library, and the name
    // lives as long as that is loaded.
    unsafe {
        let mut info: libc::Dl_info = std::mem::zeroed();
        let here = own_file as *const () as *const libc::c_void;
        if libc::dladdr(here, &raw mut info) == 0 || info.dli_fname.is_null() {
            return None;
        }
        let name = CStr::from_ptr(info.dli_fname).to_bytes();
        Some(PathBuf::from(OsStr::from_bytes(name)))
    }
}

/// Returns the file of a path; if there is no slash in it, the file of a name in PATH.
unsafe fn file(name: *const c_char, is_searched: bool) -> Option<PathBuf> {
    if name.is_null() || !crate::is_preloaded() || crate::trace::is_real() {
        return None;
    }
    // SAFETY: a C string by this function's contract.
    let name = OsStr::from_bytes(unsafe { CStr::from_ptr(name) }.to_bytes());
    if !is_searched || name.as_bytes().contains(&b'/') {
        return Some(PathBuf::from(name));
    }
    program::find(name)
}

/// An environment in which LD_PRELOAD names the library. A program that removes it would start others with a real
/// `/dev/kvm`.
struct Environment {
    list: Vec<*const c_char>,
    _variable: CString,
}

impl Environment {
    /// Returns the environment with the library. `None` if the library is named already, or is not to be named.
    ///
    /// # Safety
    ///
    /// `given` is null or a list of C strings that ends with null.
    unsafe fn completed(given: *const *const c_char) -> Option<Self> {
        const NAME: &[u8] = b"LD_PRELOAD=";
        if !crate::is_preloaded() || crate::trace::is_real() {
            return None;
        }
        let own = own_file()?;
        let own = own.as_os_str().as_bytes();
        let mut variable = [NAME, own].concat();
        let mut list = Vec::new();
        let mut at = given;
        // SAFETY: a list that ends with null, by this function's contract.
        unsafe {
            while !at.is_null() && !(*at).is_null() {
                let string = CStr::from_ptr(*at).to_bytes();
                match string.strip_prefix(NAME) {
                    Some(others) if names(others, own) => return None,
                    Some(others) => {
                        variable.push(b':');
                        variable.extend_from_slice(others);
                    }
                    None => list.push(*at),
                }
                at = at.add(1);
            }
        }
        let variable = CString::new(variable).ok()?;
        list.push(variable.as_ptr());
        list.push(std::ptr::null());
        Some(Self {
            list,
            _variable: variable,
        })
    }
}

/// Returns true if a list of libraries, as LD_PRELOAD has it, names this one.
fn names(list: &[u8], library: &[u8]) -> bool {
    list.split(|byte| b": ".contains(byte))
        .any(|name| name == library)
}

unsafe extern "C" {
    /// The process's own environment.
    static environ: *const *const c_char;
}

/// Starts a program in place of this one. Returns -1 and sets errno if that is impossible.
///
/// # Safety
///
/// The requirements of `execve`.
unsafe fn start(
    path: *const c_char,
    arguments: *const *const c_char,
    environment: *const *const c_char,
    is_searched: bool,
) -> c_int {
    // SAFETY: the caller's arguments.
    let (launch, completed) = unsafe {
        let launch = file(path, is_searched).and_then(|file| Launch::of(&file, arguments));
        (launch, Environment::completed(environment))
    };
    let (path, arguments) = started(launch.as_ref(), path, arguments);
    let environment = completed.as_ref().map_or(environment, |e| e.list.as_ptr());
    if is_searched {
        next!(execvpe(
            path => *const c_char,
            arguments => *const *const c_char,
            environment => *const *const c_char,
        ) -> c_int)
    } else {
        next!(execve(
            path => *const c_char,
            arguments => *const *const c_char,
            environment => *const *const c_char,
        ) -> c_int)
    }
}

macro_rules! exec {
    ($($name:ident($searched:literal $(, $environment:ident)?);)*) => { $(
        /// The C library's function of this name.
        ///
        /// # Safety
        ///
        /// The requirements of that function.
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C" fn $name(
            path: *const c_char,
            arguments: *const *const c_char,
            $($environment: *const *const c_char,)?
        ) -> c_int {
            // SAFETY: the caller's arguments, or the process's own environment.
            unsafe { start(path, arguments, exec!(@ $($environment)?), $searched) }
        }
    )* };
    (@ $environment:ident) => { $environment };
    (@) => { environ };
}

exec! {
    execve(false, environment);
    execv(false);
    execvp(true);
    execvpe(true, environment);
}

/// The C library's function of this name.
///
/// # Safety
///
/// The requirements of that function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn fexecve(
    fd: c_int,
    arguments: *const *const c_char,
    environment: *const *const c_char,
) -> c_int {
    // SAFETY: the caller's arguments.
    unsafe {
        launch_at(
            fd,
            c"".as_ptr(),
            arguments,
            environment,
            libc::AT_EMPTY_PATH,
        );
    };
    // SAFETY: the caller's list.
    let completed = unsafe { Environment::completed(environment) };
    let environment = completed.as_ref().map_or(environment, |e| e.list.as_ptr());
    next!(fexecve(
        fd => c_int,
        arguments => *const *const c_char,
        environment => *const *const c_char,
    ) -> c_int)
}

/// The C library's function of this name.
///
/// # Safety
///
/// The requirements of that function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn execveat(
    fd: c_int,
    path: *const c_char,
    arguments: *const *const c_char,
    environment: *const *const c_char,
    flags: c_int,
) -> c_int {
    // SAFETY: the caller's arguments.
    unsafe { launch_at(fd, path, arguments, environment, flags) };
    // SAFETY: the caller's list.
    let completed = unsafe { Environment::completed(environment) };
    let environment = completed.as_ref().map_or(environment, |e| e.list.as_ptr());
    next!(execveat(
        fd => c_int,
        path => *const c_char,
        arguments => *const *const c_char,
        environment => *const *const c_char,
        flags => c_int,
    ) -> c_int)
}

/// Starts the launcher of a program that needs one; otherwise returns.
unsafe fn launch_at(
    fd: c_int,
    path: *const c_char,
    arguments: *const *const c_char,
    environment: *const *const c_char,
    flags: c_int,
) {
    // SAFETY: the caller's arguments.
    let opened =
        unsafe { file(path, false) }.and_then(|path| program::of_path_at(fd, &path, flags));
    // SAFETY: the caller's arguments, which `execve` would read too.
    let launch = opened
        .as_ref()
        .and_then(|o| unsafe { Launch::of(&o.path, arguments) });
    if let Some(launch) = launch {
        next!(execve(
            launch.program() => *const c_char,
            launch.arguments() => *const *const c_char,
            environment => *const *const c_char,
        ) -> c_int);
    }
}

macro_rules! spawn {
    ($($name:ident($searched:literal);)*) => { $(
        /// The C library's function of this name.
        ///
        /// # Safety
        ///
        /// The requirements of that function.
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C" fn $name(
            child: *mut libc::pid_t,
            path: *const c_char,
            actions: *const libc::posix_spawn_file_actions_t,
            attributes: *const libc::posix_spawnattr_t,
            arguments: *const *const c_char,
            environment: *const *const c_char,
        ) -> c_int {
            // SAFETY: the caller's arguments.
            let (launch, completed) = unsafe {
                let launch = file(path, $searched).and_then(|file| Launch::of(&file, arguments));
                (launch, Environment::completed(environment))
            };
            let (path, arguments) = started(launch.as_ref(), path, arguments);
            let environment = completed.as_ref().map_or(environment, |e| e.list.as_ptr());
            next!($name(
                child => *mut libc::pid_t,
                path => *const c_char,
                actions => *const libc::posix_spawn_file_actions_t,
                attributes => *const libc::posix_spawnattr_t,
                arguments => *const *const c_char,
                environment => *const *const c_char,
            ) -> c_int)
        }
    )* };
}

spawn! {
    posix_spawn(false);
    posix_spawnp(true);
}

/// Makes a list of arguments on the caller's stack, as `execl` and its kind have them.
macro_rules! exec_list {
    ($($name:ident => $list:ident;)*) => { $(
        /// The C library's function of this name.
        ///
        /// # Safety
        ///
        /// The requirements of that function.
        #[unsafe(naked)]
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C" fn $name() -> c_int {
            std::arch::naked_asm!(
                // All arguments except the first are put in a row: five registers, then the arguments on the stack
                // behind the return address, which is put elsewhere.
                "mov rax, [rsp]",
                "mov [rsp], r9",
                "push r8",
                "push rcx",
                "push rdx",
                "push rsi",
                "mov rsi, rsp",
                "push rax",
                "call {list}",
                "pop rcx",
                "add rsp, 32",
                "mov [rsp], rcx",
                "ret",
                list = sym $list,
            )
        }
    )* };
}

exec_list! {
    execl => from_list;
    execlp => from_list_searched;
    execle => from_list_with_environment;
}

unsafe extern "C" fn from_list(path: *const c_char, list: *const *const c_char) -> c_int {
    // SAFETY: the caller's arguments.
    unsafe { execv(path, list) }
}

unsafe extern "C" fn from_list_searched(path: *const c_char, list: *const *const c_char) -> c_int {
    // SAFETY: the caller's arguments.
    unsafe { execvp(path, list) }
}

unsafe extern "C" fn from_list_with_environment(
    path: *const c_char,
    list: *const *const c_char,
) -> c_int {
    // SAFETY: the environment comes behind the list's end.
    unsafe {
        let mut end = 0;
        while !(*list.add(end)).is_null() {
            end += 1;
        }
        execve(path, list, (*list.add(end + 1)).cast())
    }
}
