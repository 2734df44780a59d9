//! The host CPU as the reference in tests: runs a block of user-mode code with
//! a given register file and reports registers, flags and the exception.
//!
//! **Tests only.** The code is arbitrary: the caller generates harmless blocks
//! (no system calls, memory within the window). Everything lives at fixed low
//! addresses, so that generated code can store any register without a scratch
//! one, and so that the interpreter can run the same block at the same address.
//! Code may be 32-bit: compatibility mode is entered through the frame.
//! The addresses are far from each other and from powers of two, where wild
//! pointers go. Code is executed from a mapping that cannot be written.

mod sequences;
mod signals;

use std::{
    io, ptr,
    sync::{
        Mutex, MutexGuard,
        atomic::{AtomicBool, Ordering},
    },
};

use sequences::{ENTRY, TAIL, sequences};

/// Where tested code runs: two pages, so that it can straddle them.
pub const CODE: u64 = 0x2a35_4000;
/// Bytes of code.
pub const CODE_SIZE: usize = 0x2000;
/// Maximum length of a block in bytes.
pub const BLOCK_SIZE: usize = 0x400;
/// The window of memory that tested code may access. Nothing is mapped behind it.
pub const WINDOW: u64 = 0x1b6c_8000;
/// The window's size in bytes.
pub const WINDOW_SIZE: usize = 0x2000;
/// Size of the XSAVE image in bytes: legacy region, header, AVX.
pub const AREA_SIZE: usize = 832;
/// x87, SSE and AVX.
const COMPONENTS: u8 = 7;
const PAGE: usize = 4096;
/// Flags that a block may start with: the arithmetic ones, DF, AC, ID.
const START_FLAGS: u64 = 0x24_0cd5;

/// Addresses of the register file, and of the frame that IRETQ enters a block with.
const STATE: u64 = 0x3d19_3000;
const GPR: u64 = STATE;
const RFLAGS: u64 = STATE + 0x80;
const HOST_RSP: u64 = STATE + 0x88;
const HOST_MXCSR: u64 = STATE + 0x90;
/// RIP, CS, RFLAGS, RSP, SS.
const FRAME: u64 = STATE + 0xa0;
const AREA: u64 = STATE + 0x400;

static ACTIVE: AtomicBool = AtomicBool::new(false);
static LOCK: Mutex<()> = Mutex::new(());

/// Registers before and after.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Registers {
    /// General registers in encoding order.
    pub gpr: [u64; 16],
    /// RFLAGS.
    pub rflags: u64,
    /// Address of the block; after the run, the address at which execution stopped.
    pub rip: u64,
    /// XSAVE image, standard format.
    pub area: [u8; AREA_SIZE],
}

/// The exception that ended a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Trap {
    /// Vector.
    pub vector: u8,
    /// Error code as the kernel reports it.
    pub error_code: u64,
    /// CR2 of a page fault.
    pub gva: u64,
}

/// Width of tested code.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// 64-bit mode.
    #[default]
    Bits64,
    /// 32-bit code in compatibility mode, with flat segments.
    Bits32,
}

/// Linux's 32-bit user code segment.
const USER32_CS: u16 = 0x23;

/// Returns the selectors that a block sees: ES, CS, SS, DS, FS, GS.
pub fn selectors(mode: Mode) -> [u16; 6] {
    let (cs, ss, fs, gs): (u16, u16, u16, u16);
    // SAFETY: reads segment registers.
    unsafe {
        core::arch::asm!(
            "mov {0:x}, cs", "mov {1:x}, ss", "mov {2:x}, fs", "mov {3:x}, gs",
            out(reg) cs, out(reg) ss, out(reg) fs, out(reg) gs,
            options(nomem, nostack, preserves_flags)
        );
    }
    let cs = match mode {
        Mode::Bits64 => cs,
        Mode::Bits32 => USER32_CS,
    };
    [ss, cs, ss, ss, fs, gs]
}

/// The oracle. A process has at most one.
#[derive(Debug)]
pub struct Oracle {
    /// The code pages, writable.
    alias: u64,
    _lock: MutexGuard<'static, ()>,
}

impl Oracle {
    /// Maps the fixed addresses and installs signal handlers. They pass on signals that do not come from tested code.
    /// Fails on a processor without XSAVE, by which the registers are loaded and stored.
    pub fn new() -> io::Result<Self> {
        if !is_x86_feature_detected!("xsave") {
            return Err(io::Error::other("the processor has no XSAVE"));
        }
        let lock = LOCK
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        let rw = libc::PROT_READ | libc::PROT_WRITE;
        map(WINDOW, WINDOW_SIZE, rw, None)?;
        map(STATE, PAGE, rw, None)?;
        let alias = map_code()?;
        write(
            alias + CODE_SIZE as u64,
            &sequences().map_err(io::Error::other)?,
        );
        let ss = selectors(Mode::Bits64)[2];
        write(FRAME + 32, &u64::from(ss).to_le_bytes());
        signals::install()?;
        Ok(Self { alias, _lock: lock })
    }

    /// Returns the memory window.
    pub fn window(&mut self) -> &mut [u8; WINDOW_SIZE] {
        // SAFETY: mapped by `new` until `drop`; tested code runs only in `run`,
        // which borrows `self` too.
        unsafe { &mut *(WINDOW as *mut [u8; WINDOW_SIZE]) }
    }

    /// Runs `block` at `regs.rip`, in the code pages, to its end or to an exception. In 32-bit code, only the low 32
    /// bits of registers are meaningful.
    pub fn run(&mut self, mode: Mode, block: &[u8], regs: &mut Registers) -> Option<Trap> {
        let at = regs.rip.wrapping_sub(CODE) as usize;
        let end = at.saturating_add(block.len());
        if end > CODE_SIZE || block.len() > BLOCK_SIZE {
            return None;
        }
        let code = self.alias + at as u64;
        write(code, block);
        // A jump to the tail. Its last bytes may lie behind the code pages, where the sequences leave room.
        let jump = match mode {
            Mode::Bits64 => {
                let from = CODE + end as u64 + 5;
                let to = (TAIL.wrapping_sub(from) as u32).to_le_bytes();
                [0xe9, to[0], to[1], to[2], to[3], 0xcc, 0xcc]
            }
            Mode::Bits32 => {
                let (to, cs) = ((TAIL as u32).to_le_bytes(), selectors(Mode::Bits64)[1]);
                [0xea, to[0], to[1], to[2], to[3], cs as u8, (cs >> 8) as u8]
            }
        };
        write(code + block.len() as u64, &jump);
        let cs = selectors(mode)[1];
        write(FRAME + 8, &u64::from(cs).to_le_bytes());
        write(GPR, as_bytes(&regs.gpr));
        write(FRAME, &regs.rip.to_le_bytes());
        let flags = regs.rflags & START_FLAGS | 0x202;
        write(FRAME + 16, &flags.to_le_bytes());
        write(FRAME + 24, &regs.gpr[4].to_le_bytes());
        write(AREA, &regs.area);
        let mut header = [0; 64];
        header[0] = COMPONENTS;
        write(AREA + 512, &header);
        signals::clear();
        ACTIVE.store(true, Ordering::SeqCst);
        // SAFETY: the entry sequence keeps the System V convention; what the
        // block does is the caller's promise (tests only).
        unsafe {
            let f: extern "C" fn() = core::mem::transmute(ENTRY as *const u8);
            f();
        }
        ACTIVE.store(false, Ordering::SeqCst);
        for (i, v) in regs.gpr.iter_mut().enumerate() {
            *v = read_u64(GPR + 8 * i as u64);
        }
        regs.rflags = read_u64(RFLAGS);
        read(AREA, &mut regs.area);
        if mode == Mode::Bits32 {
            for v in &mut regs.gpr {
                *v &= 0xffff_ffff;
            }
        }
        let (trap, rip) = signals::taken();
        regs.rip = rip.unwrap_or(CODE + end as u64);
        trap
    }
}

impl Drop for Oracle {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`, and no tested code runs now.
        unsafe {
            libc::munmap(self.alias as *mut _, CODE_SIZE + PAGE);
            libc::munmap(CODE as *mut _, CODE_SIZE + PAGE);
            libc::munmap(WINDOW as *mut _, WINDOW_SIZE);
            libc::munmap(STATE as *mut _, PAGE);
        }
    }
}

/// Maps the code pages and the sequences at [`CODE`], executable only, and a second time writable. Returns the address
/// of the second mapping.
fn map_code() -> io::Result<u64> {
    // SAFETY: the name is a NUL-terminated constant.
    let fd = unsafe { libc::memfd_create(c"oracle-code".as_ptr(), libc::MFD_CLOEXEC) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    let size = CODE_SIZE + PAGE;
    // SAFETY: `fd` is an open memfd; a new mapping at an address of the kernel's choice.
    let alias = unsafe {
        if libc::ftruncate(fd, size as libc::off_t) != 0 {
            libc::MAP_FAILED
        } else {
            let rw = libc::PROT_READ | libc::PROT_WRITE;
            libc::mmap(ptr::null_mut(), size, rw, libc::MAP_SHARED, fd, 0)
        }
    };
    let mapped = if alias == libc::MAP_FAILED {
        Err(io::Error::last_os_error())
    } else {
        map(CODE, size, libc::PROT_READ | libc::PROT_EXEC, Some(fd))
    };
    // SAFETY: `fd` was opened above and is used nowhere else.
    unsafe { libc::close(fd) };
    mapped.map(|()| alias as u64)
}

fn map(at: u64, size: usize, prot: libc::c_int, fd: Option<libc::c_int>) -> io::Result<()> {
    let kind = match fd {
        None => libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
        Some(_) => libc::MAP_SHARED,
    };
    let flags = kind | libc::MAP_FIXED_NOREPLACE;
    // SAFETY: NOREPLACE cannot hit an existing mapping.
    let p = unsafe { libc::mmap(at as *mut _, size, prot, flags, fd.unwrap_or(-1), 0) };
    if p == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

fn as_bytes(words: &[u64; 16]) -> &[u8] {
    // SAFETY: 16 words are 128 initialized bytes.
    unsafe { core::slice::from_raw_parts(words.as_ptr().cast(), 128) }
}

fn write(at: u64, b: &[u8]) {
    // SAFETY: callers stay within the regions that `Oracle::new` mapped.
    unsafe { ptr::copy_nonoverlapping(b.as_ptr(), at as *mut u8, b.len()) };
}

fn read(at: u64, b: &mut [u8]) {
    // SAFETY: callers stay within the regions that `Oracle::new` mapped.
    unsafe { ptr::copy_nonoverlapping(at as *const u8, b.as_mut_ptr(), b.len()) };
}

fn read_u64(at: u64) -> u64 {
    let mut b = [0; 8];
    read(at, &mut b);
    u64::from_le_bytes(b)
}
