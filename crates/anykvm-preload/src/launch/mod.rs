//! The launcher of programs that a preloaded library does not reach, above all statically linked ones.
//!
//! The program is loaded into the `anykvm` process itself, as the kernel would load it into a new one. So our code is
//! there with its own C library and thread-local storage, and shares nothing with the program. The program's system
//! calls come through [`thunks`]. A call that may be ours goes through [`entry`] to [`dispatch`]; all others are made
//! where they are, with nothing changed.

mod answer;
mod block;
mod dispatch;
mod entry;
mod execve;
mod image;
mod prepared;
mod running;
mod signals;
mod threads;
mod thunks;

use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use libc::c_void;

use crate::actions;
use crate::launcher::{self, Launcher};
use image::{Elf, Loaded};

const PAGE: usize = host::PAGE_SIZE;
/// Size of the address space for brk(2).
const HEAP: usize = 1 << 34;

fn unsupported(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::Unsupported, what.to_owned())
}

/// True if what the program starts is launched too, even where the preload library would do.
static ALL: AtomicBool = AtomicBool::new(false);

pub(super) fn launches_all() -> bool {
    ALL.load(Ordering::Relaxed)
}

/// Returns a list of libraries, as LD_PRELOAD has it, without this file. `None` if the list does not name this file.
fn without_own(list: &OsStr, own: &Path) -> Option<std::ffi::OsString> {
    let is_own = |name: &&[u8]| Path::new(OsStr::from_bytes(name)) == own;
    let words = || list.as_bytes().split(|byte| b": ".contains(byte));
    let others: Vec<&[u8]> = words().filter(|name| !is_own(name)).collect();
    let has_own = others.len() < words().count();
    has_own.then(|| OsStr::from_bytes(&others.join(&b':')).to_owned())
}

/// Starts the program in this process, which must have one thread, with a variable in its environment. With `all`, what
/// the program starts is launched too. Returns only if the program cannot be started.
pub fn launch(
    program: &Path,
    name: &OsStr,
    arguments: &[std::ffi::OsString],
    variable: Option<(&str, std::ffi::OsString)>,
    all: bool,
) -> io::Error {
    const PRELOAD: &str = "LD_PRELOAD";
    ALL.store(all, Ordering::Relaxed);
    if let Some((variable, value)) = variable {
        // SAFETY: there is one thread.
        unsafe { std::env::set_var(variable, value) };
    }
    // A dynamic loader in the program would load this file once more. The two copies would each take the other's
    // signals and descriptors for the program's.
    if let (Some(list), Ok(own)) = (std::env::var_os(PRELOAD), std::env::current_exe())
        && let Some(others) = without_own(&list, &own)
    {
        // SAFETY: there is one thread.
        unsafe {
            if others.is_empty() {
                std::env::remove_var(PRELOAD);
            } else {
                std::env::set_var(PRELOAD, others);
            }
        }
    }
    match prepare(program, name, arguments) {
        Ok(never) => match never {},
        Err(error) => error,
    }
}

fn prepare(
    program: &Path,
    name: &OsStr,
    arguments: &[std::ffi::OsString],
) -> io::Result<std::convert::Infallible> {
    check_processor()?;
    // A file without a name has a link in /proc, which has no other name.
    let absolute = program
        .canonicalize()
        .or_else(|_| std::path::absolute(program))?;
    let own = std::env::current_exe()?;
    let (Some(absolute), Some(own)) = (execve::c_path(&absolute), execve::c_path(&own)) else {
        return Err(unsupported("a path with a zero in it"));
    };
    image::set_names(absolute, own);
    crate::filter::note_texts();
    let elf = Elf::open(program)?;
    let loader = elf.loader.as_deref().map(Elf::open).transpose()?;
    let (main, loader) = load(&elf, loader.as_ref())?;
    crate::cpuid::answer_launched(program, main.base);
    let stack = Stack::build(program, name, arguments, &main, loader.as_ref())?;
    set_heap()?;
    become_program()?;
    // The main thread's calls begin on a stack of our own, as the stack that the kernel gave it is the program's.
    let ours = host::Mapping::anonymous(threads::STACK)?;
    let top = ours.as_ptr() as usize + ours.len();
    std::mem::forget(ours);
    let block = block::acquire(top).ok_or_else(|| unsupported("no memory for the first thread"))?;
    if threads::watch(block) != 0 {
        return Err(unsupported(
            "the host's kernel has no syscall user dispatch (Linux 5.11 and later have it)",
        ));
    }
    launcher::set(Launcher {
        handler: entry::signal as *const () as usize,
        restorer: thunks::restorer,
        watch: thunks::watch,
        stop_rewriting: thunks::stop_rewriting,
    });
    actions::wrap_for_launch();
    crate::set_launched();
    let entry = loader.map_or(main.entry, |loader| loader.entry);
    stack.start(entry, block)
}

/// Checks that the processor has the instructions that `entry` uses.
fn check_processor() -> io::Result<()> {
    const FSGSBASE: u64 = 2;
    // SAFETY: reads the process's auxiliary vector.
    if unsafe { libc::getauxval(libc::AT_HWCAP2) } & FSGSBASE == 0 {
        return Err(unsupported(
            "the host does not let programs set FS and GS (Linux 5.9 and a processor since 2012 do)",
        ));
    }
    // x87, SSE, AVX and AVX-512.
    const SAVED: u64 = 0xe7;
    const SSE: u64 = 2;
    let saved = host::cpu::xcr0() & SAVED;
    if saved & SSE == 0 {
        return Err(unsupported(
            "the host has no XSAVE, or its kernel has it off",
        ));
    }
    entry::XSAVE_MASK.store(saved as u32, Ordering::Relaxed);
    let size = host::cpu::cpuid(0xd, 0)[1] as usize;
    entry::XSAVE_SIZE.store(size.max(576), Ordering::Relaxed);
    Ok(())
}

/// Maps program, loader and arena close to each other, so that jumps reach the arena.
fn load(elf: &Elf, loader: Option<&Elf>) -> io::Result<(Loaded, Option<Loaded>)> {
    const STEP: usize = 1 << 24;
    const TRIES: usize = 64;
    let extra = loader.map_or(0, Elf::len) + thunks::MAPPED + 2 * PAGE;
    let (at, rest) = if elf.is_fixed() {
        let begin = elf.begin();
        image::reserve(Some(begin), elf.len())?;
        let end = (begin + elf.len()).next_multiple_of(STEP);
        let rest = (0..TRIES)
            .find_map(|step| image::reserve(Some(end + step * STEP), extra).ok())
            .ok_or_else(|| unsupported("no room near the program"))?;
        (begin, rest)
    } else {
        let at = image::reserve(None, elf.len() + PAGE + extra)?;
        (at, at + elf.len() + PAGE)
    };
    let main = elf.load(at)?;
    let arena = rest + PAGE;
    let loaded = loader.map(|l| l.load(arena + thunks::MAPPED)).transpose()?;
    let file = host::Memfd::new(c"anykvm-thunks", thunks::WRITABLE)?;
    let writable = file.map()?;
    let rw = writable.as_ptr() as usize;
    std::mem::forget(writable);
    let (protection, flags) = (
        libc::PROT_READ | libc::PROT_EXEC,
        libc::MAP_SHARED | libc::MAP_FIXED,
    );
    let fd = std::os::fd::AsRawFd::as_raw_fd(&std::os::fd::AsFd::as_fd(&file));
    // SAFETY: the pages are a part of the range reserved above.
    let rx = unsafe {
        libc::mmap(
            arena as *mut c_void,
            thunks::MAPPED,
            protection,
            flags,
            fd,
            0,
        )
    };
    if rx == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    let loader_text = loaded.map_or((0, 0), |loader| loader.text);
    thunks::prepare(rw, arena, [main.text, loader_text]);
    Ok((main, loaded))
}

fn set_heap() -> io::Result<()> {
    let begin = image::reserve(None, HEAP)?;
    // SAFETY: the range was reserved above.
    let result = unsafe {
        libc::mprotect(
            begin as *mut c_void,
            HEAP,
            libc::PROT_READ | libc::PROT_WRITE,
        )
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    let mut heap = dispatch::HEAP
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner);
    heap.begin = begin;
    heap.end = begin;
    heap.limit = begin + HEAP;
    Ok(())
}

/// Undoes what this process's own start has changed, so that all is as execve(2) would leave it.
fn become_program() -> io::Result<()> {
    // SAFETY: the alternate stack is disabled, and no handler of this process is called any more that used it.
    unsafe {
        let none = libc::stack_t {
            ss_sp: std::ptr::null_mut(),
            ss_flags: libc::SS_DISABLE,
            ss_size: 0,
        };
        libc::sigaltstack(&raw const none, std::ptr::null_mut());
    }
    // Rewritten instructions have to be seen by other processors, which needs this registration.
    const REGISTER_PRIVATE_EXPEDITED_SYNC_CORE: usize = 1 << 6;
    // SAFETY: the call has no pointers. If it fails, nothing is rewritten once there are threads.
    unsafe {
        crate::next::system_call(
            libc::SYS_membarrier,
            [REGISTER_PRIVATE_EXPEDITED_SYNC_CORE, 0, 0, 0, 0, 0],
        );
    }
    Ok(())
}

/// The first stack of a program, as the kernel makes it.
struct Stack {
    /// The bytes from the lowest address up: argc, argv, envp, the auxiliary vector, strings.
    bytes: Vec<u8>,
    to: usize,
}

impl Stack {
    fn build(
        program: &Path,
        name: &OsStr,
        arguments: &[std::ffi::OsString],
        main: &Loaded,
        loader: Option<&Loaded>,
    ) -> io::Result<Self> {
        /// Room for what the caller and `start` have on this stack.
        const ROOM: usize = 1 << 16;
        let mut strings = Vec::new();
        let mut add = |bytes: &[u8]| {
            let at = strings.len();
            strings.extend_from_slice(bytes);
            strings.push(0);
            at
        };
        let argv: Vec<usize> = std::iter::once(name)
            .chain(arguments.iter().map(std::ffi::OsString::as_os_str))
            .map(|word| add(word.as_bytes()))
            .collect();
        let envp: Vec<usize> = std::env::vars_os()
            .map(|(name, value)| add(&[name.as_bytes(), b"=", value.as_bytes()].concat()))
            .collect();
        let path = add(program.as_os_str().as_bytes());
        let mut random = [0; 16];
        host::random::fill(&mut random)?;
        let random_at = add(&random);
        let platform = add(b"x86_64");
        let auxiliary = auxiliary(main, loader)?;
        let words = 1 + argv.len() + 1 + envp.len() + 1 + 2 * auxiliary.len();
        let len = words * 8 + strings.len();
        let here = (&raw const len).addr();
        let to = (here - ROOM - len) & !15;
        let string = |at: usize| to + words * 8 + at;
        let mut all = vec![argv.len()];
        all.extend(argv.iter().map(|at| string(*at)));
        all.push(0);
        all.extend(envp.iter().map(|at| string(*at)));
        all.push(0);
        for (kind, value) in auxiliary {
            let value = match kind {
                libc::AT_EXECFN => string(path),
                libc::AT_RANDOM => string(random_at),
                libc::AT_PLATFORM => string(platform),
                _ => value,
            };
            all.extend([kind as usize, value]);
        }
        let mut bytes: Vec<u8> = all.iter().flat_map(|word| word.to_ne_bytes()).collect();
        bytes.extend_from_slice(&strings);
        Ok(Self { bytes, to })
    }

    fn start(&self, entry: usize, block: *mut block::ThreadBlock) -> ! {
        // SAFETY: the stack below is free, and the program never returns.
        unsafe { entry::start(self.bytes.as_ptr(), self.to, self.bytes.len(), entry, block) }
    }
}

/// Returns the process's own auxiliary vector, with the values of the program.
fn auxiliary(main: &Loaded, loader: Option<&Loaded>) -> io::Result<Vec<(u64, usize)>> {
    /// Entries of the thread's restartable sequences, which our C library uses.
    const RSEQ: [u64; 2] = [27, 28];
    let own = std::fs::read("/proc/self/auxv")?;
    let mut vector = Vec::new();
    for pair in own.as_chunks::<16>().0 {
        let (kind, value) = pair.split_at(8);
        let word = |bytes: &[u8]| bytes.try_into().map_or(0, u64::from_ne_bytes);
        let (kind, value) = (word(kind), word(value) as usize);
        let value = match kind {
            libc::AT_NULL => break,
            libc::AT_PHDR => main.headers.0,
            libc::AT_PHNUM => main.headers.1,
            libc::AT_ENTRY => main.entry,
            libc::AT_BASE => loader.map_or(0, |loader| loader.base),
            kind if RSEQ.contains(&kind) => continue,
            _ => value,
        };
        vector.push((kind, value));
    }
    vector.push((libc::AT_NULL, 0));
    Ok(vector)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_launched_program_does_not_get_the_library() {
        let rows = [
            ("/a/anykvm", Some("")),
            ("/a/anykvm:/lib/x.so", Some("/lib/x.so")),
            ("/lib/x.so /a/anykvm:/lib/y.so", Some("/lib/x.so:/lib/y.so")),
            ("/lib/x.so", None),
            ("", None),
        ];
        for (list, want) in rows {
            let got = without_own(OsStr::new(list), Path::new("/a/anykvm"));
            assert_eq!(got.as_deref(), want.map(OsStr::new), "{list}");
        }
    }
}
