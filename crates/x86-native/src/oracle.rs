//! The host CPU as the reference in tests: runs a block of user-mode code with
//! a given register file and reports registers, flags and the exception.
//!
//! **Tests only.** The code is arbitrary: the caller generates harmless blocks
//! (no system calls, memory within the window). Everything lives at fixed low
//! addresses, so that generated code can store any register without a scratch
//! one, and so that the interpreter can run the same block at the same address.

use std::{
    io, ptr,
    sync::{
        Mutex, MutexGuard,
        atomic::{AtomicBool, Ordering},
    },
};

use iced_x86::{IcedError, code_asm::*};

/// Where tested code runs.
pub const CODE: u64 = 0x2000_0000;
/// Offset of the block within the code page: the entry sequence comes before.
pub const BLOCK: u64 = CODE + 0x400;
/// Most bytes of a block.
pub const BLOCK_SIZE: usize = 0x800;
/// The window of memory that tested code may access; beyond it is nothing.
pub const WINDOW: u64 = 0x1000_0000;
/// Its size.
pub const WINDOW_SIZE: usize = 0x2000;
/// The register file.
const STATE: u64 = 0x3000_0000;
const PAGE: usize = 4096;
/// Offsets in the state page.
const GPR: u64 = STATE;
const RFLAGS: u64 = STATE + 0x80;
const HOST_RSP: u64 = STATE + 0x88;
const AREA: u64 = STATE + 0x400;
/// Bytes of the XSAVE image: legacy, header, AVX.
pub const AREA_SIZE: usize = 832;

static ACTIVE: AtomicBool = AtomicBool::new(false);
static LOCK: Mutex<()> = Mutex::new(());

/// Registers before and after.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Registers {
    /// General registers in encoding order.
    pub gpr: [u64; 16],
    /// RFLAGS.
    pub rflags: u64,
    /// Address at which execution stopped.
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

/// The oracle: one per process.
#[derive(Debug)]
pub struct Oracle {
    tail: u64,
    _lock: MutexGuard<'static, ()>,
}

impl Oracle {
    /// Maps the fixed addresses and installs signal handlers, which pass on
    /// what does not come from tested code.
    pub fn new() -> io::Result<Self> {
        let lock = LOCK
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        let rw = libc::PROT_READ | libc::PROT_WRITE;
        map(CODE, PAGE, rw | libc::PROT_EXEC)?;
        map(WINDOW, WINDOW_SIZE, rw)?;
        map(STATE, PAGE, rw)?;
        let (entry, tail) = sequences().map_err(io::Error::other)?;
        write(CODE, &entry);
        install_handlers()?;
        Ok(Self { tail, _lock: lock })
    }

    /// Fills the memory window.
    pub fn set_window(&mut self, bytes: &[u8; WINDOW_SIZE]) {
        write(WINDOW, bytes);
    }
    /// The memory window.
    pub fn window(&self, out: &mut [u8; WINDOW_SIZE]) {
        read(WINDOW, out);
    }

    /// Runs `block` (position: [`BLOCK`]) to its end or to an exception.
    pub fn run(&mut self, block: &[u8], regs: &mut Registers) -> Result<(), Trap> {
        let n = block.len().min(BLOCK_SIZE);
        write(BLOCK, &block[..n]);
        // JMP rel32 to the epilogue.
        let from = BLOCK + n as u64 + 5;
        let mut jump = [0xe9, 0, 0, 0, 0];
        let rel = (self.tail - TAIL_SIZE).wrapping_sub(from) as u32;
        jump[1..].copy_from_slice(&rel.to_le_bytes());
        write(BLOCK + n as u64, &jump);
        for (i, v) in regs.gpr.iter().enumerate() {
            write(GPR + 8 * i as u64, &v.to_le_bytes());
        }
        write(RFLAGS, &(regs.rflags & 0xcd5 | 2).to_le_bytes());
        write(AREA, &regs.area);
        let mut header = [0; 64];
        header[0] = 7;
        write(AREA + 512, &header);
        // SAFETY: single-threaded by `_lock`; the handler is the only other accessor.
        unsafe {
            TRAP = (u64::MAX, 0, 0, 0);
            TAIL = self.tail;
        }
        ACTIVE.store(true, Ordering::SeqCst);
        // SAFETY: the entry sequence keeps the System V convention; what the
        // block does is the caller's promise (tests only).
        unsafe {
            let f: extern "C" fn() = core::mem::transmute(CODE as *const u8);
            f();
        }
        ACTIVE.store(false, Ordering::SeqCst);
        for (i, v) in regs.gpr.iter_mut().enumerate() {
            let mut b = [0; 8];
            read(GPR + 8 * i as u64, &mut b);
            *v = u64::from_le_bytes(b);
        }
        let mut b = [0; 8];
        read(RFLAGS, &mut b);
        regs.rflags = u64::from_le_bytes(b);
        read(AREA, &mut regs.area);
        // SAFETY: as above; the block has ended.
        let (vector, error_code, gva, rip) = unsafe { TRAP };
        if vector == u64::MAX {
            regs.rip = BLOCK + n as u64;
            return Ok(());
        }
        regs.rip = rip;
        Err(Trap {
            vector: vector as u8,
            error_code,
            gva,
        })
    }
}

impl Drop for Oracle {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`, and no tested code runs now.
        unsafe {
            libc::munmap(CODE as *mut _, PAGE);
            libc::munmap(WINDOW as *mut _, WINDOW_SIZE);
            libc::munmap(STATE as *mut _, PAGE);
        }
    }
}

/// Vector (or all ones), error code, CR2, RIP.
static mut TRAP: (u64, u64, u64, u64) = (u64::MAX, 0, 0, 0);
static mut TAIL: u64 = 0;
/// Bytes between the epilogue's start and the part that a trap returns to.
const TAIL_SIZE: u64 = 0x200;

fn map(at: u64, size: usize, prot: libc::c_int) -> io::Result<()> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
    // SAFETY: NOREPLACE cannot hit an existing mapping.
    let p = unsafe { libc::mmap(at as *mut _, size, prot, flags, -1, 0) };
    if p == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

fn write(at: u64, b: &[u8]) {
    // SAFETY: callers stay within the regions that `Oracle::new` mapped.
    unsafe { ptr::copy_nonoverlapping(b.as_ptr(), at as *mut u8, b.len()) };
}

fn read(at: u64, b: &mut [u8]) {
    // SAFETY: callers stay within the regions that `Oracle::new` mapped.
    unsafe { ptr::copy_nonoverlapping(at as *const u8, b.as_mut_ptr(), b.len()) };
}

const REGISTERS: [AsmRegister64; 16] = [
    rax, rcx, rdx, rbx, rsp, rbp, rsi, rdi, r8, r9, r10, r11, r12, r13, r14, r15,
];

/// The entry sequence at [`CODE`] with the epilogue at its end of the page;
/// returns the page's bytes and the address a trap returns to.
fn sequences() -> Result<(Vec<u8>, u64), IcedError> {
    let saved = [rbx, rbp, r12, r13, r14, r15];
    let mut a = CodeAssembler::new(64)?;
    for r in saved {
        a.push(r)?;
    }
    a.mov(qword_ptr(HOST_RSP), rsp)?;
    a.mov(eax, 7)?;
    a.xor(edx, edx)?;
    a.xrstor64(ptr(AREA))?;
    a.push(qword_ptr(RFLAGS))?;
    a.popfq()?;
    for (i, r) in REGISTERS.iter().enumerate() {
        a.mov(*r, qword_ptr(GPR + 8 * i as u64))?;
    }
    a.jmp(BLOCK)?;
    let entry = a.assemble(CODE)?;

    let mut a = CodeAssembler::new(64)?;
    for (i, r) in REGISTERS.iter().enumerate() {
        a.mov(qword_ptr(GPR + 8 * i as u64), *r)?;
    }
    a.mov(rsp, qword_ptr(HOST_RSP))?;
    a.pushfq()?;
    a.pop(qword_ptr(RFLAGS))?;
    a.mov(eax, 7)?;
    a.xor(edx, edx)?;
    a.xsave64(ptr(AREA))?;
    let epilogue_at = CODE + 0xc80;
    let tail = epilogue_at + TAIL_SIZE;
    a.jmp(tail)?;
    let epilogue = a.assemble(epilogue_at)?;

    let mut a = CodeAssembler::new(64)?;
    a.mov(rsp, qword_ptr(HOST_RSP))?;
    a.mov(dword_ptr(STATE + 0x90), 0x1f80)?;
    a.ldmxcsr(dword_ptr(STATE + 0x90))?;
    a.fninit()?;
    a.vzeroupper()?;
    a.cld()?;
    for r in saved.iter().rev() {
        a.pop(*r)?;
    }
    a.ret()?;
    let finish = a.assemble(tail)?;

    let mut page = vec![0xcc; PAGE];
    page[..entry.len()].copy_from_slice(&entry);
    let at = (epilogue_at - CODE) as usize;
    page[at..at + epilogue.len()].copy_from_slice(&epilogue);
    let at = (tail - CODE) as usize;
    page[at..at + finish.len()].copy_from_slice(&finish);
    Ok((page, tail))
}

fn install_handlers() -> io::Result<()> {
    let signals = [
        libc::SIGSEGV,
        libc::SIGBUS,
        libc::SIGFPE,
        libc::SIGILL,
        libc::SIGTRAP,
    ];
    // SAFETY: a fresh alternate stack that is never freed, and a handler that
    // is async-signal-safe (memory copies only).
    unsafe {
        let size = 1 << 16;
        let stack = libc::mmap(
            ptr::null_mut(),
            size,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        );
        let alt = libc::stack_t {
            ss_sp: stack,
            ss_flags: 0,
            ss_size: size,
        };
        if stack == libc::MAP_FAILED || libc::sigaltstack(&alt, ptr::null_mut()) != 0 {
            return Err(io::Error::last_os_error());
        }
        for s in signals {
            let mut action: libc::sigaction = core::mem::zeroed();
            action.sa_sigaction = handler as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_NODEFER;
            if libc::sigaction(s, &action, ptr::null_mut()) != 0 {
                return Err(io::Error::last_os_error());
            }
        }
    }
    Ok(())
}

/// Order of the general registers in the signal frame.
const FRAME: [libc::c_int; 16] = [
    libc::REG_RAX,
    libc::REG_RCX,
    libc::REG_RDX,
    libc::REG_RBX,
    libc::REG_RSP,
    libc::REG_RBP,
    libc::REG_RSI,
    libc::REG_RDI,
    libc::REG_R8,
    libc::REG_R9,
    libc::REG_R10,
    libc::REG_R11,
    libc::REG_R12,
    libc::REG_R13,
    libc::REG_R14,
    libc::REG_R15,
];

extern "C" fn handler(
    signal: libc::c_int,
    _info: *mut libc::siginfo_t,
    context: *mut libc::c_void,
) {
    // SAFETY: the kernel passes a valid ucontext; the state page is mapped
    // while ACTIVE; the statics belong to the thread that holds `LOCK`.
    unsafe {
        let uc = &mut *context.cast::<libc::ucontext_t>();
        let g = &mut uc.uc_mcontext.gregs;
        if !ACTIVE.load(Ordering::SeqCst) {
            // Not ours: the default action takes it when the instruction repeats.
            libc::signal(signal, libc::SIG_DFL);
            return;
        }
        for (i, r) in FRAME.iter().enumerate() {
            write(GPR + 8 * i as u64, &g[*r as usize].to_le_bytes());
        }
        write(RFLAGS, &g[libc::REG_EFL as usize].to_le_bytes());
        let frame = uc.uc_mcontext.fpregs.cast::<u8>();
        let area = core::slice::from_raw_parts(frame, AREA_SIZE);
        write(AREA, area);
        TRAP = (
            g[libc::REG_TRAPNO as usize] as u64,
            g[libc::REG_ERR as usize] as u64,
            g[libc::REG_CR2 as usize] as u64,
            g[libc::REG_RIP as usize] as u64,
        );
        g[libc::REG_RIP as usize] = TAIL as i64;
        // The block may have left any flags.
        g[libc::REG_EFL as usize] = 0x202;
    }
}
