//! A thunk for each `syscall` instruction of the program that has been executed.
//!
//! The kernel's syscall user dispatch raises SIGSYS for system calls outside of the arena that the thunks are in. The
//! handler makes the instruction's thunk and lets the program go on there. It rewrites the instruction to a jump to the
//! thunk where that certainly changes nothing else; only code that was seen to run is ever changed. The other
//! instructions raise SIGSYS each time.
//!
//! A program may execute itself in a VM, too, as gVisor does, whose guest has the program's own address space. Its
//! `syscall` is answered by the guest's kernel, and perhaps executed again outside. A thunk recognises the guest by CS,
//! and then goes on at a `syscall` outside of the arena.
//!
//! A thunk executes the system call itself, with all of the program's registers, unless the call may be ours. Nothing
//! here allocates, locks for long, or uses thread-local storage.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Ordering};

use iced_x86::{Code, Decoder, DecoderOptions, FlowControl};
use libc::c_long;

use super::entry;
use crate::next::system_call;

/// Size of the arena in bytes: a table, then thunks.
pub(super) const SIZE: usize = 1 << 20;
/// Size of the arena with the guests' `syscall` instructions behind it, which raise SIGSYS.
pub(super) const MAPPED: usize = SIZE + (THUNKS * GUEST).next_multiple_of(host::PAGE_SIZE);
/// Size of the writable view, which has the index at its end.
pub(super) const WRITABLE: usize = MAPPED + size_of::<Index>();
/// Size of the table, which has a byte for each value of ax: 0 if the call is the kernel's, 1 if it may be ours.
const CLASSES: usize = 1 << 16;
/// Room for `syscall; ret`, and for the code that handlers return to.
const STUBS: usize = 64;
/// Size of a thunk in bytes.
const THUNK: usize = 128;
/// Size of a guest's `syscall` and of the jump behind it, in bytes.
const GUEST: usize = 16;
const THUNKS: usize = (SIZE - CLASSES - STUBS) / THUNK;
/// Length of a jump by rel32.
const JUMP: usize = 5;

/// The thunks that have been made. The index is shared with children, as is the arena.
#[repr(C)]
struct Index {
    used: AtomicUsize,
    /// By hash of the address after a `syscall`: that address, and above it the thunk's number.
    slots: [AtomicU64; 2 * THUNKS],
}

fn index() -> &'static Index {
    // SAFETY: `prepare` was called before any system call is watched; the memory began as zeros,
    // which are a value, and is never unmapped.
    unsafe { &*((RW.load(Ordering::Relaxed) + MAPPED) as *const Index) }
}

/// Addresses of the arena's executable and writable views.
static RX: AtomicUsize = AtomicUsize::new(0);
static RW: AtomicUsize = AtomicUsize::new(0);
/// True if this process has tried to rewrite a thunk's instruction.
static TRIED: [AtomicBool; THUNKS] = [const { AtomicBool::new(false) }; THUNKS];
/// Executable parts of the program and of its loader, which may be rewritten.
static TEXT: [[AtomicUsize; 2]; 2] = [const { [const { AtomicUsize::new(0) }; 2] }; 2];
/// True while instructions may be rewritten. A filter of the program's own may forbid the calls that this takes.
static REWRITES: AtomicBool = AtomicBool::new(false);
/// True while a thread rewrites an instruction.
static REWRITING: AtomicBool = AtomicBool::new(false);

/// System calls that may be ours, or need care.
const OURS: &[c_long] = &[
    libc::SYS_access,
    libc::SYS_arch_prctl,
    libc::SYS_brk,
    libc::SYS_clone,
    libc::SYS_clone3,
    libc::SYS_close,
    libc::SYS_close_range,
    libc::SYS_dup,
    libc::SYS_dup2,
    libc::SYS_dup3,
    libc::SYS_execve,
    libc::SYS_execveat,
    libc::SYS_exit,
    libc::SYS_faccessat,
    libc::SYS_faccessat2,
    libc::SYS_fcntl,
    libc::SYS_fork,
    libc::SYS_ioctl,
    libc::SYS_lstat,
    libc::SYS_mmap,
    libc::SYS_newfstatat,
    libc::SYS_open,
    libc::SYS_openat,
    libc::SYS_openat2,
    libc::SYS_prctl,
    libc::SYS_readlink,
    libc::SYS_readlinkat,
    libc::SYS_rseq,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_seccomp,
    libc::SYS_set_tid_address,
    libc::SYS_stat,
    libc::SYS_statx,
    libc::SYS_vfork,
];

/// Fills an arena that is mapped at both addresses. `text` is the code that may be rewritten.
pub(super) fn prepare(rw: usize, rx: usize, text: [(usize, usize); 2]) {
    RW.store(rw, Ordering::Relaxed);
    RX.store(rx, Ordering::Relaxed);
    for (known, (begin, end)) in TEXT.iter().zip(text) {
        known[0].store(begin, Ordering::Relaxed);
        known[1].store(end, Ordering::Relaxed);
    }
    for number in OURS {
        // SAFETY: inside the table.
        unsafe { ((rw + *number as usize) as *mut u8).write(1) };
    }
    // syscall; ret; then mov rax, 15; syscall as unwinders know it.
    put(CLASSES, &[0x0f, 0x05, 0xc3]);
    put(CLASSES + 16, &[0x48, 0xc7, 0xc0, 0x0f, 0, 0, 0, 0x0f, 0x05]);
    entry::SYSCALL.store(rx + CLASSES, Ordering::Relaxed);
    REWRITES.store(true, Ordering::Release);
}

/// Has these calls come to us from now on.
pub(crate) fn watch(numbers: &[c_long]) {
    for number in numbers {
        let at = RW.load(Ordering::Relaxed) + *number as usize;
        // SAFETY: inside the table, of which threads read single bytes.
        unsafe { AtomicU8::from_ptr(at as *mut u8) }.store(1, Ordering::Relaxed);
    }
}

/// Returns the code that handlers return to.
pub(crate) fn restorer() -> usize {
    RX.load(Ordering::Relaxed) + CLASSES + 16
}

/// Returns the range from which system calls pass.
pub(super) fn range() -> (usize, usize) {
    (RX.load(Ordering::Relaxed), SIZE)
}

/// Makes sure that no instruction is rewritten from now on.
pub(crate) fn stop_rewriting() {
    REWRITES.store(false, Ordering::Release);
}

/// Writes bytes into the arena.
fn put(offset: usize, bytes: &[u8]) {
    let to = (RW.load(Ordering::Relaxed) + offset) as *mut u8;
    // SAFETY: the callers stay inside the arena, in a part of it that nobody executes yet.
    unsafe { to.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
}

/// Returns the thunk of the `syscall` that ends at `after`, which has just been executed.
pub(super) fn of(after: usize) -> usize {
    let number = find(after);
    if !TRIED[number].swap(true, Ordering::Relaxed) {
        rewrite(after, address(number));
    }
    address(number)
}

/// Returns the number of the thunk of the `syscall` that ends at `after`. The thunk is made if there is none.
fn find(after: usize) -> usize {
    let slots = index().slots.len();
    let first = hash(after);
    let mut made = None;
    for step in 0..slots {
        let slot = &index().slots[(first + step) % slots];
        let mut value = slot.load(Ordering::Acquire);
        if value == 0 {
            let number = *made.get_or_insert_with(|| make(after));
            let new = after as u64 | (number as u64) << 48;
            match slot.compare_exchange(0, new, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => value = new,
                Err(other) => value = other,
            }
        }
        if value & ((1 << 48) - 1) == after as u64 {
            return (value >> 48) as usize;
        }
    }
    // SAFETY: ends the process: a program with that many system calls cannot go on.
    unsafe { libc::abort() }
}

/// Returns true if the `syscall` that ends there has a thunk.
fn is_known(after: usize) -> bool {
    let slots = index().slots.len();
    (0..slots)
        .map(|step| index().slots[(hash(after) + step) % slots].load(Ordering::Acquire))
        .take_while(|value| *value != 0)
        .any(|value| value & ((1 << 48) - 1) == after as u64)
}

fn hash(after: usize) -> usize {
    after.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40
}

fn address(number: usize) -> usize {
    RX.load(Ordering::Relaxed) + CLASSES + STUBS + number * THUNK
}

/// Collects a thunk's bytes.
struct Bytes {
    bytes: [u8; THUNK],
    len: usize,
    at: usize,
}

impl Bytes {
    fn push(&mut self, bytes: &[u8]) {
        self.bytes[self.len..self.len + bytes.len()].copy_from_slice(bytes);
        self.len += bytes.len();
    }
    /// Appends the displacement of `to` from the end of the displacement itself.
    fn relative(&mut self, to: usize) {
        let next = self.at + self.len + 4;
        self.push(&(to.wrapping_sub(next) as u32).to_le_bytes());
    }
    /// Appends a jump to any address, which changes no register.
    fn jump(&mut self, to: usize) {
        self.push(&[0xff, 0x25, 0, 0, 0, 0]);
        self.push(&to.to_le_bytes());
    }
}

/// Writes a thunk. Returns its number.
fn make(after: usize) -> usize {
    let number = index().used.fetch_add(1, Ordering::Relaxed);
    if number >= THUNKS {
        // SAFETY: ends the process.
        unsafe { libc::abort() };
    }
    let tail = Tail::of(after);
    let at = address(number);
    let mut code = Bytes {
        bytes: [0xcc; THUNK],
        len: 0,
        at,
    };
    // mov ecx, cs; lea ecx, [rcx - 0x33]; jrcxz host; jmp guest. No flag changes.
    const TO_HOST: usize = 5;
    code.push(&[0x8c, 0xc9, 0x8d, 0x49, 0xcd, 0xe3, TO_HOST as u8, 0xe9]);
    let guest = SIZE + number * GUEST;
    code.relative(RX.load(Ordering::Relaxed) + guest);
    // movzx ecx, ax; lea r11, [table]; movzx ecx, byte [r11 + rcx]; jrcxz raw
    code.push(&[0x0f, 0xb7, 0xc8, 0x4c, 0x8d, 0x1d]);
    code.relative(RX.load(Ordering::Relaxed));
    code.push(&[0x41, 0x0f, 0xb6, 0x0c, 0x0b]);
    const TO_ENTER: usize = 7 + 14;
    code.push(&[0xe3, TO_ENTER as u8]);
    // lea r11, [raw]; jmp enter
    code.push(&[0x4c, 0x8d, 0x1d]);
    let raw = at + code.len + 4 + 14;
    code.relative(raw);
    code.jump(entry::enter as *const () as usize);
    code.push(&[0x0f, 0x05]);
    let mut outside = Bytes {
        bytes: [0xcc; THUNK],
        len: 0,
        at: RX.load(Ordering::Relaxed) + guest,
    };
    outside.push(&[0x0f, 0x05]);
    outside.jump(at + code.len);
    put(guest, &outside.bytes[..GUEST]);
    // SAFETY: instructions of the program's, behind one that it has executed.
    code.push(unsafe { std::slice::from_raw_parts(after as *const u8, tail.len) });
    let next = after + tail.len;
    code.jump(if tail.reaches_another {
        address(find(next + 2))
    } else {
        next
    });
    put(at - RX.load(Ordering::Relaxed), &code.bytes);
    number
}

/// Returns the part of the program that contains these addresses.
fn text_of(begin: usize, end: usize) -> Option<(usize, usize)> {
    TEXT.iter()
        .map(|part| {
            (
                part[0].load(Ordering::Relaxed),
                part[1].load(Ordering::Relaxed),
            )
        })
        .find(|part| begin >= part.0 && end <= part.1)
}

/// Instructions behind a `syscall` that do the same elsewhere. The thunk has copies of them.
struct Tail {
    /// Length of these instructions in bytes.
    len: usize,
    /// True if they leave room for a jump in place of the `syscall`.
    makes_room: bool,
    /// True if the next instruction is a `syscall`. A thread that has given up its stack executes it as its last
    /// instruction, so it must not raise a signal.
    reaches_another: bool,
}

impl Tail {
    fn of(after: usize) -> Self {
        const MOST: usize = 40;
        const WANTED: usize = JUMP - 2;
        let mut tail = Self {
            len: 0,
            makes_room: false,
            reaches_another: false,
        };
        if text_of(after - 2, after + MOST).is_none() {
            return tail;
        }
        // SAFETY: inside the program's text.
        let bytes = unsafe { std::slice::from_raw_parts(after as *const u8, MOST) };
        let mut decoder = Decoder::with_ip(64, bytes, after as u64, DecoderOptions::NONE);
        let mut enough = None;
        let mut len = 0;
        loop {
            let instruction = decoder.decode();
            let flow = instruction.flow_control();
            if instruction.is_invalid() || instruction.is_ip_rel_memory_operand() {
                break;
            }
            if instruction.code() == Code::Syscall {
                tail.reaches_another = true;
                break;
            }
            if flow == FlowControl::Return && enough.is_none() {
                len += instruction.len();
                // Padding up to the next function may be overwritten.
                let fills = |bytes: &[u8]| bytes.iter().all(|b| *b == 0xcc || *b == 0x90);
                if len >= WANTED || fills(&bytes[len..WANTED]) {
                    enough = Some(len);
                }
                break;
            }
            if flow != FlowControl::Next {
                break;
            }
            len += instruction.len();
            if len >= WANTED && enough.is_none() {
                enough = Some(len);
            }
        }
        tail.makes_room = enough.is_some();
        tail.len = if tail.reaches_another {
            len
        } else {
            enough.unwrap_or(0)
        };
        tail
    }
}

/// Returns true if a branch with a displacement in its code may lead to between `after` and `end`.
fn is_branched_to(after: usize, end: usize) -> bool {
    let Some((begin, limit)) = text_of(after, end) else {
        return true;
    };
    // SAFETY: the program's text, which is readable.
    let text = unsafe { std::slice::from_raw_parts(begin as *const u8, limit - begin) };
    let inside = |target: usize| target >= after && target < end;
    let near = (after - begin).saturating_sub(160)..(end - begin + 160).min(text.len() - 1);
    for at in near {
        if matches!(text[at], 0x70..=0x7f | 0xe0..=0xe3 | 0xeb) {
            let next = begin + at + 2;
            if inside(next.wrapping_add_signed(text[at + 1].cast_signed().into())) {
                return true;
            }
        }
    }
    // Any four bytes may be a displacement: to see too many branches is better than to miss one.
    (0..text.len().saturating_sub(4)).any(|at| {
        let bytes = [text[at], text[at + 1], text[at + 2], text[at + 3]];
        inside((begin + at + 4).wrapping_add_signed(i32::from_le_bytes(bytes) as isize))
    })
}

/// Makes the `syscall` that ends at `after` a jump to its thunk, if that has no other effect.
fn rewrite(after: usize, thunk: usize) {
    let site = after - 2;
    if !REWRITES.load(Ordering::Acquire) || text_of(site - 8, after + 8).is_none() {
        return;
    }
    // SAFETY: inside the program's text.
    let before = unsafe { std::slice::from_raw_parts((site - 6) as *const u8, 6) };
    // Bytes that a neighbour's jump has replaced are not the instructions that they look like.
    if (site - 7..=site).any(is_known) {
        return;
    }
    // A mov eax, imm32 just before is replaced alone, by a jump to a second thunk, which does the same. A byte 0x40 to
    // 0x4f in front would belong to the mov.
    let has_move = before[1] == 0xb8
        && before[0] & 0xf0 != 0x40
        && u16::from_le_bytes([before[3], before[4]]) == 0
        && before[5] == 0;
    if Tail::of(after).makes_room && !is_branched_to(after, after + JUMP - 2) {
        jump(site, thunk);
    } else if has_move {
        let number = index().used.fetch_add(1, Ordering::Relaxed);
        if number >= THUNKS {
            return;
        }
        let at = address(number);
        let mut code = Bytes {
            bytes: [0xcc; THUNK],
            len: 0,
            at,
        };
        code.push(&before[1..]);
        code.jump(thunk);
        put(at - RX.load(Ordering::Relaxed), &code.bytes);
        jump(site - JUMP, at);
    }
}

/// Writes `jmp rel32` at `site`. The bytes behind the first two are written first, and every processor sees them before
/// those two.
fn jump(site: usize, to: usize) {
    const PAGE: usize = host::PAGE_SIZE;
    const LINE: usize = 64;
    const MEMBARRIER_PRIVATE_EXPEDITED_SYNC_CORE: usize = 1 << 5;
    let Ok(distance) = i32::try_from(to.wrapping_sub(site + JUMP).cast_signed()) else {
        return;
    };
    // The first two bytes have to change at once.
    if site % LINE == LINE - 1 || REWRITING.swap(true, Ordering::Acquire) {
        return;
    }
    let first = site & !(PAGE - 1);
    let len = (site + JUMP).next_multiple_of(PAGE) - first;
    let protect = |protection: i32| {
        // SAFETY: the program's own text stays readable and executable throughout.
        unsafe {
            system_call(
                libc::SYS_mprotect,
                [first, len, protection as usize, 0, 0, 0],
            )
        }
    };
    let rwx = libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC;
    if protect(rwx) == 0 {
        let bytes = distance.to_le_bytes();
        // SAFETY: these are five bytes of the program's text. Whoever executes them meanwhile executes the old first
        // instruction or the jump, as two bytes in one cache line change together.
        unsafe {
            let old = (site as *const u8).read();
            let is_move = old == 0xb8;
            if is_move {
                // One instruction of five bytes is replaced, of which another thread may have read a part. So this is
                // done only while there is no other thread.
                if super::running::are_alone() {
                    (site as *mut u8).write(0xe9);
                    ((site + 1) as *mut [u8; 4]).write_unaligned(bytes);
                }
            } else {
                let tail = (site + 2) as *mut [u8; 3];
                let old = tail.read();
                tail.write([bytes[1], bytes[2], bytes[3]]);
                let synced = super::running::are_alone()
                    || system_call(
                        libc::SYS_membarrier,
                        [MEMBARRIER_PRIVATE_EXPEDITED_SYNC_CORE, 0, 0, 0, 0, 0],
                    ) == 0;
                if synced {
                    (site as *mut u16).write_unaligned(u16::from_le_bytes([0xe9, bytes[0]]));
                } else {
                    tail.write(old);
                }
            }
        }
        protect(libc::PROT_READ | libc::PROT_EXEC);
    }
    REWRITING.store(false, Ordering::Release);
}
