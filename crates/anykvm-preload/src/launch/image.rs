//! The program in memory, and what hides from it that its file is not the process's.

use std::ffi::{CStr, CString};
use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::OnceLock;

use libc::c_void;

use super::answer::Answer;

const PAGE: usize = host::PAGE_SIZE;
/// Longest path (PATH_MAX).
const LONGEST: usize = 4096;

/// The program's path without links, and the launcher's.
static NAMES: OnceLock<(CString, CString)> = OnceLock::new();

/// Notes the paths.
pub(super) fn set_names(program: CString, launcher: CString) {
    // A process launches one program, so this is called once.
    let _ = NAMES.set((program, launcher));
}

/// Returns the path of the `anykvm` program.
pub(super) fn launcher() -> Option<&'static CStr> {
    NAMES.get().map(|(_, launcher)| launcher.as_c_str())
}

/// Returns the program's own path, if `name` is the link to it in /proc.
pub(super) fn own_name(name: &[u8]) -> Option<&'static CStr> {
    let middle = name.strip_prefix(b"/proc/")?.strip_suffix(b"/exe")?;
    let is_own = middle == b"self"
        || middle == b"thread-self"
        || middle == std::process::id().to_string().as_bytes();
    let (program, _) = NAMES.get()?;
    is_own.then_some(program.as_c_str())
}

/// Does readlink(2) of the program's file.
pub(super) fn readlink(path_at: usize, buffer: usize, size: usize) -> Answer {
    let Some(name) = path(path_at).and_then(|path| own_name(path.to_bytes())) else {
        return Answer::Kernel;
    };
    let name = name.to_bytes();
    let len = name.len().min(size);
    if len == 0 {
        return Answer::Is(-(libc::EINVAL as isize));
    }
    // SAFETY: the name is at least that long.
    match unsafe { kvm_abi::faults::copy(name.as_ptr(), buffer as *mut u8, len) } {
        Some(true) => Answer::Is(len as isize),
        _ => Answer::Is(-(libc::EFAULT as isize)),
    }
}

/// Reads a path of the program. `None` if it cannot be read.
pub(super) fn path(at: usize) -> Option<CString> {
    let mut bytes = Vec::new();
    while bytes.len() < LONGEST {
        let next = at.checked_add(bytes.len())?;
        let mut piece = [0u8; 256];
        let len = piece.len().min(PAGE - next % PAGE);
        // SAFETY: the piece is at least that long.
        let read = unsafe { kvm_abi::faults::copy(next as *const u8, piece.as_mut_ptr(), len) };
        read.filter(|done| *done)?;
        match piece[..len].iter().position(|byte| *byte == 0) {
            Some(end) => {
                bytes.extend_from_slice(&piece[..end]);
                return CString::new(bytes).ok();
            }
            None => bytes.extend_from_slice(&piece[..len]),
        }
    }
    None
}

/// Returns true if these bytes are at that address.
pub(super) fn starts_with(at: usize, bytes: &[u8]) -> bool {
    let mut there = vec![0u8; bytes.len()];
    // SAFETY: the buffer is that long.
    let read = unsafe { kvm_abi::faults::copy(at as *const u8, there.as_mut_ptr(), bytes.len()) };
    read == Some(true) && there == bytes
}

/// Reads a structure of the program. `None` if it cannot be read.
pub(super) fn take_as<T>(at: usize) -> Option<MaybeUninit<T>> {
    let mut value = MaybeUninit::<T>::uninit();
    let to = value.as_mut_ptr().cast();
    // SAFETY: `to` is the value.
    unsafe { kvm_abi::faults::copy(at as *const u8, to, size_of::<T>()) }?.then_some(value)
}

/// Reads a word of the program. `None` if it cannot be read.
pub(super) fn take(at: usize) -> Option<usize> {
    // SAFETY: any bytes are an integer.
    take_as::<usize>(at).map(|word| unsafe { word.assume_init() })
}

/// Stores a word for the program. Returns false if that is impossible.
pub(super) fn give(at: usize, value: usize) -> bool {
    give_bytes(at, &value.to_ne_bytes())
}

/// Does what [`give`] does, with 32 bits.
pub(super) fn give32(at: usize, value: u32) -> bool {
    give_bytes(at, &value.to_ne_bytes())
}

fn give_bytes(at: usize, bytes: &[u8]) -> bool {
    // SAFETY: the bytes are ours.
    unsafe { kvm_abi::faults::copy(bytes.as_ptr(), at as *mut u8, bytes.len()) == Some(true) }
}

/// The ELF header of a file.
#[derive(Debug)]
pub(super) struct Elf {
    file: File,
    segments: Vec<Segment>,
    entry: usize,
    /// True if the program was linked for one address.
    is_fixed: bool,
    headers: (usize, usize),
    /// The program interpreter, if the file names one.
    pub(super) loader: Option<std::path::PathBuf>,
}

#[derive(Clone, Copy, Debug)]
struct Segment {
    address: usize,
    offset: usize,
    in_file: usize,
    in_memory: usize,
    protection: i32,
}

/// A program in memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Loaded {
    pub(super) base: usize,
    pub(super) entry: usize,
    /// Address and number of program headers.
    pub(super) headers: (usize, usize),
    /// Begin and end of the first executable segment.
    pub(super) text: (usize, usize),
}

fn invalid(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.to_owned())
}

impl Elf {
    /// Reads the headers of a program that `program::kind` has found to be for x86-64.
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        const PT_LOAD: u32 = 1;
        const PT_INTERP: u32 = 3;
        const ET_EXEC: u16 = 2;
        const ET_DYN: u16 = 3;
        const HEADER: usize = 56;
        let file = File::open(path)?;
        let mut head = [0u8; 64];
        file.read_exact_at(&mut head, 0)?;
        let word = |bytes: &[u8], at: usize| {
            bytes
                .get(at..at + 8)
                .and_then(|b| b.try_into().ok())
                .map_or(0, usize::from_le_bytes)
        };
        let half = |at: usize| u16::from_le_bytes([head[at], head[at + 1]]);
        let (kind, count) = (half(16), usize::from(half(56)));
        if !matches!(kind, ET_EXEC | ET_DYN) || usize::from(half(54)) != HEADER {
            return Err(invalid("not a program"));
        }
        let table_at = word(&head, 32);
        let mut table = vec![0u8; count * HEADER];
        file.read_exact_at(&mut table, table_at as u64)?;
        let mut elf = Self {
            file,
            segments: Vec::new(),
            entry: word(&head, 24),
            is_fixed: kind == ET_EXEC,
            headers: (0, count),
            loader: None,
        };
        for row in table.chunks_exact(HEADER) {
            let kind = u32::from_le_bytes([row[0], row[1], row[2], row[3]]);
            let (offset, address) = (word(row, 8), word(row, 16));
            let (in_file, in_memory) = (word(row, 32), word(row, 40));
            match kind {
                PT_LOAD if in_memory > 0 => {
                    let end = address.checked_add(in_memory).filter(|end| end >> 46 == 0);
                    if end.is_none() || in_file > in_memory || (address ^ offset) % PAGE != 0 {
                        return Err(invalid("a segment that cannot be mapped"));
                    }
                    let flags = row[4];
                    let bit =
                        |bit: u8, protection: i32| if flags & bit != 0 { protection } else { 0 };
                    if (offset..offset + in_file).contains(&table_at) {
                        elf.headers.0 = table_at - offset + address;
                    }
                    elf.segments.push(Segment {
                        address,
                        offset,
                        in_file,
                        in_memory,
                        protection: bit(4, libc::PROT_READ)
                            | bit(2, libc::PROT_WRITE)
                            | bit(1, libc::PROT_EXEC),
                    });
                }
                PT_INTERP => {
                    let mut name = vec![0; in_file.min(LONGEST)];
                    elf.file.read_exact_at(&mut name, offset as u64)?;
                    let name =
                        CStr::from_bytes_until_nul(&name).map_err(|_| invalid("no loader"))?;
                    elf.loader =
                        Some(std::ffi::OsString::from(name.to_string_lossy().as_ref()).into());
                }
                _ => {}
            }
        }
        if elf.segments.is_empty() {
            return Err(invalid("nothing to load"));
        }
        Ok(elf)
    }

    /// Returns the first and the last address, rounded to pages.
    fn range(&self) -> (usize, usize) {
        let begin = self.segments.iter().map(|s| s.address).min().unwrap_or(0);
        let end = self
            .segments
            .iter()
            .map(|s| s.address + s.in_memory)
            .max()
            .unwrap_or(0);
        (begin & !(PAGE - 1), end.next_multiple_of(PAGE))
    }

    /// Returns the length of the address space from the begin of [`Elf::range`] on.
    pub(super) fn len(&self) -> usize {
        let (begin, end) = self.range();
        end - begin
    }

    /// Returns true for a program that was linked for one address.
    pub(super) fn is_fixed(&self) -> bool {
        self.is_fixed
    }

    /// Returns the first address of a fixed program.
    pub(super) fn begin(&self) -> usize {
        self.range().0
    }

    /// Maps the program at `at`, where [`Elf::len`] bytes are reserved for it.
    pub(super) fn load(&self, at: usize) -> io::Result<Loaded> {
        let (begin, _) = self.range();
        let base = at.wrapping_sub(begin);
        let place = |address: usize| base.wrapping_add(address);
        let mut text = (0, 0);
        for s in &self.segments {
            let first = place(s.address) & !(PAGE - 1);
            let data_end = place(s.address) + s.in_file;
            let memory_end = place(s.address) + s.in_memory;
            let skipped = s.address % PAGE;
            if s.in_file > 0 {
                // The rest of the last page, behind the file's bytes, has to be zero.
                let needs_zeros = s.in_memory > s.in_file && data_end % PAGE != 0;
                let extra = if needs_zeros { libc::PROT_WRITE } else { 0 };
                let fd = self.file.as_raw_fd();
                let offset = s.offset - skipped;
                map(
                    first,
                    s.in_file + skipped,
                    s.protection | extra,
                    Some((fd, offset)),
                )?;
                if needs_zeros {
                    let len = data_end.next_multiple_of(PAGE) - data_end;
                    // SAFETY: these bytes are the rest of a page that was just mapped writable.
                    unsafe { std::ptr::write_bytes(data_end as *mut u8, 0, len) };
                    if s.protection & libc::PROT_WRITE == 0 {
                        // SAFETY: the segment's own pages.
                        unsafe {
                            libc::mprotect(first as *mut c_void, s.in_file + skipped, s.protection)
                        };
                    }
                }
            }
            let zeros = if s.in_file > 0 {
                data_end.next_multiple_of(PAGE)
            } else {
                first
            };
            if memory_end > zeros {
                map(zeros, memory_end - zeros, s.protection, None)?;
            }
            if s.protection & libc::PROT_EXEC != 0 && text.1 == 0 {
                text = (place(s.address), data_end);
            }
        }
        Ok(Loaded {
            base,
            entry: place(self.entry),
            headers: (place(self.headers.0), self.headers.1),
            text,
        })
    }
}

/// Maps a segment over reserved address space.
fn map(at: usize, len: usize, protection: i32, file: Option<(i32, usize)>) -> io::Result<()> {
    let (fd, offset) = file.map_or((-1, 0), |(fd, offset)| (fd, offset as libc::off_t));
    let anonymous = if file.is_none() {
        libc::MAP_ANONYMOUS
    } else {
        0
    };
    let flags = libc::MAP_PRIVATE | libc::MAP_FIXED | anonymous;
    // SAFETY: inside the range that was reserved for the program.
    let got = unsafe { libc::mmap(at as *mut c_void, len, protection, flags, fd, offset) };
    if got == libc::MAP_FAILED {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}

/// Reserves address space: at `at` and nowhere else, or anywhere.
pub(super) fn reserve(at: Option<usize>, len: usize) -> io::Result<usize> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    let fixed = if at.is_some() {
        libc::MAP_FIXED_NOREPLACE
    } else {
        0
    };
    let hint = at.unwrap_or(0) as *mut c_void;
    // SAFETY: a new mapping, which replaces none.
    let got = unsafe { libc::mmap(hint, len, libc::PROT_NONE, flags | fixed, -1, 0) };
    if got == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    if at.is_some_and(|at| at != got as usize) {
        // Kernels before 4.17 take the address as a hint.
        // SAFETY: just made, and not used.
        unsafe { libc::munmap(got, len) };
        return Err(io::Error::from_raw_os_error(libc::EEXIST));
    }
    Ok(got as usize)
}
