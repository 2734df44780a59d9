//! The C functions through which an unmodified VMM reaches anykvm (`docs/in-process.md`).
//!
//! The `anykvm` program is also a shared library (`crates/anykvm/build.rs`). `anykvm exec` names it in LD_PRELOAD, so
//! that the functions here come before those of the C library. All calls that have nothing to do with `/dev/kvm` go on
//! to the next definition unchanged.
//!
//! [`launch`] starts programs that the library does not reach.
//!
//! Rules: nothing is allocated, locked or printed for a call that is not ours; nothing unwinds
//! into C; errno is set as the function's own documentation says.

mod actions;
mod calls;
mod cancel;
pub mod cpuid;
mod descriptors;
mod files;
mod filter;
pub mod launch;
mod launcher;
mod memory;
mod next;
mod path;
pub mod program;
mod shown;
mod spawn;
mod trace;

use std::sync::atomic::{AtomicBool, Ordering};

/// The program interpreter of the `anykvm` program, which the linker does not name in a shared library.
#[used]
#[unsafe(link_section = ".interp")]
static INTERPRETER: [u8; 28] = *b"/lib64/ld-linux-x86-64.so.2\0";

/// The allocator of the program and of the library. A VMM's filter of system calls allows the calls that it makes.
#[global_allocator]
static ALLOCATOR: host::allocator::Allocator = host::allocator::Allocator;

unsafe extern "C" {
    /// The first byte of this object in memory, where its ELF header is. The linker defines it.
    static __ehdr_start: u8;
}

/// True if a program runs in this process beside `anykvm` itself.
static LAUNCHED: AtomicBool = AtomicBool::new(false);

pub(crate) fn set_launched() {
    // The measurement is made while the program starts, before its first vCPU asks for the result.
    host::cpu::begin_to_measure_tsc();
    LAUNCHED.store(true, Ordering::Release);
}

pub(crate) fn is_launched() -> bool {
    LAUNCHED.load(Ordering::Acquire)
}

/// Returns true if `/dev/kvm` is anykvm in this process.
pub(crate) fn is_active() -> bool {
    is_launched() || is_preloaded()
}

/// Returns this object's ELF header.
pub(crate) fn header() -> *const u8 {
    &raw const __ehdr_start
}

/// Returns true if the library is in another program. In `anykvm` itself, `/dev/kvm` is an ordinary file.
pub fn is_preloaded() -> bool {
    const ENTRY: usize = 24;
    let header = header();
    // SAFETY: the ELF header is mapped as long as the code that reads it; the entry point is the
    // eight bytes at 24.
    let entry = unsafe { header.add(ENTRY).cast::<u64>().read_unaligned() };
    // SAFETY: an integer argument.
    let program = unsafe { libc::getauxval(libc::AT_ENTRY) };
    (header as u64).wrapping_add(entry) != program
}
